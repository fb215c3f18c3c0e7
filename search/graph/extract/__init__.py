"""Extraction: the cheapest graph that an e-graph holds.

A registry of extractors. Each takes an `EGraphView` and a cost, and each result goes through `check.checked_graph`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass

from eqtune.errors import InputError

from ..cost import TermCost
from ..egraph_view import EGraphView
from ..terms import TermGraph
from .check import checked_graph
from .greedy import greedy, greedy_dag
from .ilp import ilp
from .problem import Choice, make_problem, solution_cost

__all__ = ["EXTRACTORS", "Extraction", "extract"]

EXTRACTORS = ("greedy", "greedy-dag", "ilp")
"""From the fastest to the best: no one costs more than those before it."""


@dataclass(frozen=True)
class Extraction:
    """One extractor's result, checked.

    Attributes
    ----------
    extractor : str
    graph : TermGraph
    choice : Choice
        The node of each class.
    cost_s : float
        What the extractor minimised, in seconds.
    seconds : float
        Time that it took.
    gap : float or None
        Relative distance to a proven lower bound; None for an extractor that proves none.
    """

    extractor: str
    graph: TermGraph
    choice: Choice
    cost_s: float
    seconds: float
    gap: float | None = None


def extract(
    view: EGraphView,
    cost: TermCost,
    extractors: Sequence[str] = EXTRACTORS,
    *,
    time_limit_s: float = 10.0,
    without: Container[str] = (),
) -> list[Extraction]:
    """Extract by each of `extractors`, in order; nothing that the rules named in `without` made.

    Raises
    ------
    InputError
        For an unknown extractor.
    MismatchError
        When a result is not a valid extraction, which would be an error of the extractor, or nothing is left.
    """
    unknown = set(extractors) - set(EXTRACTORS)
    if unknown:
        raise InputError(f"no extractors named {sorted(unknown)}; there are {list(EXTRACTORS)}")
    problem = make_problem(view, cost, without)
    results = []
    for name in extractors:
        started = time.perf_counter()
        gap = None
        if name == "greedy":
            choice = greedy(problem)
        elif name == "greedy-dag":
            choice = greedy_dag(problem)
        else:
            choice = greedy_dag(problem)
            if math.isfinite(solution_cost(problem, choice)):  # else there is no graph at all: refused below
                choice, gap = ilp(problem, choice, time_limit_s=time_limit_s)
        graph = checked_graph(view, problem, choice)
        seconds = time.perf_counter() - started
        results.append(Extraction(name, graph, choice, solution_cost(problem, choice), seconds, gap))
    return results
