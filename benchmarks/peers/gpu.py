"""What others make of a product or a model on this machine's GPU: cuBLAS, TVM's own tuner, torch.compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["cublas", "metaschedule", "torch_compile"]

CALLS = 50
REPEATS = 5


def cublas(size: int, dtype: str, sums: str) -> tuple[float | None, str | None, str]:
    """Seconds of one call, the best of `REPEATS` averages, and the dtype of what it writes: `sums` where PyTorch can.

    None, None and the reason where PyTorch cannot run it.
    """
    try:
        import torch
    except ModuleNotFoundError:
        return None, None, "PyTorch is not installed"
    if not torch.cuda.is_available():
        return None, None, "PyTorch was built without CUDA, or sees no GPU"
    kind = getattr(torch, dtype)
    if (dtype, sums) == ("int8", "int32"):
        a, b = (torch.randint(-8, 8, (size, size), device="cuda", dtype=kind) for _ in range(2))
        out = torch.empty(size, size, device="cuda", dtype=torch.int32)
        try:
            # cuBLAS is faster where the second operand lies along the reduction: whichever suits it counts.
            return min(_seconds(partial(torch._int_mm, a, right, out=out)) for right in (b, b.T)), sums, ""
        except (RuntimeError, AttributeError) as error:
            return None, None, (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if not kind.is_floating_point:
        return None, None, f"PyTorch has no product of {dtype}"
    torch.backends.cuda.matmul.allow_tf32 = False
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.float32).to(kind) for _ in range(2))
    if dtype != sums:
        try:
            out = torch.empty(size, size, device="cuda", dtype=getattr(torch, sums))
            return _seconds(lambda: torch.mm(a, b, out_dtype=out.dtype, out=out)), sums, ""
        except (TypeError, RuntimeError):
            pass  # older versions write the operands' dtype only
    out = torch.empty(size, size, device="cuda", dtype=kind)
    return _seconds(lambda: torch.matmul(a, b, out=out)), dtype, ""


def metaschedule(kernel: Any, target: Any, trials: int, seed: int, seconds: float) -> tuple[list[float], str]:
    """Seconds of each candidate that TVM's own tuner measured, and why there are none or fewer than asked for."""
    from tvm import IRModule
    from tvm.s_tir import meta_schedule

    from benchmarks.peers.metaschedule import FAILED_S, PersistentBuilder

    database, why = meta_schedule.database.MemoryDatabase(), ""
    builder = PersistentBuilder(os.cpu_count() or 1, time.monotonic() + seconds)
    try:
        with tempfile.TemporaryDirectory(prefix="eqtune-gpu-") as work_dir:
            meta_schedule.tune_tir(
                IRModule({"main": kernel}),
                target,
                work_dir,
                max_trials_global=trials,
                builder=builder,
                database=database,
                seed=seed,
            )
    except (RuntimeError, ValueError, TypeError) as error:
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
        why = "out of time" if builder.out_of_time else last
    runs = [record.run_secs for record in database.get_all_tuning_records() if record.run_secs]
    latencies_s = [min(float(s) for s in run) for run in runs]
    return [s for s in latencies_s if s < FAILED_S], why or ("" if latencies_s else "no candidate worked")


def torch_compile(name: str, seed: int, limit_s: float) -> tuple[float | None, str]:
    """Seconds of one call of torch.compile(max-autotune, frozen), in a process of its own that ends after `limit_s`.

    None and the reason where PyTorch cannot run it, or not in time.
    """
    from eqtune.measure.process import run_limited

    if limit_s <= 0:
        return None, "no time is left"
    command = [sys.executable, "-m", "benchmarks.peers.gpu", name, str(seed)]
    try:
        done = run_limited(command, limit_s, Path(__file__).parents[2])
    except subprocess.TimeoutExpired:
        return None, f"it took longer than {limit_s:.3g} s"
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]
    try:
        seconds, why = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return None, "its process said nothing"
    return seconds, why


def _torch_compile_here(name: str, seed: int) -> tuple[float | None, str]:
    from eqtune import zoo

    try:
        import torch
        import torch._inductor.config as inductor
    except ModuleNotFoundError:
        return None, "PyTorch is not installed"
    if not torch.cuda.is_available():
        return None, "PyTorch was built without CUDA, or sees no GPU"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    module, inputs = zoo.torch(name, seed=seed)
    inductor.freezing = True
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


if __name__ == "__main__":
    print(json.dumps(_torch_compile_here(sys.argv[1], int(sys.argv[2]))))
