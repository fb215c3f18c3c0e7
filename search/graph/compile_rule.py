"""Rules to egglog programs.

What a rule's conditions and computed attributes depend on, types and attributes, takes few distinct values in a model,
while matches are many. So a rule becomes two egglog rules that share its pattern:

* *ask* collects the distinct combinations of types and attributes (its *key*) into a relation, which Python reads;
* *build* joins the pattern with a relation of answers, which Python fills: for each key that meets the conditions, the
  attributes and types of what is built. Conditions therefore run once a key, in Python, and matching is egglog's alone.

A multi-pattern rule has in its key the numbers of its roots and variables as well: Python chooses single matches, and
build finds their classes by number instead of matching again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Generic, TypeVar

from .rules.rule import Attr, Node, Pattern, Rule, Var, instantiate
from .terms import OPS, TensorType

__all__ = ["CompiledRule", "Interner", "Key", "compile_rule", "constructor"]

H = TypeVar("H", bound=Hashable)
Key = tuple[int, ...]


class Interner(Generic[H]):
    """Numbers for values, in the order in which they are first seen."""

    def __init__(self) -> None:
        self.values: list[H] = []
        self._numbers: dict[H, int] = {}

    def __call__(self, value: H) -> int:
        """The number of a value."""
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


def constructor(op: str, arguments: int) -> str:
    """Name of the egglog constructor of an operator with so many arguments."""
    return op if OPS[op].arity is not None else f"{op}{arguments}"


@dataclass
class CompiledRule:
    """A rule in egglog's terms.

    Attributes
    ----------
    rule : Rule
    tag : int
        Marks what the rule builds; the position of its name in a report.
    number : int
        Tells its relations and rulesets from those of others: ask-NUMBER, answer-NUMBER, ask-rule-NUMBER,
        build-rule-NUMBER.
    program : list of str
        Declares them.
    numbered : tuple of str
        What the key's last columns number: the roots "#0", "#1", ..., then the variables "#x", "#y", ...
    """

    rule: Rule
    tag: int
    number: int
    program: list[str]
    numbered: tuple[str, ...] = ()
    _solved: dict[Key, Key | None] = field(default_factory=dict)

    @property
    def constructors(self) -> set[tuple[str, int]]:
        """Operators that the program uses, with their numbers of arguments."""
        return {(node.op, len(node.args)) for node in (*self.rule.before_nodes, *self.rule.after_nodes)}

    def bindings(self, key: Key) -> dict[str, int]:
        """A key by name: attribute variables, tensor variables (their types), then what is numbered."""
        return dict(zip(self.key_names, key, strict=True))

    @property
    def key_names(self) -> tuple[str, ...]:
        """The columns of a key."""
        return (*self.rule.attributes, *(var.name for var in self.rule.variables), *self.numbered)

    def solve(self, key: Key, attrs: Interner[Any], types: Interner[TensorType]) -> Key | None:
        """The columns that an answer adds to its key; None where the rule does not apply."""
        plain = key[: len(key) - len(self.numbered)]
        if plain not in self._solved:
            self._solved[plain] = self._solve(plain, attrs, types)
        return self._solved[plain]

    def _solve(self, key: Key, attrs: Interner[Any], types: Interner[TensorType]) -> Key | None:
        names, variables = self.rule.attributes, self.rule.variables
        instance = instantiate(
            self.rule,
            {var.name: types.values[number] for var, number in zip(variables, key[len(names) :], strict=True)},
            {name: attrs.values[number] for name, number in zip(names, key, strict=False)},
        )
        if instance is None:
            return None
        computed = [
            attrs(value) for value, node in zip(instance.attrs, self.rule.after_nodes, strict=True) if _computed(node)
        ]
        return (*computed, *(types(result) for result in instance.types))


def compile_rule(
    rule: Rule, tag: int, number: int, attrs: Interner[Any], *, numbered: bool | None = None
) -> CompiledRule:
    """Compile a rule. `numbered`: whether single matches are chosen; by default, those of multi-pattern rules."""
    by_number = dict[str, Pattern]()
    if rule.multi if numbered is None else numbered:
        by_number = {f"#{i}": root for i, root in enumerate(rule.roots)}
        by_number |= {f"#{var.name}": var for var in rule.variables}
    names: dict[Pattern, str] = {var: f"v_{var.name}" for var in rule.variables}
    names |= {node: f"n{i}" for i, node in enumerate(rule.before_nodes)}
    facts = [
        f"(= {names[node]} ({constructor(node.op, len(node.args))} {_attrs(node, attrs)} {_join(names, node.args)}))"
        for node in rule.before_nodes
    ]
    facts += [f"(= 1 (weight {names[var]}))" for var in rule.variables if var.weight]
    # What depends on weights alone is free as it is: rewriting it would only grow the e-graph.
    facts += [f"(= 0 (weight {names[root]}))" for root in rule.roots]
    key = [f"a_{name}" for name in rule.attributes]
    for var in rule.variables:
        facts.append(f"(= t_{var.name} (type {names[var]}))")
        key.append(f"t_{var.name}")
    found = [f"(= {names[pattern]} (numbered {number}))" for number, pattern in by_number.items()]
    key += by_number
    again = found or facts
    facts = facts + [f"(= {number} (number {names[pattern]}))" for number, pattern in by_number.items()]
    if rule.multi:
        for i, j in combinations(range(len(rule.roots)), 2):
            facts.append(f"({'<' if _interchangeable(rule, i, j) else '!='} #{i} #{j})")

    built = {var: names[var] for var in rule.variables}
    answers, actions = [], []
    for i, node in enumerate(rule.after_nodes):
        built[node] = f"m{i}"
        if _computed(node):
            answers.append(f"b{i}")
        attr = f"b{i}" if _computed(node) else _attrs(node, attrs)
        name, arguments = constructor(node.op, len(node.args)), _join(built, node.args)
        actions.append(f"(let m{i} ({name} {attr} {arguments}))")
        actions.append(f"(set (type m{i}) s{i}) (set (weight m{i}) {int(node.op == 'full')})")
        actions.append(f"(set (made-{name} {attr} {arguments}) {tag})")
    answers += [f"s{i}" for i in range(len(rule.after_nodes))]
    for root, result in zip(rule.roots, rule.results, strict=True):
        actions.append(f"(union {names[root]} {built[result]})")

    program = [
        f"(relation ask-{number} ({' '.join(['i64'] * len(key))}))",
        f"(relation answer-{number} ({' '.join(['i64'] * (len(key) + len(answers)))}))",
        f"(ruleset ask-rule-{number})",
        f"(ruleset build-rule-{number})",
        f'(rule ({" ".join(facts)}) ((ask-{number} {" ".join(key)})) :ruleset ask-rule-{number} :name "ask {number}")',
        f"(rule ({' '.join(again)} (answer-{number} {' '.join(key + answers)})) ({' '.join(actions)}) "
        f':ruleset build-rule-{number} :name "build {number}")',
    ]
    return CompiledRule(rule, tag, number, program, tuple(by_number))


def _computed(node: Node) -> bool:
    return callable(node.attrs)


def _attrs(node: Node, attrs: Interner[Any]) -> str:
    return f"a_{node.attrs.name}" if isinstance(node.attrs, Attr) else str(attrs(node.attrs))


def _join(names: dict[Any, str], arguments: Sequence[Pattern]) -> str:
    return " ".join(names[argument] for argument in arguments)


def _interchangeable(rule: Rule, i: int, j: int) -> bool:
    """Whether exchanging two roots gives the same pattern, up to the names of variables."""
    roots = list(rule.roots)
    exchanged = roots[:]
    exchanged[i], exchanged[j] = exchanged[j], exchanged[i]
    return _skeleton(roots) == _skeleton(exchanged)


def _skeleton(roots: Sequence[Pattern]) -> list[Any]:
    """The roots with their variables numbered in the order in which they appear."""
    numbers: dict[Any, int] = {}

    def visit(pattern: Pattern) -> Any:
        if isinstance(pattern, Var):
            return (pattern.weight, numbers.setdefault(pattern, len(numbers)))
        attrs = numbers.setdefault(pattern.attrs, len(numbers)) if isinstance(pattern.attrs, Attr) else pattern.attrs
        return (pattern.op, attrs, tuple(visit(argument) for argument in pattern.args))

    return [visit(root) for root in roots]
