"""What TVM calls at the end of `import tvm`, through the entry-point group "tvm.backends"."""

from __future__ import annotations

from typing import Any

from ._compat import check_versions

__all__ = ["register"]


def register() -> None:
    """Make `relax.build(..., relax_pipeline="eqtune")` and `relax.get_pipeline("eqtune")` work.

    Idempotent, and cheap: the passes are imported when the pipeline is first asked for. Raises SetupError
    for an installation that is known to crash; TVM shows it as a warning and goes on without eqtune.
    """
    check_versions()
    from tvm.relax import pipeline

    if "eqtune" not in pipeline.PIPELINE_MAP:
        pipeline.register_pipeline("eqtune")(_pipeline)


def _pipeline(**options: Any) -> Any:
    """The pass that `relax.get_pipeline("eqtune", **options)` returns."""
    from .pipeline import eqtune_pipeline

    return eqtune_pipeline(**options)
