# Write a strategy of your own
# ============================
#
# A strategy proposes candidates and hears how fast they were: `ask` and `tell`. It sees a space of small integers and a
# score, and knows nothing of compilers, so it can be tested on a toy space in milliseconds, by the same checks that
# eqtune's own strategies pass.

import tempfile
from pathlib import Path

import numpy as np

import eqtune
from eqtune.search.strategies.conformance import check_strategy
from eqtune.search.strategies.moves import Moves


class HillClimbing:
    """From the best measured point, score all its neighbours; ask for the best of them."""

    name = "hill-climbing"

    def begin(self, space, seed):
        return HillClimbingSearch(space, seed)


class HillClimbingSearch:
    def __init__(self, space, seed):
        self.moves = Moves(space)
        self.rng = np.random.default_rng(seed)
        self.seen = set()
        self.best, self.best_s = None, np.inf

    def ask(self, count, score):
        pool = self.moves.sample(self.rng, 32 * count)
        if self.best is not None:
            pool = np.concatenate([self.moves.neighbours(self.best[None]), pool])
        pool = np.unique(pool, axis=0)
        pool = pool[[point.tobytes() not in self.seen for point in pool]]
        chosen = pool[np.argsort(-score(pool), kind="stable")[:count]]
        self.seen.update(point.tobytes() for point in chosen)
        return chosen

    def tell(self, points, latencies_s):
        self.seen.update(point.tobytes() for point in points)
        if len(points) and latencies_s.min() < self.best_s:
            self.best, self.best_s = points[np.argmin(latencies_s)], latencies_s.min()


check_strategy(HillClimbing())

result = eqtune.tune_model(
    "zoo:nasrnn", strategy=HillClimbing(), trials=60, work_dir=Path(tempfile.mkdtemp()) / "work", progress=False
)
print(f"untuned {result.baseline_latency_s * 1e3:.2f} ms, tuned {result.latency_s * 1e3:.2f} ms")
assert result.latency_s < result.baseline_latency_s
