"""Gradient-boosted trees that learn to rank candidates.

Pairs of candidates of the same kernel are compared (LambdaMART without the NDCG weight: `rank:pairwise`), as in
AutoTVM (Chen et al., NeurIPS 2018). The label of a candidate is its throughput relative to the best of its kernel, in
(0, 1], and 0 for one that failed: one scale for all kernels, so that what one kernel teaches serves the others.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import xgboost
from numpy.typing import NDArray

from eqtune.errors import InputError

from .model_file import read_booster, write_booster

__all__ = ["XGBoostConfig", "XGBoostModel"]


@dataclass(frozen=True)
class XGBoostConfig:
    """Constants of the trees and of the ranking.

    Attributes
    ----------
    rounds, depth, eta : int, int, float
        Trees, their depth, and the step of each. Deeper or slower trees rank no better on a few hundred rows a kernel.
    min_child_weight, reg_lambda, gamma : float
        Regularisation. The first two are a tenth of XGBoost's defaults: the weights that ranking gives to a row are
        small, and so is a leaf's share of a few dozen rows.
    max_bin : int
        Histogram bins a feature. Decisions have few values: 64 bins fit in two thirds of the time of 256.
    pairs : int
        The `pairs` candidates of a kernel that the model ranks highest are compared with all others. More is slower;
        what matters is who is at the top.
    min_rows : int
        Measured rows that it takes before the model is asked.
    """

    rounds: int = 60
    depth: int = 4
    eta: float = 0.25
    min_child_weight: float = 0.1
    reg_lambda: float = 0.1
    gamma: float = 1e-4
    max_bin: int = 64
    pairs: int = 64
    min_rows: int = 8


class XGBoostModel:
    """The default cost model.

    Fitting 1000 rows takes about 0.1 s, a prediction of 2000 rows 1.5 ms, on one core. A NaN feature means that it does
    not apply.

    Parameters
    ----------
    seed : int
        XGBoost's seed.
    threads : int
        Threads for fitting and predicting: 1 or 2. More threads gain nothing at these sizes and would disturb
        measurements.
    config : XGBoostConfig
        Constants.

    Raises
    ------
    InputError
        When `threads` is not 1 or 2.
    """

    name: ClassVar[str] = "xgboost"

    def __init__(self, seed: int = 0, threads: int = 1, config: XGBoostConfig | None = None) -> None:
        if threads not in (1, 2):
            raise InputError(f"the cost model was given {threads} threads; it takes 1 or 2")
        self._config = config or XGBoostConfig()
        self._seed = seed
        self._threads = threads
        self._booster: xgboost.Booster | None = None
        self._features = 0

    @property
    def trained(self) -> bool:
        """Whether there were enough measurements, and at least two that differ, for a model to be fitted."""
        return self._booster is not None

    def fit(self, features: NDArray[np.float32], latencies_s: NDArray[np.float64], tasks: NDArray[np.int64]) -> None:
        """Retrain from scratch; see `CostModel.fit`.

        With too few rows to learn from, what was learnt before stays. Raises InputError when the lengths differ.
        """
        if not len(features) == len(latencies_s) == len(tasks):
            raise InputError(
                f"fit was given {len(features)} rows of features, {len(latencies_s)} latencies and {len(tasks)} tasks; "
                "each row needs one of each"
            )
        labels = relative_throughput(latencies_s, tasks)
        if len(labels) < self._config.min_rows or not (labels != labels[0]).any():
            return
        order = np.argsort(tasks, kind="stable")
        data = xgboost.QuantileDMatrix(
            np.ascontiguousarray(features[order], dtype=np.float32),
            label=labels[order],
            qid=np.unique(tasks[order], return_inverse=True)[1],
            max_bin=self._config.max_bin,
            nthread=self._threads,
        )
        self._booster = xgboost.train(self._parameters(), data, self._config.rounds)
        self._features = features.shape[1]

    def predict(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """Scores, shape [n]: higher is faster.

        Raises InputError before the model is trained, or when the number of features is not that of `fit`.
        """
        if self._booster is None:
            raise InputError("the cost model was asked before it was trained; check `trained` first")
        if features.ndim != 2 or features.shape[1] != self._features:
            raise InputError(
                f"the cost model was trained on {self._features} features and was given shape {features.shape}"
            )
        if not len(features):
            return np.zeros(0)
        rows = np.ascontiguousarray(features, dtype=np.float32)
        scores = self._booster.inplace_predict(rows, predict_type="margin", validate_features=False)
        return np.asarray(scores, dtype=np.float64)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trained model as JSON, replacing the file at once.

        Raises InputError when nothing was learnt yet, RecordError when the file cannot be written.
        """
        if self._booster is None:
            raise InputError("an untrained cost model cannot be saved; fit it first")
        booster = json.loads(bytes(self._booster.save_raw("json")))
        write_booster(Path(path), booster, {"features": self._features, "config": asdict(self._config)})

    @classmethod
    def load(cls, path: str | os.PathLike[str], seed: int = 0, threads: int = 1) -> XGBoostModel:
        """A model from a file that `save` wrote.

        Nothing in the file is executed; the trees are checked before XGBoost sees them.

        Raises
        ------
        InputError
            When the file cannot be read, is cut short, changed or something else, or is from an XGBoost that this
            one cannot read.
        """
        booster, header = read_booster(Path(path))
        try:
            model = cls(seed, threads, XGBoostConfig(**header["config"]))
        except TypeError as error:
            raise InputError(f"cost model {os.fspath(path)!r} has constants of another version: {error}") from error
        model._features = header["features"]
        try:
            model._booster = xgboost.Booster({"nthread": threads}, model_file=bytearray(json.dumps(booster), "utf-8"))
            model.predict(np.zeros((1, model._features), dtype=np.float32))  # some of it is only read when needed
        except xgboost.core.XGBoostError as error:
            raise InputError(
                f"cost model {os.fspath(path)!r} cannot be read by XGBoost {xgboost.__version__}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        return model

    def _parameters(self) -> dict[str, Any]:
        config = self._config
        return {
            "objective": "rank:pairwise",
            "lambdarank_pair_method": "topk",
            "lambdarank_num_pair_per_sample": config.pairs,
            "tree_method": "hist",
            "max_depth": config.depth,
            "eta": config.eta,
            "min_child_weight": config.min_child_weight,
            "lambda": config.reg_lambda,
            "gamma": config.gamma,
            "max_bin": config.max_bin,
            "nthread": self._threads,
            "seed": self._seed % 2**31,
            "verbosity": 0,
        }


def relative_throughput(latencies_s: NDArray[np.float64], tasks: NDArray[np.int64]) -> NDArray[np.float64]:
    """The best latency of the row's task / the row's latency, in (0, 1], shape [n]; 0 for a candidate that failed."""
    best = np.full(len(latencies_s), np.inf)
    _, index = np.unique(tasks, return_inverse=True)
    np.minimum.at(best, index, latencies_s)
    measured = np.isfinite(latencies_s)
    labels = np.zeros(len(latencies_s))
    labels[measured] = best[index[measured]] / latencies_s[measured]
    return labels
