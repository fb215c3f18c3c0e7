"""The parts of the ablation that need no machine: strategies on toy spaces, scores on measured tables.

Rows have the form of benchmarks.ablation: best latency / the best there is, geometric mean over spaces and seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measured import MeasuredKernel, TableSpace
from eqtune import cost_model
from eqtune.cost_model.xgboost_model import XGBoostConfig, XGBoostModel
from eqtune.search import strategies
from eqtune.search.space.toy import ToySpace
from eqtune.search.strategies.annealed_evolution import AnnealedEvolution, Descent
from eqtune.search.strategies.batch import BatchConfig
from eqtune.search.strategies.evolution import Breeding
from eqtune.search.strategies.simulate import simulate

__all__ = ["scores_on_tables", "strategies_on_toys", "trained"]


_BY_SCORE = AnnealedEvolution(descent=Descent(share=0.0), batch=BatchConfig(epsilon=0.0))
"""Measured tables are small: the best scored candidates are asked, and neighbours mean nothing there."""


def strategies_on_toys(spaces: int, trials: int = 96) -> list[dict[str, Any]]:
    """A row a strategy, with XGBoost and the toy's estimate, in batches of 16; 7 * 10^10 points, none enumerated."""
    default = AnnealedEvolution()
    variants: dict[str, Any] = {
        "annealed-evolution (default)": default,
        **{name: strategies.create(name) for name in ("evolution", "annealing", "random")},
        "default without descent": replace(default, descent=Descent(share=0.0)),
        "default without random share": replace(default, batch=BatchConfig(epsilon=0.0)),
        "default, 64 points scored a round": replace(
            default, chains=2, breeding=Breeding(population=64, generations=1, fresh=32)
        ),
        "default, 2,000 points scored a round": replace(
            default, chains=16, breeding=Breeding(population=256, generations=5)
        ),
    }
    rows = []
    for label, strategy in variants.items():
        curves, seconds = [], []
        for seed in range(spaces):
            space = ToySpace(seed, knobs=12)
            learnt = cost_model.create("xgboost", seed)
            run = simulate(strategy, space, space.measured_s, trials, model=learnt, seed=seed)
            curves.append(run.best_s / space.best_s)
            seconds.append(run.ask_s / (trials / 16))
        rows.append({"variant": label, **_after(curves, (16, 48, 96)), "ask_ms": float(np.mean(seconds)) * 1e3})
    return rows


class _WithPrior(TableSpace):
    """A table whose estimate is averaged with the score of trees that were trained beforehand."""

    def __init__(self, kernel: MeasuredKernel, prior: XGBoostModel) -> None:
        scores = _unit(-np.log(kernel.analytic_s)) + _unit(prior.predict(kernel.features))
        super().__init__(replace(kernel, analytic_s=np.exp(-scores / 2)))


def scores_on_tables(
    kernels: Sequence[MeasuredKernel], seeds: int, stride: int, least: int = 36
) -> list[dict[str, Any]]:
    """A row a score, on every `stride`-th kernel with at least `least` measured candidates, in batches of 4.

    The prior of each kernel saw only other models' kernels.
    """
    kernels = [kernel for kernel in kernels if len(kernel.points) >= least]
    priors = {model: _prior_without(model, kernels) for model in sorted({kernel.model for kernel in kernels})}
    variants: dict[str, tuple[Any, str, float, bool]] = {
        "estimate and XGBoost (default)": (_BY_SCORE, "xgboost", 32.0, False),
        "the same, half life 8": (_BY_SCORE, "xgboost", 8.0, False),
        "XGBoost alone once it is trained": (_BY_SCORE, "xgboost", 0.0, False),
        "estimate alone": (_BY_SCORE, "analytic", 32.0, False),
        "estimate with prior": (_BY_SCORE, "analytic", 32.0, True),
        "estimate with prior, and XGBoost": (_BY_SCORE, "xgboost", 32.0, True),
        "chance": (strategies.create("random"), "analytic", 32.0, False),
    }
    rows = []
    for label, (strategy, model, half_life, with_prior) in variants.items():
        curves = []
        for kernel in kernels[::stride]:
            space = _WithPrior(kernel, priors[kernel.model]) if with_prior else TableSpace(kernel)
            for seed in range(seeds):
                learnt = cost_model.create(model, seed)
                run = simulate(strategy, space, space.measured_s, 24, 4, learnt, seed, half_life)
                curves.append(run.best_s / kernel.latencies_s.min())
        needed = [int(np.argmax(curve <= 1 / 0.95)) + 1 if curve[-1] <= 1 / 0.95 else 25 for curve in curves]
        rows.append({"variant": label, **_after(curves, (4, 8, 16, 24)), "to_95": float(np.mean(needed))})
    return rows


def _prior_without(model: str, kernels: Sequence[MeasuredKernel]) -> XGBoostModel:
    """Trees over the kernels of the other models."""
    known = {kernel.workload_hash for kernel in kernels if kernel.model == model}
    return trained([k for k in kernels if k.model != model and k.workload_hash not in known])


def trained(kernels: Sequence[MeasuredKernel]) -> XGBoostModel:
    """A prior: trees over measured kernels."""
    trees = XGBoostModel(config=XGBoostConfig(rounds=150))
    trees.fit(
        np.concatenate([kernel.features for kernel in kernels]),
        np.concatenate([kernel.latencies_s for kernel in kernels]),
        np.repeat(np.arange(len(kernels)), [len(kernel.points) for kernel in kernels]),
    )
    return trees


def _unit(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    return (scores - scores.mean()) / max(float(scores.std()), 1e-12)


def _after(curves: Sequence[NDArray[np.float64]], counts: Sequence[int]) -> dict[str, float]:
    return {f"after_{n}": math.exp(np.mean([math.log(curve[n - 1]) for curve in curves])) for n in counts}
