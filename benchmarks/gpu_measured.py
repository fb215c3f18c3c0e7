"""Matrix products and models on this machine's GPU, beside what others make of them. See `benchmarks.gpu`."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["matmul_row", "model_row", "ranking_row", "reason_to_skip"]

CALLS = 50
REPEATS = 5


def reason_to_skip() -> str:
    """Why nothing can be measured here; "" when it can."""
    from eqtune.gpu_machine import find_compiler
    from eqtune.measure.cuda import gpu_count

    if not gpu_count():
        return "there is no NVIDIA GPU that can be used here"
    compiler = find_compiler()
    if compiler is None or compiler.kind != "nvcc":
        return "there is no nvcc on PATH or in CUDA_HOME"
    return ""


def matmul_row(size: int, dtype: str, sums: str, trials: int, seed: int, flush_l2: bool = False) -> dict[str, Any]:
    """Tune one square product; time cuBLAS (through PyTorch), dlight's default schedule and what MetaSchedule finds in
    the same number of trials on the same device.

    Parameters
    ----------
    size : int
        Rows, columns and reduction.
    dtype, sums : str
        Of the operands and of the result: "float16" and "float32", for example.
    trials : int
        Candidates that are measured.
    seed : int
    flush_l2 : bool
        Empty L2 before each timed call of our and dlight's kernels; cuBLAS is then not timed.

    Returns
    -------
    dict
        Seconds (`eqtune_s`, `dlight_s`, `metaschedule_s`, `cublas_s`) and ratios; a peer that cannot run has None, and
        `skipped` says why.
    """
    from eqtune import tune_kernels
    from eqtune.gpu_machine import resolve_target
    from eqtune.measure.cuda import CudaMeasurer

    target = resolve_target("cuda")
    kernel = _matmul(size, dtype, sums)
    with (
        CudaMeasurer(target, flush_l2=flush_l2, seed=seed) as measurer,
        tempfile.TemporaryDirectory(prefix="eqtune-gpu-") as work_dir,
    ):
        found = tune_kernels(
            kernel, target, trials=trials, work_dir=work_dir, measure=measurer, seed=seed, progress=False
        )
        device = measurer.describe()["device"]
    (task,) = found.tasks
    cublas_s, why = (None, "L2 is flushed") if flush_l2 else _cublas(size, dtype)
    metaschedule_s, reason = (None, "L2 is flushed") if flush_l2 else _metaschedule(kernel, target, trials, seed)
    skipped = [f"{peer}: {text}" for peer, text in (("cuBLAS", why), ("MetaSchedule", reason)) if text]
    return {
        "device": device,
        "kernel": f"matmul {size} {dtype} -> {sums}",
        "eqtune_s": task.latency_s,
        "tflops": 2e-12 * size**3 / task.latency_s,
        "dlight_s": task.baseline_latency_s,
        "over_dlight": task.baseline_latency_s / task.latency_s,
        "metaschedule_s": metaschedule_s,
        "over_metaschedule": None if metaschedule_s is None else metaschedule_s / task.latency_s,
        "cublas_s": cublas_s,
        "share_of_cublas": None if cublas_s is None else cublas_s / task.latency_s,
        "trials": task.trials,
        "failed": task.failed,
        "sketch": (task.decision or {}).get("sketch", ""),
        "skipped": "; ".join(skipped),
    }


def model_row(name: str, trials: int, seed: int, graph: bool = True) -> dict[str, Any]:
    """Tune one model of the zoo, and time torch.compile(max-autotune) on the same device.

    Parameters
    ----------
    name : str
    trials : int
        Of the whole model, in each of two runs.
    seed : int
    graph : bool
        Tune it once more without the graph search, so that its gain can be told.

    Returns
    -------
    dict
        Seconds (`eqtune_s`, `without_graph_s`, `torch_compile_s`), `graph_gain` (0.1: a tenth more speed) and ratios.
    """
    from eqtune import tune_model

    latency_s: dict[str, float] = {}
    for kind in ("saturate", "off") if graph else ("saturate",):
        with tempfile.TemporaryDirectory(prefix="eqtune-gpu-") as work_dir:
            found = tune_model(
                f"zoo:{name}", target="cuda", trials=trials, graph=kind, work_dir=work_dir, seed=seed, progress=False
            )
        latency_s[kind] = found.latency_s
    torch_s, why = _torch_compile(name, seed)
    own_s, without_s = latency_s["saturate"], latency_s.get("off")
    return {
        "model": name,
        "eqtune_s": own_s,
        "without_graph_s": without_s,
        "graph_gain": None if without_s is None else without_s / own_s - 1.0,
        "torch_compile_s": torch_s,
        "over_torch_compile": None if torch_s is None else torch_s / own_s,
        "skipped": f"torch.compile: {why}" if why else "",
    }


def ranking_row(size: int, dtype: str, sums: str, measurer: Any, candidates: int, seed: int) -> dict[str, Any]:
    """Measure random legal candidates of a product, and correlate the order that is predicted with the measured one.

    Parameters
    ----------
    size : int
    dtype, sums : str
    measurer : eqtune.measure.Measurer
        With the `hardware` that the space is built from.
    candidates : int
        Half of them are learnt from; the others are held out.
    seed : int

    Returns
    -------
    dict
        Spearman's correlation on the held-out half: of the analytic model (`before`) and of the learnt one (`after`).
    """
    from eqtune.cost_model import create
    from eqtune.cost_model.metrics import spearman
    from eqtune.records.workload import as_workload
    from eqtune.search.space import build_space
    from eqtune.search.strategies.moves import Moves
    from eqtune.tasks import task_of

    task = task_of("matmul", as_workload(_matmul(size, dtype, sums))["main"])
    space = build_space(task.mod, measurer.hardware)
    points = Moves(space).sample(np.random.default_rng(seed), candidates)
    measurer.baseline([task])
    measured = measurer.measure(task, [space.decision(point) for point in points])
    latencies_s = np.array([m.latency_s if not m.error else math.inf for m in measured])
    learnt, held = np.arange(len(points)) % 2 == 0, np.arange(len(points)) % 2 == 1
    features = space.features(points)
    model = create("xgboost", seed=seed)
    model.fit(features[learnt], latencies_s[learnt], np.zeros(int(learnt.sum()), dtype=np.int64))
    return {
        "device": measurer.describe()["device"],
        "kernel": f"matmul {size} {dtype} -> {sums}",
        "candidates": len(points),
        "failed": int(np.isinf(latencies_s).sum()),
        "before": spearman(-space.latency_s(points[held]), latencies_s[held]),
        "after": spearman(model.predict(features[held]), latencies_s[held]),
    }


def _matmul(size: int, dtype: str, sums: str) -> Any:
    from tvm import te, tirx

    extent = tirx.IntImm("int64", size)
    a, b = (te.placeholder((extent, extent), dtype, name=name) for name in "ab")
    k = te.reduce_axis((0, extent), name="k")

    def product(i: Any, j: Any) -> Any:
        left, right = a[i, k], b[k, j]
        return te.sum(left * right if dtype == sums else left.astype(sums) * right.astype(sums), axis=k)

    return te.create_prim_func([a, b, te.compute((extent, extent), product, name="c")])


def _cublas(size: int, dtype: str) -> tuple[float | None, str]:
    """Seconds of one call, the best of `REPEATS` averages; None and the reason where PyTorch cannot run it."""
    try:
        import torch
    except ModuleNotFoundError:
        return None, "PyTorch is not installed"
    if not torch.cuda.is_available():
        return None, "PyTorch was built without CUDA, or sees no GPU"
    kind = getattr(torch, dtype)
    if not kind.is_floating_point:
        return None, f"PyTorch has no product of {dtype}"
    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.float32).to(kind) for _ in range(2))
    out = torch.empty(size, size, device="cuda", dtype=kind)
    return _seconds(lambda: torch.matmul(a, b, out=out)), ""


def _metaschedule(kernel: Any, target: Any, trials: int, seed: int) -> tuple[float | None, str]:
    """Seconds of the best candidate of TVM's own tuner; None and the reason where it finds none."""
    from tvm import IRModule
    from tvm.s_tir import meta_schedule

    from benchmarks.peers.metaschedule import PersistentBuilder

    try:
        with tempfile.TemporaryDirectory(prefix="eqtune-gpu-") as work_dir:
            database = meta_schedule.tune_tir(
                IRModule({"main": kernel}),
                target,
                work_dir,
                max_trials_global=trials,
                builder=PersistentBuilder(os.cpu_count() or 1),
                seed=seed,
            )
            seconds = [float(s) for record in database.get_all_tuning_records() for s in record.run_secs or ()]
    except (RuntimeError, ValueError, TypeError) as error:
        return None, (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
    return (min(seconds), "") if seconds else (None, "no candidate worked")


def _torch_compile(name: str, seed: int) -> tuple[float | None, str]:
    """Seconds of one call of torch.compile(max-autotune); None and the reason where PyTorch cannot run it."""
    from eqtune import zoo

    try:
        import torch
    except ModuleNotFoundError:
        return None, "PyTorch is not installed"
    if not torch.cuda.is_available():
        return None, "PyTorch was built without CUDA, or sees no GPU"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    module, inputs = zoo.torch(name, seed=seed)
    compiled = torch.compile(module.eval().cuda(), mode="max-autotune")
    on_device = [tensor.cuda() for tensor in inputs]
    with torch.inference_mode():
        return _seconds(lambda: compiled(*on_device)), ""


def _seconds(call: Callable[[], Any]) -> float:
    """Seconds of one call on the GPU, the best of `REPEATS` averages, by CUDA events."""
    import torch

    for _ in range(3):  # autotuning and graph capture come first
        call()
    best_ms = float("inf")
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        best_ms = min(best_ms, start.elapsed_time(end) / CALLS)
    return best_ms * 1e-3
