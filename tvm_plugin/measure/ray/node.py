"""What runs on the nodes of a Ray cluster: tasks that build candidates, and the actor that owns a device.

Loaded by Ray's workers, never by a program that does not use Ray. eqtune must be installed on every node.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...gpu_machine import is_gpu, let_tvm_compile
from ..affinity import on_first_core
from ..base import MAX_DETAIL
from ..elsewhere.exported import libraries_of
from ..elsewhere.model_bench import ModelBench
from ..elsewhere.runner import Runner
from ..pool import Config
from ..scratch import Scratch
from ..server import Server
from ..worker import restore_crash_signals

__all__ = ["DeviceActor", "build", "reference"]

FIRST_BUILD_S = 30.0
"""What the first build of a process may take beyond its limit: it imports the rest of TVM."""


class _Builder:
    """The builder of one Ray worker process: it lives from task to task."""

    def __init__(self, config_text: str) -> None:
        restore_crash_signals()
        self._directory = Scratch("ray-builder")
        fields = json.loads(config_text) | {"references": self._directory.name}
        self._server: Server
        if fields["target"]["kind"] == "cuda":
            from ..cuda.builder import CudaBuilder

            self._server = CudaBuilder(Config(**fields))
        else:
            self._server = Server(Config(**fields))
        self._known: set[str] = set()
        self.fresh = True

    def build(self, batch: int, workloads: Mapping[str, str], specs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        new = {task: text for task, text in workloads.items() if task not in self._known}
        answer = self._server.answer({"op": "build", "batch": batch, "workloads": new, "candidates": specs})
        self._known |= new.keys()
        built = [fields for fields in answer.get("built", ()) if "error" not in fields]
        paths = {path for fields in built for path in libraries_of(fields)}
        answer["libraries"] = {path: Path(path).read_bytes() for path in sorted(paths)}
        for path in paths:
            Path(path).unlink()
        return answer

    def reference(self, task: str, text: str) -> dict[str, Any]:
        answer = self._server.answer({"op": "reference", "task": task, "workloads": {task: text}})
        return answer | {"references": _files_of(self._directory.name, task)}


def _files_of(directory: str, task: str) -> dict[str, bytes]:
    """The reference outputs of a kernel by the names of their files."""
    return {file.name: file.read_bytes() for file in sorted(Path(directory).glob(f"{task}.*.npy"))}


@functools.lru_cache(maxsize=1)
def _builder(config_text: str) -> _Builder:
    return _Builder(config_text)


def build(
    config_text: str, batch: int, workloads: Mapping[str, str], specs: Sequence[Mapping[str, Any]], limit_s: float
) -> dict[str, Any]:
    """Build candidates; a build that takes longer than `limit_s` seconds ends the process.

    Returns
    -------
    dict
        What `../server.py` answers, and "libraries": the bytes of each library by its path.
    """
    with _limited(config_text, limit_s) as builder:
        return builder.build(batch, workloads, specs)


def reference(config_text: str, task: str, text: str, limit_s: float) -> dict[str, Any]:
    """Run the kernel `text` of a GPU on this CPU, for its outputs; as `build`, in at most `limit_s` seconds.

    Returns
    -------
    dict
        {"domain": ...} or an error, and "references": the files of its outputs by name.
    """
    with _limited(config_text, limit_s) as builder:
        return builder.reference(task, text)


@contextlib.contextmanager
def _limited(config_text: str, limit_s: float) -> Iterator[_Builder]:
    """The builder, in a process that ends when what is done with it takes longer."""
    builder = _builder(config_text)
    faulthandler.dump_traceback_later(limit_s + FIRST_BUILD_S * builder.fresh, exit=True)
    try:
        yield builder
    finally:
        builder.fresh = False
        faulthandler.cancel_dump_traceback_later()


class DeviceActor:
    """Runs programs on a device of its node.

    Parameters
    ----------
    target : dict
        What programs are compiled for.
    seed : int
        Of the inputs.
    """

    def __init__(self, target: Mapping[str, Any], seed: int) -> None:
        import tvm

        restore_crash_signals()
        self._target = tvm.target.Target(dict(target))
        if is_gpu(self._target):
            from tvm.backend.cuda import register_backend

            register_backend()  # workers import TVM without its back ends
            let_tvm_compile()
        self._directory = Scratch("ray-device")
        self._batch = -1
        self._libraries: list[Path] = []
        device = tvm.device(self._target.get_target_device_type(), 0)
        self._runner = Runner(device, self._module, Path(self._directory.name), seed)
        self._models = ModelBench(device, self._module)

    def describe(self) -> str:
        """The device's name."""
        from ...machine import device_name

        return device_name(self._target)

    def load(
        self, request: Mapping[str, Any], libraries: Mapping[str, bytes], references: Mapping[str, bytes]
    ) -> dict[str, Any]:
        """Bring program, inputs and reference outputs to the device; {} or an error."""
        if request["batch"] != self._batch:
            self._batch = request["batch"]
            for library in self._libraries:
                for file in library.parent.glob(f"{library.stem}.*"):  # beside object files, what was linked of them
                    file.unlink()
            self._libraries.clear()
        self._libraries += self._write(libraries)
        self._write(references)
        try:
            self._runner.load(request)
        except Exception as error:  # noqa: BLE001 - TVM raises anything; it is the candidate's failure
            return {"error": "build_error", "detail": str(error)[-MAX_DETAIL:]}
        return {}

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """As `../server.py`'s "run"; where outputs were saved, "references" holds their files by name."""
        try:
            with on_first_core():
                answer = self._runner.run(request)
        except Exception as error:  # noqa: BLE001 - generated code raises anything; it is the candidate's failure
            return {"error": "crash", "detail": str(error)[-MAX_DETAIL:]}
        if request["save"]:
            answer["references"] = _files_of(self._directory.name, str(request["task"]))
        return answer

    def load_model(self, request: Mapping[str, Any], library: bytes, inputs: bytes) -> dict[str, Any]:
        """Bring a model and its inputs to the device, see `elsewhere/model_bench.py`; {} or an error."""
        self._write({request["model"]: library, request["inputs"]: inputs})
        try:
            self._models.load({**request, "inputs": str(self._place(request["inputs"]))})
        except Exception as error:  # noqa: BLE001 - TVM raises anything
            return {"error": "build_error", "detail": str(error)[-MAX_DETAIL:]}
        return {}

    def run_model(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """As `ModelBench.run`; "files" holds the outputs by the path that was asked for."""
        outputs = request["outputs"]
        place = self._place(outputs) if outputs else None
        try:
            with on_first_core():
                answer = self._models.run({**request, "outputs": str(place or "")})
        except Exception as error:  # noqa: BLE001 - generated code raises anything
            return {"error": "crash", "detail": str(error)[-MAX_DETAIL:]}
        if place is not None:
            answer["files"] = {outputs: place.read_bytes()}
            place.unlink()
        return answer

    def tidy(self) -> None:
        """Leave no file behind: the last call."""
        self._directory.cleanup()

    def _write(self, files: Mapping[str, bytes]) -> list[Path]:
        """Which of them were new: a library that is loaded must not be written to."""
        new = {place: data for path, data in files.items() if not (place := self._place(path)).exists()}
        for place, data in new.items():
            place.write_bytes(data)
        return list(new)

    def _module(self, path: str) -> Any:
        import tvm

        return tvm.runtime.load_module(str(self._place(path)))

    def _place(self, path: str) -> Path:
        return Path(self._directory.name) / Path(path).name
