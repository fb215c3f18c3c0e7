"""What the user of `tune_model` and `tune_kernels` says of the search, in one value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    import tvm

    from ..cost_model import CostModel
    from ..measure import Measurer
    from ..search.allocation import Allocator
    from ..search.strategies import Strategy

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """The arguments that `tune_model` and `tune_kernels` share; see there."""

    target: tvm.target.Target | Mapping[str, Any] | str | None = None
    trials: int | None = None
    time_budget_s: float | None = None
    work_dir: str | os.PathLike[str] = "eqtune-work"
    strategy: str | Strategy = "annealed-evolution"
    cost_model: str | CostModel = "xgboost"
    allocator: str | Allocator = "gradient"
    measure: str | Measurer = "local"
    threads: int | None = None
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        """Raise InputError for what is no number, for less than a thread, and for a seed that no record can hold.

        How large the others may be is for others to say. Numbers of numpy's become Python's, which JSON can hold.
        """
        for name in ("trials", "threads", "seed"):
            value = getattr(self, name)
            if value is None and name != "seed":
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise InputError(f"{name} is a whole number, not {value!r}")
            object.__setattr__(self, name, int(value))
        if self.threads is not None and self.threads < 1:
            raise InputError(f"threads must be at least 1, not {self.threads}; leave it out to use all cores")
        if self.seed < 0:
            raise InputError(f"seed must be at least 0, not {self.seed}")
        if self.seed >= 2**63:
            raise InputError(f"seed must be less than 2**63, not {self.seed}")
        seconds = self.time_budget_s
        if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, Real)):
            raise InputError(f"time_budget_s is a number of seconds, not {seconds!r}")
        if seconds is not None:
            object.__setattr__(self, "time_budget_s", seconds if isinstance(seconds, int) else float(seconds))
