"""Tuning for a GPU that is not there: nothing is run, and nothing says that it was."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from tvm import te

import eqtune
from eqtune.cost_model.random import RandomModel
from eqtune.errors import InputError, SetupError
from eqtune.gpu_machine import Compiler, describe_gpu, find_compiler, resolve_target
from eqtune.machine import detect_target
from eqtune.measure.cuda.builder import compile_cubin
from eqtune.measure.cuda.code import Resources, ptxas_resources, resource_notes, resource_problem
from eqtune.measure.cuda.compile_only import CompileOnlyMeasurer
from eqtune.records import RecordDatabase
from eqtune.records.record import notes_of
from eqtune.records.workload import as_workload
from eqtune.report.table import kernel_table
from eqtune.search.space.base import Decision
from eqtune.search.space.features import COMPILED, FEATURES
from eqtune.search.strategies.moves import Moves
from eqtune.tasks import task_of

compiler = find_compiler()
needs_nvcc = pytest.mark.skipif(
    compiler is None or compiler.kind != "nvcc", reason="there is no nvcc here (install the CUDA toolkit)"
)

H100 = "nvidia/nvidia-h100"


def matmul():
    a, b = te.placeholder((64, 96), name="a"), te.placeholder((96, 128), name="b")
    k = te.reduce_axis((0, 96), name="k")
    return te.create_prim_func([a, b, te.compute((64, 128), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")])


@pytest.fixture(autouse=True)
def without_nvcc(request, monkeypatch):
    """Most of this must work on a machine that has none; nvcc also takes seconds."""
    if not request.node.get_closest_marker("slow"):
        monkeypatch.setattr("eqtune.measure.cuda.compile_only.find_compiler", lambda: None)


def candidates(measurer, task, count):
    space = measurer._space(task)
    return [space.decision(point) for point in Moves(space).sample(np.random.default_rng(0), count)]


def test_candidates_get_estimates_and_the_context_says_so():
    task = task_of("matmul", as_workload(matmul())["main"])
    with CompileOnlyMeasurer(resolve_target(H100)) as measurer:
        measurements = measurer.measure(task, candidates(measurer, task, 6))
        assert [m.error for m in measurements] == [""] * 6
        assert all(1e-7 < m.latency_s < 1e-2 and m.trace for m in measurements)
        assert "not measured" in measurer.describe()["device"]
        assert measurer.baseline([task]) == [float("inf")]


def test_what_cannot_be_launched_fails_alone():
    task = task_of("matmul", as_workload(matmul())["main"])
    with CompileOnlyMeasurer(resolve_target(H100)) as measurer:
        good = next(d for d in candidates(measurer, task, 20) if d.sketch == "gpu_tiled")
        bad = Decision(good.sketch, {**good.values, "ti": 32, "tj": 128})
        results = measurer.measure(task, [bad, good, Decision("no such sketch", {})])
    assert [m.error for m in results] == ["build_error", "", "build_error"]


def test_spills_and_few_warps_make_an_estimate_worse():
    measurer = CompileOnlyMeasurer(resolve_target(H100))
    fine = Resources(registers=64, spill_bytes=0, static_shared_bytes=0, threads=256)
    assert measurer._slowdown(fine) == 1.0
    assert measurer._slowdown(dataclasses.replace(fine, spill_bytes=200)) > 2.0
    assert measurer._slowdown(dataclasses.replace(fine, threads=32, registers=0)) == 1.0
    assert measurer._slowdown(dataclasses.replace(fine, threads=64, registers=1024)) > 1.0


def test_a_cpu_is_measured_instead():
    with pytest.raises(InputError, match="use 'local'"):
        eqtune.measure.create("compile-only", target=detect_target())


def test_tuned_kernels_are_scheduled_and_resume(tmp_path, capsys):
    arguments = {"target": H100, "measure": "compile-only", "work_dir": tmp_path / "work", "trials": 24}
    result = eqtune.tune_kernels(matmul(), **arguments)
    (task,) = result.tasks
    assert task.tuned
    assert task.trials == 24
    assert "threadIdx.x" in result.mod.script()
    assert "estimates, not measured" in capsys.readouterr().err
    assert eqtune.tune_kernels(matmul(), **arguments).tasks[0].trials == 24


@pytest.mark.slow
def test_a_model_is_tuned_and_every_door_says_that_nothing_was_run(tmp_path):
    result = eqtune.tune_model(
        "zoo:nasrnn", target=H100, measure="compile-only", trials=24, graph="off", work_dir=tmp_path, progress=False
    )
    assert not result.measured
    assert all(task.tuned for task in result.tasks)
    assert "NOT MEASURED" in kernel_table(result.summary)
    assert "not measured" in result.report(tmp_path / "report.html").read_text()
    assert "not measured" in json.loads((tmp_path / "summary.json").read_text())["context"]["device"]
    with pytest.raises(SetupError, match="without its device"):
        result.compile()


@pytest.mark.slow
@needs_nvcc
def test_ptxas_reports_registers_and_spills_and_reports_are_kept(tmp_path):
    source = """
    extern "C" __global__ void __launch_bounds__(128) light(float* a) { a[threadIdx.x] += 1.0f; }
    extern "C" __global__ void __launch_bounds__(1024, 2) heavy(float* a, int n) {
      float x[96];
      for (int i = 0; i < 96; ++i) x[i] = a[i * n + threadIdx.x];
      for (int r = 0; r < n; ++r)
        for (int i = 0; i < 96; ++i) x[i] = x[i] * x[(i + 1) % 96] + a[r];
      for (int i = 0; i < 96; ++i) a[i * n + threadIdx.x] = x[i];
    }
    """
    found = ptxas_resources(source, "sm_90", compiler, tmp_path)
    assert found["light"].threads == 128
    assert found["light"].spill_bytes == 0 < found["light"].registers < 32
    assert found["heavy"].registers <= 32
    assert found["heavy"].stack_bytes > 96 > found["light"].stack_bytes == 0
    assert resource_notes(found.values())["spill_bytes"] == found["heavy"].spill_bytes > 0
    assert len(list(tmp_path.glob("*.cubin"))) == 1
    absent = Compiler("nvcc", "/nowhere/nvcc", compiler.version)  # so the second answer can only come from the cache
    assert ptxas_resources(source, "sm_90", absent, tmp_path) == found


@pytest.mark.slow
@needs_nvcc
def test_what_ptxas_reports_is_recorded_and_reaches_the_cost_model(tmp_path):
    seen = []

    class Model(RandomModel):
        def fit(self, features, latencies_s, tasks):
            seen.append(features)

    arguments = {"target": H100, "measure": "compile-only", "work_dir": tmp_path, "trials": 4, "progress": False}
    eqtune.tune_kernels(matmul(), cost_model=Model(), **arguments)
    columns = [FEATURES.index(name) for name in COMPILED]
    told = seen[-1][:, columns]
    assert (told[:, COMPILED.index("registers")] >= 16).all()
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        assert [[notes_of(record)[name] for name in COMPILED] for record in database.all()] == told.tolist()
    eqtune.tune_kernels(matmul(), cost_model=Model(), **arguments)  # resumes: nothing is compiled again
    np.testing.assert_array_equal(seen[-1][:, columns], told)


@pytest.mark.slow
@needs_nvcc
def test_refused_source_says_why():
    with pytest.raises(ValueError, match="error"):
        ptxas_resources("__global__ void broken( {", "sm_90", compiler)


@needs_nvcc
def test_heavy_spills_and_impossible_launches_do_not_reach_a_device(tmp_path):
    source = """
    extern "C" __global__ void __launch_bounds__(1024, 2) heavy(float* a, int n) {
      float x[96];
      for (int i = 0; i < 96; ++i) x[i] = a[i * n + threadIdx.x];
      for (int r = 0; r < n; ++r)
        for (int i = 0; i < 96; ++i) x[i] = x[i] * x[(i + 1) % 96] + a[r];
      for (int i = 0; i < 96; ++i) a[i * n + threadIdx.x] = x[i];
    }
    """
    hardware = describe_gpu(resolve_target(H100))
    assert compile_cubin(source, "sm_90", tmp_path)[0]  # what candidates are compared with may be as slow as it likes
    with pytest.raises(ValueError, match="spills"):
        compile_cubin(source, "sm_90", tmp_path, hardware)
    fine = Resources(registers=64, spill_bytes=0, static_shared_bytes=0, threads=1024)
    assert resource_problem([fine], hardware) == ""
    assert "cannot be launched" in resource_problem([fine, dataclasses.replace(fine, registers=72)], hardware)
    assert "static" in resource_problem([dataclasses.replace(fine, static_shared_bytes=50_000)], hardware)
