"""The graph search on one term graph: explore, extract, choose."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .cost import AnalyticCost, TermCost, graph_cost_s
from .egraph import EGraph
from .egraph_view import EGraphView
from .extract import EXTRACTORS, Extraction, extract
from .rules import Group, Rule
from .saturate import Limits, Saturation, saturate
from .terms import TermGraph

__all__ = ["Replacement", "SearchResult", "superoptimize"]


@dataclass(frozen=True)
class Replacement:
    """A kernel of the original graph that is computed in another way: the rules that led there."""

    original: str
    replacement: str
    rules: tuple[str, ...]


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
    classes : int
        Number of e-classes.
    rules_used : dict of str to int
        How many terms of `graph` each rule made.
    replacements : list of Replacement
    load_s, explore_s, extract_s : float
        Seconds spent.
    """

    graph: TermGraph
    cost_before_s: float
    cost_after_s: float
    saturation: Saturation
    extractions: list[Extraction] = field(default_factory=list)
    classes: int = 0
    rules_used: dict[str, int] = field(default_factory=dict)
    replacements: list[Replacement] = field(default_factory=list)
    load_s: float = 0.0
    explore_s: float = 0.0
    extract_s: float = 0.0


def superoptimize(
    graph: TermGraph,
    rules: Sequence[Rule | Group],
    *,
    limits: Limits | None = None,
    cost: TermCost | None = None,
    extractors: Sequence[str] = EXTRACTORS,
    extract_seconds: float = 10.0,
) -> SearchResult:
    """Search for a cheaper graph that is equal to `graph` by `rules`.

    Parameters
    ----------
    graph : TermGraph
        Not changed.
    rules : sequence of Rule or Group
    limits : Limits
        Of the exploration.
    cost : TermCost
        Prices of terms; analytic by default.
    extractors : sequence of str
        Names in `extract.EXTRACTORS`; the cheapest result wins.
    extract_seconds : float
        Limit of the integer program.
    """
    limits, cost = limits or Limits(), cost or AnalyticCost()
    before = graph_cost_s(graph, cost)
    started = time.perf_counter()
    if limits.e_nodes <= len(graph.terms) or limits.seconds <= 0 or limits.iterations <= 0 or not rules:
        reason = "e_nodes" if limits.e_nodes <= len(graph.terms) else "seconds" if limits.seconds <= 0 else "iterations"
        return SearchResult(graph, before, before, Saturation(reason, 0, len(graph.terms), 0.0))
    egraph = EGraph(graph, rules)
    loaded = time.perf_counter()
    saturation = saturate(egraph, rules, limits)
    view = egraph.view()
    explored = time.perf_counter()
    extractions = extract(view, cost, extractors, time_limit_s=extract_seconds)
    result = SearchResult(
        graph,
        before,
        before,
        saturation,
        extractions,
        len(view.classes),
        load_s=loaded - started,
        explore_s=explored - loaded,
        extract_s=time.perf_counter() - explored,
    )
    best = min(extractions, key=lambda extraction: extraction.cost_s)
    if best.cost_s < before * (1 - 1e-9):
        result.graph, result.cost_after_s = best.graph, graph_cost_s(best.graph, cost)
        needed = _needed(view, best.choice)
        result.rules_used = dict(Counter(view.made_by[best.choice[c]] for c in needed if view.made_by[best.choice[c]]))
        result.replacements = _replacements(view, best.choice, needed)
    return result


def _needed(view: EGraphView, choice: Mapping[int, int]) -> list[int]:
    """The classes that roots need, without those that depend on weights alone, operands first."""
    order: dict[int, None] = {}
    stack = [(root, False) for root in view.roots]
    seen: set[int] = set()
    while stack:
        c, done = stack.pop()
        if done:
            order[c] = None
        elif c not in seen and not view.constant[c]:
            seen.add(c)
            stack.append((c, True))
            stack += [(child, False) for child in view.children[choice[c]]]
    return list(order)


def _replacements(view: EGraphView, choice: Mapping[int, int], needed: Sequence[int]) -> list[Replacement]:
    """For each original term that is computed otherwise now, the rules that made its new operands and itself."""
    originals = {c: node for c in needed for node in view.classes[c] if not view.made_by[node] and node != choice[c]}
    result = []
    for c, original in originals.items():
        if not view.made_by[choice[c]]:
            continue
        rules: dict[str, None] = {}
        stack, seen = [c], set[int]()
        while stack:
            current = stack.pop()
            if current in seen or view.constant[current] or not view.made_by[choice[current]]:
                continue
            seen.add(current)
            rules[view.made_by[choice[current]]] = None
            stack += view.children[choice[current]]
        result.append(Replacement(_describe(view, original), _describe(view, choice[c]), tuple(rules)))
    return result


def _describe(view: EGraphView, node: int) -> str:
    """A node in one line: operator, attributes, shapes."""
    shapes = ", ".join("x".join(map(str, view.types[child].shape)) or "scalar" for child in view.children[node])
    result = "x".join(map(str, view.types[view.node_class[node]].shape)) or "scalar"
    name = getattr(view.attrs[node], "name", "") or getattr(view.attrs[node], "kind", "")
    return f"{view.ops[node]}{' ' + name if name else ''}({shapes}) -> {result}"
