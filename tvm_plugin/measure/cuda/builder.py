"""Building workers for CUDA: `python -m eqtune.measure.cuda.builder SOCKET`. As `../worker.py`, but on no GPU.

Beside what `../server.py` says, it answers {"op": "reference", "task": hash} with {"domain": ...}: it runs the untuned
kernel on the CPU and keeps its outputs, because TVM cannot compile a kernel without threads for a GPU. The "untuned"
candidate is what dlight, TVM's default schedules for GPUs, makes of the kernel.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm.backend.cuda import register_backend

from ...machine import core_count, describe_machine, detect_target, target_json
from ...records.workload import deserialize_workload
from ...schedules.default import default_schedule
from ...search.space import build_space
from ...search.space.analysis import analyze
from ...search.space.gpu.hardware import GpuHardware
from ...search.space.hardware import Hardware
from ...search.space.lowering import ASYNC_COPIES, as_written
from ...search.strategies.moves import Moves
from ..arguments import Interface
from ..build import CANDIDATE_CONFIG, Program
from ..pool import Config
from ..server import Server, _failure, _Scheduled, _Workload
from ..timing import ONCE
from ..worker import Answer, serve_forks
from .code import CALLBACK, compile_cubin, resource_notes

__all__ = ["CudaBuilder", "main"]


CONFIG = {**CANDIDATE_CONFIG, **ASYNC_COPIES}

SLOW_FLOPS = 2e9
"""A contraction with more takes an unscheduled kernel seconds to minutes: it is scheduled, for all cores."""


class CudaBuilder(Server):
    """Compiles candidates to libraries with cubins inside, and runs references on the CPU."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        gpu = Hardware.from_json(config.hardware)
        assert isinstance(gpu, GpuHardware)
        self._gpu = gpu
        self._suits: GpuHardware | None = None
        self._notes: dict[str, float] | None = None
        register_backend()  # workers import TVM without its back ends: most need none
        tvm_ffi.register_global_func(CALLBACK, self._cubin, override=True)

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
            try:
                answer = self._cpu.outputs(spec, self._workloads[task])
            except Exception as error:  # noqa: BLE001 - as above
                answer = _failure(error, "crash")
            if "error" not in answer:
                break
        return answer

    @cached_property
    def _cpu(self) -> _Cpu:
        """Made in the worker, when the first reference is: threads of TVM's pool are not forked."""
        threads = core_count()
        # Builders have one each, which is for compiling. Bound to cores, those of two references wait for each other:
        # 5 s for what takes 2.3 (two products of 4096 on two cores).
        os.environ.update(TVM_NUM_THREADS=str(threads), TVM_BIND_THREADS="0")
        target = detect_target(threads)
        hardware = describe_machine(target, threads, measure=False).to_json()
        return _Cpu(replace(self.config, target=json.loads(target_json(target)), hardware=hardware, export=""))

    def _reference_specs(self, task: str) -> list[dict[str, Any]]:
        untuned = {"task": task, "untuned": True}
        mod = self._workloads[task].mod
        try:
            contraction = analyze(mod).contraction
        except ValueError:  # a block that the analysis does not read
            contraction = None
        if contraction is None or contraction.flops < SLOW_FLOPS:
            return [untuned]
        space = build_space(mod, self._cpu.hardware)
        points = Moves(space).sample(np.random.default_rng(0), 256)
        best = space.decision(points[np.argmin(space.latency_s(points))])
        return [{"task": task, "decision": best.to_json()}, untuned]


class _Cpu(Server):
    """Runs kernels for their outputs, on all cores and perhaps beside others: what it takes says nothing."""

    @property
    def hardware(self) -> Hardware:
        """What spaces are built from."""
        return self._hardware

    def outputs(self, spec: Mapping[str, Any], workload: _Workload) -> dict[str, Any]:
        """Build a candidate, run it once and keep its outputs as the reference; {"domain": ...} or an error."""
        task = str(spec["task"])
        self._workloads[task] = replace(workload, space=None)  # schedules of a CPU are another space
        (built,) = self._build({"batch": self._batch + 1, "candidates": [spec], "workloads": {}})["built"]
        if "error" in built:
            return dict(built)
        run = {"task": task, "program": built["program"], "domain": "normal", "save": True, "check": False}
        return self._run(run | {"effort": asdict(ONCE), "best_s": math.inf})


def main() -> None:
    """Fork builders until the parent closes the pipe."""
    serve_forks(_start)


def _start(fields: Mapping[str, Any]) -> Answer:
    return CudaBuilder(Config(**fields)).answer


if __name__ == "__main__":
    main()
