"""A building worker for CUDA: `python -m eqtune.measure.cuda_builder`. As `worker.py`, but it runs nothing on a GPU.

Beside what `server.py` says, it answers {"op": "reference", "task": hash} with {"domain": ...}: it runs the untuned
kernel on the CPU and keeps its outputs, because TVM cannot compile a kernel without threads for a GPU. The "untuned"
candidate is what dlight, TVM's default schedules for GPUs, makes of the kernel.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm.backend.cuda import register_backend

from ..gpu_machine import find_compiler
from ..machine import describe_machine, detect_target, target_json
from ..records.workload import deserialize_workload, serialize_workload
from ..search.space import build_space
from ..search.space.analysis import analyze
from ..search.space.lowering import ASYNC_COPIES
from ..search.strategies.moves import Moves
from .arguments import Interface
from .build import CANDIDATE_CONFIG, Program
from .cuda_code import COMPILE_LIMIT_S, NVCC_FLAGS
from .pool import Config
from .server import Server, _failure, _Scheduled, _Workload
from .timing import BASELINE
from .worker import Answer, limit_memory, serve

__all__ = ["CudaBuilder", "compile_cubin", "default_schedule", "main"]


CONFIG = {**CANDIDATE_CONFIG, **ASYNC_COPIES}

SLOW_FLOPS = 2e9
"""A contraction with more takes an unscheduled kernel seconds to minutes."""


class CudaBuilder(Server):
    """Compiles candidates to libraries with cubins inside, and runs references on the CPU."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        host = detect_target(1)
        self._cpu_hardware = describe_machine(host, 1, measure=False)
        self._cpu = Server(
            replace(config, target=json.loads(target_json(host)), hardware=self._cpu_hardware.to_json(), export="")
        )
        self._references_made = 0
        register_backend()  # workers import TVM without its back ends: most need none
        tvm_ffi.register_global_func("tvm_callback_cuda_compile", self._cubin, override=True)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one request."""
        if request["op"] != "reference":
            return super().answer(request)
        try:
            return self._reference(request)
        except Exception as error:  # noqa: BLE001 - TVM and generated code raise anything
            return _failure(error, "build_error")

    def _cubin(self, source: str, _target: Any = None) -> bytes:
        return compile_cubin(source, str(self._target.attrs["arch"]))

    def _schedule(self, candidate: Mapping[str, Any]) -> _Scheduled:
        if not candidate.get("untuned"):
            return super()._schedule(candidate)
        task = str(candidate["task"])
        function = default_schedule(self._workloads[task].mod, self._target)["main"]
        return _Scheduled(f"{task}_untuned", "", function)

    def _compile(self, scheduled: Sequence[_Scheduled]) -> dict[str, dict[str, Any]]:
        """Compile each into a library of its own; what fails is returned by its key."""
        failures = {}
        for s in scheduled:
            mod = tvm.IRModule({s.symbol: s.function.with_attr("global_symbol", s.symbol)})
            try:
                with self._target, tvm.transform.PassContext(opt_level=3, config=CONFIG):
                    self._programs[s.key] = Program(tvm.compile(mod, self._target), s.symbol)
            except Exception as error:  # noqa: BLE001 - TVM raises many kinds; each is a failed candidate
                failures[s.key] = _failure(error, "build_error")
        return failures

    def _reference(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run the kernel on the CPU and keep its outputs: unscheduled, or where that takes minutes, scheduled."""
        task = str(request["task"])
        for workload_hash, text in request["workloads"].items():
            mod = deserialize_workload(text)
            self._workloads[workload_hash] = _Workload(mod, Interface.of(mod["main"]))
        answer: dict[str, Any] = {}
        for spec in self._reference_specs(task):
            self._references_made += 1
            build = {"op": "build", "batch": self._references_made, "candidates": [spec], "workloads": {}}
            build["workloads"] = {task: serialize_workload(self._workloads[task].mod)}
            (answer,) = self._cpu.answer(build)["built"]
            if "error" not in answer:
                run = {"op": "run", "task": task, "program": answer["program"], "domain": "normal"}
                run |= {"effort": asdict(BASELINE), "best_s": 0.0, "save": True, "check": False}
                answer = self._cpu.answer(run)
            if "error" not in answer:
                break
        return answer

    def _reference_specs(self, task: str) -> list[dict[str, Any]]:
        untuned = {"task": task, "untuned": True}
        mod = self._workloads[task].mod
        try:
            contraction = analyze(mod).contraction
        except ValueError:  # a block that the analysis does not read
            contraction = None
        if contraction is None or contraction.flops < SLOW_FLOPS:
            return [untuned]
        space = build_space(mod, self._cpu_hardware)
        points = Moves(space).sample(np.random.default_rng(0), 256)
        best = space.decision(points[np.argmin(space.latency_s(points))])
        return [{"task": task, "decision": best.to_json()}, untuned]


def default_schedule(mod: Any, target: Any) -> Any:
    """What dlight makes of a kernel: TVM's schedules for GPUs that need no tuning."""
    from tvm.s_tir import dlight

    rules = dlight.gpu
    with target:
        return dlight.ApplyDefaultSchedule(
            rules.Matmul(),
            rules.GEMV(),
            rules.Reduction(),
            rules.GeneralReduction(),
            rules.Fallback(),
        )(tvm.IRModule({"main": mod["main"]}))


def compile_cubin(source: str, arch: str, cache: Path | None = None) -> bytes:
    """The machine code of CUDA source; kept by hash of source, arch, flags and compiler.

    Parameters
    ----------
    source : str
    arch : str
        For example "sm_90".
    cache : Path, optional
        By default `EQTUNE_CUBIN_CACHE`; without it nothing is kept.

    Raises
    ------
    ValueError
        When nvcc is missing or refuses the source.
    """
    compiler = find_compiler()
    if compiler is None or compiler.kind != "nvcc":
        raise ValueError("compiling for CUDA needs nvcc on PATH or in CUDA_HOME; install the CUDA toolkit")
    kept = os.environ.get("EQTUNE_CUBIN_CACHE")
    cache = cache or (Path(kept) if kept else None)
    flags = [flag for flag in NVCC_FLAGS if not flag.startswith("-Xptxas")]
    key = hashlib.blake2b("\n".join([source, arch, compiler.version, *flags]).encode(), digest_size=16).hexdigest()
    if cache is not None and (cache / f"{key}.run.cubin").exists():
        return (cache / f"{key}.run.cubin").read_bytes()
    with tempfile.TemporaryDirectory(prefix="eqtune-nvcc-") as directory:
        file, cubin = Path(directory) / "kernels.cu", Path(directory) / "kernels.cubin"
        file.write_text(source, encoding="utf-8")
        command = [compiler.path, "-cubin", f"-arch={arch}", *flags, "-o", str(cubin), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr[-200:]]
            raise ValueError(f"nvcc: {said[0]}")
        code = cubin.read_bytes()
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
        # Another process may write the same: whichever comes last, the file is whole.
        partial = cache / f"{key}.{os.getpid()}"
        partial.write_bytes(code)
        partial.replace(cache / f"{key}.run.cubin")
    return code


def main() -> None:
    """Serve until the parent closes the pipe."""
    serve(_start)


def _start(fields: Mapping[str, Any]) -> Answer:
    config = Config(**fields)
    builder = CudaBuilder(config)
    limit_memory(config.memory_bytes)
    return builder.answer


if __name__ == "__main__":
    main()
