"""Building workers for CUDA: `python -m eqtune.measure.cuda_builder SOCKET`. As `worker.py`, but on no GPU.

Beside what `server.py` says, it answers {"op": "reference", "task": hash} with {"domain": ...}: it runs the untuned
kernel on the CPU and keeps its outputs, because TVM cannot compile a kernel without threads for a GPU. The "untuned"
candidate is what dlight, TVM's default schedules for GPUs, makes of the kernel.
"""

from __future__ import annotations

import json
import os
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
from ..search.space.gpu.hardware import GpuHardware
from ..search.space.hardware import Hardware
from ..search.space.lowering import ASYNC_COPIES, as_written
from ..search.strategies.moves import Moves
from .arguments import Interface
from .build import CANDIDATE_CONFIG, Program
from .cuda_code import Resources, compile_kernels, resource_notes, resource_problem
from .pool import Config
from .server import Server, _failure, _Scheduled, _Workload
from .timing import BASELINE
from .worker import Answer, serve_forks

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
        gpu = Hardware.from_json(config.hardware)
        assert isinstance(gpu, GpuHardware)
        self._gpu = gpu
        self._suits: GpuHardware | None = None
        self._notes: dict[str, float] | None = None
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
        code, found = compile_cubin(source, str(self._target.attrs["arch"]), hardware=self._suits)
        self._notes = resource_notes(found.values())
        return code

    def _schedule(self, candidate: Mapping[str, Any]) -> _Scheduled:
        if not candidate.get("untuned"):
            return super()._schedule(candidate)
        task = str(candidate["task"])
        function = default_schedule(self._workloads[task].mod, self._target)["main"]
        return _Scheduled(f"{task}_untuned", "", as_written(function))

    def _compile(self, scheduled: Sequence[_Scheduled]) -> dict[str, dict[str, Any]]:
        """Compile each into a library of its own; what fails is returned by its key."""
        failures = {}
        for s in scheduled:
            # A candidate that spills heavily does not get as far as the device; what it is compared with does.
            self._suits = self._gpu if s.trace else None
            self._notes = None
            mod = tvm.IRModule({s.symbol: s.function.with_attr("global_symbol", s.symbol)})
            try:
                with self._target, tvm.transform.PassContext(opt_level=3, config=CONFIG):
                    module = tvm.compile(mod, self._target)
                if self._notes is None:  # without a driver, TVM leaves the source to whoever loads it
                    self._cubin("\n".join(str(part.inspect_source()) for part in module.mod.imports))
                self._programs[s.key] = Program(module, s.symbol, notes=self._notes or {})
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


def compile_cubin(
    source: str, arch: str, cache: Path | None = None, hardware: GpuHardware | None = None
) -> tuple[bytes, dict[str, Resources]]:
    """The machine code of CUDA source, and what its kernels take; kept by hash of source, arch, flags and compiler.

    Parameters
    ----------
    source : str
    arch : str
        For example "sm_90".
    cache : Path, optional
        By default `EQTUNE_CUBIN_CACHE`; without it nothing is kept.
    hardware : GpuHardware, optional
        What the kernels must suit (`cuda_code.resource_problem`); by default, whatever they take is right.

    Raises
    ------
    ValueError
        When nvcc is missing or refuses the source, or the kernels do not suit the hardware.
    """
    compiler = find_compiler()
    if compiler is None or compiler.kind != "nvcc":
        raise ValueError("compiling for CUDA needs nvcc on PATH or in CUDA_HOME; install the CUDA toolkit")
    kept = os.environ.get("EQTUNE_CUBIN_CACHE")
    code, found = compile_kernels(source, arch, compiler, cache or (Path(kept) if kept else None))
    problem = "" if hardware is None else resource_problem(found.values(), hardware)
    if problem:
        raise ValueError(problem)
    return code, found


def main() -> None:
    """Fork builders until the parent closes the pipe."""
    serve_forks(_start)


def _start(fields: Mapping[str, Any]) -> Answer:
    return CudaBuilder(Config(**fields)).answer


if __name__ == "__main__":
    main()
