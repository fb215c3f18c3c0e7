"""Is a rule right? Both sides are evaluated on random tensors, modulo primes and in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from random import Random
from typing import Any

import numpy as np

from eqtune.errors import InputError

from ..attributes import TensorType
from ..operators import NotTypeable
from ..rules.rule import Group, Rule, term_graphs
from ..terms import TermGraph
from .bound import survival_log2
from .evaluate import Array, evaluate
from .field import PRIMES, Field
from .floats import Floats
from .sample import sample_match

__all__ = ["Counterexample", "Verdict", "instances_of", "verify_rule"]

SURVIVAL_LOG2 = -60.0
"""Trials go on until an instance for which the rule is wrong would have shown it, except with probability 2**this."""

INSTANCES = 24
ATTEMPTS = 20_000
GROUP_SIZES = (2, 3, 4)

TOLERANCE = 1e-4
"""Largest error in float32, relative to the largest element."""
FAST_MATH_TOLERANCE = 1e-2

_WEAKEST_TRIAL_LOG2 = -4.0
"""Instances so large that a trial says less than this are passed over."""

_POSITIVE = frozenset({"divide", "log", "power", "rsqrt", "sqrt"})
"""Functions that are not defined, or not tame, everywhere."""

Choice = tuple[Mapping[str, TensorType], Mapping[str, Any]]


@dataclass(frozen=True)
class Counterexample:
    """Types and attributes for which the two sides differ.

    Attributes
    ----------
    rule : str
        The rule; for a group, that of one number of members.
    types, attrs : dict
        Of the variables.
    output : int
        The root whose values differ.
    how : str
        "modulo PRIME" or "in float32, by ERROR".
    """

    rule: str
    types: Mapping[str, TensorType]
    attrs: Mapping[str, Any]
    output: int
    how: str

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {list(ty.shape)}" for name, ty in self.types.items())
        attrs = "".join(f", {name} = {value}" for name, value in self.attrs.items())
        return f"{self.rule}: output {self.output} differs {self.how} for {shapes}{attrs}"


@dataclass(frozen=True)
class Verdict:
    """What verification found.

    Attributes
    ----------
    rule : str
    instances : int
        Choices of shapes and attributes that were compared.
    refused : int
        Choices that met the conditions but for which the result had no type, or another one: not applied.
    trials : int
        Pairs of values that were compared modulo a prime.
    survival_log2 : float
        Base-2 logarithm of a bound on the probability that the rule is wrong for one of the instances and was not
        caught (see `bound.py`).
    max_error : float
        Largest difference between the two sides in float32, relative to the largest element.
    counterexample : Counterexample or None
    """

    rule: str
    instances: int = 0
    refused: int = 0
    trials: int = 0
    survival_log2: float = 0.0
    max_error: float = 0.0
    counterexample: Counterexample | None = None

    @property
    def sound(self) -> bool:
        """Whether instances were found, and all of them agreed."""
        return self.counterexample is None and self.survival_log2 <= SURVIVAL_LOG2

    def __str__(self) -> str:
        if self.counterexample is not None:
            return f"{self.rule} is wrong: {self.counterexample}"
        if not self.sound:
            return f"{self.rule}: no instance met its conditions; give the rule an `example`"
        return (
            f"{self.rule} holds for {self.instances} instances in {self.trials} trials; a wrong rule survives with "
            f"probability 2**{self.survival_log2:.0f}; float32 differs by {self.max_error:.1e}"
        )


def verify_rule(rule: Rule | Group, seed: int = 0, *, instances: int = INSTANCES) -> Verdict:
    """Compare the two sides of a rule for random shapes, attributes and values.

    The conditions `when` are taken as they are; what is only `worth` is ignored, so that a rule is verified wherever it
    holds, not only where it is used.

    Parameters
    ----------
    rule : Rule or Group
        A group is verified for 2, 3 and 4 members.
    seed : int
        The same seed gives the same verdict.
    instances : int
        How many choices of shapes and attributes to compare.

    Raises
    ------
    InputError
        When `instances` is not positive.
    """
    if instances < 1:
        raise InputError(f"instances is {instances}; a rule is verified on at least one")
    if isinstance(rule, Rule):
        return _verify(replace(rule, worth=()), Random(f"{seed} {rule.name}"), instances)
    members = [verify_rule(rule.make(count), seed, instances=instances) for count in GROUP_SIZES]
    wrong = next((verdict.counterexample for verdict in members if verdict.counterexample), None)
    return Verdict(
        rule.name,
        min(verdict.instances for verdict in members),
        sum(verdict.refused for verdict in members),
        sum(verdict.trials for verdict in members),
        max(verdict.survival_log2 for verdict in members),
        max(verdict.max_error for verdict in members),
        wrong,
    )


def instances_of(rule: Rule, seed: int = 0) -> Iterator[tuple[TermGraph, TermGraph]]:
    """Random pairs of graphs that the rule says are equal, with the same leaves: what `verify_rule` compares."""
    for _, graphs in _instances(replace(rule, worth=()), Random(f"{seed} {rule.name}")):
        if graphs is not None:
            yield graphs


def _verify(rule: Rule, random: Random, instances: int) -> Verdict:
    verdict = Verdict(rule.name)
    tolerance = FAST_MATH_TOLERANCE if rule.fast_math else TOLERANCE
    worst = -float("inf")
    for choice, graphs in _instances(rule, random):
        if graphs is None:
            verdict = replace(verdict, refused=verdict.refused + 1)
            continue
        if survival_log2(*graphs, min(PRIMES)) > _WEAKEST_TRIAL_LOG2:
            continue
        survival, trials, output = _exact(graphs, random)
        if output is not None:
            example = Counterexample(rule.name, *choice, output, f"modulo {PRIMES[(trials - 1) % len(PRIMES)]}")
            return replace(verdict, counterexample=example)
        error, output = _rounding(graphs, random)
        if error > tolerance:
            example = Counterexample(rule.name, *choice, output, f"in float32, by {error}")
            return replace(verdict, counterexample=example)
        worst = max(worst, survival)
        verdict = replace(
            verdict,
            instances=verdict.instances + 1,
            trials=verdict.trials + trials,
            survival_log2=worst,
            max_error=max(verdict.max_error, error),
        )
        if verdict.instances == instances:
            break
    return verdict


def _instances(rule: Rule, random: Random) -> Iterator[tuple[Choice, tuple[TermGraph, TermGraph] | None]]:
    """Types and attributes that fit the pattern and the conditions, from the rule's own examples and at random.

    With the two sides, or None where the result has no type or another one.
    """
    for attempt in range(ATTEMPTS):
        own = rule.example is not None and attempt % 2
        choice = rule.example(random) if own and rule.example is not None else sample_match(rule, random)
        if choice is None:
            continue
        try:
            graphs = term_graphs(rule, *choice)
        except NotTypeable:
            yield choice, None
            continue
        if graphs is not None:
            yield choice, graphs


def _exact(graphs: tuple[TermGraph, TermGraph], random: Random) -> tuple[float, int, int | None]:
    """Trials until one differs, or enough agree.

    Returns log2 of the probability to survive them, how many there were, and the output that differs or None.
    """
    survival = 0.0
    for trial, prime in enumerate(cycle(PRIMES), 1):
        seed = random.getrandbits(63)
        generator = np.random.default_rng(seed)
        leaves = [generator.integers(0, prime, ty.shape) for ty in _leaf_types(graphs[0])]
        algebra = Field(prime, seed)
        before, after = (evaluate(graph, leaves, algebra) for graph in graphs)
        for output, (x, y) in enumerate(zip(before, after, strict=True)):
            if not np.array_equal(x, y):
                return 0.0, trial, output
        survival += survival_log2(*graphs, prime)
        if survival <= SURVIVAL_LOG2:
            return survival, trial, None
    raise AssertionError("unreachable")


def _rounding(graphs: tuple[TermGraph, TermGraph], random: Random) -> tuple[float, int]:
    """The largest error of `after` in float32, relative to the largest element of `before`, and where it is."""
    generator = np.random.default_rng(random.getrandbits(63))
    kinds = {getattr(term.attrs, "name", "") for graph in graphs for term in graph.terms}
    leaves: list[Array] = []
    for ty in _leaf_types(graphs[0]):
        values = generator.standard_normal(ty.shape)
        leaves.append((0.5 + np.abs(values) if kinds & _POSITIVE else values).astype(np.float32))
    with np.errstate(all="ignore"):
        wide = [leaf.astype(np.float64) for leaf in leaves]
        expected = evaluate(graphs[0], wide, Floats(np.float64))
        actual = evaluate(graphs[1], leaves, Floats(np.float32))
    errors = [_error(x, y) for x, y in zip(expected, actual, strict=True)]
    output = int(np.argmax(errors))
    return errors[output], output


def _error(expected: Array, actual: Array) -> float:
    seen = np.isfinite(expected) & (np.abs(expected) < np.finfo(np.float32).max / 2**10)
    if not seen.any():
        return 0.0
    with np.errstate(invalid="ignore"):
        error = np.nan_to_num(np.abs(expected - actual)[seen], nan=np.inf)
    return float(error.max() / max(1.0, np.abs(expected[seen]).max()))


def _leaf_types(graph: TermGraph) -> list[TensorType]:
    return [ty for term, ty in zip(graph.terms, graph.types, strict=True) if term.op == "leaf"]
