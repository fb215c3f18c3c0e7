"""Which rules led from an original term to the one that is computed instead.

An e-graph remembers which rule made a node first, not from what. That is found again: the rule's pattern is matched
against the node's class, original nodes first; the nodes that it matches were made by rules in turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from .egraph_view import EGraphView
from .rules.pattern import Attr, Node, Pattern, Var
from .rules.rule import Group, Rule, instantiate

__all__ = ["Replacement", "needed_classes", "replacements"]

MOST_MATCHES = 100
"""How many matches of a pattern are looked at: the first is right nearly always."""


@dataclass(frozen=True)
class Replacement:
    """A kernel of the original graph that is computed in another way: the rules that led there."""

    original: str
    replacement: str
    rules: tuple[str, ...]


@dataclass(frozen=True)
class _Match:
    """Nodes that a pattern matched, classes of its variables, values of its attributes."""

    nodes: tuple[int, ...]
    classes: Mapping[str, int]
    attrs: Mapping[str, object]


def needed_classes(view: EGraphView, choice: Mapping[int, int]) -> list[int]:
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


def replacements(view: EGraphView, choice: Mapping[int, int], rules: Sequence[Rule | Group]) -> list[Replacement]:
    """Each original term of a needed class that is computed otherwise now, with the rules that led there.

    Parameters
    ----------
    view : EGraphView
    choice : mapping of int to int
        The node of each class.
    rules : sequence of Rule or Group
        All that the e-graph was grown by.
    """
    explainer = _Explainer(view, rules)
    result = []
    for c in needed_classes(view, choice):
        original = next((node for node in view.classes[c] if not view.made_by[node]), choice[c])
        if not view.made_by[choice[c]] or view.made_by[original]:
            continue
        made, stack, seen = list[int](), [c], set[int]()
        while stack:
            current = stack.pop()
            if current not in seen and not view.constant[current] and view.made_by[choice[current]]:
                seen.add(current)
                made.append(choice[current])
                stack += view.children[choice[current]]
        names = explainer.rules_behind(made)
        result.append(Replacement(_describe(view, original), _describe(view, choice[c]), names))
    return result


class _Explainer:
    def __init__(self, view: EGraphView, rules: Sequence[Rule | Group]) -> None:
        self.view = view
        self.rules = {rule.name: rule for rule in rules}
        self.users: dict[int, list[int]] = defaultdict(list)
        for node, name in enumerate(view.made_by):
            if name:
                for child in view.children[node]:
                    self.users[child].append(node)

    def rules_behind(self, nodes: Sequence[int]) -> tuple[str, ...]:
        """The rules that made these nodes, and those that made what they were made from."""
        names: dict[str, None] = {}
        stack, seen = list(reversed(nodes)), set[int]()
        while stack:
            node = stack.pop()
            name = self.view.made_by[node]
            if name and node not in seen and not self.view.constant[self.view.node_class[node]]:
                seen.add(node)
                names[name] = None
                stack += self._made_from(node, self.rules[name], seen)
        return tuple(names)

    def _made_from(self, node: int, rule: Rule | Group, seen: set[int]) -> list[int]:
        """Nodes that the rule matched when it made this one; else what it made together with it."""
        view, c = self.view, self.view.node_class[node]
        several = isinstance(rule, Group) or rule.multi
        together = [
            other
            for child in (view.children[node] if several else ())
            for other in view.classes[child]
            if view.made_by[other] == rule.name
        ]
        for root in (rule.member,) if isinstance(rule, Group) else rule.roots:
            for match in islice(self._matches(root, c, _Match((), {}, {}), seen), MOST_MATCHES):
                if several or self._makes(node, rule, match):
                    return [*match.nodes, *together]
        users = [user for user in self.users[c] if view.made_by[user] == rule.name]
        return together + users if several or seen.isdisjoint(users) else []

    def _makes(self, node: int, rule: Rule | Group, match: _Match) -> bool:
        """Whether a rule of one root makes this very node of this match."""
        if isinstance(rule, Group):
            return True
        types = {name: self.view.types[c] for name, c in match.classes.items()}
        instance = instantiate(rule, types, match.attrs)
        root = rule.results[0]
        if instance is None or not isinstance(root, Node):
            return False
        return root.op == self.view.ops[node] and instance.attrs[-1] == self.view.attrs[node]

    def _matches(self, pattern: Pattern, c: int, match: _Match, seen: set[int]) -> Iterator[_Match]:
        view = self.view
        if isinstance(pattern, Var):
            if match.classes.get(pattern.name, c) == c and (view.constant[c] or not pattern.weight):
                yield _Match(match.nodes, {**match.classes, pattern.name: c}, match.attrs)
            return
        for node in sorted(view.classes[c], key=lambda node: bool(view.made_by[node])):
            children = view.children[node]
            if node in seen or view.ops[node] != pattern.op or len(children) != len(pattern.args):
                continue
            attrs = match.attrs
            if isinstance(pattern.attrs, Attr):
                attrs = {**attrs, pattern.attrs.name: view.attrs[node]}
                if match.attrs.get(pattern.attrs.name, view.attrs[node]) != view.attrs[node]:
                    continue
            elif pattern.attrs != view.attrs[node]:
                continue
            found = iter([_Match((*match.nodes, node), match.classes, attrs)])
            for argument, child in zip(pattern.args, children, strict=True):
                found = self._all(argument, child, found, seen)
            yield from found

    def _all(self, pattern: Pattern, c: int, found: Iterator[_Match], seen: set[int]) -> Iterator[_Match]:
        for match in found:
            yield from self._matches(pattern, c, match, seen)


def _describe(view: EGraphView, node: int) -> str:
    """A node in one line: operator, attributes, shapes."""
    shapes = ", ".join("x".join(map(str, view.types[child].shape)) or "scalar" for child in view.children[node])
    result = "x".join(map(str, view.types[view.node_class[node]].shape)) or "scalar"
    name = getattr(view.attrs[node], "name", "") or getattr(view.attrs[node], "kind", "")
    return f"{view.ops[node]}{' ' + name if name else ''}({shapes}) -> {result}"
