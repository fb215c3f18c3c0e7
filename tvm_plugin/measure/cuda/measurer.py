"""Measure on this machine's NVIDIA GPUs: build on all CPU cores, run in one process a GPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...errors import InputError, SetupError
from ...gpu_machine import describe_gpu, find_compiler, is_gpu, not_run_by_gpu
from ...machine import core_count, logical_count
from ...runtime import LocalModels
from ...search.space.gpu.hardware import GpuHardware
from ..elsewhere.built_here import BuiltHereMeasurer
from ..elsewhere.fleet import Fleet
from ..elsewhere.process_device import ProcessDevice
from ..pool import START_LIMIT_S
from .worker import CudaWorkerConfig

__all__ = ["CudaMeasurer", "alike_gpus", "gpu_count"]

BUILDER = (sys.executable, "-m", "eqtune.measure.cuda.builder")
RUNNER = (sys.executable, "-m", "eqtune.measure.cuda.worker")


def gpu_count() -> int:
    """NVIDIA GPUs that can be used here."""
    import tvm

    count = 0
    while tvm.cuda(count).exist:
        count += 1
    return count


def alike_gpus() -> list[int]:
    """The first GPU, and all others of its name: a monitor's, perhaps, is another."""
    import tvm

    names = [str(tvm.cuda(index).device_name) for index in range(gpu_count())]
    return [index for index, name in enumerate(names) if name == names[0]]


class CudaMeasurer(BuiltHereMeasurer):
    """A `Measurer` for NVIDIA GPUs; also a context manager.

    A kernel is timed with CUDA events. One that faults or hangs costs its process, which is replaced by one with a new
    context. Outputs are compared with the untuned kernel's on the CPU; the baseline is what dlight's default schedules
    give. GPUs must be alike: a kernel is timed on any of them.

    Parameters
    ----------
    target : tvm.target.Target
        What to compile for.
    hardware : GpuHardware, optional
        What spaces are built from; by default, of the target.
    devices : sequence of int, optional
        Which GPUs; by default, the first and those of its name.
    workers : int, optional
        Processes that compile; by default, one a logical core: nothing is timed on them.
    timeout_s : float
        How long a candidate may take to compile, and to run.
    seed : int
        Of the random inputs.
    flush_l2 : bool
        Empty L2 before each timed call, so that inputs come from DRAM.
    runner : sequence of str
        The command of a GPU's process; it speaks as `worker.py` does.

    Raises
    ------
    InputError
        When the target is no GPU, or one whose code these do not run, or for numbers out of range.
    SetupError
        When there is no GPU, or no nvcc.
    """

    def __init__(
        self,
        target: Any,
        hardware: GpuHardware | None = None,
        devices: Sequence[int] | None = None,
        workers: int | None = None,
        timeout_s: float = 20.0,
        seed: int = 0,
        flush_l2: bool = False,
        runner: Sequence[str] = RUNNER,
    ) -> None:
        if not is_gpu(target):
            raise InputError(f"CudaMeasurer is for targets of the kind 'cuda', not {target.kind.name!r}")
        chosen = alike_gpus() if devices is None else list(devices)
        if not chosen:
            raise SetupError(
                "there is no NVIDIA GPU that can be used here (see `eqtune doctor`); measure='compile-only' tunes "
                "without one"
            )
        if runner == RUNNER and (reason := not_run_by_gpu(target, chosen[0])):
            raise InputError(f"{reason}; give target='cuda', which means that GPU, or measure='compile-only'")
        compiler = find_compiler()
        if compiler is None or compiler.kind != "nvcc":
            raise SetupError("compiling for CUDA needs nvcc on PATH or in CUDA_HOME; install the CUDA toolkit")
        super().__init__(target, Fleet(START_LIMIT_S, "see `eqtune doctor`"), timeout_s, seed)
        workers = logical_count() if workers is None else workers
        if not workers > 0:
            raise InputError(f"workers must be positive, got {workers!r}")
        # What candidates are compiled for decides which instructions there are.
        self.hardware = replace(hardware or describe_gpu(target), arch=str(target.attrs["arch"]))
        self._start_builders("cuda", workers, self.hardware, seed, "so", command=BUILDER)
        directory = Path(self._directory.name)
        flush_bytes = self.hardware.l2_bytes * 2 if flush_l2 else 0
        for index in chosen:
            config = CudaWorkerConfig(index, str(directory), seed, flush_bytes)
            self._fleet.add(_GpuDevice(runner, asdict(config), directory / f"gpu-{index}.log"))
        try:
            described = self._ask_first({"op": "describe"})
        except BaseException:
            self.close()
            raise
        self._first = chosen[0]
        # Times with cold caches are other times: their records never pass for those of warm ones.
        device = described["device"] + (" with L2 flushed" if flush_l2 else "")
        self._device = {"device": device, "threads": self.hardware.multiprocessors}

    @property
    def models(self) -> LocalModels:
        """Where whole models run: on the first of the GPUs, in this process."""
        import tvm

        return LocalModels(core_count(), tvm.cuda(self._first))


class _GpuDevice(ProcessDevice):
    """One GPU. A `Device`."""

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return self.ask({"op": "run", **request}, float(request.get("limit_s", START_LIMIT_S)))
