"""Whole models on devices elsewhere: sent there as libraries, run and timed there."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import SetupError
from ...runtime import export_library, first_line
from .exported import interface_of, libraries_of
from .fleet import Fleet
from .model_bench import digest_of, read_arrays, write_arrays

__all__ = ["FarModel", "FarModels", "transfer_limit_s"]

MODEL_LIMIT_S = 300.0
"""What the runs of one request may take."""

BYTES_PER_S = 1e6
"""Programs and models arrive at least as fast as this."""

ROUNDS = 3
"""Turns that each model gets when several are timed."""

MOST_RUNS = 50
"""In one turn."""


def transfer_limit_s(request: Mapping[str, Any]) -> float:
    """What sending a program or a model with its inputs may take."""
    is_model = "model" in request
    files = (request["model"], request["inputs"]) if is_model else libraries_of(request["fields"])
    array_bytes = 0 if is_model else interface_of(request["interface"]).nbytes
    return (sum(Path(file).stat().st_size for file in files) + array_bytes) / BYTES_PER_S


@dataclass(frozen=True)
class FarModel:
    """The function "main" of an executable, as a library that devices elsewhere load."""

    models: FarModels
    library: Path

    def __call__(self, *inputs: NDArray[Any]) -> list[NDArray[Any]]:
        """Outputs in order; tuples of outputs are flattened. Raises SetupError where it does not run."""
        return self.models.run_once(self, inputs)[0]


class FarModels:
    """Runs models on the devices of a fleet. A `Models`.

    Parameters
    ----------
    fleet : Fleet
    directory : Path
        Where libraries, inputs and outputs are written; it must outlive this.
    kind : str
        "so" links libraries here; "tar" holds object files, for the far side to link.
    """

    def __init__(self, fleet: Fleet, directory: Path, kind: str) -> None:
        self._fleet = fleet
        self._directory = directory
        self._kind = kind
        self._inputs: dict[str, list[list[Any]]] = {}

    def load(self, executable: Any) -> FarModel:
        """See `Models`. Raises SetupError when the library cannot be linked."""
        library = self._directory / f"model-{uuid.uuid4().hex}.{self._kind}"
        try:
            export_library(executable, library)
        except (OSError, RuntimeError) as error:
            reason = first_line(error)[:200]
            raise SetupError(f"the model cannot be linked to be sent to a device ({reason})") from error
        return FarModel(self, library)

    def run_once(self, model: FarModel, inputs: Sequence[NDArray[Any]]) -> tuple[list[NDArray[Any]], float]:
        """See `Models`."""
        path = self._directory / f"outputs-{uuid.uuid4().hex}.npz"
        request = self._request(model, inputs) | {"outputs": str(path)}
        answers: list[dict[str, Any]] = []
        self._fleet.run([[0]], lambda _: request, lambda _, answer: answers.append(_checked(answer)))
        try:
            return read_arrays(path, answers[0]["output_specs"]), float(answers[0]["latencies_s"][0])
        finally:
            path.unlink(missing_ok=True)

    def time_s(
        self,
        models: Sequence[Any],
        inputs: Sequence[NDArray[Any]],
        budget_s: float = 1.0,
        at_least: int = 3,
        settle: bool = False,
    ) -> list[float]:
        """See `Models`. All on one device, unless it is lost; nobody knows whether its cores are at full speed."""
        requests = [self._request(model, inputs) | {"outputs": ""} for model in models]
        best = [math.inf] * len(models)
        share_s, spent_s = budget_s / (ROUNDS * len(models)), 0.0

        def ask(number: int) -> Mapping[str, Any] | None:
            if number >= at_least * len(models) and spent_s >= budget_s:
                return None
            seconds = best[number % len(models)]
            runs = 1 if seconds == math.inf else min(MOST_RUNS, int(share_s / max(seconds, 1e-9)))
            return requests[number % len(models)] | {"repeat": max(runs, 1)}

        def note(number: int, answer: dict[str, Any]) -> None:
            nonlocal spent_s
            latencies_s = _checked(answer)["latencies_s"]
            spent_s += sum(latencies_s)
            best[number % len(models)] = min([best[number % len(models)], *latencies_s])

        rounds = max(ROUNDS, at_least)
        self._fleet.run([range(rounds * len(models))], ask, note)
        return best

    def _request(self, model: FarModel, inputs: Sequence[NDArray[Any]]) -> dict[str, Any]:
        arrays = [np.asarray(value) for value in inputs]
        digest = digest_of(arrays)
        path = self._directory / f"inputs-{digest}.npz"
        if digest not in self._inputs:
            self._inputs[digest] = write_arrays(path, arrays)
        return {
            "model": str(model.library),
            "inputs": str(path),
            "input_specs": self._inputs[digest],
            "input_digest": digest,
            "limit_s": MODEL_LIMIT_S,
        }


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        raise SetupError(f"the model does not run on the device: {answer['error']}: {answer['detail']}")
    return answer
