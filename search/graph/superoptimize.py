"""The graph search on one term graph: explore, extract, choose."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .cost import AnalyticCost, Pricing, TermCost, graph_cost_s
from .egraph import EGraph
from .egraph_view import EGraphView
from .explain import Replacement, needed_classes, replacements
from .extract import EXTRACTORS, Extraction, extract
from .extract.problem import Choice
from .rules import Group, Rule
from .saturate import Limits, Saturation, saturate
from .terms import TermGraph

__all__ = ["Candidate", "SearchResult", "superoptimize"]

ROUNDS = 6
"""How often prices are learned and graphs extracted again: most models need two or three."""


@dataclass(frozen=True)
class Candidate:
    """One extracted graph.

    Attributes
    ----------
    graph : TermGraph
    cost_s : float
        Its cost, by the prices that were known in the end.
    rules_used : dict of str to int
        How many of its terms each rule made.
    choice : Choice
        The node of each class of the e-graph.
    """

    graph: TermGraph
    cost_s: float
    rules_used: Mapping[str, int]
    choice: Choice


@dataclass
class SearchResult:
    """What the search found for one graph.

    Attributes
    ----------
    graph : TermGraph
        The best graph; the original one where nothing is cheaper.
    cost_before_s, cost_after_s : float
        Estimated run time of the original and of `graph`, in seconds.
    saturation : Saturation
    extractions : list of Extraction
        Of each extractor, with the prices that were known in the end.
    candidates : list of Candidate
        The distinct graphs that were extracted and are cheaper than the original, cheapest first.
    classes : int
        Number of e-classes.
    load_s, explore_s, extract_s, price_s : float
        Seconds spent; `extract_s` is that of the last extraction.
    view : EGraphView or None
        The e-graph; None where nothing was explored.
    cost : TermCost
        The prices that were known in the end.
    rules : sequence of Rule or Group
        What the e-graph was grown by.
    """

    graph: TermGraph
    cost_before_s: float
    cost_after_s: float
    saturation: Saturation
    extractions: list[Extraction] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    classes: int = 0
    load_s: float = 0.0
    explore_s: float = 0.0
    extract_s: float = 0.0
    price_s: float = 0.0
    view: EGraphView | None = None
    cost: TermCost = field(default_factory=AnalyticCost)
    rules: Sequence[Rule | Group] = ()

    def without(self, rules: Container[str], *, time_limit_s: float = 10.0) -> Candidate | None:
        """The cheapest graph in which nothing was made by these rules; None where it is not cheaper than the original.

        Prices of single terms do not see how kernels fuse: who can price whole graphs may take rules back.
        """
        if self.view is None or not self.extractions:
            return None
        strongest = max((extraction.extractor for extraction in self.extractions), key=EXTRACTORS.index)
        found = extract(self.view, self.cost, (strongest,), time_limit_s=time_limit_s, without=rules)
        return next(iter(_cheaper(self.view, found, self.cost, self.cost_before_s)), None)

    @property
    def rules_used(self) -> Mapping[str, int]:
        """How many terms of `graph` each rule made."""
        return self.candidates[0].rules_used if self.candidates else {}

    @property
    def replacements(self) -> Sequence[Replacement]:
        """Kernels that `graph` computes in another way."""
        return self.explain(self.candidates[0]) if self.candidates else ()

    def explain(self, candidate: Candidate) -> Sequence[Replacement]:
        """Kernels that a candidate computes in another way, and the rules that led there."""
        return () if self.view is None else replacements(self.view, candidate.choice, self.rules)


def superoptimize(
    graph: TermGraph,
    rules: Sequence[Rule | Group],
    *,
    limits: Limits | None = None,
    cost: TermCost | None = None,
    pricing: Pricing | None = None,
    extractors: Sequence[str] = EXTRACTORS,
    extract_seconds: float = 10.0,
    seconds: float = math.inf,
) -> SearchResult:
    """Search for a cheaper graph that is equal to `graph` by `rules`.

    With `pricing`, extraction and learning alternate: the prices of what was extracted are learned, and graphs are
    extracted again, until nothing new turns up. An e-graph has thousands of terms; dozens of them are ever priced.

    Parameters
    ----------
    graph : TermGraph
        Not changed.
    rules : sequence of Rule or Group
    limits : Limits
        Of the exploration.
    cost : TermCost
        Prices of terms; analytic by default.
    pricing : Pricing
        Where better prices come from; `cost` is not used then.
    extractors : sequence of str
        Names in `extract.EXTRACTORS`; the cheapest result wins.
    extract_seconds : float
        Limit of the integer program.
    seconds : float
        Of all together: half to explore, a quarter for an integer program; no prices are learned after three quarters.
    """
    limits, cost = limits or Limits(), cost or AnalyticCost()
    limits = replace(limits, seconds=min(limits.seconds, seconds / 2))
    began = started = time.perf_counter()
    if limits.e_nodes <= len(graph.terms) or limits.seconds <= 0 or limits.iterations <= 0 or not rules:
        reason = "e_nodes" if limits.e_nodes <= len(graph.terms) else "seconds" if limits.seconds <= 0 else "iterations"
        before = graph_cost_s(graph, cost)
        return SearchResult(graph, before, before, Saturation(reason, 0, len(graph.terms), 0.0))
    egraph = EGraph(graph, rules)
    loaded = time.perf_counter()
    saturation = saturate(egraph, rules, limits)
    view = egraph.view()
    result = SearchResult(graph, 0.0, 0.0, saturation, classes=len(view.classes), load_s=loaded - started)
    result.explore_s = time.perf_counter() - loaded
    found: dict[tuple[Any, ...], Extraction] = {}
    for round_number in range(ROUNDS + 1):
        started = time.perf_counter()
        cost = pricing.cost if pricing is not None else cost
        result.extractions = extract(view, cost, extractors, time_limit_s=min(extract_seconds, seconds / 4))
        result.extract_s = time.perf_counter() - started
        for extraction in result.extractions:
            found.setdefault((tuple(extraction.graph.terms), tuple(extraction.graph.outputs)), extraction)
        too_late = time.perf_counter() - began > 0.75 * seconds
        if pricing is None or round_number == ROUNDS or too_late:
            break
        started = time.perf_counter()
        new = pricing.learn([graph, *(extraction.graph for extraction in result.extractions)])
        result.price_s += time.perf_counter() - started
        if not new:
            break
    result.view, result.cost, result.rules = view, cost, rules
    result.cost_before_s = result.cost_after_s = graph_cost_s(graph, cost)
    result.candidates = _cheaper(view, list(found.values()), cost, result.cost_before_s)
    if result.candidates:
        result.graph, result.cost_after_s = result.candidates[0].graph, result.candidates[0].cost_s
    return result


def _cheaper(view: EGraphView, found: Sequence[Extraction], cost: TermCost, before_s: float) -> list[Candidate]:
    """The extracted graphs that cost less than `before_s`, cheapest first."""
    candidates = []
    for extraction in found:
        cost_s = graph_cost_s(extraction.graph, cost)
        if cost_s < before_s * (1 - 1e-9):
            choice = extraction.choice
            rules_used = Counter(view.made_by[choice[c]] for c in needed_classes(view, choice))
            del rules_used[""]
            candidates.append(Candidate(extraction.graph, cost_s, rules_used, choice))
    return sorted(candidates, key=lambda candidate: candidate.cost_s)
