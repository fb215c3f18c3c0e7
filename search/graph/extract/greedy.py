"""Greedy extraction, blind to sharing or aware of it."""

from __future__ import annotations

from collections import deque

from .problem import Choice, Problem, cheapest_trees, solution_cost

__all__ = ["greedy", "greedy_dag"]


def greedy(problem: Problem) -> Choice:
    """The cheapest tree below each root: a value that is used twice counts twice. Not optimal, never has a cycle."""
    return cheapest_trees(problem.classes, problem.children, problem.cost)[0]


def greedy_dag(problem: Problem) -> Choice:
    """The cheapest graph below each class, given the choices below it: a value that is used twice counts once.

    Bottom-up to a fixed point, as extraction-gym's faster-greedy-dag: each class keeps the set of classes that its best
    term needs, here as the bits of an integer. Not optimal (a class does not see what its users share with others):
    the result is compared with `greedy`'s, and the cheaper one is returned.
    """
    order = {c: i for i, c in enumerate(problem.classes)}
    below: dict[int, int] = {}
    total: dict[int, float] = {}
    own: list[float] = [0.0] * len(order)
    choice: Choice = {}
    owner = {node: c for c, nodes in problem.classes.items() for node in nodes}
    parents: dict[int, list[int]] = {c: [] for c in problem.classes}
    for node in owner:
        for child in problem.children[node]:
            parents[child].append(node)

    queue = deque(node for node in owner if not problem.children[node])
    queued = set(queue)
    while queue:
        node = queue.popleft()
        queued.discard(node)
        c, children = owner[node], problem.children[node]
        if any(child not in below for child in children):
            continue
        needs, value = 0, problem.cost[node]
        for child in sorted(children, key=lambda child: -total[child]):
            added = below[child] & ~needs
            value += total[child] if not needs else _sum(added, own)
            needs |= added
        bit = 1 << order[c]
        if needs & bit or value >= total.get(c, float("inf")) - 1e-15:
            continue
        below[c], total[c], choice[c] = needs | bit, value, node
        own[order[c]] = problem.cost[node]
        for parent in parents[c]:
            if parent not in queued:
                queued.add(parent)
                queue.append(parent)
    trees = greedy(problem)
    if _cyclic(problem, choice) or solution_cost(problem, trees) < solution_cost(problem, choice):
        return trees
    return choice


def _sum(bits: int, own: list[float]) -> float:
    """Sum of `own` over the positions of set bits."""
    total = 0.0
    while bits:
        low = bits & -bits
        total += own[low.bit_length() - 1]
        bits ^= low
    return total


def _cyclic(problem: Problem, choice: Choice) -> bool:
    """Whether the chosen nodes that roots need form a cycle, or lack one."""
    state: dict[int, bool] = {}
    stack = [(root, False) for root in problem.roots]
    while stack:
        c, done = stack.pop()
        if done:
            state[c] = True
        elif c not in choice:
            return True
        elif c not in state:
            state[c] = False
            stack.append((c, True))
            for child in problem.children[choice[c]]:
                if state.get(child) is False:
                    return True
                if child not in state:
                    stack.append((child, False))
    return False
