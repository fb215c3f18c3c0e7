"""Strategies: which candidates of one kernel to measure next.

A strategy is a frozen dataclass of documented constants with a `name` and `begin(space, seed)`, which starts a search
that is asked for batches and told latencies (`base`). `create` makes one from what a user wrote.

| name | module | what it does |
|---|---|---|
| `annealed-evolution` | `annealed_evolution` | the default: evolution, refined by annealing, finished by descent |
| `evolution` | `evolution` | population, tournament, crossover, mutation (Ansor's constants) |
| `annealing` | `annealing` | 128 persistent Markov chains (AutoTVM's constants) |
| `random` | `random` | legal points at random: the baseline |
| `exhaustive` | `exhaustive` | scores every point in every round: small spaces |

The shared parts are `moves` (every vectorised move on decision vectors), `archive` (what was asked and told) and
`batch` (from scored candidates to a batch). To write one's own: derive from `batch.BatchedSearch` and define
`propose`, or implement `base.Strategy` from scratch, and run `conformance.check_strategy` on it. `simulate` runs a
strategy with a cost model on a toy space or on recorded measurements, without a compiler.
"""

from __future__ import annotations

from .base import Score, Search, Strategy
from .registry import create, names

__all__ = ["Score", "Search", "Strategy", "create", "names"]
