"""Which classes every solution needs: what makes the integer program's relaxation tight."""

from __future__ import annotations

from dataclasses import replace

from .problem import Choice, Problem, cheapest_trees

__all__ = ["without_impossible"]


def _necessary_classes(problem: Problem) -> dict[int, int]:
    """For each class, the classes that each of its acyclic terms contains, as the bits of an integer.

    Bit i is the i-th class of `problem.classes`. The greatest solution of

        need(c) = {c} + intersection over the nodes n of c of (union of need(m) over the classes m that n needs)

    By induction on a term's height, any solution of it holds for every finite term; so this one, the largest, does.
    A class without finite terms is missing.
    """
    finite: Choice = cheapest_trees(problem.classes, problem.children, problem.cost)[0]
    bit = {c: 1 << i for i, c in enumerate(problem.classes)}
    everything = (1 << len(bit)) - 1
    need = dict.fromkeys(finite, everything)
    changed = True
    while changed:
        changed = False
        for c in finite:  # operands come before what uses them: few passes are enough
            common = everything
            for node in problem.classes[c]:
                union = 0
                for child in problem.children[node]:
                    union |= need.get(child, everything)
                common &= union
            if need[c] != common | bit[c]:
                need[c] = common | bit[c]
                changed = True
    return need


def without_impossible(problem: Problem) -> tuple[Problem, dict[int, int]]:
    """The problem without nodes that no acyclic term holds, and what is necessary then.

    A node is impossible when one of its operands needs the node's own class, or has no finite term.
    """
    while True:
        need = _necessary_classes(problem)
        bit = {c: 1 << i for i, c in enumerate(problem.classes)}
        classes = {
            c: [
                node
                for node in nodes
                if all(child in need and not need[child] & bit[c] for child in problem.children[node])
            ]
            for c, nodes in problem.classes.items()
        }
        if classes == problem.classes:
            return problem, need
        problem = replace(problem, classes=classes)
