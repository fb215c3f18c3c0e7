"""Runs programs on one GPU, for one parent process: `python -m eqtune.measure.cuda.worker`.

A process of its own, because a kernel that faults leaves a CUDA context that is good for nothing, and one that hangs
cannot be stopped: the parent kills the process, and the next one has a new context. The protocol is that of
`../worker.py`: the first line is `CudaWorkerConfig`; then

    {"op": "describe"}                -> {"device": name, "clock_khz": now}
    {"op": "run", a runner request}   -> as `../server.py`'s "run", with the clocks as "notes"; {"lost": reason} after a
                                         fault
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..arguments import Domain, Interface, poison
from ..base import MAX_DETAIL, last_line
from ..bench import Bench
from ..build import Program
from ..elsewhere.runner import Runner
from ..worker import Answer, serve
from .clock import GpuClock

__all__ = ["CudaWorkerConfig", "main"]

MAX_FLUSHED_CALLS = 100


@dataclass(frozen=True)
class CudaWorkerConfig:
    """What the process is told when it starts.

    Attributes
    ----------
    index : int
        Which GPU.
    references : str
        Directory of the reference outputs.
    seed : int
        Of the inputs.
    flush_bytes : int
        Written between calls, so that inputs come from DRAM; 0 leaves L2 as the call before left it.
    """

    index: int
    references: str
    seed: int
    flush_bytes: int = 0


class _GpuBench(Bench):
    """Times with CUDA events, L2 emptied before each call where asked for."""

    flush_bytes = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._poisons: dict[int, Any] = {}  # on the device: copying them there takes longer than most kernels

    def _poison_outputs(self) -> None:
        import tvm

        if not self._poisons:
            self._poisons = {
                position: tvm.runtime.tensor(poison(self._interface.params[position]), self._device)
                for position in self._interface.outputs
            }
        for position, values in self._poisons.items():
            self._buffers[position].copyfrom(values)

    def evaluate(self, program: Program, number: int, repeat: int) -> list[float]:
        if not self.flush_bytes:
            return super().evaluate(program, number, repeat)
        calls = min(MAX_FLUSHED_CALLS, number * repeat)  # a flush is between repeats, not between their calls
        timer = program.module.time_evaluator(
            program.symbol, self._device, number=1, repeat=calls, cache_flush_bytes=self.flush_bytes
        )
        return sorted(float(seconds) for seconds in timer(*self._arguments(program)).results)[:repeat]


class _CudaRunner(Runner):
    """A `Runner` whose first call is timed as any: the device is at hand."""

    def __init__(self, device: Any, config: CudaWorkerConfig) -> None:
        import tvm

        super().__init__(device, tvm.runtime.load_module, Path(config.references), config.seed)
        self._flush_bytes = config.flush_bytes

    def _make_bench(self, task: str, interface: Interface, domain: Domain) -> Bench:
        bench = _GpuBench(task, interface, self._device, self._references, self._seed, domain)
        bench.flush_bytes = self._flush_bytes
        return bench


class _Gpu:
    def __init__(self, config: CudaWorkerConfig) -> None:
        import tvm
        from tvm.backend.cuda import register_backend

        register_backend()  # workers import TVM without its back ends
        self._device = tvm.cuda(config.index)
        if not self._device.exist:
            raise RuntimeError(f"there is no GPU {config.index}{_why_no_runtime()}")
        self._runner = _CudaRunner(self._device, config)
        self._clock = GpuClock(config.index)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one request."""
        if request["op"] == "describe":
            return {"device": str(self._device.device_name), "clock_khz": int(self._device.max_clock_rate)}
        try:
            self._runner.load(request)
            answer = self._runner.run(request)
            # Right after the last call: an idle GPU lowers its clocks.
            return answer | ({"notes": self._clock.read()} if "latencies_s" in answer else {})
        except Exception as error:  # noqa: BLE001 - TVM and the driver raise many kinds
            text = _driver_line(error)
        try:
            self._device.sync()
        except Exception:  # noqa: BLE001 - a fault stays in the context: nothing works any more
            return {"lost": text}
        return {"error": "out_of_memory" if "out of memory" in text.lower() else "crash", "detail": text}


def _why_no_runtime() -> str:
    """What keeps TVM's CUDA runtime from being loaded, libcudart perhaps; "" where it loads."""
    import tvm

    try:
        ctypes.CDLL(str(Path(tvm.__file__).parent / "lib" / "libtvm_runtime_cuda.so"))
    except OSError as error:
        return f": {error}"
    return ""


def _driver_line(error: Exception) -> str:
    """The line that names CUDA's error: TVM puts a kernel's source behind it."""
    named = [line.strip() for line in str(error).splitlines() if "CUDA" in line and "rror" in line]
    return named[0][:MAX_DETAIL] if named else last_line(error)


def main() -> None:
    """Serve until the parent closes the pipe."""
    serve(_start)


def _start(fields: Mapping[str, Any]) -> Answer:
    return _Gpu(CudaWorkerConfig(**fields)).answer


if __name__ == "__main__":
    main()
