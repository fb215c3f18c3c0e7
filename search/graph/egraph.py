"""An e-graph of terms in egglog: load a graph, apply rules by name, take snapshots, read it out."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from operator import itemgetter
from typing import Any

from eqtune.errors import InputError

from .compile_rule import CompiledRule, Form, Interner, Key, compile_rule, constructor
from .database import Database
from .egraph_view import EGraphView, read_view
from .groups import group_key, subsets
from .rules.pattern import Node
from .rules.rule import Group, Rule
from .terms import TermGraph

__all__ = ["EGraph", "Round"]

_SCHEMA = """
(sort T)
(function number (T) i64 :merge (min old new))
(function numbered (i64) T :merge old)
(ruleset place)
"""


@dataclass
class Round:
    """What one application of some rules did.

    Attributes
    ----------
    matches : dict of str to int
        New matches for which each rule built its result.
    seconds : dict of str to float
        Seconds that each rule took to match and build.
    changed : bool
        Whether the e-graph changed.
    postponed : tuple of str
        Rules that did not run because their matches would not have fitted the limit of e-nodes.
    """

    matches: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    changed: bool = False
    postponed: tuple[str, ...] = ()


@dataclass
class _State:
    """What a snapshot of the e-graph has to remember in Python."""

    constructors: set[tuple[str, int]] = field(default_factory=set)
    compiled: dict[str, CompiledRule] = field(default_factory=dict)
    answers: set[tuple[int, Key]] = field(default_factory=set)
    builds: set[int] = field(default_factory=set)
    pending: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    numbered: int = 0
    stale_numbers: bool = False
    attempts: int = 0  # egglog's snapshots since ours: it has no way to forget one

    def copy(self) -> _State:
        """A copy that shares nothing that changes."""
        return replace(
            self,
            constructors=set(self.constructors),
            compiled=dict(self.compiled),
            answers=set(self.answers),
            builds=set(self.builds),
            pending=self.pending.copy(),
            attempts=0,
        )


class EGraph:
    """Terms, and what is known to be equal to them.

    Parameters
    ----------
    graph : TermGraph
        The term with index i gets the number i; `graph.outputs` are the roots.
    rules : sequence of Rule or Group
        What may be applied, by name.
    """

    def __init__(self, graph: TermGraph, rules: Sequence[Rule | Group]) -> None:
        self.forms: Interner[Form] = Interner()
        self.roots = tuple(graph.outputs)
        self.rules = {rule.name: rule for rule in rules}
        self._tags = ["", *self.rules]
        self._database = Database()
        self._state = _State(numbered=len(graph.terms))
        self._saved: list[_State] = []
        self._facts = defaultdict[str, list[Key]](list)
        self._rulesets = 0
        self._originals = len(graph.terms)
        self._database.run(_SCHEMA)
        self._declare((term.op, len(term.args)) for term in graph.terms)
        self._load(graph)
        for rule in _reachable(rules, {(term.op, len(term.args)) for term in graph.terms}):
            self._compile(rule)

    @property
    def e_nodes(self) -> int:
        """Number of e-nodes."""
        names = {constructor(*shape) for shape in self._state.constructors}
        return sum(size for name, size in self._database.run("(print-size)")[0].sizes if name in names)

    def apply(
        self, names: Iterable[str] | None = None, *, budget: int = 1000, e_node_limit: int | None = None
    ) -> Round:
        """Apply rules to all their matches, once.

        Parameters
        ----------
        names : iterable of str
            Which; None: all.
        budget : int
            For how many matches each multi-pattern rule and each group may build.
        e_node_limit : int or None
            Rules whose matches could make the e-graph larger than this are postponed, the largest first.

        Raises
        ------
        InputError
            For a name that is not among the rules.
        """
        chosen = list(self.rules if names is None else names)
        unknown = set(chosen) - set(self.rules)
        if unknown:
            raise InputError(f"no rules named {sorted(unknown)} in this e-graph; it has {list(self.rules)}")
        result = Round()
        if self._state.stale_numbers and any(self._chooses_matches(name) for name in chosen):
            self._number_classes()
        rules = {name: self._state.compiled[name] for name in chosen if name in self._state.compiled}
        if e_node_limit is not None:  # what has more matches than there is room will never be built
            fitting = self._fitting(list(rules.values()), e_node_limit)
            result.postponed = tuple(name for name, rule in rules.items() if rule not in fitting)
            rules = {name: rule for name, rule in rules.items() if rule in fitting}
        self._step("ask", list(rules.values()), result)
        building = set(self._state.builds)
        asked = self._database.tables()
        ready = [rule for name in rules for rule in self._answer(name, asked, budget)]
        self._database.insert(self._facts)
        self._facts.clear()
        self._step("note", [rule for rule in ready if rule.notes and rule.number not in building], result)
        if e_node_limit is None:
            result.changed = self._build(ready, result)
        else:
            self._build_within(e_node_limit, ready, result)
        if result.changed:
            self._state.stale_numbers = True
        return result

    def push(self) -> None:
        """Take a snapshot; several stack up."""
        self._database.run("(push)")
        self._saved.append(self._state)
        self._state = self._state.copy()

    def pop(self) -> None:
        """Go back to the last snapshot."""
        self._database.run(f"(pop {1 + self._state.attempts})")
        self._state = self._saved.pop()

    def view(self) -> EGraphView:
        """The e-graph as plain lists."""
        return read_view(self._database, self._state.constructors, self.forms.values, self._tags, self.roots)

    def _declare(self, shapes: Iterable[tuple[str, int]]) -> None:
        for op, count in sorted(set(shapes) - self._state.constructors):
            self._state.constructors.add((op, count))
            name = constructor(op, count)
            sorts = " ".join(["i64"] + ["T"] * count)
            term = f"{name} form {' '.join(f'x{i}' for i in range(count))}"
            operands = " ".join(f"(= x{i} (numbered j{i}))" for i in range(count))
            program = [
                f"(constructor {name} ({sorts}) T)",
                f"(function made-{name} ({sorts}) i64 :merge (* old (min 1 new)))",  # 0 is original, and stays
                f"(relation place-{name} ({' '.join(['i64'] * (2 + count))}))",
                f"(rule ((place-{name} i form {' '.join(f'j{i}' for i in range(count))}) {operands})"
                f" ((let e ({term})) (set (numbered i) e) (set (number e) i)) :ruleset place)",
            ]
            self._database.run("\n".join(program))

    def _load(self, graph: TermGraph) -> None:
        # One by one, operands first: the rules of "place" look for the next terms in as many rounds as the graph is
        # deep, and each round joins every operand of every term. Loading an LSTM of 50 steps took 4.3 s that way.
        commands = []
        for i, term in enumerate(graph.terms):
            types = tuple(graph.types[j] for j in term.args)
            weights = tuple(graph.constant[j] for j in term.args)
            form = self.forms(Form(term.attrs, types, weights, graph.types[i], graph.constant[i]))
            name = constructor(term.op, len(term.args))
            key = " ".join([str(form), *(f"(numbered {j})" for j in term.args)])
            commands.append(f"(set (numbered {i}) ({name} {key}))")
            commands.append(f"(set (number (numbered {i})) {i})")
            commands.append(f"(set (made-{name} {key}) 0)")
        self._database.run_all(commands)

    def _place(self, places: Mapping[str, Sequence[Key]]) -> None:
        """Give numbers to terms, which are made unless they exist: for each constructor number, form, operands."""
        self._database.insert(places)
        self._database.run("(run-schedule (saturate place))")

    def _compile(self, rule: Rule | Group) -> None:
        tag = self._tags.index(rule.name)
        if isinstance(rule, Group):
            member = Rule(rule.name, rule.member, rule.member, rule.reason)
            compiled = self._add(rule.name, member, tag, numbered=True)
        else:
            compiled = self._add(rule.name, rule, tag)
        self._declare(_operators(compiled.rule.before_nodes))
        self._database.run_all(compiled.asking)

    def _add(self, name: str, rule: Rule, tag: int, *, numbered: bool | None = None, asks: bool = True) -> CompiledRule:
        compiled = compile_rule(rule, tag, len(self._state.compiled), numbered=numbered, asks=asks)
        self._state.compiled[name] = compiled
        return compiled

    def _chooses_matches(self, name: str) -> bool:
        rule = self.rules[name]
        return isinstance(rule, Group) or rule.multi

    def _build(self, rules: Sequence[CompiledRule], result: Round) -> bool:
        """Build for all answered matches; whether anything changed."""
        changed = self._step("build", rules, result)
        for rule in rules:
            self._state.pending[rule.number] = 0
        return changed

    def _build_within(self, limit: int, rules: Sequence[CompiledRule], result: Round) -> None:
        """The same within a limit of e-nodes: while the result would be too large, the largest rules are postponed."""
        ready = self._fitting(rules, limit)
        while ready:
            attempt = Round(seconds=result.seconds)
            self._database.run("(push)")
            self._state.attempts += 1
            attempt.changed = self._step("build", ready, attempt)
            grown = self.e_nodes
            if grown <= limit:
                result.changed = attempt.changed
                result.matches = attempt.matches
                for rule in ready:
                    self._state.pending[rule.number] = 0
                break
            self._database.run("(pop)")
            self._state.attempts -= 1
            largest = _largest(attempt.matches, (grown - limit) / (grown - self.e_nodes))
            ready = [rule for rule in ready if self._tags[rule.tag] not in largest]
        left = [self._tags[rule.tag] for rule in rules if rule not in ready]
        result.postponed = tuple(dict.fromkeys([*result.postponed, *left]))

    def _step(self, kind: str, rules: Sequence[CompiledRule], result: Round) -> bool:
        """Run one of the egglog rules of each rule, all on the same e-graph; whether anything changed."""
        if not rules:
            return False
        self._rulesets += 1
        names = [self._name(kind, rule) for rule in rules]
        rulesets = " ".join(name.replace(" ", "-rule-") for name in names)
        together = f"step-{self._rulesets}"
        started = time.perf_counter()
        report = self._database.run(f"(unstable-combined-ruleset {together} {rulesets}) (run {together} 1)")[0].report
        elapsed = time.perf_counter() - started
        # The bindings round these times to what they take for microseconds: only the rules' shares are to be trusted.
        times = report.search_and_apply_time_per_rule
        parts = [times.get(name, timedelta()).total_seconds() + 1e-6 for name in names]
        for rule, name, part in zip(rules, names, parts, strict=True):
            reported = self._tags[rule.tag]
            found = report.num_matches_per_rule.get(name, 0)
            if kind == "ask":
                self._state.pending[rule.number] += found
            elif kind == "build" and found:
                result.matches[reported] += found
            result.seconds[reported] += elapsed * part / sum(parts)
        return bool(report.updated)

    def _name(self, kind: str, rule: CompiledRule) -> str:
        """An egglog rule of a rule. What can build asks and notes at once."""
        notes = kind == "ask" and rule.notes and rule.number in self._state.builds
        return f"{'note' if notes else kind} {rule.number}"

    def _answer(self, name: str, asked: Mapping[str, Any], budget: int) -> list[CompiledRule]:
        """Answer the keys of a rule's new matches. Returns what can build now: the rule, or those of its groups."""
        rule = self._state.compiled[name]
        if not self._state.pending[rule.number]:
            return []
        integer = self._database.integer
        keys = sorted(tuple(map(integer, row.inputs)) for row in asked[f"ask-{rule.number}"].rows)
        group = self.rules[name]
        if isinstance(group, Group):
            self._state.pending[rule.number] = 0
            return self._answer_group(group, rule, keys, budget)
        if not rule.numbered:
            self._tell(rule, keys)
        else:
            new = [key for key in keys if (rule.number, key) not in self._state.answers and self._solve(rule, key)]
            self._tell(rule, new[:budget])
            self._state.pending[rule.number] = min(len(new), budget)
        return [rule] if rule.number in self._state.builds else []

    def _answer_group(self, group: Group, member: CompiledRule, keys: Sequence[Key], budget: int) -> list[CompiledRule]:
        """Answer for the groups that these members form. Only classes of the original graph are grouped."""
        groups: dict[Any, dict[int, tuple[Any, Key]]] = defaultdict(dict)
        for key in keys:
            bound = member.bind([self.forms.values[form] for form in key[: len(member.rule.before_nodes)]])
            numbers = member.numbers(key)
            if bound is not None and numbers["#0"] < self._originals:
                attrs = [bound[1][name] for name in group.shared if name in bound[1]]
                tensors = [numbers[f"#{name}"] for name in group.shared if f"#{name}" in numbers]
                place = () if group.order is None else group.order(bound[1])
                alike = () if group.alike is None else group.alike(bound[0], bound[1])
                groups[(*attrs, *tensors, alike)].setdefault(numbers["#0"], (place, key))
        ready: dict[str, CompiledRule] = {}
        told = 0
        for members in groups.values():
            ordered = [key for _, key in sorted(members.values(), key=itemgetter(0))]
            for chosen in subsets(ordered):
                name = f"{group.name}/{len(chosen)}"
                compiled = self._state.compiled.get(name)
                if compiled is None:
                    compiled = self._add(name, group.make(len(chosen)), self._tags.index(group.name), asks=False)
                key = group_key(compiled, member, chosen)
                if told < budget and self._solve(compiled, key):
                    before = len(self._state.answers)
                    self._tell(compiled, [key])
                    new = len(self._state.answers) - before
                    told += new
                    self._state.pending[compiled.number] += new
                    if self._state.pending[compiled.number]:
                        ready[name] = compiled
        return list(ready.values())

    def _solve(self, rule: CompiledRule, key: Key) -> Key | None:
        return rule.solve(key, self.forms)

    def _tell(self, rule: CompiledRule, keys: Iterable[Key]) -> None:
        """Note the answers to keys that were not answered before."""
        facts = []
        for key in keys:
            if (rule.number, key) not in self._state.answers:
                self._state.answers.add((rule.number, key))
                answer = self._solve(rule, key)
                if answer is not None:
                    facts.append((*key, *answer))
        if facts and rule.number not in self._state.builds:
            self._state.builds.add(rule.number)
            self._declare(_operators(rule.rule.after_nodes))
            self._database.run_all(rule.building)
        if facts:
            self._facts[f"answer-{rule.number}"] += facts

    def _fitting(self, rules: Sequence[CompiledRule], limit: int) -> list[CompiledRule]:
        """The rules that can be expected to build within a limit of e-nodes: a lower bound, to spare hopeless work.

        Asking counts matches that differ in their forms or in operators that patterns share; building may find more.
        """
        room = limit - self.e_nodes
        return [rule for rule in rules if self._state.pending[rule.number] <= room]

    def _number_classes(self) -> None:
        """Give a number to each class that has none, so that multi-pattern rules can choose among its matches."""
        view = self.view()
        numbers = dict(view.numbers)
        waiting = [c for c in range(len(view.classes)) if c not in numbers]
        places = defaultdict[str, list[Key]](list)
        while waiting:
            left = []
            for c in waiting:
                for n in view.classes[c]:
                    children = view.children[n]
                    if all(child in numbers for child in children):
                        number = numbers[c] = self._state.numbered
                        self._state.numbered += 1
                        operands = [numbers[child] for child in children]
                        places[f"place-{constructor(view.ops[n], len(children))}"].append(
                            (number, view.forms[n], *operands)
                        )
                        break
                else:
                    left.append(c)
            waiting = left
        self._place(places)
        self._state.stale_numbers = False


def _largest(matches: Mapping[str, int], share: float) -> set[str]:
    """The rules with the most matches, as few as have at least this share of all."""
    missing, chosen = share * sum(matches.values()), set[str]()
    for name, count in sorted(matches.items(), key=lambda item: -item[1]):
        if chosen and missing <= 0:
            break
        chosen.add(name)
        missing -= count
    return chosen


def _operators(nodes: Iterable[Node]) -> set[tuple[str, int]]:
    """Operators, each with its number of arguments."""
    return {(node.op, len(node.args)) for node in nodes}


def _reachable(rules: Sequence[Rule | Group], operators: set[tuple[str, int]]) -> list[Rule | Group]:
    """The rules whose operators are in the graph, or are made by other such rules: declaring a rule costs most of a
    millisecond.
    """
    available, reachable, waiting = set(operators), list[Rule | Group](), list(rules)
    while True:
        left = []
        for rule in waiting:
            plain = rule.make(2) if isinstance(rule, Group) else rule
            if _operators(plain.before_nodes) <= available:
                reachable.append(rule)
                available |= _operators(plain.after_nodes)
            else:
                left.append(rule)
        if len(left) == len(waiting):
            return reachable
        waiting = left
