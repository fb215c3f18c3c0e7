"""The parts of the ablation that measure candidates without a search: first batches with a prior, and early give-up."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.ablation_replay import trained
from benchmarks.measured import MeasuredKernel, candidates
from benchmarks.replay import RememberingMeasurer
from eqtune.cost_model import BlendedScore
from eqtune.measure import LocalMeasurer
from eqtune.search import strategies
from eqtune.search.space import Hardware, Space
from eqtune.tasks import Task

__all__ = ["first_batches", "give_up"]

Kernels = Mapping[str, tuple[Task, Space]]

FIRST = (1, 2, 4, 16)
"""After so many candidates of a first batch the best is looked at."""


def first_batches(
    kernels: Kernels, measurer: RememberingMeasurer, known: Sequence[MeasuredKernel], seeds: int
) -> list[dict[str, Any]]:
    """A row a score that picks the first candidates of each kernel: best latency / the best that any of them found.

    The prior is trained on `known`, but for these very kernels; beside the estimate it has half of the weight.
    """
    these = {task.workload_hash for task, _ in kernels.values()}
    prior = trained([kernel for kernel in known if kernel.workload_hash not in these])
    scores = {
        "estimate": lambda space: BlendedScore(space, None, 0),
        "estimate and prior": lambda space: BlendedScore(space, prior, 1, half_life=1.0),
        "prior": lambda space: BlendedScore(space, prior, 1, half_life=0.0),
    }
    found: dict[str, list[tuple[str, list[float]]]] = {}
    for label, score in scores.items():
        for task, space in kernels.values():
            for seed in range(seeds):
                points = strategies.create("annealed-evolution").begin(space, seed).ask(FIRST[-1], score(space))
                measured = measurer.measure(task, [space.decision(point) for point in points])
                found.setdefault(label, []).append((task.workload_hash, [m.latency_s for m in measured]))
        measurer.save()
    rows = []
    for label, runs in found.items():
        figures = {
            f"after_{count}": math.exp(
                np.mean([math.log(min(seconds[:count]) / measurer.best_s(key)) for key, seconds in runs])
            )
            for count in FIRST
        }
        rows.append({"variant": f"first batch: {label}", **figures, "runs": len(runs)})
    return rows


def give_up(kernels: Kernels, target: Any, hardware: Hardware, count: int, seed: int) -> list[dict[str, Any]]:
    """Two rows: seconds of running `count` candidates of each kernel one by one, with early give-up and without.

    A third of the candidates are random, the others good or nearly good by the estimate (`measured.candidates`).
    """
    rows = []
    for gives_up in (True, False):
        given_up, fastest_s = 0, []
        started = time.monotonic()
        with LocalMeasurer(target, hardware, threads=hardware.threads, seed=seed) as measurer:
            measurer.baseline([task for task, _ in kernels.values()])
            before_s = measurer.overheads.run_s
            for task, space in kernels.values():
                best_s = math.inf
                for point in candidates(space, count, np.random.default_rng(seed)):
                    # One a call: within a call, the later ones are held against the earlier.
                    (one,) = measurer.measure(task, [space.decision(point)], best_s if gives_up else math.inf)
                    best_s = min(best_s, one.latency_s)
                    given_up += one.given_up
                fastest_s.append(best_s)
            run_s = measurer.overheads.run_s - before_s
        rows.append(
            {
                "variant": "early give-up" if gives_up else "no early give-up",
                "run_s": run_s,
                "wall_s": time.monotonic() - started,
                "given_up": given_up,
                "sum_us": sum(fastest_s) * 1e6,
            }
        )
    return rows
