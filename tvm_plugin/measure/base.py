"""What measuring gives, and what the tuning loop expects of a measurer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:  # a worker imports this package before it can say that TVM is to do without torch
    from ..runtime import Models
    from ..search.space.base import Decision
    from ..tasks.task import Task

__all__ = [
    "CLOSED",
    "ERROR_KINDS",
    "MAX_DETAIL",
    "NO_REFERENCE",
    "Measurement",
    "Measurer",
    "MeasuresTogether",
    "Overheads",
    "Price",
    "Pricer",
    "RunsModels",
    "TakesPlainBaselines",
    "TimesColdWeights",
    "last_line",
]

ERROR_KINDS = ("build_error", "timeout", "crash", "out_of_memory", "wrong_result")
"""How a candidate can fail."""

NO_REFERENCE = "no_reference"
"""Error of a candidate that was not tried, because the untuned kernel fails: it says nothing of the candidate."""

MAX_DETAIL = 300
"""Characters of an error that are kept."""

CLOSED = "this measurer is closed, as by a tune_model that was given it: make another one"


def last_line(error: Exception) -> str:
    """What an error says last, shortened; its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1][:MAX_DETAIL]


@dataclass(frozen=True)
class Measurement:
    """One candidate, built and run, or failed.

    Attributes
    ----------
    decision : Decision
        Which candidate.
    latencies_s : tuple of float
        Seconds of one call, one entry for each repeat; empty when it failed.
    error : str
        "", one of `ERROR_KINDS`, or `NO_REFERENCE`.
    detail : str
        What went wrong, in at most a few hundred characters.
    trace : str
        The schedule's trace as TVM's JSON; "" when scheduling failed.
    given_up : bool
        True when it was clearly slower than the best after its first run, and was not repeated.
    notes : mapping of str to float
        What else was learnt of it: on GPUs, the columns `features.COMPILED` that the compiler tells, and the clock
        that it was timed at ("clock_mhz").
    """

    decision: Decision
    latencies_s: tuple[float, ...] = ()
    error: str = ""
    detail: str = ""
    trace: str = ""
    given_up: bool = False
    notes: Mapping[str, float] = field(default_factory=dict)

    @property
    def latency_s(self) -> float:
        """The minimum of the repeats; `inf` when it failed."""
        return min(self.latencies_s, default=math.inf)


class Price(NamedTuple):
    """What a kernel costs before it is tuned: seconds of its fastest candidate.

    Attributes
    ----------
    latency_s : float
        Of one call; `inf` where no candidate ran.
    fastest : int
        Which of the candidates it is, from 0.
    """

    latency_s: float
    fastest: int = 0


@dataclass
class Overheads:
    """Wall-clock seconds by what they were spent on."""

    search_s: float = 0.0
    build_s: float = 0.0
    run_s: float = 0.0
    model_s: float = 0.0


class Measurer(Protocol):
    """Builds and runs candidates. Every result was compared with the untuned kernel's on random inputs."""

    overheads: Overheads

    def baseline(self, tasks: Sequence[Task]) -> list[float]:
        """Seconds of one call of each kernel as TVM compiles it without a schedule; also the checks' reference."""

    def measure(self, task: Task, decisions: Sequence[Decision], best_s: float = math.inf) -> list[Measurement]:
        """One `Measurement` for each decision, in order. `best_s` is the best so far: what is far slower is given up.

        A failed candidate is a value, never an exception.
        """

    def retime(self, task: Task, decisions: Sequence[Decision]) -> list[Measurement]:
        """Time the few best again, longer and side by side, before one of them is believed."""

    def close(self) -> None:
        """Stop all workers."""

    def describe(self) -> dict[str, Any]:
        """Device name, target and threads, for the records."""


@runtime_checkable
class Pricer(Protocol):
    """A measurer that can time candidates without a reference to compare them with."""

    def price(self, candidates: Sequence[tuple[Task, Sequence[Decision]]]) -> Sequence[Price]:
        """The price of each task by these candidates of it. Outputs are not compared."""


@runtime_checkable
class MeasuresTogether(Protocol):
    """A measurer that can compile candidates of several kernels side by side."""

    def measure_together(self, requests: Sequence[tuple[Task, Sequence[Decision], float]]) -> list[list[Measurement]]:
        """As `Measurer.measure`, for several kernels: each with its candidates and its best latency so far."""


@runtime_checkable
class TakesPlainBaselines(Protocol):
    """A measurer that can compare with plain schedules instead of untuned kernels, which take seconds each."""

    plain_baselines: bool
    """Assign it before the first measurement."""


@runtime_checkable
class TimesColdWeights(Protocol):
    """A measurer that can time calls as they are in a model with more weights than the caches hold."""

    model_bytes: int
    """Bytes of all weights of such a model; 0 times kernels that are called again and again. Assign it before the first
    measurement: `describe` names another device then, because such times are other times."""


@runtime_checkable
class RunsModels(Protocol):
    """A measurer whose devices run whole models, too, as long as it is not closed."""

    @property
    def models(self) -> Models:
        """Where they run."""
