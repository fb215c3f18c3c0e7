"""A look at a whole program before it is converted: which operators it has, and which functions it calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from .operators.refused import reason_of
from .program import Call, Expr, Function, GlobalRef, If, Let, Program, Tuple, TupleItem

__all__ = ["Survey", "refuse_unknown_operators", "survey"]


@dataclass
class Survey:
    """What the functions that a function reaches consist of.

    Attributes
    ----------
    operators
        How often each is called in the text.
    first
        Where each is called first.
    calls
        The functions that are mentioned.
    branches
        Whether there is an `if`.
    """

    operators: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)
    calls: set[str] = field(default_factory=set)
    branches: bool = False


def _children(node: Expr) -> Iterator[Expr]:
    if isinstance(node, Call):
        yield from node.args
        if not isinstance(node.callee, str):
            yield node.callee
    elif isinstance(node, Tuple):
        yield from node.fields
    elif isinstance(node, TupleItem):
        yield node.value
    elif isinstance(node, Let):
        yield from (node.value, node.body)
    elif isinstance(node, If):
        yield from (node.condition, node.then, node.otherwise)
    elif isinstance(node, Function):
        yield node.body


def survey(function: Function) -> Survey:
    """Look at every expression once, in no particular order."""
    found = Survey()
    seen: set[int] = set()
    stack: list[Expr] = [function]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Call) and isinstance(node.callee, str):
            found.operators[node.callee] += 1
            found.first[node.callee] = min(node.position, found.first.get(node.callee, node.position))
        found.branches = found.branches or isinstance(node, If)
        if isinstance(node, GlobalRef):
            found.calls.add(node.name)
        stack.extend(_children(node))
    return found


def refuse_unknown_operators(program: Program, surveys: list[Survey], known: Container[str]) -> None:
    """Raise UnsupportedRelayError that lists every operator that is not known, with how often it occurs."""
    counts: Counter[str] = Counter()
    first: dict[str, int] = {}
    for found in surveys:
        for name, count in found.operators.items():
            if name not in known:
                counts[name] += count
                first[name] = min(found.first[name], first.get(name, found.first[name]))
    if not counts:
        return
    entries = []
    for name, count in counts.most_common():
        place, reason = program.place(first[name]), reason_of(name)
        times = f"{count} time{'s' if count > 1 else ''}"
        entries.append(f"{name} ({times}{', first at ' + place if place else ''}{'; ' + reason if reason else ''})")
    raise program.unsupported(
        min(first.values()),
        f"{len(entries)} operator{'s' if len(entries) > 1 else ''} cannot be converted to Relax: {', '.join(entries)}",
    )
