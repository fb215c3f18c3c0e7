"""The buffers of the kernel that is being run, and calls on them. Runs in the workers."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray

from ..arrays import ALIGNMENT, aligned_empty, huge_memory
from ..dtypes import is_floating, numpy_dtype
from ..relax_ir.constants import tensor_of
from .arguments import BufferSpec, Domain, Interface, as_comparable, poison, random_inputs
from .build import Program
from .check import ONE_OFF, mismatch, relative_tolerance

__all__ = ["Bench"]

PACKED_LIMIT_BYTES = 512 * 1024**2
"""Packed weights are kept for the next candidate with the same packing, up to this size in all."""

WEIGHT_DTYPES = ("float64", "float32", "float16", "bfloat16", "int8", "uint8")
"""What weights of products are; other constants (indices) are not exchanged."""

MOST_TURNS = 256
"""Pieces of memory that take turns as weights; with so many, they are no longer in the nearest caches."""

WARM_UP_S = 10e-3
"""Kernels that would take longer for all pieces do not wait long for their weights."""

LOADING_S = (1e-3, 0.1)
"""A first call on a GPU that takes as long may have loaded code; what takes longer is slow by itself."""

PATTERN_BYTES = 1 << 22
"""Of random bytes, which repeat in the memory that stands for weights."""


@dataclass(frozen=True)
class _Turns:
    """Arguments of calls: `count` different ones, over and over again; equal `key`s have equal ones."""

    key: tuple[str, int]
    count: int
    endless: Iterator[list[Any]]


class Bench:
    """Inputs of one kernel, its outputs, and the reference to compare them with.

    Inputs stay in memory from call to call, as the activations of a running model do: caches are not flushed.

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
        self._cold: _Turns | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its inputs and outputs, and of the packed weights that it keeps."""
        return self._interface.nbytes + sum(nbytes for nbytes, _ in self._packed.values())

    def call(self, program: Program) -> float:
        """Seconds of one call, on outputs that hold no right value before it.

        A GPU's driver loads the code in the first call, which takes milliseconds: there is a second one then.
        """
        self._poison_outputs()
        first_s = self._timed_call(program)
        loads = self._device.type == "cuda" and LOADING_S[0] <= first_s < LOADING_S[1]
        return min(first_s, self._timed_call(program)) if loads else first_s

    def _poison_outputs(self) -> None:
        for position in self._interface.outputs:
            self._buffers[position].copyfrom(poison(self._interface.params[position]))

    def _timed_call(self, program: Program) -> float:
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

    def evaluate_cold(self, program: Program, number: int, repeat: int, model_bytes: int) -> list[float]:
        """As `evaluate`, in a model with so many bytes of weights: those of a call were last read a run of it before.

        Instead of its own, each call gets the next piece of memory of that size, in huge pages as those of models are;
        what it computes is meaningless. All else is where the call before left it. Short kernels pass all pieces once
        to warm up, or some: what was compiled meanwhile has taken the caches, and each core reads its own part.
        """
        function = program.module.get_function(program.symbol)
        turns = self._turns(program, model_bytes)
        warm_by = time.perf_counter() + (WARM_UP_S if number > 1 else 0.0)
        for _ in range(turns.count):
            if time.perf_counter() >= warm_by:
                break
            function(*next(turns.endless))
        averages_s = []
        for _ in range(repeat):
            started = time.perf_counter()
            for _ in range(number):
                function(*next(turns.endless))
            averages_s.append((time.perf_counter() - started) / number)
        return averages_s

    def _turns(self, program: Program, model_bytes: int) -> _Turns:
        """Arguments of one call after the other."""
        key = program.packing.key if program.packing else "", model_bytes
        if self._cold is None or self._cold.key != key:
            turns = self._with_other_weights(self._arguments(program), model_bytes)
            self._cold = _Turns(key, len(turns), itertools.cycle(turns))
        return self._cold

    def _with_other_weights(self, arguments: list[Any], model_bytes: int) -> list[list[Any]]:
        """The arguments, as often as their weights fill a model's, with other memory as weights.

        Only once, as they are, where there is no room for two, and where a weight may say what else is read.
        """
        weights = {p: _spec_of(arguments[p]) for p in self._interface.weights}
        weights = {p: spec for p, spec in weights.items() if spec.dtype in WEIGHT_DTYPES}
        starts = np.cumsum([0, *(-(-spec.nbytes // ALIGNMENT) * ALIGNMENT for spec in weights.values())])
        piece_bytes = int(starts[-1])
        if self._interface.index_bound is not None or not 0 < 2 * piece_bytes <= model_bytes:
            return [arguments]
        memory = _memory_of_weights(model_bytes)
        result = []
        for turn in range(min(MOST_TURNS, memory.nbytes // piece_bytes)):
            chosen = list(arguments)
            for start, (position, spec) in zip(turn * piece_bytes + starts[:-1], weights.items(), strict=True):
                place = memory[start : start + spec.nbytes]
                chosen[position] = tensor_of(place.view(numpy_dtype(spec.dtype)).reshape(spec.shape))
            result.append(chosen)
        return result

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
        floating = [dtype for dtype in types if is_floating(dtype)]
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


def _spec_of(tensor: Any) -> BufferSpec:
    return BufferSpec(tuple(map(int, tensor.shape)), str(tensor.dtype))


@functools.cache
def _memory_of_weights(nbytes: int) -> NDArray[np.uint8]:
    """Memory that holds ordinary numbers in all of `WEIGHT_DTYPES`: neither NaN nor numbers that take longer."""
    nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
    memory = huge_memory(nbytes)
    if memory is None:
        memory = aligned_empty((nbytes,), np.uint8)
    pattern = np.random.default_rng(0).integers(0, 256, PATTERN_BYTES, np.uint8) & 0x8F | 0x30
    for start in range(0, nbytes, PATTERN_BYTES):
        memory[start : start + PATTERN_BYTES] = pattern[: nbytes - start]
    return memory
