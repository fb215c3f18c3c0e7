"""Saturation: apply rules to an e-graph round by round, until nothing changes or a limit is met."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from .egraph import EGraph
from .rules.rule import Group, Rule

__all__ = ["SMALL", "Limits", "Saturation", "saturate"]

FULL = 0.9
"""Once rules did not fit, an e-graph of this share of the limit is full: each further round adds little, slowly."""


MOST_GROWTH = 4
"""Times that a round may make an e-graph larger..."""

SMALL = 8000
"""... unless it has fewer e-nodes than these afterwards."""


@dataclass(frozen=True)
class Limits:
    """When to stop. E-nodes and `k_multi` are Tensat's by default.

    Attributes
    ----------
    e_nodes : int
        Rules that could make the e-graph larger are not applied.
    iterations : int
        Rounds in all.
    seconds : float
        Wall-clock time of the exploration; a round that has begun is finished.
    k_multi : int
        Multi-pattern rules are applied in the first so many rounds: they may square the e-graph.
    k_group : int
        Groups are applied in the first so many rounds. They grow the e-graph less, as only classes of the original
        graph are grouped; what single rules find in a round or two (a sum of products is a product) can be grouped.
    matches : int
        For how many matches a multi-pattern rule, or a group, may build in one round.
    """

    e_nodes: int = 50_000
    iterations: int = 20
    seconds: float = 10.0
    k_multi: int = 1
    k_group: int = 3
    matches: int = 1000


@dataclass
class Saturation:
    """What an exploration did.

    Attributes
    ----------
    stop_reason : str
        "saturated", "e_nodes", "iterations" or "seconds".
    iterations : int
        Rounds that were run.
    e_nodes : int
        At the end.
    seconds : float
    matches, rule_seconds : dict
        For how many matches each rule built, and the seconds that it took, by name.
    """

    stop_reason: str
    iterations: int
    e_nodes: int
    seconds: float
    matches: dict[str, int] = field(default_factory=dict)
    rule_seconds: dict[str, float] = field(default_factory=dict)


def saturate(egraph: EGraph, rules: Sequence[Rule | Group], limits: Limits) -> Saturation:
    """Apply `rules`, which the e-graph was made with, within `limits`."""
    started = time.perf_counter()
    matches: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    rounds = {
        rule.name: limits.k_group if isinstance(rule, Group) else limits.k_multi if rule.multi else limits.iterations
        for rule in rules
    }
    reason, iteration = "iterations", 0
    while iteration < limits.iterations:
        if time.perf_counter() - started >= limits.seconds:
            reason = "seconds"
            break
        if egraph.e_nodes >= limits.e_nodes:
            reason = "e_nodes"
            break
        names = [name for name, last in rounds.items() if iteration < last]
        # Rules that feed themselves may grow tenfold in a tenth of a second; the round after that takes a minute.
        limit = min(limits.e_nodes, max(SMALL, MOST_GROWTH * egraph.e_nodes))
        step = egraph.apply(names, budget=limits.matches, e_node_limit=limit)
        iteration += 1
        for name, count in step.matches.items():
            matches[name] += count
        for name, spent in step.seconds.items():
            seconds[name] += spent
        full = step.postponed and egraph.e_nodes >= FULL * limits.e_nodes
        if full or not step.changed:
            reason = "e_nodes" if step.postponed else "saturated"
            break
    return Saturation(reason, iteration, egraph.e_nodes, time.perf_counter() - started, dict(matches), dict(seconds))
