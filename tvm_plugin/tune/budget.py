"""How much measuring is allowed, over all runs in one work directory."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from ..errors import InputError

__all__ = ["Budget"]


@dataclass
class Budget:
    """Trials and wall-clock seconds, whichever ends first. What earlier runs spent on the same model counts.

    Attributes
    ----------
    trials : int or None
        Measurements in all; None for no limit.
    time_s : float or None
        Seconds in all, from the start of tuning to its result; None for no limit.
    reserve_s : float
        Seconds kept back for what follows the search: re-timing, compiling, checking.
    reserve_trials : int
        Measurements kept back for a later search.
    spent_trials, spent_s : int, float
        What earlier runs used.
    """

    trials: int | None = None
    time_s: float | None = None
    reserve_s: float = 0.0
    reserve_trials: int = 0
    spent_trials: int = 0
    spent_s: float = 0.0
    _started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.trials is not None and self.trials < 1:
            raise InputError(
                f"trials must be at least 1, not {self.trials}; leave it out to tune until nothing improves"
            )
        if self.time_s is not None and not 0 < self.time_s < math.inf:
            raise InputError(
                f"the time budget must be more than 0 seconds, not {self.time_s}; leave it out to tune until nothing "
                "improves"
            )

    @property
    def elapsed_s(self) -> float:
        """Seconds spent by all runs together."""
        return self.spent_s + time.monotonic() - self._started

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the search must stop; None without a limit."""
        return None if self.time_s is None else self.time_s - self.reserve_s - self.elapsed_s

    @property
    def whole_seconds_left(self) -> float | None:
        """Seconds until the result is due, the reserve included; None without a limit."""
        return None if self.time_s is None else self.time_s - self.elapsed_s

    @property
    def trials_left(self) -> int | None:
        """Measurements until the search must stop; None without a limit."""
        return None if self.trials is None else max(0, self.trials - self.reserve_trials - self.spent_trials)

    def allows(self, round_s: float = 0.0) -> bool:
        """Whether another round, expected to take `round_s` seconds, still fits."""
        seconds, trials = self.seconds_left, self.trials_left
        return (seconds is None or seconds > round_s) and (trials is None or trials > 0)
