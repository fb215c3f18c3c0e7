"""Matrix products on this machine's GPU, beside what others make of them. `python -m benchmarks.gpu --matmul 4096`."""

from __future__ import annotations

import tempfile
from typing import Any

__all__ = ["matmul_row", "reason_to_skip"]

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
    """Tune one square product, and time cuBLAS (through PyTorch) and dlight's default schedule on the same device.

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
        Seconds (`eqtune_s`, `dlight_s`, `cublas_s`) and ratios; a peer that cannot run has None, and `skipped` says
        why.
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
    return {
        "device": device,
        "kernel": f"matmul {size} {dtype} -> {sums}",
        "eqtune_s": task.latency_s,
        "tflops": 2e-12 * size**3 / task.latency_s,
        "dlight_s": task.baseline_latency_s,
        "over_dlight": task.baseline_latency_s / task.latency_s,
        "cublas_s": cublas_s,
        "share_of_cublas": None if cublas_s is None else cublas_s / task.latency_s,
        "trials": task.trials,
        "failed": task.failed,
        "sketch": (task.decision or {}).get("sketch", ""),
        "skipped": f"cuBLAS: {why}" if why else "",
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
    torch.matmul(a, b, out=out)
    best_ms = float("inf")
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(CALLS):
            torch.matmul(a, b, out=out)
        end.record()
        end.synchronize()
        best_ms = min(best_ms, start.elapsed_time(end) / CALLS)
    return best_ms * 1e-3, ""
