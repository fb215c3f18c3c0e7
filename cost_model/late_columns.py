"""Columns that only compiling tells, for candidates that were not compiled: what the other columns let expect.

A GPU's registers and spills decide much, and are known of measured candidates only. Trees that learnt from them could
not rank the thousands that a search scores before any is compiled; so what the compiler would say is learnt, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .base import CostModel

if TYPE_CHECKING:
    import xgboost

__all__ = ["LateColumns"]

MIN_ROWS = 16
"""Compiled candidates that it takes before a column is filled."""

ROUNDS = 60

PARAMETERS = {
    "objective": "reg:squarederror",
    "tree_method": "hist",
    "max_depth": 5,
    "eta": 0.2,
    "max_bin": 64,
    "nthread": 1,
    "verbosity": 0,
}


class LateColumns:
    """A `CostModel` around another one, whose rows have NaN in `columns` until the candidate was compiled.

    Parameters
    ----------
    model : CostModel
        Sees every row with these columns filled as soon as enough is known; what was told stays as it is.
    columns : sequence of int
        Which columns of the features.
    seed : int
        XGBoost's seed.
    """

    def __init__(self, model: CostModel, columns: Sequence[int], seed: int = 0) -> None:
        self.model = model
        self._columns = list(columns)
        self._seed = seed
        self._experts: dict[int, xgboost.Booster] = {}

    @property
    def name(self) -> str:
        """That of the model inside."""
        return self.model.name

    @property
    def trained(self) -> bool:
        """Whether the model inside can be asked."""
        return self.model.trained

    def fit(self, features: NDArray[np.float32], latencies_s: NDArray[np.float64], tasks: NDArray[np.int64]) -> None:
        """Learn what the compiler tells, then let the model learn; see `CostModel.fit`."""
        import xgboost

        early = self._early(features)
        for column in self._columns:
            told = np.isfinite(features[:, column])
            values = features[told, column]
            if len(values) < MIN_ROWS or (values == values[0]).all():
                self._experts.pop(column, None)  # nothing to learn, and nothing that would tell candidates apart
                continue
            data = xgboost.QuantileDMatrix(early[told], label=values, max_bin=PARAMETERS["max_bin"], nthread=1)
            parameters = {**PARAMETERS, "seed": self._seed % 2**31}
            self._experts[column] = xgboost.train(parameters, data, ROUNDS)
        self.model.fit(self.fill(features), latencies_s, tasks)

    def predict(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """Scores of the model inside, shape [n]."""
        return self.model.predict(self.fill(features))

    def fill(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """The features, shape [n, features], with the columns filled where they are NaN and something was learnt."""
        if not self._experts or not len(features):
            return features
        result, early = features.copy(), self._early(features)
        for column, expert in self._experts.items():
            missing = np.isnan(features[:, column])
            if missing.any():
                result[missing, column] = expert.inplace_predict(early[missing], validate_features=False)
        return result

    def _early(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.ascontiguousarray(np.delete(features, self._columns, axis=1), dtype=np.float32)
