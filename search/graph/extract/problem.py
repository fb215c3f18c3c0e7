"""The extraction problem as plain numbers: choose one node for each class that is needed, at least cost."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ..cost import ELEMENTWISE, TermCost, is_computed, users_that_join
from ..egraph_view import EGraphView
from ..operators import OPS

__all__ = ["Choice", "Problem", "cheapest_trees", "make_problem", "solution_cost"]

Choice = dict[int, int]
"""The chosen node of each class."""


@dataclass
class Problem:
    """Nodes and classes keep their indices in the view.

    Attributes
    ----------
    classes : dict of int to list of int
        The nodes worth considering, of each class that can be needed and does not depend on weights alone.
    children : dict of int to tuple of int
        The distinct classes that a node needs, again without those that depend on weights alone.
    cost : dict of int to float
        Price of each node, in seconds.
    roots : tuple of int
    weights : dict of int to int
        The node that computes each class that depends on weights alone: the fewest operators, computed ahead of time.
    """

    classes: dict[int, list[int]]
    children: dict[int, tuple[int, ...]]
    cost: dict[int, float]
    roots: tuple[int, ...]
    weights: Choice


def make_problem(view: EGraphView, cost: TermCost, without: Container[str] = ()) -> Problem:
    """Price the nodes that roots can need; leave out self-loops and nodes that another of their class dominates.

    Also left out is what the rules named in `without` made, other than weights.
    """
    computed = [any(is_computed(view.ops[node]) for node in nodes) for nodes in view.classes]
    joins = users_that_join(
        (op, children, c)
        for op, children, c in zip(view.ops, view.children, view.node_class, strict=True)
        if not view.constant[c]
    )
    prices: dict[object, float] = {}

    def price(node: int) -> float:
        children = view.children[node]
        if view.ops[node] in ELEMENTWISE:
            fused = any(computed[child] and not view.constant[child] for child in children)
        else:
            fused = joins(view.ops[node], view.node_class[node])
        key = (view.ops[node], view.forms[node], fused, *((view.types[c], view.constant[c]) for c in children))
        if key not in prices:
            types = [view.types[child] for child in children]
            weights = [view.constant[child] for child in children]
            result = view.types[view.node_class[node]]
            prices[key] = cost.term_s(view.ops[node], view.attrs[node], types, weights, result, fused)
        return prices[key]

    weights = _weights(view)
    problem = Problem({}, {}, {}, tuple(root for root in view.roots if not view.constant[root]), weights)
    stack = list(problem.roots)
    while stack:
        c = stack.pop()
        if c in problem.classes:
            continue
        nodes = []
        for node in view.classes[c]:
            children = tuple(dict.fromkeys(child for child in view.children[node] if not view.constant[child]))
            if c not in children and view.made_by[node] not in without:
                problem.children[node] = children
                problem.cost[node] = price(node)
                nodes.append(node)
        problem.classes[c] = nodes = _undominated(nodes, problem)
        for node in nodes:
            stack += problem.children[node]
    return problem


def _undominated(nodes: Sequence[int], problem: Problem) -> list[int]:
    """Without nodes that cost at least as much as another and need at least the same classes."""
    kept: list[tuple[int, frozenset[int]]] = []
    for node in sorted(nodes, key=lambda n: (problem.cost[n], len(problem.children[n]), n)):
        needs = frozenset(problem.children[node])
        if not any(other <= needs for _, other in kept):
            kept.append((node, needs))
    return [node for node, _ in kept]


def _weights(view: EGraphView) -> Choice:
    """For each class that depends on weights alone, the tree with the fewest operators, all of which fold."""
    classes = {c: view.classes[c] for c in range(len(view.classes)) if view.constant[c]}
    children = {
        node: view.children[node]
        for nodes in classes.values()
        for node in nodes
        if (view.ops[node] == "leaf" or OPS[view.ops[node]].folds)
        and all(view.constant[child] for child in view.children[node])
    }
    classes = {c: [node for node in nodes if node in children] for c, nodes in classes.items()}
    return cheapest_trees(classes, children, dict.fromkeys(children, 1.0))[0]


def cheapest_trees(
    classes: dict[int, list[int]], children: dict[int, tuple[int, ...]], cost: dict[int, float]
) -> tuple[Choice, dict[int, float]]:
    """The cheapest node of each class when shared values count each time: Knuth's generalisation of Dijkstra.

    Returns the choice, which has no cycle, and each class's cost. A class that has no finite term is missing.
    """
    missing = {node: len(set(children[node])) for nodes in classes.values() for node in nodes}
    parents: dict[int, list[int]] = {c: [] for c in classes}
    owner: dict[int, int] = {}
    heap: list[tuple[float, int]] = []
    for c, nodes in classes.items():
        for node in nodes:
            owner[node] = c
            for child in set(children[node]):
                if child in parents:
                    parents[child].append(node)
            if not missing[node]:
                heappush(heap, (cost[node], node))
    choice: Choice = {}
    total: dict[int, float] = {}
    while heap:
        value, node = heappop(heap)
        c = owner[node]
        if c in choice:
            continue
        choice[c], total[c] = node, value
        for parent in parents[c]:
            missing[parent] -= 1
            if not missing[parent] and owner[parent] not in choice:
                heappush(heap, (cost[parent] + sum(total[child] for child in children[parent]), parent))
    return choice, total


def solution_cost(problem: Problem, choice: Choice) -> float:
    """Seconds of a choice, each class once; infinite where a class is missing."""
    seen: set[int] = set()
    stack = list(problem.roots)
    total = 0.0
    while stack:
        c = stack.pop()
        if c in seen:
            continue
        seen.add(c)
        if c not in choice:
            return math.inf
        total += problem.cost[choice[c]]
        stack += problem.children[choice[c]]
    return total
