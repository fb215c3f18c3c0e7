"""The GPU benchmark: what can be checked without a GPU, and one small run where there is one."""

from __future__ import annotations

import sys

import pytest
import tvm

from benchmarks import gpu, gpu_measured
from eqtune.gpu_machine import resolve_target
from eqtune.measure.compile_only import CompileOnlyMeasurer

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


def test_one_run_does_products_ranking_and_models(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(gpu_measured, "reason_to_skip", lambda: "")
    monkeypatch.setattr(gpu_measured, "matmul_row", lambda size, *_: asked.append(size) or {"kernel": f"matmul {size}"})
    monkeypatch.setattr(gpu_measured, "model_row", lambda name, trials, _: asked.append(name) or {"model": name})
    monkeypatch.setattr(
        gpu, "_measure_ranking", lambda _, size, add: asked.append("ranking") or add({"kernel": f"matmul {size}"})
    )
    assert run(monkeypatch, "--models", "nasrnn,squeezenet", "--json", str(tmp_path / "out.json")) == 0
    assert asked == [4096] * len(gpu.PRODUCTS) + ["ranking", "nasrnn", "squeezenet"]
    assert (tmp_path / "out.json").read_text().count("{") == len(asked)


def test_ranking_is_judged_on_candidates_that_were_held_out(monkeypatch):
    monkeypatch.setattr("eqtune.measure.compile_only.find_compiler", lambda: None)
    with CompileOnlyMeasurer(resolve_target("nvidia/nvidia-h100")) as measurer:
        row = gpu_measured.ranking_row(128, "float32", "float32", measurer, 64, seed=0)
    # Without a compiler, what is "measured" is the analytic estimate itself.
    assert row["before"] == pytest.approx(1.0)
    assert 0.3 < row["after"] <= 1.0
    assert row["failed"] <= 0.05 * row["candidates"]


@pytest.mark.parametrize(("dtype", "sums"), [pytest.param(*pair, marks=needs_gpu) for pair in gpu.PRODUCTS])
def test_products_are_tuned_on_the_device(dtype, sums):
    row = gpu_measured.matmul_row(1024, dtype, sums, trials=64, seed=0)
    assert row["over_dlight"] > 1.0
    assert row["failed"] <= 0.1 * row["trials"]
