"""eqtune: makes models compiled by Apache TVM faster, and checks that they compute the same.

It searches twice: over equal graphs (equality saturation) and over schedules of each resulting kernel (sketches,
annotations, evolution and annealing, a cost model retrained on measurements).

>>> import eqtune
>>> result = eqtune.tune_model("zoo:squeezenet", time_budget_s=60)  # doctest: +SKIP

Importing this package is cheap: TVM is loaded when a name that needs it is first used.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from .errors import (
    EqtuneError,
    InputError,
    MismatchError,
    MissingExtraError,
    RecordError,
    SetupError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from .graph_search import GraphConfig, GraphResult, optimize_graph
    from .tune import KernelsResult, TuneResult, tune_kernels, tune_model

_HOMES = {
    "GraphConfig": ".graph_search",
    "GraphResult": ".graph_search",
    "KernelsResult": ".tune",
    "TuneResult": ".tune",
    "optimize_graph": ".graph_search",
    "tune_kernels": ".tune",
    "tune_model": ".tune",
}
_SUBPACKAGES = (
    "cost_model",
    "frontends",
    "machine",
    "measure",
    "records",
    "relay",
    "report",
    "search",
    "tasks",
    "transform",
    "zoo",
)

__all__ = [
    "EqtuneError",
    "GraphConfig",
    "GraphResult",
    "InputError",
    "KernelsResult",
    "MismatchError",
    "MissingExtraError",
    "RecordError",
    "SetupError",
    "TuneResult",
    "UnsupportedModelError",
    "__version__",
    "optimize_graph",
    "tune_kernels",
    "tune_model",
]

try:
    __version__ = metadata.version("eqtune")
except metadata.PackageNotFoundError:  # a source tree on sys.path that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in _SUBPACKAGES:
        raise AttributeError(f"module 'eqtune' has no attribute {name!r}")
    from ._compat import check_versions

    check_versions()
    module = import_module(_HOMES.get(name, f".{name}"), __name__)
    return getattr(module, name) if name in _HOMES else module


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBPACKAGES})
