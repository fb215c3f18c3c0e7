import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eqtune.errors import RecordError
from eqtune.records import Context, Record, RecordDatabase

HASH = "0123456789abcdef"
OTHER_HASH = "f" * 16
CONTEXT = Context('{"kind": "llvm"}', "a cpu", 2, "0.27.0")


def record(latency_s=1e-3, **changes):
    latencies = () if latency_s is None else (latency_s, latency_s * 2)
    error = "timeout" if latency_s is None else ""
    fields = {"timestamp_s": 1.5, "seed": 3, "eqtune_version": "0.1.0"} | changes
    return Record(
        **({"workload_hash": HASH, "decision": '{"sketch": "s", "values": {"tile": 4}}', "trace": "[[],[]]"} | {
            "context": CONTEXT, "latencies_s": latencies, "error": error,
        } | fields)
    )  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "records.sqlite"


def test_importing_the_package_loads_neither_tvm_nor_numpy():
    code = "import sys, eqtune.records; print(sorted({'tvm', 'tvm_ffi', 'numpy', 'torch'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_records_come_back_as_they_were(path):
    batch = [
        record(notes='{"registers": 64.0}'),
        record(None, detail='line one\n"two" é'),
        record(2e-3, decision="", workload_hash=OTHER_HASH),
    ]
    with RecordDatabase(path) as database:
        database.add(batch)
        database.add([])
    with RecordDatabase(path) as database:
        assert database.all() == batch
        assert database.for_workload(HASH, CONTEXT) == batch[:2]
        assert database.all(OTHER_HASH) == batch[2:]
        assert database.count() == 3
        assert database.count(HASH) == 2
        assert database.contexts() == [CONTEXT]


def test_best_is_the_fastest_success_and_the_earlier_of_equals(path):
    with RecordDatabase(path) as database:
        database.add([record(2e-3), record(None), record(1e-3, seed=7), record(1e-3, seed=8)])
        database.add([record(5e-3, workload_hash=OTHER_HASH)])
        database.add([record(None, workload_hash="0" * 16)])
        assert database.best(HASH, CONTEXT) == record(1e-3, seed=7)
        assert database.best("0" * 16, CONTEXT) is None
        best = database.best_by_workload(CONTEXT)
        assert best == {HASH: record(1e-3, seed=7), OTHER_HASH: record(5e-3, workload_hash=OTHER_HASH)}


@pytest.mark.parametrize(
    "other",
    [
        replace(CONTEXT, target='{"kind": "cuda"}'),
        replace(CONTEXT, device="another cpu"),
        replace(CONTEXT, threads=1),
        replace(CONTEXT, tvm_version="0.28.0"),
    ],
)
def test_another_context_never_matches(path, other):
    with RecordDatabase(path) as database:
        database.add([record()])
        assert database.best(HASH, other) is None
        assert database.for_workload(HASH, other) == []
        assert database.best_by_workload(other) == {}
        assert database.count(HASH, other) == 0
        database.add([record(5e-3, context=other)])
        assert database.best(HASH, CONTEXT) == record()
        assert database.contexts() == [CONTEXT, other]


def test_workloads_are_kept_once(path):
    with RecordDatabase(path) as database:
        database.add_workload(HASH, "text", name="matmul", flops=2e9)
        database.add_workload(HASH, "other text", name="other", flops=1.0)
        found = database.workload(HASH)
        assert found is not None
        assert (found.hash, found.text, found.name, found.flops) == (HASH, "text", "matmul", 2e9)
        assert database.workloads() == [found]
        assert database.workload(OTHER_HASH) is None


def test_facts_are_json(path):
    value = {"peak_flops_per_s": 1.1e11, "names": ["a", None, True]}
    with RecordDatabase(path) as database:
        assert database.get_json("hardware") is None
        database.put_json("hardware", 1)
        database.put_json("hardware", value)
    with RecordDatabase(path) as database:
        assert database.get_json("hardware") == value
        for bad in (float("nan"), {1, 2}, object()):
            with pytest.raises(RecordError, match="cannot be kept as JSON"):
                database.put_json("hardware", bad)
        assert database.get_json("hardware") == value


def test_records_and_the_facts_that_go_with_them_are_kept_together_or_not_at_all(path):
    with RecordDatabase(path) as database:
        with pytest.raises(RecordError, match="'trials' cannot be kept"):
            database.add([record()], {"trials": float("nan")})
        with pytest.raises(RecordError):
            database.add([record(workload_hash="")], {"trials": 1})
        assert (database.count(), database.get_json("trials")) == (0, None)
        database.add([record()], {"trials": 1})
        assert (database.count(), database.get_json("trials")) == (1, 1)


def test_what_two_processes_add_to_a_number_is_its_sum(path):
    with RecordDatabase(path) as one, RecordDatabase(path) as other:
        one.add([record()], sums={"spent": {"seconds": 1.5, "trials": 16}})
        other.add([], sums={"spent": {"seconds": 0.5, "trials": 4}})
        one.add([], sums={"spent": {"seconds": 1.0, "trials": 8}})
        assert other.get_json("spent") == {"seconds": 3.0, "trials": 28}
        with pytest.raises(RecordError):
            one.add([record(workload_hash="")], sums={"spent": {"seconds": 1.0, "trials": 1}})
        assert other.get_json("spent") == {"seconds": 3.0, "trials": 28}
        assert other.count() == 1


def test_kernels_are_counted_without_their_traces(path):
    batch = [record(2e-3), record(None), record(1e-3), record(None, workload_hash=OTHER_HASH)]
    with RecordDatabase(path) as database:
        database.add(batch)
        database.add([record(1e-6, context=replace(CONTEXT, threads=4))])
        assert database.kernels(CONTEXT) == [(HASH, 3, 1, 1e-3), (OTHER_HASH, 1, 1, None)]
        assert database.all(context=CONTEXT, traces=False) == [replace(one, trace="") for one in batch]


def test_imported_schedules_are_left_out_where_only_searched_ones_count(path):
    with RecordDatabase(path) as database:
        database.add([record(2e-3), record(1e-3, decision="")])
        assert database.best(HASH, CONTEXT).decision == ""
        assert database.best(HASH, CONTEXT, searched=True).latencies_s[0] == 2e-3


def test_a_fact_that_is_no_such_thing_counts_as_unknown(path):
    with RecordDatabase(path) as database:
        database.put_json("run", {"seconds": 1.5, "trials": -1, "form": "a", "most": 10**400})
        database.put_json("list", [1])
        assert database.get_number("run", "seconds") == 1.5
        assert [database.get_number("run", name) for name in ("trials", "form", "most", "other")] == [None] * 4
        assert database.get_number("list", "seconds") is None
        assert database.get_object("list") == database.get_object("nothing") == {}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"workload_hash": "xyz"}, "16 hexadecimal"),
        ({"workload_hash": HASH.upper()}, "16 hexadecimal"),
        ({"latencies_s": (float("nan"),)}, "finite"),
        ({"latencies_s": (float("inf"),)}, "finite"),
        ({"latencies_s": (-1.0,)}, "positive"),
        ({"latencies_s": ()}, "either latencies or an error"),
        ({"error": "crash"}, "either latencies or an error"),
        ({"decision": "[1]"}, "JSON object"),
        ({"decision": "{"}, "not JSON"),
        ({"notes": '{"registers": 1e300}'}, "at most 3e"),
        ({"seed": 2**70}, "64-bit"),
        ({"timestamp_s": float("inf")}, "finite"),
        ({"trace": None}, "must be text"),
        ({"context": replace(CONTEXT, threads=0)}, "threads"),
    ],
)
def test_a_wrong_record_is_refused_and_its_batch_not_kept(path, changes, complaint):
    with RecordDatabase(path) as database:
        with pytest.raises(RecordError, match=complaint):
            database.add([record(), replace(record(), **changes)])
        assert database.count() == 0


@pytest.mark.parametrize(
    ("assignment", "complaint"),
    [
        ("latencies_s = '[1e999]'", "finite"),
        ("latencies_s = '[NaN]'", "not JSON"),
        ("latencies_s = '{}'", "tuple"),
        ("latencies_s = '[\"1\"]'", "finite"),
        ("latencies_s = x'80049503'", "not JSON"),
        (f"latencies_s = '[1{'0' * 400}]'", "finite"),
        (f"notes = '{{\"registers\": 1{'0' * 400}}}'", "finite"),
        ("decision = '!!python/object'", "not JSON"),
        ("decision = '{}'", "names a sketch"),
        ('decision = \'{"sketch": "x", "values": 5}\'', "names a sketch"),
        ('decision = \'{"sketch": "x", "values": {"a": 1e999}}\'', "names a sketch"),
        ("trace = x'00ff'", "must be text"),
        ("seed = 'x'", "seed"),
        ("workload_hash = '../../etc/passwd'", "16 hexadecimal"),
    ],
)
def test_what_someone_wrote_into_the_file_is_checked(path, assignment, complaint):
    with RecordDatabase(path) as database:
        database.add([record()])
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE records SET {assignment}")
    connection.close()
    with RecordDatabase(path) as database, pytest.raises(RecordError, match=complaint) as raised:
        database.all()
    assert str(path) in str(raised.value)
    assert "record 1 is damaged" in str(raised.value)
    assert "restore the file from a copy, or move it away" in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE records DROP COLUMN notes",
        "ALTER TABLE contexts RENAME COLUMN device TO machine",
        "DROP TABLE records",
    ],
)
@pytest.mark.parametrize("use", [lambda database: database.all(), lambda database: database.add([record()])])
def test_a_file_that_lacks_a_part_says_what_to_do(path, change, use):
    RecordDatabase(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(change)
    connection.close()
    with RecordDatabase(path) as database, pytest.raises(RecordError, match=r"lacks a table or column .*; restore"):
        use(database)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.floats(min_value=1e-12, max_value=1e6), min_size=1, max_size=4),
    st.integers(-(2**63), 2**63 - 1),
)
def test_any_text_and_number_survives(tmp_path, text, latencies, seed):
    one = record(trace=text, latencies_s=tuple(latencies), seed=seed, context=replace(CONTEXT, device=text))
    path = tmp_path / "any.sqlite"
    path.unlink(missing_ok=True)
    with RecordDatabase(path) as database:
        database.add([one])
        assert database.all() == [one]


# Files that cannot be used


def _assert_one_line(raised, path, *words):
    message = str(raised.value)
    assert "\n" not in message
    assert str(path) in message
    for word in words:
        assert word in message


def test_a_file_that_is_no_database_is_left_alone(path):
    path.write_text("these are not the records you are looking for" * 100)
    before = path.read_bytes()
    with pytest.raises(RecordError) as raised:
        RecordDatabase(path)
    _assert_one_line(raised, path, "not a database")
    assert path.read_bytes() == before


def test_another_programs_database_is_left_alone(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(RecordError) as raised:
        RecordDatabase(path)
    _assert_one_line(raised, path, "another program")
    assert path.read_bytes() == before


def test_another_schema_version_says_which_program_to_use(path):
    RecordDatabase(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
        connection.execute("UPDATE meta SET value = '7.0' WHERE key = 'eqtune_version'")
    connection.close()
    with pytest.raises(RecordError) as raised:
        RecordDatabase(path)
    _assert_one_line(raised, path, "eqtune 7.0", "schema 99", "reads schema 2")


def test_a_file_of_the_first_schema_is_upgraded_and_keeps_its_records(path):
    with RecordDatabase(path) as database:
        database.add([record()])
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE records DROP COLUMN notes")
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    with RecordDatabase(path) as database:
        database.add([record(notes='{"clock_mhz": 1980}')])
    with RecordDatabase(path) as database:
        assert database.all() == [record(), record(notes='{"clock_mhz": 1980}')]


@pytest.mark.parametrize("part", [0.05, 0.3, 0.6, 0.95])
def test_a_file_that_was_cut_short_is_one_clear_error(path, part):
    with RecordDatabase(path) as database:
        database.add([record(trace="x" * 3000) for _ in range(50)])
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(RecordError) as raised, RecordDatabase(path) as database:
        database.all()
    _assert_one_line(raised, path, "cut short")


def test_a_missing_directory_and_a_directory_are_clear_errors(tmp_path):
    with pytest.raises(RecordError) as raised:
        RecordDatabase(tmp_path / "no" / "such" / "records.sqlite")
    _assert_one_line(raised, tmp_path, "must exist and be writable")
    with pytest.raises(RecordError):
        RecordDatabase(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_file_that_may_not_be_written_is_a_clear_error(path):
    RecordDatabase(path).close()
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        with pytest.raises(RecordError, match=r"not writable|cannot be opened"):
            RecordDatabase(path).add([record()])
    finally:
        path.parent.chmod(0o700)


def test_a_full_disk_loses_nothing_that_was_kept(path):
    with RecordDatabase(path) as database:
        database.add([record()])
        pages = database._connection.execute("PRAGMA page_count").fetchone()[0]
        database._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(RecordError) as raised:
            database.add([record(trace="x" * 5000) for _ in range(20)])
        _assert_one_line(raised, path, "disk is full")
        assert database.all() == [record()]
        database._connection.execute("PRAGMA max_page_count = 100000")
        database.add([record(2e-3)])
    with RecordDatabase(path) as database:
        assert database.all() == [record(), record(2e-3)]


def test_waiting_for_another_process_ends(path):
    with RecordDatabase(path, timeout_s=0.1) as database:
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(RecordError) as raised:
            database.add([record()])
        _assert_one_line(raised, path, "locked for more than 0.1 s")
        assert database.count() == 0  # reading goes on
        holder.execute("ROLLBACK")
        holder.close()
        database.add([record()])
        assert database.count() == 1


def test_ctrl_c_while_a_transaction_begins_leaves_none_open(path):
    """It is raised once SQLite returns, with the lock that it had waited for."""

    class Interrupted:
        def __getattr__(self, name):
            return getattr(connection, name)

        def execute(self, statement, *values):
            done = connection.execute(statement, *values)
            if statement.startswith("BEGIN"):
                raise KeyboardInterrupt
            return done

    with RecordDatabase(path) as database:
        connection, database._connection = database._connection, Interrupted()
        with pytest.raises(KeyboardInterrupt):
            database.add([record()])
        database._connection = connection
        assert not connection.in_transaction
        database.add([record(2e-3)])
        assert database.all() == [record(2e-3)]


def test_contexts_of_one_batch_are_in_the_order_of_their_records(path):
    """Whoever asks for one by its number means the same one in every process."""
    contexts = [replace(CONTEXT, device=device) for device in "hbgcfade"]
    with RecordDatabase(path) as database:
        database.add([record(context=context) for context in contexts])
        assert database.contexts() == contexts


def test_who_only_reads_changes_nothing(tmp_path):
    path = tmp_path / "wörk 100% ?#.sqlite"
    with pytest.raises(RecordError, match="cannot be opened"):
        RecordDatabase(path, read_only=True)
    assert list(tmp_path.iterdir()) == []
    with RecordDatabase(path) as database:
        database.add([record()])
    with RecordDatabase(path, read_only=True) as database:
        with pytest.raises(RecordError, match="not writable"):
            database.add([record(2e-3)])
        assert database.all() == [record()]


def test_a_closed_database_says_so(path):
    database = RecordDatabase(path)
    database.close()
    database.close()
    with pytest.raises(RecordError, match="closed"):
        database.count()


# Several processes, and their sudden ends

_WRITER = """
import sys
sys.path.insert(0, {folder!r})
from eqtune.records import Record, RecordDatabase, Context
database = RecordDatabase({path!r})
context = Context('{{"kind": "llvm"}}', "a cpu", 2, "0.27.0")
number = 0
while number < int(sys.argv[2]):
    batch = [Record("0123456789abcdef", "", "x" * 500, context, (1e-3,), seed=int(sys.argv[1]) + number + i)
             for i in range(4)]
    database.add(batch)
    number += 4
    print(number, flush=True)
"""


def _writer(path, first, count):
    code = _WRITER.format(folder=str(Path(__file__).parent), path=str(path))
    return subprocess.Popen(
        [sys.executable, "-c", code, str(first), str(count)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_processes_that_open_a_new_file_at_once_all_write_to_it(path):
    writers = [_writer(path, 1000 * index, 20) for index in range(4)]
    for writer in writers:
        _, complaints = writer.communicate(timeout=60)
        assert writer.returncode == 0, complaints
    with RecordDatabase(path) as database:
        assert sorted(r.seed for r in database.all()) == [1000 * i + n for i in range(4) for n in range(20)]
        assert len(database.contexts()) == 1


def test_kill_9_loses_nothing_that_was_reported(path):
    writer = _writer(path, 0, 10**9)
    reported = 0
    until = time.monotonic() + 30
    while reported < 60 and time.monotonic() < until:
        reported = int(writer.stdout.readline())
    os.kill(writer.pid, signal.SIGKILL)
    reported = max([reported, *map(int, writer.stdout.read().split())])
    writer.wait(timeout=30)
    writer.stdout.close()
    writer.stderr.close()
    with RecordDatabase(path) as database:
        seeds = [r.seed for r in database.all()]
    assert len(seeds) >= reported >= 60
    assert len(seeds) % 4 == 0  # batches are whole
    assert seeds == list(range(len(seeds)))
