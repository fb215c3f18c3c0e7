import argparse
import errno
import inspect
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

import eqtune
from eqtune.cli import main
from eqtune.cli import records as records_command
from eqtune.cli import report as report_command
from eqtune.cli.options import WORK_DIR, write_text
from eqtune.errors import InputError
from eqtune.files import replacing
from eqtune.records import Context, Record, RecordDatabase
from eqtune.report import KernelRow, RunSummary

CONTEXT = Context('{"kind": "llvm"}', "a cpu", 2, "0.27.0")
OTHER = Context('{"kind": "llvm"}', "another cpu", 2, "0.27.0")
FAST, SLOW = "a" * 16, "b" * 16


def command(*argv):
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    records_command.add_parser(commands)
    report_command.add_parser(commands)
    args = parser.parse_args([str(arg) for arg in argv])
    return args.run(args)


def record(workload, latency_s, context=CONTEXT):
    latencies, error = ((latency_s,), "") if latency_s else ((), "crash")
    decision = '{"sketch": "tiled", "values": {"tile": 4}}'
    return Record(workload, decision, "[[],[]]", context, latencies, error=error)


@pytest.fixture
def work(tmp_path):
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        database.add_workload(FAST, "text", name="conv2d\x1b[31m", flops=2e9)
        database.add([record(FAST, 2e-3), record(FAST, None), record(FAST, 1e-3), record(SLOW, 1.0)])
    return tmp_path


def test_list_counts_per_context_and_kernel(work, capsys):
    assert command("records", "list", "--db", work) == 0
    shown = capsys.readouterr().out
    assert "context 1: a cpu, 2 threads, TVM 0.27.0, 4 records" in shown
    assert "\x1b" not in shown
    assert command("records", "list", "--db", work / "records.sqlite", "--json") == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["kernels"][0] == {
        "context": 1, "workload": FAST, "name": "conv2d\x1b[31m", "flops": 2e9, "records": 3, "failed": 1,
        "best_us": pytest.approx(1000),
    }  # fmt: skip
    assert fields["contexts"][0]["device"] == "a cpu"


def test_list_reads_no_traces(work, capsys, monkeypatch):
    """Of a hundred thousand records, they are a gigabyte."""
    monkeypatch.setattr(RecordDatabase, "_record", lambda *_: pytest.fail("a record is read"))
    assert command("records", "list", "--db", work, "--json") == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert [(row["workload"], row["records"], row["failed"]) for row in kernels] == [(FAST, 3, 1), (SLOW, 1, 0)]


def test_list_says_that_there_is_nothing(tmp_path, capsys):
    with RecordDatabase(tmp_path / "records.sqlite"):
        pass
    assert command("records", "list", "--db", tmp_path) == 0
    assert capsys.readouterr().out == "nothing was measured yet\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["tune", "zoo:nasrnn", "--budjet", "3"],
            "tune: error: unrecognized arguments: --budjet 3; did you mean --budget?",
        ),
        (["records", "list", "--joson"], "records list: error: unrecognized arguments: --joson; did you mean --json?"),
        (["doctor", "--quickly"], "doctor: error: unrecognized arguments: --quickly"),
    ],
)
def test_a_command_says_itself_what_it_does_not_know(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"eqtune {message}"


def test_best_shows_the_schedule_of_each_kernel(work, capsys):
    command("records", "best", "--db", work, "--json", "--workload", "aa")
    (best,) = json.loads(capsys.readouterr().out)
    assert best["best_us"] == pytest.approx(1000)
    assert best["decision"] == {"sketch": "tiled", "values": {"tile": 4}}
    assert best["trace"] == "[[],[]]"
    command("records", "best", "--db", work)
    assert '"sketch": "tiled"' in capsys.readouterr().out
    with pytest.raises(InputError, match="0 kernels"):
        command("records", "best", "--db", work, "--workload", "ff")


def test_contexts_are_never_mixed(work, capsys):
    with RecordDatabase(work / "records.sqlite") as database:
        database.add([record(FAST, 1e-6, OTHER)])
    with pytest.raises(InputError, match=r"1: a cpu.*2: another cpu"):
        command("records", "best", "--db", work)
    with pytest.raises(InputError, match="3 does not exist"):
        command("records", "best", "--db", work, "--context", 3)
    command("records", "best", "--db", work, "--context", 2, "--json")
    assert json.loads(capsys.readouterr().out)[0]["best_us"] == pytest.approx(1)


def test_looking_at_nothing_creates_nothing(tmp_path):
    with pytest.raises(InputError, match="no records"):
        command("records", "list", "--db", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_schedules_of_another_process_with_intrinsics_are_exported(tmp_path):
    import tvm
    from tvm import te

    from eqtune.records.traces import trace_to_json
    from eqtune.records.workload import serialize_workload, workload_hash
    from eqtune.search.space import Hardware, build_space

    a, b = (te.placeholder((16, 16), "int8", name) for name in "ab")
    k = te.reduce_axis((0, 16), "k")
    product = te.compute((16, 16), lambda i, j: te.sum(a[i, k].astype("int32") * b[k, j].astype("int32"), k), "c")
    func = te.create_prim_func([a, b, product])
    space = build_space(tvm.IRModule({"main": func}), Hardware(dot_products=("avx512vnni",)))
    knobs = np.random.default_rng(0).integers(0, space.cardinalities[0], (500, space.cardinalities.shape[1]))
    points = np.insert(knobs, 0, 0, axis=1).astype(np.int16)
    trace = trace_to_json(space.apply(space.decision(points[space.legal(points)][0])).trace)
    assert "eqtune_dot_" in trace
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        database.add_workload(workload_hash(func), serialize_workload(func), name="product", flops=8192.0)
        database.add([Record(workload_hash(func), "", trace, CONTEXT, (1e-6,))])
    arguments = ["records", "export", str(tmp_path / "out"), "--db", str(tmp_path), "--json"]
    done = subprocess.run([sys.executable, "-m", "eqtune", *arguments], capture_output=True, check=True)
    assert json.loads(done.stdout) == {"workloads": 1, "records": 1, "skipped": {}}


def test_export_and_import_make_a_round_trip(tmp_path, capsys):
    from tvm import te

    from eqtune.records.workload import serialize_workload, workload_hash

    a = te.placeholder((8,), "float32", "a")
    func = te.create_prim_func([a, te.compute((8,), lambda i: a[i] + 1.0, "b")])
    trace = '[[["GetSBlock",[],["b","main"],["b0"]],["GetLoops",["b0"],[],["l1"]],["Vectorize",["l1"],[],[]]],[]]'
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        database.add_workload(workload_hash(func), serialize_workload(func), name="add", flops=8.0)
        database.add([Record(workload_hash(func), "", trace, CONTEXT, (1e-6,))])
    command("records", "export", tmp_path / "out", "--db", tmp_path, "--json")
    assert json.loads(capsys.readouterr().out) == {"workloads": 1, "records": 1, "skipped": {}}
    fields = {"target": {"kind": "llvm"}, "device": "a cpu", "threads": 2, "tvm_version": "0.27.0"}
    new = ("--db", tmp_path / "new.sqlite", "--new-context", json.dumps(fields))
    command("records", "import", tmp_path / "out", *new)
    assert "1 records of 1 kernels" in capsys.readouterr().out
    command("records", "import", tmp_path / "out", *new)
    assert "left out: 1 (already there)" in capsys.readouterr().out
    with RecordDatabase(tmp_path / "new.sqlite") as database:
        assert database.contexts() == [CONTEXT]
    with pytest.raises(InputError, match="--new-context is not usable"):
        command("records", "import", tmp_path / "out", "--db", tmp_path, "--new-context", "{}")
    wrong = json.dumps(fields | {"threads": "2"})
    with pytest.raises(InputError, match=r"not usable .threads must be a positive integer, not .2"):
        command("records", "import", tmp_path / "out", "--db", tmp_path / "other.sqlite", "--new-context", wrong)
    assert not (tmp_path / "other.sqlite").exists()
    with pytest.raises(InputError, match="say --new-context"):
        command("records", "import", tmp_path / "out", "--db", tmp_path / "empty.sqlite")
    assert not (tmp_path / "empty.sqlite").exists()
    command("records", "import", tmp_path / "out", "--db", tmp_path / "work", "--new-context", json.dumps(fields))
    assert (tmp_path / "work" / "records.sqlite").is_file()  # a directory that `eqtune tune` can go on in


def test_options_of_export_and_import_say_which_records(tmp_path, capsys):
    from tvm import te

    from eqtune.records.workload import serialize_workload, workload_hash

    a = te.placeholder((8,), "float32", "a")
    func = te.create_prim_func([a, te.compute((8,), lambda i: a[i] + 1.0, "b")])
    kernel = workload_hash(func)
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        database.add_workload(kernel, serialize_workload(func), name="add", flops=8.0)
        database.add([Record(kernel, "", "[[],[]]", CONTEXT, (seconds,)) for seconds in (2e-6, 1e-6)])
    export = ("records", "export", tmp_path / "out", "--db", tmp_path, "--json")
    command(*export)
    assert json.loads(capsys.readouterr().out)["records"] == 1
    with pytest.raises(InputError, match="already holds"):
        command(*export, "--every")
    command(*export, "--every", "--overwrite")
    assert json.loads(capsys.readouterr().out)["records"] == 2
    with RecordDatabase(tmp_path / "other.sqlite") as database:
        database.add([record(SLOW, 1.0), record(SLOW, 1.0, OTHER)])
    into = ("records", "import", tmp_path / "out", "--db", tmp_path / "other.sqlite")
    with pytest.raises(InputError, match="--context was not given"):
        command(*into)
    command(*into, "--context", 2)
    with RecordDatabase(tmp_path / "other.sqlite") as database:
        assert [database.best(kernel, context) is None for context in (CONTEXT, OTHER)] == [True, False]


def test_records_that_can_be_begun_nowhere_are_a_clear_error(tmp_path, capsys):
    (tmp_path / "file").touch()
    fields = {"target": {"kind": "llvm"}, "device": "a cpu", "threads": 2, "tvm_version": "0.27.0"}
    new = ["--db", str(tmp_path / "file" / "below"), "--new-context", json.dumps(fields)]
    assert main(["records", "import", str(tmp_path), *new]) == 1
    assert "its directory must exist and be writable" in capsys.readouterr().err


def test_report_is_made_again_from_summary_and_records(work, capsys):
    row = KernelRow("conv2d", FAST, 2, 2e9, 1e6, baseline_s=1e-2, tuned_s=1e-3, trials=0)
    summary = RunSummary("net", CONTEXT, (row,), baseline_s=2.1e-2, tuned_s=2.2e-3)
    (work / "summary.json").write_text(json.dumps(summary.to_json()))
    assert command("report", work) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"the model that was tuned last in {work}:\n")
    assert "net: untuned 21.0 ms, tuned 2.20 ms" in said
    assert "<h1>net</h1>" in (work / "report.html").read_text(encoding="utf-8")
    command("report", work, "-o", work / "other.html", "--json")
    fields = json.loads(capsys.readouterr().out)
    assert (fields["trials"], fields["failed"], fields["errors"]) == (3, 1, {"crash": 1})
    assert (work / "other.html").exists()
    (work / "records.sqlite").unlink()
    (work / "report.html").unlink()
    command("report", work, "--json")
    assert json.loads(capsys.readouterr().out)["trials"] == 0
    assert not (work / "report.html").exists()


def test_a_report_that_cannot_be_written_is_bad_input(work, capsys):
    summary = RunSummary("net", CONTEXT, (), graph={"form": "as given"})
    (work / "summary.json").write_text(json.dumps(summary.to_json()))
    assert main(["report", str(work), "-o", str(work / "records.sqlite" / "page.html")]) == 2
    assert "the report cannot be written" in capsys.readouterr().err
    assert main(["report", str(work), "-o", str(work / "page.html")]) == 0
    page = (work / "page.html").read_text(encoding="utf-8")
    assert "<h2>Form</h2>" in page
    assert "Graph search" not in page


def test_a_report_is_whole_or_the_older_one(work, monkeypatch):
    (work / "summary.json").write_text(json.dumps(RunSummary("net", CONTEXT, ()).to_json()))
    page = work / "page.html"
    page.write_text("an older one")

    def full(path, text, **_):
        with path.open("w") as file:
            file.write(text[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(page), "write_text", full)
    assert main(["report", str(work), "-o", str(page)]) == 2
    with pytest.raises(InputError, match="No space left on device"):
        write_text(str(page), "new")
    assert page.read_text() == "an older one"
    assert [file.name for file in work.glob("*page*")] == ["page.html"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_report_goes_where_a_name_leads(work):
    """Into a pipe or a device, which a file would otherwise take the place of, and into what a link leads to."""
    (work / "summary.json").write_text(json.dumps(RunSummary("net", CONTEXT, ()).to_json()))
    pipe, page, link = work / "pipe", work / "page.html", work / "link.html"
    os.mkfifo(pipe)
    page.write_text("an older one")
    link.symlink_to(page)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert [main(["report", str(work), "-o", str(name)]) for name in (pipe, link)] == [0, 0]
    assert pipe.is_fifo()
    assert b"<h1>net</h1>" in os.read(reader, 1 << 20)
    os.close(reader)
    assert link.is_symlink()
    assert "<h1>net</h1>" in page.read_text(encoding="utf-8")


def test_what_a_link_leads_to_is_written_in_the_format_of_its_name(tmp_path):
    """`model.tar`, a link to `stored.1`: TVM would link a shared library."""
    stored, link = tmp_path / "stored.1", tmp_path / "model.tar"
    link.symlink_to(stored)
    with replacing(link) as temporary:
        assert temporary.suffix == ".tar"
        temporary.write_text("new")
    assert link.is_symlink()
    assert stored.read_text() == "new"


def test_a_private_file_stays_private(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("old")
    page.chmod(0o600)
    write_text(str(page), "new")
    assert page.read_text() == "new"
    assert page.stat().st_mode & 0o777 == 0o600


def test_a_name_may_be_as_long_as_the_system_permits(tmp_path):
    page = tmp_path / f"{250 * 'p'}.html"
    write_text(str(page), "new")
    assert page.read_text() == "new"


def test_names_of_files_may_be_no_text(work, capsys):
    (work / "summary.json").write_text(json.dumps(RunSummary("net", CONTEXT, ()).to_json()))
    page = work / "page\udcff.html"
    assert main(["report", str(work), "-o", str(page)]) == 0
    assert "page\\udcff.html" in capsys.readouterr().out
    write_text(str(page), "of net\udcff")
    assert page.read_text(encoding="utf-8") == "of net?"


def test_commands_look_where_tune_writes_unless_told(work, capsys, monkeypatch):
    folder = work / WORK_DIR
    folder.mkdir()
    (work / "records.sqlite").rename(folder / "records.sqlite")
    (folder / "summary.json").write_text(json.dumps(RunSummary("net", CONTEXT, ()).to_json()))
    monkeypatch.chdir(work)
    assert [main(arguments) for arguments in (["report"], ["watch", "--once"], ["records", "list"])] == [0, 0, 0]
    assert (folder / "report.html").exists()
    assert "2 kernels, 4 trials, 1 failed" in capsys.readouterr().out
    assert main(["records", "list", "--work-dir", str(folder)]) == 0, "as it is called elsewhere"
    assert inspect.signature(eqtune.tune_model).parameters["work_dir"].default == WORK_DIR


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_report_of_no_run_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    with pytest.raises(InputError, match=r"summary"):
        command("report", tmp_path)


def test_watch_tells_what_is_new_until_the_result_is_there_and_writes_nothing(work, capsys, monkeypatch):
    (work / "summary.json").write_text("{}")  # of an earlier run
    os.utime(work / "summary.json", (0, 0))
    database = RecordDatabase(work / "records.sqlite")  # of the run that is watched
    later = iter([lambda: None, lambda: database.add([record(SLOW, None)]), lambda: (work / "summary.json").touch()])
    monkeypatch.setattr(time, "sleep", lambda seconds: next(later)())
    assert main(["watch", str(work)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == ["2 kernels, 4 trials, 1 failed", "2 kernels, 5 trials, 2 failed"]
    assert said.err == ""
    database.close()
    before = {file.name: file.read_bytes() for file in work.iterdir()}
    assert main(["watch", str(work), "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"kernels": 2, "trials": 5, "failed": 2}
    assert {file.name: file.read_bytes() for file in work.iterdir()} == before


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "1e300"])
def test_watch_looks_after_seconds_that_pass(work, capsys, seconds):
    assert main(["watch", str(work), f"--every={seconds}"]) == 2
    assert f"--every is a number of seconds, at most a day, not {float(seconds)}" in capsys.readouterr().err


def test_watch_leaves_other_files_alone(tmp_path, capsys):
    other = tmp_path / "records.sqlite"
    other.touch()
    assert main(["watch", str(tmp_path)]) == 1
    assert "holds no records yet" in capsys.readouterr().err
    assert other.read_bytes() == b""
