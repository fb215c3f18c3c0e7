"""What the user of `tune_model` and `tune_kernels` says of the search, in one value."""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from ..errors import InputError

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """The arguments that `tune_model` and `tune_kernels` share; see there."""

    target: Any = None
    trials: int | None = None
    time_budget_s: float | None = None
    work_dir: str | os.PathLike[str] = "eqtune-work"
    strategy: Any = "annealed-evolution"
    cost_model: Any = "xgboost"
    allocator: Any = "gradient"
    measure: Any = "local"
    threads: int | None = None
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        """Raise InputError for what is no number, and for a seed that no generator takes, or no record can hold.

        How large the others may be is for others to say. Numbers of numpy's become Python's, which JSON can hold.
        """
        for name in ("trials", "threads", "seed"):
            value = getattr(self, name)
            if value is None and name != "seed":
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise InputError(f"{name} is a whole number, not {value!r}")
            object.__setattr__(self, name, int(value))
        if self.seed < 0:
            raise InputError(f"seed must be at least 0, not {self.seed}")
        if self.seed >= 2**63:
            raise InputError(f"seed must be less than 2**63, not {self.seed}")
        seconds = self.time_budget_s
        if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, Real)):
            raise InputError(f"time_budget_s is a number of seconds, not {seconds!r}")
        if seconds is not None:
            object.__setattr__(self, "time_budget_s", seconds if isinstance(seconds, int) else float(seconds))
