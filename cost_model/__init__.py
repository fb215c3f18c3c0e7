"""Cost models: features of candidates in, scores out, without a compiler.

| name | module | what it does |
|---|---|---|
| `xgboost` | `xgboost_model` | the default: boosted trees that learn to rank, retrained after every round |
| `analytic` | `analytic` | learns nothing: candidates are ranked by the analytic estimate alone |
| `random` | `random` | a fixed random score: what a search is worth without a model |

`blend.BlendedScore` joins a model with the analytic estimate that every search space brings, and is what a strategy is
given as its score; `late_columns.LateColumns` fills, for any model, what only a GPU's compiler tells; `metrics` says
how good a model ranks.
"""

from __future__ import annotations

if __name__ != "eqtune.cost_model":
    raise ImportError(
        f"import this package as 'eqtune.cost_model', not as {__name__!r}: "
        "a second copy of its classes would break isinstance"
    )

from .base import CostModel
from .blend import BlendedScore
from .late_columns import LateColumns
from .registry import check, create, names

__all__ = ["BlendedScore", "CostModel", "LateColumns", "check", "create", "names"]
