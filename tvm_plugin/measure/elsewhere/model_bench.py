"""Runs whole models on one device, which may be in another process, or on another machine. See `far_models.py`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dtypes import numpy_dtype

__all__ = ["ModelBench", "digest_of", "read_arrays", "write_arrays"]

MOST_LOADED = 2
"""Models that are kept on the device: two are timed in turn."""

Specs = Sequence[Sequence[Any]]
"""Shape and dtype of each array, as JSON."""


def write_arrays(path: Path, arrays: Sequence[NDArray[Any]]) -> list[list[Any]]:
    """Write arrays of any dtype, bfloat16 included, to an .npz file of bytes. Returns their `Specs`."""
    np.savez(path, *(np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays))
    return [[list(array.shape), str(array.dtype)] for array in arrays]


def read_arrays(path: Path, specs: Specs) -> list[NDArray[Any]]:
    """The inverse of `write_arrays`."""
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return [
            arrays[f"arr_{index}"].view(numpy_dtype(dtype)).reshape(shape) for index, (shape, dtype) in enumerate(specs)
        ]


def digest_of(arrays: Sequence[NDArray[Any]]) -> str:
    """Tells inputs apart."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(f"{array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


class ModelBench:
    """The models that are on a device at the moment, each with its inputs.

    A request has "model", the path of a library; "inputs" and "input_specs", what `write_arrays` wrote, and
    "input_digest", which tells whether they are there already; and either "outputs", where one run's are written, or ""
    and "repeat", how many runs to time.

    Parameters
    ----------
    device : tvm.runtime.Device
        Where models run.
    load : callable
        The module of a library's path.
    """

    def __init__(self, device: Any, load: Callable[[str], Any]) -> None:
        self._device = device
        self._load_module = load
        self._machines: dict[str, Any] = {}
        self._inputs: dict[str, str] = {}

    def load(self, request: Mapping[str, Any]) -> None:
        """Bring model and inputs to the device, where they are not there yet."""
        import tvm
        from tvm import relax

        model = str(request["model"])
        if model not in self._machines:
            while len(self._machines) >= MOST_LOADED:
                oldest = next(iter(self._machines))
                del self._machines[oldest]
                self._inputs.pop(oldest, None)
            self._machines[model] = relax.VirtualMachine(self._load_module(model), self._device)
        if self._inputs.get(model) != request["input_digest"]:
            arrays = read_arrays(Path(request["inputs"]), request["input_specs"])
            tensors = [tvm.runtime.tensor(array, self._device) for array in arrays]
            self._machines[model].set_input("main", *tensors)
            self._machines[model].save_function("main", "timed", *tensors, include_return=False)
            self._inputs[model] = str(request["input_digest"])

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """{"latencies_s": seconds of each run}, and "output_specs" of the outputs, where they were written."""
        from ...runtime import flat_tensors

        machine = self._machines[request["model"]]
        if not request["outputs"]:
            timer = machine.time_evaluator("timed", self._device, number=1, repeat=request["repeat"])
            return {"latencies_s": [float(seconds) for seconds in timer().results]}
        started = time.perf_counter()
        machine.invoke_stateful("main")
        self._device.sync()
        seconds = time.perf_counter() - started
        outputs = [tensor.numpy() for tensor in flat_tensors(machine.get_outputs("main"))]
        return {"latencies_s": [seconds], "output_specs": write_arrays(Path(request["outputs"]), outputs)}
