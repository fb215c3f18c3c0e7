"""One candidate on its way to a `Measurement`: what the measurers of this folder share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..machine import memory_bytes
from ..search.space.base import Decision
from .base import NO_REFERENCE, Measurement

__all__ = [
    "BASELINE_LIMIT_FACTOR",
    "LOST",
    "RETIME_ROUNDS",
    "SHARED_MODULE",
    "SPACE_BUILDER",
    "Candidate",
    "Trial",
    "candidate_spec",
    "chunks_of",
    "fastest_of",
    "to_measurement",
    "without_reference",
    "worker_memory_bytes",
]

Candidate = Decision | str
"""A decision, or a schedule's trace as TVM's JSON (for imported records, which have no decision)."""

SHARED_MODULE = 8
"""Candidates compiled in one module: 18 ms each instead of 30 alone; more gain nothing and make failures dearer."""

RETIME_ROUNDS = 5
"""Finalists are timed in turns, so that a slow moment of the machine hits all of them."""

BASELINE_LIMIT_FACTOR = 12.0
"""An untuned kernel may take this many times the limit of a candidate: it is run once and is the reference."""

LOST = ("crash", "out_of_memory")
"""How untuned kernels fail that run again, alone: something from outside may have killed the process, or what ran
beside it may have taken the memory. One that takes longer than its limit would only take that long again."""

MEMORY_SHARE = 0.6
"""Of the machine's memory, or its container's, what one worker may take."""

SPACE_BUILDER = "eqtune.search.space:build_space"

T = TypeVar("T", bound="Trial")


@dataclass
class Trial:
    """One candidate: what is built, what came of it, and what running it gave.

    Attributes
    ----------
    spec : dict
        The candidate as `server.py` reads it.
    program : str
        Key of the program once it is built; equal for equal programs.
    trace : str
        The schedule's trace.
    failure : dict
        Error kind and detail, where building or the last run failed.
    answer : dict
        What the last run gave.
    notes : dict
        What the compiler told of it; see `Measurement`.
    """

    spec: dict[str, Any]
    program: str = ""
    trace: str = ""
    failure: dict[str, Any] = field(default_factory=dict)
    answer: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """Hash of the kernel."""
        return str(self.spec["task"])

    @property
    def latency_s(self) -> float:
        """The minimum of the last run; `inf` where there was none."""
        return min(self.answer.get("latencies_s", ()), default=math.inf)

    def take(self, built: dict[str, Any]) -> None:
        """Note what the builder answered."""
        self.trace = str(built.get("trace", ""))
        self.notes = dict(built.get("notes", {}))
        if "error" in built:
            self.failure = built
        else:
            self.program = str(built["program"])

    @property
    def disturbed(self) -> bool:
        """Whether the device was never at full speed while it ran."""
        return bool(self.answer.get("disturbed"))

    def add_round(self, answer: dict[str, Any]) -> None:
        """Note one more round of timing."""
        if "error" in answer:
            self.failure = answer
        else:
            self.answer = {
                "latencies_s": [*self.answer.get("latencies_s", ()), *answer["latencies_s"]],
                "notes": answer.get("notes", {}),
                "disturbed": answer.get("disturbed", False) and self.answer.get("disturbed", True),
            }

    def add_run(self, answer: dict[str, Any]) -> None:
        """Note one more run; of several, the faster counts."""
        if "error" in answer or min(answer["latencies_s"]) < self.latency_s:
            self.answer = answer
        else:
            self.answer = self.answer | {"disturbed": answer["disturbed"]}


def worker_memory_bytes() -> int:
    """What one worker may allocate beyond what it needs itself."""
    return int(MEMORY_SHARE * memory_bytes())


def fastest_of(trials: Sequence[Trial]) -> int:
    """Index of the trial whose last run was fastest; 0 without any."""
    return min(range(len(trials)), key=lambda index: trials[index].latency_s, default=0)


def chunks_of(trials: Sequence[T], workers: int, shared: int = SHARED_MODULE) -> list[Sequence[T]]:
    """What is compiled in one module each: `shared` trials at most, fewer where that keeps all `workers` busy."""
    size = max(1, min(shared, -(-len(trials) // max(1, workers))))
    return [trials[start : start + size] for start in range(0, len(trials), size)]


def candidate_spec(task: str, candidate: Candidate) -> dict[str, Any]:
    """The candidate as `server.py` reads it."""
    what = {"trace": candidate} if isinstance(candidate, str) else {"decision": candidate.to_json()}
    return {"task": task, **what}


def to_measurement(candidate: Candidate, trial: Trial) -> Measurement:
    """What became of it."""
    outcome = trial.failure or trial.answer
    return Measurement(
        _decision(candidate),
        latencies_s=() if "error" in outcome else tuple(outcome["latencies_s"]),
        error=str(outcome.get("error", "")),
        detail=str(outcome.get("detail", "")),
        trace=trial.trace,
        given_up=bool(outcome.get("given_up", False)),
        notes={**trial.notes, **outcome.get("notes", {})},
    )


def without_reference(candidates: Sequence[Candidate], reason: str) -> list[Measurement]:
    """Of candidates that are not tried: they cannot be checked, because the untuned kernel failed with `reason`."""
    detail = f"there is no reference: the untuned kernel failed: {reason}"
    return [Measurement(_decision(candidate), error=NO_REFERENCE, detail=detail[:300]) for candidate in candidates]


def _decision(candidate: Candidate) -> Decision:
    return Decision("", {}) if isinstance(candidate, str) else candidate
