"""`tune_model`, `tune_kernels` and the command line, through the public doors, on this machine's CPU."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

import eqtune
from eqtune import zoo
from eqtune.cli import main
from eqtune.compile.executable import build_scheduled
from eqtune.records import RecordDatabase
from eqtune.tune.model import MOST_COMPILED, _calls_matter
from eqtune.tune.result import TaskResult

from .small_models import module, weight


def small_model(size: int = 24) -> tvm.IRModule:
    """conv + bias + relu, pooled, flattened, dense: one of each kind of kernel, milliseconds untuned."""
    rng = np.random.default_rng(0)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 4, size, size), "float32"))
    kernel = relax.const(rng.standard_normal((8, 4, 3, 3)).astype("float32"))
    bias = relax.const(rng.standard_normal((1, 8, 1, 1)).astype("float32"))
    dense = relax.const(rng.standard_normal((8, 10)).astype("float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.conv2d(x, kernel, padding=1))
            y = builder.emit(relax.op.nn.relu(relax.op.add(y, bias)))
            y = builder.emit(relax.op.nn.adaptive_avg_pool2d(y, (1, 1)))
            y = builder.emit(relax.op.reshape(y, (1, 8)))
            y = builder.emit_output(relax.op.matmul(y, dense))
        builder.emit_func_output(y)
    return builder.finalize()


def tune(work_dir: Path, **arguments: object) -> eqtune.TuneResult:
    defaults = {"trials": 24, "graph": "off", "progress": False, "work_dir": work_dir, "threads": 1}
    return eqtune.tune_model(small_model(), **{**defaults, **arguments})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[eqtune.TuneResult, Path]:
    work_dir = tmp_path_factory.mktemp("tuned") / "work"
    return tune(work_dir), work_dir


def test_the_result_is_right_and_not_slower(tuned: tuple[eqtune.TuneResult, Path]) -> None:
    result, _ = tuned
    assert result.max_rel_error <= 1e-4
    assert result.latency_s <= result.baseline_latency_s
    x = np.random.default_rng(1).standard_normal((1, 4, 24, 24)).astype(np.float32)
    untuned = relax.VirtualMachine(tvm.compile(small_model(), tvm.target.Target("llvm")), tvm.cpu())
    expected = untuned["main"](tvm.runtime.tensor(x)).numpy()
    (got,) = result.run(x)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.ones((1, 4, 24, 23), "float32"), r"the input .* takes R.Tensor.*, not float32 of shape \(1, 4, 24, 23\)"),
        (np.ones((4, 24, 24), "float32"), r"not float32 of shape \(4, 24, 24\)"),
        (np.ones((1, 4, 24, 24)), r"not float64 of shape \(1, 4, 24, 24\)"),
        (np.ones((1, 4, 24, 24), ">f4"), "not >f4 of shape"),
        ("data", "not <U4 of shape"),
        ([[1.0], [1.0, 2.0]], "is no array: setting an array element with a sequence"),
    ],
)
def test_inputs_that_do_not_fit_are_named(tuned: tuple[eqtune.TuneResult, Path], given: object, message: str) -> None:
    with pytest.raises(eqtune.InputError, match=message):
        tuned[0].run(given)


def test_inputs_may_be_tensors_of_tvm(tuned: tuple[eqtune.TuneResult, Path]) -> None:
    x = np.ones((1, 4, 24, 24), np.float32)
    np.testing.assert_array_equal(tuned[0].run(tvm.runtime.tensor(x))[0], tuned[0].run(x)[0])
    with pytest.raises(eqtune.InputError, match="not float64 of shape"):
        tuned[0].run_tensors(tvm.runtime.tensor(x.astype("float64")))


def test_several_threads_run_it_at_once(tuned: tuple[eqtune.TuneResult, Path]) -> None:
    inputs = [np.full((1, 4, 24, 24), value, np.float32) for value in range(4)]
    expected = [tuned[0].run(x)[0] for x in inputs]
    with ThreadPoolExecutor(4) as threads:
        for index, (got,) in enumerate(threads.map(tuned[0].run, inputs * 16)):
            np.testing.assert_array_equal(got, expected[index % 4])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_runs_it_too(tuned: tuple[eqtune.TuneResult, Path]) -> None:
    """TVM's threads, and the one that calls them, stay behind in the parent."""
    x = np.ones((1, 4, 24, 24), np.float32)
    (expected,) = tuned[0].run(x)
    child = multiprocessing.get_context("fork").Process(
        target=lambda: np.testing.assert_array_equal(tuned[0].run(x)[0], expected)
    )
    child.start()
    child.join(60)
    child.kill()
    child.join()
    assert child.exitcode == 0
    np.testing.assert_array_equal(tuned[0].run(x)[0], expected)


@pytest.mark.parametrize("send", [pickle.dumps, copy.deepcopy])
def test_compiled_code_is_not_sent_to_other_processes(
    tuned: tuple[eqtune.TuneResult, Path], send: Callable[[Any], Any]
) -> None:
    with pytest.raises(eqtune.SetupError, match="give the other process the path of what `export` writes"):
        send(tuned[0])


def test_the_result_prints_as_its_table_and_not_as_its_module(tuned: tuple[eqtune.TuneResult, Path]) -> None:
    result, _ = tuned
    assert all(task.name[:10] in str(result) for task in result.tasks)
    assert "faster on" in repr(result)
    assert len(repr(result)) < 300
    assert all(task.trace not in repr(task) for task in result.tasks if task.trace)


def test_the_budget_of_trials_is_kept_and_each_is_recorded(tuned: tuple[eqtune.TuneResult, Path]) -> None:
    result, work_dir = tuned
    assert 0 < sum(task.trials for task in result.tasks) <= 24
    with RecordDatabase(work_dir / "records.sqlite") as database:
        assert database.count() <= 24


def test_running_again_measures_nothing_and_gives_the_same(tuned: tuple[eqtune.TuneResult, Path]) -> None:
    result, work_dir = tuned
    with RecordDatabase(work_dir / "records.sqlite") as database:
        before = database.count()
    again = tune(work_dir)
    with RecordDatabase(work_dir / "records.sqlite") as database:
        assert database.count() == before
    assert {t.workload_hash: t.decision for t in again.tasks} == {t.workload_hash: t.decision for t in result.tasks}


def test_a_larger_budget_goes_on_and_measures_nothing_twice(
    tuned: tuple[eqtune.TuneResult, Path], tmp_path: Path
) -> None:
    work_dir = tmp_path / "work"
    shutil.copytree(tuned[1], work_dir)
    with RecordDatabase(work_dir / "records.sqlite") as database:
        before = database.count()
    tune(work_dir, trials=before + 12)
    with RecordDatabase(work_dir / "records.sqlite") as database:
        records = database.all()
    assert before < len(records) <= before + 12
    decisions = [(record.workload_hash, record.decision) for record in records]
    assert len(set(decisions)) == len(decisions)


def test_a_baseline_of_quieter_times_is_timed_again(tuned: tuple[eqtune.TuneResult, Path], tmp_path: Path) -> None:
    _, work_dir = tuned
    shutil.copytree(work_dir, tmp_path / "work")
    with contextlib.closing(sqlite3.connect(tmp_path / "work" / "records.sqlite")) as database, database:
        changed = database.execute(
            "update facts set value = ? where key like 'reference:%'", [json.dumps({"latency_s": 1e-9})]
        )
        assert changed.rowcount == 1
    result = tune(tmp_path / "work")
    assert 1e-6 < result.latency_s <= result.baseline_latency_s


def test_the_tuned_module_is_scheduled_and_tvm_builds_it(tuned: tuple[eqtune.TuneResult, Path]) -> None:
    result, _ = tuned
    kernels = [f for f in result.mod.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    scheduled = [f for f in kernels if "tirx.is_scheduled" in f.attrs]
    assert len(scheduled) == sum(task.tuned for task in result.tasks) > 0
    machine = relax.VirtualMachine(tvm.compile(result.mod, eqtune.machine.detect_target(1)), tvm.cpu())
    x = np.random.default_rng(2).standard_normal((1, 4, 24, 24)).astype(np.float32)
    np.testing.assert_array_equal(machine["main"](tvm.runtime.tensor(x)).numpy(), result.run(x)[0])


def test_llvm_means_this_machine(tmp_path: Path) -> None:
    result = tune(tmp_path / "work", target="llvm", trials=4)
    assert result.summary.context.target == eqtune.machine.target_json(eqtune.machine.detect_target(1))


def test_a_target_of_one_core_is_timed_on_one(tmp_path: Path) -> None:
    result = tune(tmp_path / "work", target=eqtune.machine.detect_target(1), threads=None, trials=4)
    assert result.summary.context.threads == 1


def test_unverified_models_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eqtune.tune.accuracy.compare", lambda *_: pytest.fail("compared"))
    assert np.isnan(tune(tmp_path / "work", trials=4, verify=False).max_rel_error)


def test_a_stricter_tolerance_of_the_graph_search_holds_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eqtune.tune.accuracy.compare", lambda *_: (1e-5, 1e-5))
    assert tune(tmp_path / "work", trials=4, graph=eqtune.GraphConfig(rules=())).max_rel_error == 1e-5
    with pytest.raises(eqtune.MismatchError, match="1e-06 relative is allowed"):
        tune(tmp_path / "work", trials=4, graph=eqtune.GraphConfig(rules=(), tolerance=1e-6))


def test_a_model_that_makes_much_of_roundings_is_refused_and_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eqtune.tune.accuracy.compare", lambda *_: (1.0, 1e-2))
    calm = module((4, 32), lambda _, x: relax.op.tanh(relax.op.matmul(x, weight(32, 16))))
    sharp = module(
        (4, 32), lambda _, x: relax.op.sin(relax.op.matmul(x, relax.op.multiply(weight(32, 16), relax.const(1e4))))
    )
    for mod, told in ((calm, False), (sharp, True)):
        with pytest.raises(eqtune.MismatchError, match="nothing is returned") as raised:
            eqtune.tune_model(mod, trials=2, graph="off", progress=False, work_dir=tmp_path / str(told), threads=1)
        assert ("makes much of roundings" in str(raised.value)) == told


def test_facts_that_are_none_are_found_out_again(tuned: tuple[eqtune.TuneResult, Path], tmp_path: Path) -> None:
    shutil.copytree(tuned[1], tmp_path / "work")
    with contextlib.closing(sqlite3.connect(tmp_path / "work" / "records.sqlite")) as database, database:
        wrong = json.dumps({"latency_s": [], "decision": {}, "form": 3, "seconds": "1"})
        database.execute("update facts set value = ? where key not like 'hardware:%'", [wrong])
    assert tune(tmp_path / "work").max_rel_error <= 1e-4


def test_the_exported_library_runs(
    tuned: tuple[eqtune.TuneResult, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result, _ = tuned
    path = result.export(tmp_path / "model.so")
    assert capfd.readouterr().err == ""
    library = tvm.runtime.load_module(str(path))
    x = np.ones((1, 4, 24, 24), dtype=np.float32)
    got = relax.VirtualMachine(library, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_array_equal(got, result.run(x)[0])
    with pytest.raises(eqtune.InputError, match=r"must end in \.so or \.tar"):
        result.export(tmp_path / "model.dll")
    (tmp_path / "folder.so").mkdir()
    with pytest.raises(eqtune.InputError, match="it is a folder"):
        result.export(tmp_path / "folder.so")


def test_without_a_compiler_object_files_are_exported(
    tuned: tuple[eqtune.TuneResult, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("tar", "gzip"):
        (programs / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(programs))
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(eqtune.SetupError, match=r"there is no C\+\+ compiler.*a \.tar needs no compiler"):
        tuned[0].export(tmp_path / "model.so")
    assert tuned[0].export(tmp_path / "model.tar").stat().st_size > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.tar", "programs"]


def test_the_report_names_every_kernel(tuned: tuple[eqtune.TuneResult, Path], tmp_path: Path) -> None:
    result, _ = tuned
    page = result.report(tmp_path / "report.html").read_text()
    for task in result.tasks:
        assert task.name[:12] in page
    assert "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "no-such-target"}, "unknown target"),
        ({"target": {"kind": "no-such-kind"}}, "unknown target"),
        ({"trials": 0}, "at least 1"),
        ({"time_budget_s": -5}, "more than 0"),
        ({"strategy": "simulated-annealing"}, "annealed-evolution"),
        ({"cost_model": "gpt"}, "xgboost"),
        ({"allocator": "fair"}, "round-robin"),
        ({"measure": "telepathy"}, "local"),
        ({"measure": "local:flush-l2"}, "is for GPUs, not for a target of the kind llvm"),
        ({"threads": 0}, "at least 1"),
        ({"graph": "taso"}, "saturate"),
        ({"graph": "off", "fast_math": True}, "fast_math permits rules of the graph search, which graph='off' leaves"),
    ],
)
def test_an_argument_that_cannot_be_used_is_one_clear_error(
    tmp_path: Path, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(eqtune.InputError, match=message):
        tune(tmp_path / "work", **arguments)


@pytest.mark.parametrize("function", [eqtune.tune_model, eqtune.tune_kernels])
def test_all_but_the_first_two_arguments_are_given_by_name(function: Callable[..., Any]) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    assert [parameter.kind for parameter in parameters[:2]] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2
    assert {parameter.kind for parameter in parameters[2:]} == {inspect.Parameter.KEYWORD_ONLY}


def test_a_work_directory_that_is_no_path_is_refused() -> None:
    """Not made a folder called None."""
    with pytest.raises(eqtune.InputError, match="path of a folder, not None"):
        eqtune.tune_model(small_model(), trials=1, work_dir=None)  # type: ignore[arg-type]


def test_single_kernels_are_tuned_and_stay_right(tmp_path: Path) -> None:
    from tvm import te

    a, b = te.placeholder((33, 65), name="a"), te.placeholder((65, 47), name="b")
    k = te.reduce_axis((0, 65), "k")
    c = te.compute((33, 47), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    result = eqtune.tune_kernels(te.create_prim_func([a, b, c]), trials=12, work_dir=tmp_path / "work", progress=False)
    assert result.tasks[0].latency_s <= result.tasks[0].baseline_latency_s
    built = tvm.compile(result.mod, eqtune.machine.detect_target())
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((33, 65)).astype("float32"), rng.standard_normal((65, 47)).astype("float32")
    out = tvm.runtime.empty((33, 47), "float32")
    built["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y), out)
    np.testing.assert_allclose(out.numpy(), x @ y, rtol=1e-4, atol=1e-4)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "eqtune", *map(str, arguments)]


SMALL = "zoo:nasrnn:steps=2:hidden=256"


@pytest.mark.slow
def test_the_command_line_tunes_reports_and_resumes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["tune", SMALL, "--trials", "20", "--graph", "off", "--work-dir", str(tmp_path / "work")]
    files = ["--report", str(tmp_path / "r.html"), "--export", str(tmp_path / "m.so")]
    assert main([*arguments, *files]) == 0
    said = capfd.readouterr().out
    assert "untuned" in said
    assert "largest difference" in said
    assert (tmp_path / "r.html").exists()
    assert (tmp_path / "m.so").exists()
    assert f"m.so; run it with TVM_NUM_THREADS={eqtune.machine.core_count()}\n" in said
    again = subprocess.run(command(*arguments, "--json", "-q"), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    summary = json.loads(again.stdout)
    assert summary["trials"] <= 20
    assert summary["max_rel_error"] <= 1e-4
    assert again.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tune", "missing.onnx"), "no file"),
        (("tune", "zoo:alexnet"), "squeezenet"),
        (("tune", "zoo:bert_base:words=3"), "its options: "),
        (("tune", "zoo:nasrnn", "--target", "{"), "not JSON"),
        (("tune", "zoo:nasrnn", "--graph", "off", "--fast-math"), "drop one of the two"),
        (("tune", "zoo:nasrnn", "--shape", "x=a"), "NAME=1,3,224,224"),
        (("tune", "zoo:nasrnn", "--export", "model.dll"), "must end in"),
        (("records", "list", "--db", "nowhere"), "there are no records at 'nowhere'"),
        (("watch", "nowhere"), "no records.sqlite"),
    ],
)
def test_bad_input_on_the_command_line_is_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(list(arguments)) == 2
    said = capfd.readouterr().err
    assert said.startswith("eqtune: error:")
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_bad_input_ends_the_process_with_exit_code_2(tmp_path: Path) -> None:
    done = subprocess.run(command("tune", "missing.onnx"), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("eqtune: error:")
    assert len(done.stderr.strip().splitlines()) == 1


TINY = "zoo:nasrnn:steps=1:hidden=32"


def test_kernels_are_listed_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", TINY, "--list", "--json", "--threads", "1", "--work-dir", str(tmp_path / "work")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len({row["kernel"] for row in rows}) == len(rows) > 0
    assert all(row["bytes"] > 0 and row["candidates"] > 0 and row["sketches"] for row in rows)
    name = rows[0]["kernel"]
    assert main(["kernels", TINY, "--list", "--only", name, "--threads", "1"]) == 0
    listed = capsys.readouterr().out
    assert listed.strip()
    assert all(name in line for line in listed.splitlines())
    assert " 0.00 M" not in listed  # of small kernels, too, three digits
    assert main(["kernels", TINY, "--list", "--only", "alexnet"]) == 2
    assert "no kernel's name contains 'alexnet'" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_kernels_are_tuned_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--trials", "4", "--threads", "1", "--work-dir", str(tmp_path / "work"), "--quiet", "--json"]
    assert main(["kernels", TINY, *options, "--output", str(tmp_path / "scheduled.json")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert 0 < sum(row["trials"] for row in rows) <= 4
    assert all(0 < row["tuned_us"] <= row["baseline_us"] for row in rows)
    scheduled = tvm.ir.load_json((tmp_path / "scheduled.json").read_text())
    assert {variable.name_hint for variable in scheduled.get_global_vars()} == {row["kernel"] for row in rows}


def test_what_an_earlier_run_found_is_exported(tmp_path: Path) -> None:
    """As the help of --export says."""
    arguments = ["tune", TINY, "--graph", "off", "--trials", "4", "--threads", "1", "--work-dir", str(tmp_path), "-q"]
    counts = []
    for more in ([], ["--export", str(tmp_path / "model.so")]):
        assert main([*arguments, *more]) == 0
        with RecordDatabase(tmp_path / "records.sqlite") as database:
            counts.append(database.count())
    assert counts == [4, 4]
    assert (tmp_path / "model.so").stat().st_size > 0


def test_a_budget_that_earlier_runs_spent_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"graph": "off", "threads": 1, "work_dir": tmp_path}
    for trials, told in ((8, False), (8, True), (16, False)):
        eqtune.tune_model(small_model(), trials=trials, **arguments)
        assert ("to go on, give a larger one" in capsys.readouterr().err) == told


@pytest.mark.parametrize(("name", "extra"), [("model.onnx", "onnx"), ("model.pt2", "torch"), ("model.txt", "")])
def test_a_file_that_cannot_be_read_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, extra: str
) -> None:
    (tmp_path / name).touch()
    if extra:
        monkeypatch.setitem(sys.modules, extra, None)
    assert main(["tune", str(tmp_path / name), "--work-dir", str(tmp_path / "work")]) == 2
    assert (f"eqtune[{extra}]" if extra else "unknown suffix '.txt'") in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_ctrl_c_saves_and_returns_the_best_so_far(tmp_path: Path) -> None:
    work = tmp_path / "work"
    process = subprocess.Popen(
        command("tune", SMALL, "--graph", "off", "--work-dir", work),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_records(work, 8)
    process.send_signal(signal.SIGINT)
    output, progress = process.communicate(timeout=120)
    assert "no budget was given: the search ends when no kernel improves, or by Ctrl-C" in progress
    assert process.returncode == 130
    assert "interrupted: this is the best so far" in output


@pytest.mark.slow
def test_kill_9_loses_no_reported_measurement_and_repeats_none(tmp_path: Path) -> None:
    work = tmp_path / "work"
    arguments = ["tune", SMALL, "--graph", "off", "--work-dir", str(work), "--trials", "24"]
    process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    reported = wait_for_records(work, 8)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert main(arguments) == 0
    with RecordDatabase(work / "records.sqlite") as database:
        records = database.all()
    decisions = [(record.workload_hash, record.decision) for record in records]
    assert reported <= len(records) <= 24
    assert len(set(decisions)) == len(decisions)


def wait_for_records(work: Path, count: int) -> int:
    """Wait until a run has reported `count` measurements; returns how many it has."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (work / "records.sqlite").exists():
            with RecordDatabase(work / "records.sqlite") as database:
                if database.count() >= count:
                    return database.count()
        time.sleep(0.2)
    raise AssertionError("the run reported nothing in two minutes")


@pytest.mark.slow
@pytest.mark.alone
def test_squeezenet_is_tuned_whole(tmp_path: Path) -> None:
    result = eqtune.tune_model("zoo:squeezenet", work_dir=tmp_path / "work", trials=220, graph="off", progress=False)
    assert result.max_rel_error <= 1e-4
    assert result.latency_s < result.baseline_latency_s / 5
    inputs = zoo.inputs("squeezenet").values()
    torch = pytest.importorskip("torch")
    module, examples = zoo.torch("squeezenet")
    with torch.inference_mode():
        expected = module(*examples).numpy()
    (got,) = result.run(*inputs)
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(("width", "compiled"), [(8, True), (768, False)])
def test_calls_of_short_kernels_are_compiled(
    width: int, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of eight layers matter beside products of 8 x 8, not beside those of 768 x 768."""
    asked = []

    def build(mod: tvm.IRModule, target: object, calls_compiled: bool) -> object:
        asked.append(calls_compiled)
        return build_scheduled(mod, target, calls_compiled)

    def layers(bb: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        for _ in range(8):
            x = bb.emit(relax.op.matmul(x, weight(width, width)))
            x = bb.emit(relax.op.multiply(x, relax.const(width**-0.5, "float32")))
        return x

    monkeypatch.setattr("eqtune.tune.model.build_scheduled", build)
    model = module((width, width), layers)
    eqtune.tune_model(model, trials=8, graph="off", progress=False, work_dir=tmp_path, threads=1)
    assert asked == [compiled]


def test_calls_of_a_thousand_kernels_are_not_compiled() -> None:
    """LLVM takes two minutes for 1200 calls in one function: no budget of seconds has them."""
    target = tvm.target.Target("llvm")

    def of(calls: int) -> TaskResult:
        return TaskResult("step", "", calls, 0.0, 0.0, 1e-7, 1e-7, 0, 0, "")

    assert _calls_matter([of(MOST_COMPILED)], target)
    assert not _calls_matter([of(MOST_COMPILED), of(1)], target)
