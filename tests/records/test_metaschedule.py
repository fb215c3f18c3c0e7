import json
import os
from dataclasses import replace

import pytest
import tvm
from tvm import relax
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

from eqtune.errors import InputError
from eqtune.records import Context, Record, RecordDatabase
from eqtune.records.metaschedule import RECORD_FILE, WORKLOAD_FILE, export_metaschedule, import_metaschedule
from eqtune.records.traces import replay, trace_to_json
from eqtune.records.workload import as_workload, serialize_workload, workload_hash

from .kernels import factored_sum, matmul_add, row_sum, tiled_matmul

TARGET = {"kind": "llvm", "num-cores": 2}
CONTEXT = Context(json.dumps(TARGET), "a cpu", 2, tvm.__version__)


def tiled(func, tile=4):
    # In TVM's own files a boolean annotation comes back as the integer 1: leave it out.
    return tiled_matmul(func, tile, flag=False)


def record(func, schedule, latency_s, **changes):
    trace = trace_to_json(schedule.trace) if schedule else "[[],[]]"
    fields = {"error": ""} | changes
    return Record(workload_hash(func), "", trace, CONTEXT, (latency_s, 2 * latency_s) if latency_s else (), **fields)


@pytest.fixture
def filled(tmp_path):
    """Two kernels: three successes and a failure of a matmul, one success of a sum."""
    matmul, rows = matmul_add(), row_sum()
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        for func in (matmul, rows):
            database.add_workload(workload_hash(func), serialize_workload(func), name="kernel", flops=1.0)
        for tile, latency_s in ((2, 3e-3), (4, 1e-3), (8, 2e-3)):
            database.add([record(matmul, tiled(matmul, tile), latency_s)])
        database.add([record(matmul, None, None, error="timeout"), record(rows, factored_sum(rows), 5e-4)])
        yield database


def test_tvms_own_pass_applies_an_export(filled, tmp_path):
    export_metaschedule(filled, tmp_path / "out", CONTEXT)
    fused = tvm.IRModule({"fused": matmul_add().without_attr("global_symbol"), "other": matmul_add(m=48)})
    with tvm.target.Target(TARGET):
        applied = relax.transform.MetaScheduleApplyDatabase(str(tmp_path / "out"))(fused)
    expected = tiled(matmul_add()).mod["main"].with_attr("tirx.is_scheduled", True)
    tvm.ir.assert_structural_equal(applied["fused"], expected)
    tvm.ir.assert_structural_equal(applied["other"], fused["other"])


def test_weights_layout_attribute_is_part_of_the_kernel(tmp_path):
    func = matmul_add(layout_free=True)
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        database.add_workload(workload_hash(func), serialize_workload(func), name="kernel", flops=1.0)
        database.add([record(func, tiled(func), 1e-3)])
        export_metaschedule(database, tmp_path / "out", CONTEXT)
    fused = tvm.IRModule({"free": func.without_attr("global_symbol"), "fixed": matmul_add()})
    with tvm.target.Target(TARGET):
        applied = relax.transform.MetaScheduleApplyDatabase(str(tmp_path / "out"))(fused)
    assert applied["free"].attrs["tirx.is_scheduled"]
    assert "tirx.is_scheduled" not in applied["fixed"].attrs


@pytest.mark.parametrize("every", [False, True])
def test_import_of_an_export_gives_the_same_bests(filled, tmp_path, every):
    done = export_metaschedule(filled, tmp_path / "out", CONTEXT, every=every)
    assert (done.workloads, done.records, done.skipped) == (2, 4 if every else 2, {})
    with RecordDatabase(tmp_path / "again.sqlite") as again:
        done = import_metaschedule(again, tmp_path / "out", CONTEXT)
        assert (done.workloads, done.records, done.skipped) == (2, 4 if every else 2, {})
        best, expected = again.best_by_workload(CONTEXT), filled.best_by_workload(CONTEXT)
        assert {w: (r.trace, r.latencies_s) for w, r in best.items()} == {
            w: (r.trace, r.latencies_s) for w, r in expected.items()
        }
        assert {w.hash: w.text for w in again.workloads()} == {w.hash: w.text for w in filled.workloads()}
        # What is known is not added again, in either place.
        assert import_metaschedule(filled, tmp_path / "out", CONTEXT).records == 0
        assert import_metaschedule(again, tmp_path / "out", CONTEXT).skipped == {"already there": 4 if every else 2}


def test_what_metaschedule_itself_wrote_is_imported(tmp_path):
    mod = tvm.IRModule({"main": matmul_add().with_attr("global_symbol", "main")})
    schedule = tiled(matmul_add())
    theirs = JSONDatabase(work_dir=str(tmp_path))
    workload = theirs.commit_workload(mod)
    arguments = ArgInfo.from_prim_func(mod["main"])
    for seconds, target in (([2e-3], TARGET), ([1e10], TARGET), ([1e-3], {"kind": "llvm", "num-cores": 64})):
        theirs.commit_tuning_record(
            TuningRecord(schedule.trace, workload, seconds, tvm.target.Target(target), arguments)
        )
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        done = import_metaschedule(database, tmp_path, CONTEXT)
        assert done.records == 1
        assert done.skipped == {"the candidate failed": 1, "another target": 1}
        best = database.best(workload_hash(matmul_add()), CONTEXT)
        assert best is not None
        assert best.latencies_s == (2e-3,)
        tvm.ir.assert_structural_equal(replay(best.trace, as_workload(matmul_add())).mod, schedule.mod)


def test_lines_that_cannot_be_read_are_counted(filled, tmp_path):
    out = tmp_path / "out"
    export_metaschedule(filled, out, CONTEXT, every=True)
    lines = (out / RECORD_FILE).read_text().splitlines()
    broken = [
        "",
        lines[0][: len(lines[0]) // 2],
        "[99" + lines[1][lines[1].index(",") :],
        "[-1" + lines[1][lines[1].index(",") :],
        '[0,[[[],[[7,1]]],[1.0],null,null]]',
        '[0,[[[],[]],["x"],null,null]]',
        f"[0,[[[],[]],[1{'0' * 400}],null,null]]",
        '[0,[[[],[]],[1.0],{"kind":"no such target"},null]]',
        "null",
    ]  # fmt: skip
    (out / RECORD_FILE).write_text("\n".join([*broken, *lines[1:]]))
    with (out / WORKLOAD_FILE).open("a") as file:
        file.write('["1", "AAAA"]\n{"cut\n' + "[" * 100_000)
    with RecordDatabase(tmp_path / "again.sqlite") as again:
        done = import_metaschedule(again, out, CONTEXT)
        assert done.records == 3
        assert done.skipped == {"the line cannot be read": 7, "its kernel cannot be read": 2}


def test_another_context_exports_nothing(filled, tmp_path):
    done = export_metaschedule(filled, tmp_path / "out", replace(CONTEXT, device="another cpu"))
    assert (done.workloads, done.records) == (0, 0)


def test_records_without_their_kernel_or_with_a_stale_trace_are_left_out(tmp_path):
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        database.add([record(row_sum(), factored_sum(row_sum()), 1e-3)])
        database.add([record(matmul_add(), factored_sum(row_sum()), 1e-3)])
        database.add_workload(workload_hash(matmul_add()), serialize_workload(matmul_add()), name="kernel", flops=1.0)
        done = export_metaschedule(database, tmp_path / "out", CONTEXT)
    assert done.records == 0
    assert done.skipped == {"its kernel was not recorded": 1, "its trace does not replay": 1}


def test_an_export_replaces_a_database_only_when_told_to(filled, tmp_path):
    export_metaschedule(filled, tmp_path / "out", CONTEXT)
    with pytest.raises(InputError, match="already holds"):
        export_metaschedule(filled, tmp_path / "out", CONTEXT, every=True)
    export_metaschedule(filled, tmp_path / "out", CONTEXT, every=True, overwrite=True)
    assert len((tmp_path / "out" / RECORD_FILE).read_text().splitlines()) == 4
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [RECORD_FILE, WORKLOAD_FILE]


def test_an_export_that_was_cut_short_leaves_no_records_of_other_kernels(filled, tmp_path, monkeypatch):
    export_metaschedule(filled, tmp_path / "out", CONTEXT)

    def killed(source, target):
        if str(target).endswith(RECORD_FILE):
            raise KeyboardInterrupt
        os.rename(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        export_metaschedule(filled, tmp_path / "out", CONTEXT, every=True, overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [WORKLOAD_FILE]


def test_what_is_missing_or_no_target_is_a_clear_error(filled, tmp_path):
    with pytest.raises(InputError, match=WORKLOAD_FILE):
        import_metaschedule(filled, tmp_path / "nothing", CONTEXT)
    for call in (import_metaschedule, export_metaschedule):
        with pytest.raises(InputError, match="is a directory at a path, not None"):
            call(filled, None, CONTEXT)
    with pytest.raises(InputError, match="not a target"):
        export_metaschedule(filled, tmp_path / "out", replace(CONTEXT, target="my cpu"))
