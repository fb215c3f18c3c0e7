"""Optimal extraction: an integer linear program, solved by HiGHS.

Variables: x_n in {0, 1} for each node, y_c for each class. Minimise sum of cost_n x_n such that

    y_root = 1,   y_c = sum of x_n over the nodes of c,   sum of x_n over the nodes of c that need m <= y_m.

Tensat's formulation (MLSys 2021) has the last inequality for each node by itself; summed over a class, of which at most
one node is chosen, it is as valid and tighter. y_c <= y_m is added for each m that all terms of c contain, however far
below: the relaxation would otherwise pay only a share of it for each way to get there (necessary.py). Nodes that no
graph as cheap as the given start has are left out; a row that says how much may be spent makes HiGHS take twice as
long. Solutions with a cycle are cut off when they appear, and two-cycles from the start, instead of by ordering
variables.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from .necessary import without_impossible
from .problem import Choice, Problem, solution_cost

__all__ = ["ilp"]

_COST_UNIT_S = 1e-6
"""Costs are given to the solver in microseconds: its tolerances are absolute."""

_RELATIVE_GAP = 1e-4
"""The solver may stop when it has proven to be this close to the optimum."""


def ilp(problem: Problem, start: Choice, *, time_limit_s: float = 10.0) -> tuple[Choice, float]:
    """The cheapest graph that is found, and how far it may be from the best, relative to its cost; 0 for nowhere.

    Parameters
    ----------
    problem : Problem
    start : Choice
        A valid extraction; no result costs more.
    time_limit_s : float
        For all solves together.
    """
    deadline = time.monotonic() + time_limit_s
    start_cost = solution_cost(problem, start)
    possible, need = without_impossible(problem)
    program = _Program(_affordable(possible, need, start_cost * (1 + 1e-6)), need)
    best, lower = start, 0.0
    while problem.roots and program.nodes and time.monotonic() < deadline:
        choice, bound = program.solve(max(0.1, deadline - time.monotonic()))
        lower = max(lower, min(bound, start_cost))
        if choice is None:
            break
        cycles = list(_cycles(problem, choice))
        if not cycles:
            if solution_cost(problem, choice) < start_cost:
                best = choice
            break
        for cycle in cycles:
            program.cut(cycle)
    cost = solution_cost(problem, best)
    gap = max(0.0, cost - lower) / cost if cost else 0.0
    return best, gap if gap > _RELATIVE_GAP else 0.0


class _Program:
    """The rows of the integer program; nodes come first among the columns, then classes."""

    def __init__(self, problem: Problem, need: Mapping[int, int]) -> None:
        self.problem = problem
        self.order = list(problem.classes)
        self.needed_by_roots = _needed_by(problem.roots, need)
        self.nodes = [node for nodes in problem.classes.values() for node in nodes]
        self.node_column = {node: i for i, node in enumerate(self.nodes)}
        self.class_column = {c: len(self.nodes) + i for i, c in enumerate(problem.classes)}
        self.rows: list[tuple[list[int], list[float]]] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        for c, nodes in problem.classes.items():
            self.row(
                [*(self.node_column[n] for n in nodes), self.class_column[c]], [1.0] * len(nodes) + [-1.0], 0.0, 0.0
            )
            users: dict[int, list[int]] = {}
            for node in nodes:
                for child in problem.children[node]:
                    users.setdefault(child, []).append(self.node_column[node])
            for child, columns in users.items():
                self.row([*columns, self.class_column[child]], [1.0] * len(columns) + [-1.0], -np.inf, 0.0)
        for c, further in _further_needs(self.order, need):
            self.row([self.class_column[c], self.class_column[further]], [1.0, -1.0], -np.inf, 0.0)
        for cycle in _two_cycles(problem):
            self.cut(cycle)

    def row(self, columns: list[int], values: list[float], lower: float, upper: float) -> None:
        self.rows.append((columns, values))
        self.lower.append(lower)
        self.upper.append(upper)

    def cut(self, cycle: Iterable[int]) -> None:
        """Not all of these nodes may be chosen together."""
        columns = [self.node_column[node] for node in cycle]
        self.row(columns, [1.0] * len(columns), -np.inf, len(columns) - 1.0)

    def solve(self, time_limit_s: float) -> tuple[Choice | None, float]:
        """The best choice, which may have cycles, or None; and a lower bound of the cost in seconds."""
        columns = len(self.nodes) + len(self.class_column)
        cost = np.zeros(columns)
        cost[: len(self.nodes)] = [self.problem.cost[node] / _COST_UNIT_S for node in self.nodes]
        lower, upper = np.zeros(columns), np.ones(columns)
        for i in _bits(self.needed_by_roots):
            lower[self.class_column[self.order[i]]] = 1.0
        matrix = csr_array(
            (
                np.concatenate([np.asarray(values) for _, values in self.rows]),
                np.concatenate([np.asarray(indices) for indices, _ in self.rows]),
                np.cumsum([0, *(len(indices) for indices, _ in self.rows)]),
            ),
            shape=(len(self.rows), columns),
        )
        integrality = np.zeros(columns)
        integrality[: len(self.nodes)] = 1
        result = milp(
            cost,
            integrality=integrality,
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(matrix, self.lower, self.upper),
            options={"time_limit": time_limit_s, "mip_rel_gap": _RELATIVE_GAP},
        )
        bound = result.mip_dual_bound if result.mip_dual_bound is not None else 0.0
        if result.x is None:
            return None, float(bound) * _COST_UNIT_S
        chosen = {}
        for c, nodes in self.problem.classes.items():
            for node in nodes:
                if result.x[self.node_column[node]] > 0.5:
                    chosen[c] = node
        return chosen, float(bound) * _COST_UNIT_S


def _affordable(problem: Problem, need: Mapping[int, int], most_s: float) -> Problem:
    """Without nodes that no graph of at most this cost has: the cheapest of all that it then needs costs more."""
    order = list(problem.classes)
    place = {c: i for i, c in enumerate(order)}
    cheapest = [min((problem.cost[node] for node in problem.classes[c]), default=0.0) for c in order]
    always = _needed_by(problem.roots, need)
    base = sum(cheapest[i] for i in _bits(always))

    def least_s(c: int, node: int) -> float:
        needed = 1 << place[c] | _needed_by(problem.children[node], need)
        return base + sum(cheapest[i] for i in _bits(needed & ~always)) - cheapest[place[c]] + problem.cost[node]

    classes = {c: [node for node in nodes if least_s(c, node) <= most_s] for c, nodes in problem.classes.items()}
    return replace(problem, classes=classes)


def _needed_by(classes: Iterable[int], need: Mapping[int, int]) -> int:
    """The classes that any of these needs, as the bits of an integer."""
    return reduce(or_, (need.get(c, 0) for c in classes), 0)


def _bits(bits: int) -> Iterable[int]:
    """Positions of the set bits."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _further_needs(order: Sequence[int], need: Mapping[int, int]) -> Iterable[tuple[int, int]]:
    """(class, class that it needs), without what follows from others."""
    for i, c in enumerate(order):
        below = need.get(c, 0) & ~(1 << i)
        left, implied = below, 0
        while left:  # what a need needs is implied with it: not looked at, of which there are thousands in a deep graph
            low = left & -left
            needed = need[order[low.bit_length() - 1]]
            implied |= needed & ~low
            left &= ~(needed | low)
        for j in _bits(below & ~implied):
            yield c, order[j]


def _two_cycles(problem: Problem) -> Iterable[tuple[int, int]]:
    """Pairs of nodes that need each other's class."""
    for c, nodes in problem.classes.items():
        for node in nodes:
            for child in problem.children[node]:
                if child > c:
                    for other in problem.classes[child]:
                        if c in problem.children[other]:
                            yield node, other


def _cycles(problem: Problem, choice: Choice) -> Iterable[list[int]]:
    """Disjoint cycles among the chosen nodes, each as its nodes."""
    done: set[int] = set()
    for first in problem.roots:
        path: list[int] = []
        position: dict[int, int] = {}
        stack: list[tuple[int, int]] = [(first, 0)]
        while stack:
            c, i = stack.pop()
            if i == 0:
                if c in done:
                    continue
                position[c] = len(path)
                path.append(c)
            children = problem.children[choice[c]]
            if i == len(children):
                done.add(c)
                position.pop(path.pop())
                continue
            stack.append((c, i + 1))
            child = children[i]
            if child in position:
                cycle = path[position[child] :]
                yield [choice[member] for member in cycle]
                # What is on the path is left: its other cycles appear in the next round, if they still matter.
                done.update(path)
                break
            if child not in done:
                stack.append((child, 0))
