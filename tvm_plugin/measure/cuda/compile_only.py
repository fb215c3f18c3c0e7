"""Tuning without a device: candidates are compiled and judged by static analysis (Tuna's idea; Wang et al., 2021).

Nothing runs, so nothing here is a measurement: the context says so, and records of it match no other.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputError
from ...gpu_machine import Compiler, describe_gpu, find_compiler, is_gpu
from ...machine import logical_count, target_json
from ...records.record import NOT_MEASURED
from ...records.traces import trace_to_json
from ...search.space import Space, build_space
from ...search.space.base import Decision
from ...search.space.gpu.hardware import GpuHardware
from ...search.space.lowering import prepare_for_lowering
from ...tasks.task import Task
from ..base import Measurement, Overheads
from .code import (
    Resources,
    cuda_source,
    launch_problem,
    ptxas_resources,
    resource_notes,
    resource_problem,
)

__all__ = ["CompileOnlyMeasurer"]

SPILL_CLOCKS_PER_BYTE = 0.01
"""Spilled bytes slow a kernel down by this share each: a register more in flight is a trip to L1."""

FEW_WARPS = 8.0
"""Warps of a multiprocessor below which latencies are not hidden."""

KERNELS_A_FILE = 8
"""Candidates that share one run of nvcc: its start costs as much as several kernels."""


@dataclass
class _Candidate:
    decision: Decision
    function: Any = None
    trace: str = ""
    error: str = ""
    resources: tuple[Resources, ...] = ()


class CompileOnlyMeasurer:
    """A `Measurer` that runs nothing. Latencies are the analytic model's, corrected by what ptxas reports.

    Parameters
    ----------
    target : tvm.target.Target
        Of an NVIDIA GPU, here or not.
    hardware : GpuHardware, optional
        By default, the table's entry for the target.
    compiler : Compiler, optional
        An nvcc; by default, what is found. Without one, only TVM's lowering and launch limits are checked.
    cache : Path, optional
        Where cubins are kept by hash of their source; by default `EQTUNE_CUBIN_CACHE`, else they are not kept.

    Attributes
    ----------
    runs : bool
        False: there is nothing to time, to compare or to call.

    Raises
    ------
    InputError
        When the target is no GPU: a CPU is at hand, so measure.
    """

    runs = False

    def __init__(
        self,
        target: Any,
        hardware: GpuHardware | None = None,
        compiler: Compiler | None = None,
        cache: Path | None = None,
    ) -> None:
        if not is_gpu(target):
            raise InputError(
                f"measure='compile-only' is for GPU targets such as 'nvidia/nvidia-h100', not {target.kind.name!r}; "
                "for CPUs use 'local'"
            )
        self.target = target
        # What candidates are compiled for decides which instructions there are.
        self.hardware = replace(hardware or describe_gpu(target), arch=str(target.attrs["arch"]))
        found = compiler or find_compiler()
        self.compiler = found if found is not None and found.kind == "nvcc" else None
        kept = os.environ.get("EQTUNE_CUBIN_CACHE")
        self._cache = cache or (Path(kept) if kept else None)
        self.overheads = Overheads()
        self._spaces: dict[str, Space] = {}
        self._known: dict[tuple[str, str], Measurement] = {}

    def __enter__(self) -> CompileOnlyMeasurer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def baseline(self, tasks: Sequence[Task]) -> list[float]:
        """`inf`: TVM cannot compile an unscheduled kernel for a GPU, and nothing is run."""
        return [math.inf for _ in tasks]

    def measure(self, task: Task, decisions: Sequence[Decision], best_s: float = math.inf) -> list[Measurement]:
        """Build each candidate and estimate its latency; one that cannot be compiled or launched fails."""
        started = time.monotonic()
        space = self._space(task)
        candidates = [self._lower(space, decision) for decision in decisions]
        good = [candidate for candidate in candidates if not candidate.error]
        groups = [good[start : start + KERNELS_A_FILE] for start in range(0, len(good), KERNELS_A_FILE)]
        sources = [self._sources(group) for group in groups]
        if self.compiler is not None:
            with ThreadPoolExecutor(logical_count()) as pool:
                list(pool.map(self._assemble, groups, sources))
        result = [self._judge(space, candidate) for candidate in candidates]
        self.overheads.build_s += time.monotonic() - started
        return result

    def retime(self, task: Task, decisions: Sequence[Decision]) -> list[Measurement]:
        """The same as `measure`: an estimate does not change."""
        return self.measure(task, decisions)

    def close(self) -> None:
        """Nothing to stop."""

    def describe(self) -> dict[str, Any]:
        """The context of these records: a device that says that it was not there."""
        import tvm

        return {
            "device": f"{self.hardware.name} ({NOT_MEASURED})",
            "target": target_json(self.target),
            "threads": self.hardware.multiprocessors,
            "tvm_version": str(tvm.__version__),
        }

    def _space(self, task: Task) -> Space:
        if task.workload_hash not in self._spaces:
            self._spaces[task.workload_hash] = build_space(task.mod, self.hardware)
        return self._spaces[task.workload_hash]

    def _lower(self, space: Space, decision: Decision) -> _Candidate:
        candidate = _Candidate(decision)
        try:
            schedule = space.apply(decision)
            candidate.trace = trace_to_json(schedule.trace)
            candidate.function = prepare_for_lowering(schedule.mod["main"])
            candidate.error = launch_problem(candidate.function, self.hardware)
        except Exception as error:  # noqa: BLE001 - TVM raises many kinds; each is a failed candidate
            candidate.error = _last_line(error)
        return candidate

    def _sources(self, group: Sequence[_Candidate]) -> str:
        """CUDA source of the group; one that cannot be lowered fails alone."""
        try:
            return cuda_source({f"candidate{i}": c.function for i, c in enumerate(group)}, self.target)
        except Exception as error:  # noqa: BLE001 - as above
            if len(group) == 1:
                group[0].error = _last_line(error)
                return ""
        for candidate in group:
            try:
                cuda_source({"candidate": candidate.function}, self.target)
            except Exception as error:  # noqa: BLE001 - as above
                candidate.error = _last_line(error)
        alive = {f"candidate{i}": c.function for i, c in enumerate(group) if not c.error}
        return cuda_source(alive, self.target) if alive else ""

    def _assemble(self, group: Sequence[_Candidate], source: str) -> None:
        """Let ptxas say what each candidate takes; where it refuses the file, the file's candidates fail."""
        assert self.compiler is not None
        if not source:
            return
        try:
            found = ptxas_resources(source, self.hardware.arch, self.compiler, self._cache)
        except ValueError as error:
            for candidate in group:
                candidate.error = candidate.error or _last_line(error)
            return
        for index, candidate in enumerate(group):
            prefix = f"candidate{index}_kernel"
            candidate.resources = tuple(
                r for name, r in found.items() if name == prefix or name.startswith(f"{prefix}_")
            )

    def _judge(self, space: Space, candidate: _Candidate) -> Measurement:
        if candidate.error:
            return Measurement(
                candidate.decision, error="build_error", detail=candidate.error[:300], trace=candidate.trace
            )
        point = space.point(candidate.decision)
        if point is None:
            return Measurement(candidate.decision, error="build_error", detail="the space no longer has this candidate")
        latency_s = float(space.latency_s(point[np.newaxis])[0])
        notes = resource_notes(candidate.resources)
        if problem := resource_problem(candidate.resources, self.hardware):
            return Measurement(
                candidate.decision, error="build_error", detail=problem, trace=candidate.trace, notes=notes
            )
        slowest = max((self._slowdown(resources) for resources in candidate.resources), default=1.0)
        return Measurement(candidate.decision, (latency_s * slowest,), trace=candidate.trace, notes=notes)

    def _slowdown(self, resources: Resources) -> float:
        """What spills, and too few warps because of registers, cost on top of the analytic estimate."""
        spills = 1.0 + SPILL_CLOCKS_PER_BYTE * resources.spill_bytes
        if not resources.threads or not resources.registers:
            return spills
        blocks = self.hardware.registers_per_multiprocessor // (resources.registers * resources.threads)
        warps = max(1, blocks) * resources.threads / self.hardware.warp_size
        return spills * max(1.0, FEW_WARPS / warps) ** 0.5


def _last_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[-1][:300]
