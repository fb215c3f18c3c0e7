"""The buffers of the kernel that is being run, and calls on them. Runs in the workers."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from ..dtypes import numpy_dtype
from .arguments import Domain, Interface, as_comparable, poison, random_inputs
from .build import Program
from .check import ONE_OFF, mismatch, relative_tolerance

__all__ = ["Bench"]

PACKED_LIMIT_BYTES = 512 * 1024**2
"""Packed weights are kept for the next candidate with the same packing, up to this size in all."""

EVICT = "eqtune.evict_weights"
"""Name of the function that TVM's timer calls before each call with cold weights."""

_evicted: list[Any] = []
"""What `EVICT` takes out of the caches; a worker times one kernel at a time."""


class Bench:
    """Inputs of one kernel, its outputs, and the reference to compare them with.

    Inputs stay in memory from call to call, as the activations and weights of a running model do: caches are not
    flushed.

    Parameters
    ----------
    task : str
        Hash of the kernel.
    interface : Interface
        Its parameters.
    device : tvm.runtime.Device
        Where it runs.
    references : Path
        Directory of the reference outputs.
    seed : int
        Of the inputs.
    domain : Domain
        How inputs are drawn.
    """

    def __init__(
        self, task: str, interface: Interface, device: Any, references: Path, seed: int, domain: Domain
    ) -> None:
        self.task = task
        self.domain = domain
        self._interface = interface
        self._device = device
        self._references = references
        self._buffers = {
            position: tvm.runtime.tensor(array, device)
            for position, array in random_inputs(interface, seed, task, domain).items()
        }
        for position in interface.outputs:
            spec = interface.params[position]
            self._buffers[position] = tvm.runtime.empty(spec.shape, spec.dtype, device)
        self._packed: dict[str, tuple[int, list[Any]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of its inputs and outputs, and of the packed weights that it keeps."""
        return self._interface.nbytes + sum(nbytes for nbytes, _ in self._packed.values())

    def call(self, program: Program) -> float:
        """Seconds of one call, on outputs that hold no right value before it."""
        for position in self._interface.outputs:
            self._buffers[position].copyfrom(poison(self._interface.params[position]))
        function = program.module.get_function(program.symbol)
        arguments = self._arguments(program)
        started = time.perf_counter()
        function(*arguments)
        self._device.sync()
        return time.perf_counter() - started

    def evaluate(self, program: Program, number: int, repeat: int) -> list[float]:
        """Seconds of one call, `repeat` times averaged over `number` calls, after one call to warm up."""
        timer = program.module.time_evaluator(program.symbol, self._device, number=number, repeat=repeat)
        return [float(seconds) for seconds in timer(*self._arguments(program)).results]

    def evaluate_cold(self, program: Program, calls: int) -> float:
        """Seconds of one call that finds its weights in no cache, its other inputs where the call before left them.

        The median of `calls`: each is timed alone, and may meet an interrupt.
        """
        arguments = self._arguments(program)
        timer = program.module.time_evaluator(program.symbol, self._device, number=1, repeat=calls, f_preproc=EVICT)
        _evicted[:] = [arguments[position] for position in self._interface.weights]
        try:
            return statistics.median(float(seconds) for seconds in timer(*arguments).results)
        finally:
            _evicted.clear()

    @property
    def has_weights(self) -> bool:
        """Whether some inputs are constants of the model."""
        return bool(self._interface.weights)

    def finite(self) -> bool:
        """Whether the outputs have neither NaN nor infinity."""
        return all(
            bool(np.isfinite(as_comparable(self._buffers[position].numpy())).all())
            for position in self._interface.outputs
        )

    def save(self) -> None:
        """Keep the outputs as the reference."""
        for position in self._interface.outputs:
            np.save(self._path(position), as_comparable(self._buffers[position].numpy()), allow_pickle=False)

    def mismatch(self) -> str:
        """What differs from the reference; "" when nothing does."""
        types = [self._interface.params[p].dtype for p in range(len(self._interface.params))]
        floating = [dtype for dtype in types if dtype.startswith(("float", "bfloat"))]
        least = min(floating, key=lambda dtype: numpy_dtype(dtype).itemsize, default="int32")
        if self._interface.factors and least in ("float32", "float64"):
            least = self._interface.factors
        tolerance = relative_tolerance(least, self._interface.reduction)
        for position in self._interface.outputs:
            reference = np.load(self._path(position), mmap_mode="r", allow_pickle=False)
            got = as_comparable(self._buffers[position].numpy())
            wrong = mismatch(got, reference, tolerance, ONE_OFF if self._interface.quantizes else 0.0)
            if wrong:
                return wrong
        return ""

    def _path(self, position: int) -> Path:
        return self._references / f"{self.task}.{position}.npy"

    def _arguments(self, program: Program) -> list[Any]:
        """Buffers in the order of the parameters, packed weights in the places of the plain ones."""
        arguments = [self._buffers[position] for position in range(len(self._interface.params))]
        if program.packing is None:
            return arguments
        packing = program.packing
        if packing.key not in self._packed:
            self._make_room(packing.nbytes)
            packed = [tvm.runtime.empty(spec.shape, spec.dtype, self._device) for spec in packing.packed]
            program.pack(*[arguments[position] for position in packing.sources], *packed)
            self._packed[packing.key] = packing.nbytes, packed
        for position, buffer in zip(packing.sources, self._packed[packing.key][1], strict=True):
            arguments[position] = buffer
        return arguments

    def _make_room(self, needed_bytes: int) -> None:
        while self._packed and needed_bytes + sum(n for n, _ in self._packed.values()) > PACKED_LIMIT_BYTES:
            del self._packed[next(iter(self._packed))]


def _evict(*arguments: Any) -> None:
    tvm.get_global_func("cache_flush_cpu_non_first_arg")(arguments[0], *_evicted)


tvm_ffi.register_global_func(EVICT, _evict, override=True)
