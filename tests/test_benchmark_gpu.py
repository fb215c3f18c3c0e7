"""The GPU benchmark: what can be checked without a GPU, and one small run where there is one."""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tvm

from benchmarks import gpu, gpu_measured
from benchmarks.peers import gpu as gpu_peers
from eqtune.gpu_machine import find_compiler, resolve_target
from eqtune.measure.cuda.compile_only import CompileOnlyMeasurer
from eqtune.measure.cuda.measurer import CudaMeasurer
from eqtune.records import RecordDatabase
from eqtune.records.workload import as_workload
from eqtune.tasks import task_of

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs an NVIDIA GPU")]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    return ended.value.code


def test_without_a_gpu_it_says_why_and_writes_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_measured, "reason_to_skip", lambda: "there is no NVIDIA GPU that can be used here")
    assert run(monkeypatch, "--json", str(tmp_path / "out.json")) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def asked(monkeypatch):
    """Parts as they are begun, in order; one whose name is in its `faults` fails."""
    calls = []

    def row(name, **fields):
        def make(*arguments):
            calls.append((name, arguments))
            if name in make.faults:
                raise RuntimeError("CUDA error")
            return {"kernel": name, **fields}

        make.faults = set()
        return make

    monkeypatch.setattr(gpu_measured, "reason_to_skip", lambda: "")
    made = {name: row(name, eqtune_s=1e-3) for name in ("matmul_row", "metaschedule_row", "model_row")}
    for name, function in made.items():
        monkeypatch.setattr(gpu_measured, name, function)
    monkeypatch.setattr(gpu, "_ranking", row("ranking"))
    return SimpleNamespace(calls=calls, made=made)


def test_parts_are_done_once_and_one_that_fails_loses_no_other(monkeypatch, asked, tmp_path):
    out = tmp_path / "out.json"
    arguments = ("--models", "nasrnn,squeezenet,vgg19", "--json", str(out), "--keep", str(tmp_path))
    asked.made["model_row"].faults.add("model_row")
    assert run(monkeypatch, *arguments) == 1
    names = [name for name, _ in asked.calls]
    products = len(gpu.PRODUCTS)
    assert names == (
        ["matmul_row"] * products
        + ["ranking"] * products
        + ["model_row"] * 2
        + ["metaschedule_row"] * products
        + ["model_row"]
    )
    assert asked.calls[-2][1][-1] == 1e-3  # MetaSchedule is compared with what was just measured
    rows = {row["part"]: row for row in json.loads(out.read_text())}
    assert rows["model-nasrnn"]["error"] == "RuntimeError: CUDA error"
    asked.calls.clear()
    asked.made["model_row"].faults.clear()
    assert run(monkeypatch, *arguments, "--parts", "model-*") == 0  # what failed is tried again, nothing else
    assert [name for name, _ in asked.calls] == ["model_row"] * 3
    assert len(json.loads(out.read_text())) == len(rows)
    asked.calls.clear()
    run(monkeypatch, *arguments, "--parts", "product-*,ranking-*,model-*", "--trials", "9")
    assert [name for name, _ in asked.calls] == ["matmul_row"] * products  # rows of other settings do not count


def test_minutes_bound_a_run_and_what_was_cut_short_goes_on(monkeypatch, asked, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock.__setitem__(0, clock[0] + 100.0) or clock[0])
    arguments = ("--minutes", "5", "--parts", "product-*", "--json", str(tmp_path / "out.json"))
    assert run(monkeypatch, *arguments) == 0
    assert len(asked.calls) == 1  # 100 seconds pass at every look at the clock
    asked.calls.clear()
    assert run(monkeypatch, *arguments) == 0
    (first,) = json.loads((tmp_path / "out.json").read_text())[:1]
    assert not first.get("cut_short")
    assert asked.calls[0][1][1] == gpu.PRODUCTS[1][0]


def test_unknown_parts_are_refused_by_name(monkeypatch, asked):
    assert "product-float16-float32" in run(monkeypatch, "--parts", "prodcut")


def test_ranking_is_judged_on_candidates_that_were_held_out_and_kept(monkeypatch, tmp_path):
    monkeypatch.setattr("eqtune.measure.cuda.compile_only.find_compiler", lambda: None)
    with CompileOnlyMeasurer(resolve_target("nvidia/nvidia-h100")) as measurer:
        row = gpu_measured.ranking_row(128, "float32", "float32", measurer, 64, seed=0, work_dir=tmp_path / "kept")
    # Without a compiler, what is "measured" is the analytic estimate itself.
    assert row["before"] == pytest.approx(1.0)
    assert 0.3 < row["after"] <= 1.0
    assert row["after_compiling"] == pytest.approx(row["after"])  # nothing was told
    assert row["failed"] <= 0.05 * row["candidates"]
    with RecordDatabase(tmp_path / "kept" / "records.sqlite") as database:
        assert database.count() == row["candidates"]


def test_a_ranking_that_is_cut_keeps_what_it_measured_and_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr("eqtune.measure.cuda.compile_only.find_compiler", lambda: None)
    clock = [0.0]
    with CompileOnlyMeasurer(resolve_target("nvidia/nvidia-h100")) as measurer:

        def measure(task, decisions):
            clock[0] += 100.0
            asked.append(len(decisions))
            return measured(task, decisions)

        asked, measured = [], measurer.measure
        monkeypatch.setattr(measurer, "measure", measure)
        monkeypatch.setattr(gpu_measured.time, "monotonic", lambda: clock[0])
        rank = functools.partial(gpu_measured.ranking_row, 128, "float32", "float32", measurer, 80, 0, tmp_path)
        assert rank(seconds=0.0)["skipped"] == "out of time with 0 candidates"
        cut = rank(seconds=150.0)
        assert (cut["candidates"], cut["cut_short"]) == (64, True)
        assert cut["before"] == pytest.approx(1.0)
        whole = rank()
    assert asked == [32, 32, 16]
    assert whole["candidates"] == 80
    assert "cut_short" not in whole
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        assert database.count() == 80


@pytest.mark.parametrize(
    ("limit_s", "python", "why"),
    [
        (0.1, sys.executable, "it took longer than 0.1 s"),
        (0.0, sys.executable, "no time is left"),
        (600.0, "false", "exit code 1"),
    ],
    ids=["late", "no time", "crash"],
)
def test_a_model_row_is_not_lost_with_its_peer(limit_s, python, why, monkeypatch, tmp_path):
    monkeypatch.setattr("eqtune.tune_model", lambda *_, **__: SimpleNamespace(latency_s=1e-3))
    monkeypatch.setattr(gpu_measured, "TORCH_LIMIT_S", limit_s)
    monkeypatch.setattr(gpu_peers.sys, "executable", python)
    row = gpu_measured.model_row("squeezenet", trials=1, seed=0, work_dir=tmp_path)
    assert row["skipped"] == f"torch.compile: {why}"
    assert (row["eqtune_s"], row["torch_compile_s"], row["over_torch_compile"]) == (1e-3, None, None)


def test_a_part_that_goes_on_gets_its_seconds_beside_those_of_earlier_runs(monkeypatch, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(gpu_measured.time, "monotonic", lambda: clock[0])
    with gpu_measured._budget(tmp_path, 60.0) as budget_s:
        clock[0] += 40.0
    assert budget_s == 60.0
    with gpu_measured._budget(tmp_path, 30.0) as budget_s:
        assert budget_s == 70.0
    with gpu_measured._budget(tmp_path, math.inf) as budget_s:
        assert budget_s is None


class NumpyAsTorch:
    """What the row for int8 takes of PyTorch."""

    cuda = SimpleNamespace(is_available=lambda: True)
    int8, int32 = np.int8, np.int32

    def randint(self, low, high, shape, device, dtype):
        return np.random.default_rng(0).integers(low, high, shape, dtype)

    def empty(self, *shape, device, dtype):
        return np.empty(shape, dtype)

    def _int_mm(self, a, b, out):
        return np.matmul(a, b, out=out, dtype=np.int32)


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None or find_compiler().kind != "nvcc", reason="needs nvcc")
def test_a_product_row_says_why_dlight_has_no_time_and_compares_int8_with_cublas(monkeypatch, tmp_path):
    fake = (sys.executable, str(Path(__file__).parent / "tvm_plugin" / "measure" / "fake_gpu.py"), str(tmp_path))
    target, products = resolve_target("nvidia/nvidia-h100"), []

    def tune(kernel, *_, measure, **__):
        task = task_of("matmul", as_workload(kernel)["main"])
        (baseline_s,) = measure.baseline([task])
        found = SimpleNamespace(latency_s=1e-3, baseline_latency_s=baseline_s, trials=1, failed=0, decision=None)
        return SimpleNamespace(tasks=[found])

    monkeypatch.setattr("eqtune.tune_kernels", tune)
    monkeypatch.setattr("eqtune.gpu_machine.resolve_target", lambda _: target)
    monkeypatch.setattr(
        "eqtune.measure.cuda.measurer.CudaMeasurer",
        functools.partial(CudaMeasurer, devices=[0], workers=1, runner=fake),
    )
    monkeypatch.setitem(sys.modules, "torch", NumpyAsTorch())
    monkeypatch.setattr(gpu_peers, "_seconds", lambda call: products.append(call()) or 5e-4)
    row = gpu_measured.matmul_row(128, "int8", "int32", trials=1, seed=0, work_dir=tmp_path)
    assert (row["dlight_s"], row["over_dlight"]) == (None, None)
    assert row["skipped"].startswith("dlight: build_error: ")
    assert (row["eqtune_s"], row["cublas_s"], row["cublas_writes"]) == (1e-3, 5e-4, "int32")
    assert products[0].dtype == np.int32


@pytest.mark.parametrize(("dtype", "sums"), [pytest.param(*pair, marks=needs_gpu) for pair in gpu.PRODUCTS])
def test_products_are_tuned_on_the_device(dtype, sums, tmp_path):
    row = gpu_measured.matmul_row(1024, dtype, sums, trials=64, seed=0, work_dir=tmp_path)
    assert row["over_dlight"] > 1.0
    assert row["failed"] <= 0.1 * row["trials"]
