"""Cost models by name. XGBoost is loaded only when it is asked for."""

from __future__ import annotations

from eqtune.errors import InputError

from .base import CostModel

__all__ = ["check", "create", "names"]

_NAMES = ("analytic", "random", "xgboost")


def names() -> list[str]:
    """Names that `create` takes."""
    return list(_NAMES)


def check(model: str | CostModel) -> None:
    """Refuse what `create` would refuse, without loading anything."""
    if not isinstance(model, str):
        if isinstance(model, type) or not all(hasattr(model, part) for part in ("fit", "predict", "trained")):
            raise InputError(
                f"a cost model is a name ({', '.join(_NAMES)}) or an object with fit, predict and trained, "
                f"not {model!r}"
            )
    elif model not in _NAMES:
        raise InputError(f"unknown cost model {model!r}; there are {', '.join(_NAMES)}")


def create(model: str | CostModel, seed: int = 0) -> CostModel:
    """A cost model by name; an instance is returned as it is.

    Parameters
    ----------
    model : str or CostModel
        One of `names`, or a model.
    seed : int
        Decides a named model's random choices.

    Raises
    ------
    InputError
        When the name is unknown (the message lists those there are), or the instance is no cost model.
    """
    check(model)
    if not isinstance(model, str):
        return model
    if model == "xgboost":
        from .xgboost_model import XGBoostModel

        return XGBoostModel(seed=seed)
    if model == "random":
        from .random import RandomModel

        return RandomModel(seed=seed)
    from .analytic import AnalyticModel

    return AnalyticModel()
