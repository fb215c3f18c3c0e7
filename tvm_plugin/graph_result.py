"""What the graph search is asked, and what it answers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from .errors import InputError, SetupError

try:
    import egglog.bindings  # noqa: F401  what comes below needs it
except ImportError as error:
    raise SetupError(
        f"the graph search needs egglog, which cannot be loaded here ({error}): install it with what it needs, "
        "`pip install --upgrade egglog`; or tune without it (graph='off', `eqtune tune --graph off`)"
    ) from error

from .search.graph.cost import TermCost
from .search.graph.explain import Replacement
from .search.graph.extract import EXTRACTORS
from .search.graph.rules import EXTENDED_RULES, Group, Rule, select
from .search.graph.saturate import Limits
from .search.graph.terms import TermGraph
from .search.graph.verify import Verdict, verify_rule

__all__ = ["ExtractorReport", "GraphConfig", "GraphResult", "RuleReport"]


@dataclass(frozen=True)
class GraphConfig:
    """How to search equal graphs.

    Attributes
    ----------
    rules : tuple of str or None
        Names of the rules to use, any of `eqtune.search.graph.rules.EXTENDED_RULES`; None: those in `RULES`, of which
        some need `fast_math`.
    extra_rules : tuple of Rule or Group
        Rules of your own, used besides those (`eqtune.search.graph.rules.rule` tells how to write one). Each is
        verified first, which takes a part of a second.
    limits : Limits
        E-nodes, rounds and seconds of the exploration.
    extractors : tuple of str
        Which extractors to run; the cheapest result wins.
    extract_seconds : float
        Limit of the integer program.
    seconds : float
        Limit of exploring, extracting and pricing together, roughly: a step that has begun is finished.
    cost : TermCost or None
        Prices of terms; None: an analytic roofline.
    fast_math : bool
        Permit rules that are equal over the reals but lose floating-point accuracy.
    min_gain : float
        The original is kept unless the estimated cost falls by more than this share.
    verify : bool
        Compare the outputs of a changed module with the original's on random inputs.
    tolerance : float
        Largest difference that is accepted, relative to the largest magnitude of an output; for float16 100
        times, for bfloat16 800 times as much.
    seed : int
        Of the random inputs.

    Raises
    ------
    InputError
        For unknown rules or extractors, negative seconds or tolerance, and a rule of your own that is wrong, cannot be
        verified, or has the name of another.
    """

    rules: tuple[str, ...] | None = None
    extra_rules: tuple[Rule | Group, ...] = ()
    limits: Limits = field(default_factory=Limits)
    extractors: tuple[str, ...] = EXTRACTORS
    extract_seconds: float = 10.0
    seconds: float = math.inf
    cost: TermCost | None = None
    fast_math: bool = False
    min_gain: float = 0.01
    verify: bool = True
    tolerance: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rules", "extractors"):
            if isinstance(getattr(self, name), str):
                raise InputError(f"{name} is a sequence of names, not {getattr(self, name)!r}")
        if not isinstance(self.limits, Limits):
            raise InputError(f"limits is an eqtune.search.graph.saturate.Limits, not {self.limits!r}")
        unknown = set(self.extractors) - set(EXTRACTORS)
        if unknown or not self.extractors:
            raise InputError(f"extractors {list(self.extractors)}: choose from {list(EXTRACTORS)}")
        if not (self.seconds >= 0 and self.extract_seconds >= 0):
            raise InputError(f"seconds {self.seconds}, extract_seconds {self.extract_seconds}: must not be negative")
        if self.seed < 0:
            raise InputError(f"seed {self.seed}: must not be negative")
        if not self.tolerance >= 0:
            raise InputError(f"tolerance {self.tolerance}: must not be negative")
        names = [rule.name for rule in (*EXTENDED_RULES, *self.extra_rules)]
        taken = sorted({rule.name for rule in self.extra_rules if names.count(rule.name) > 1})
        if taken:
            raise InputError(f"there are other rules named {taken}: give yours names of their own")
        select(self.rules)
        for rule in self.extra_rules:
            verdict = _verdict(rule)
            if not verdict.sound:
                raise InputError(f"a rule must hold before it is used: {verdict}")

    def check_permitted(self, fast_math: bool = False) -> None:
        """Raise InputError where a rule was asked for that needs fast math, which nobody permits.

        `fast_math` is a permission from elsewhere.
        """
        if self.fast_math or fast_math:
            return
        asked = (*(() if self.rules is None else select(self.rules, fast_math=True)), *self.extra_rules)
        lossy = [rule.name for rule in asked if rule.fast_math]
        if lossy:
            raise InputError(
                f"the rules {lossy} lose floating-point accuracy and need fast math (--fast-math, fast_math=True)"
            )

    @property
    def selected_rules(self) -> tuple[Rule | Group, ...]:
        """The rules that the search uses: without `fast_math`, no lossy ones."""
        own = tuple(rule for rule in self.extra_rules if self.fast_math or not rule.fast_math)
        return (*select(self.rules, fast_math=self.fast_math), *own)


@cache
def _verdict(rule: Rule | Group) -> Verdict:
    """Verified once, however many configurations have the rule."""
    return verify_rule(rule)


@dataclass(frozen=True)
class RuleReport:
    """What one rule did: matches it built for, seconds it took, terms of the result that it made."""

    matches: int
    seconds: float
    used: int


@dataclass(frozen=True)
class ExtractorReport:
    """What one extractor found: cost in seconds, seconds it took, proven relative gap (None: it proves none)."""

    cost_s: float
    seconds: float
    gap: float | None


@dataclass
class GraphResult:
    """What the graph search found.

    Attributes
    ----------
    mod : tvm.ir.IRModule
        The module to use: the optimised one, or the given one itself.
    changed : bool
        Whether `mod` is another module than the one given.
    kept_because : str
        Why the given module was kept; "" when it was not.
    alternatives : list of tvm.ir.IRModule
        Other equal modules that cost less than the given one, cheapest first; with `prices` only.
    exact : tvm.ir.IRModule or None
        Of the modules that cost less than the given one, the cheapest without fast math; with `prices` only.
    cost_before_s, cost_after_s : float
        Estimated seconds of one run: the sum of the terms' prices.
    price_before_s, price_after_s : float or None
        Seconds of one run as the sum of the fused kernels' prices; with `prices` only. Under a budget of time, kernels
        that all graphs have in common are estimated.
    latency_before_s, latency_after_s : float or None
        Measured seconds of one run, where a timer was given.
    rel_err : float or None
        Largest relative difference of the outputs, where they were compared.
    e_nodes, e_classes, iterations : int
        Size of the e-graphs in all, and rounds of the longest exploration.
    stop_reason : str
        Why the largest exploration ended: "saturated", "e_nodes", "iterations" or "seconds"; "" without any.
    rules : dict of str to RuleReport
        Rules that matched.
    extractors : dict of str to ExtractorReport
    replacements : list of Replacement
        Kernels that are computed in another way, and the rules that led there.
    graphs : list of (TermGraph, TermGraph)
        Each block that was searched, before and after.
    encode_s, explore_s, extract_s, measure_s, decode_s, verify_s : float
        Seconds spent.
    """

    mod: Any = field(repr=False)
    changed: bool = False
    kept_because: str = ""
    alternatives: list[Any] = field(repr=False, default_factory=list)
    exact: Any = field(repr=False, default=None)
    price_before_s: float | None = None
    price_after_s: float | None = None
    cost_before_s: float = 0.0
    cost_after_s: float = 0.0
    latency_before_s: float | None = None
    latency_after_s: float | None = None
    rel_err: float | None = None
    e_nodes: int = 0
    e_classes: int = 0
    iterations: int = 0
    stop_reason: str = ""
    rules: dict[str, RuleReport] = field(default_factory=dict)
    extractors: dict[str, ExtractorReport] = field(default_factory=dict)
    replacements: list[Replacement] = field(default_factory=list)
    graphs: list[tuple[TermGraph, TermGraph]] = field(repr=False, default_factory=list)
    encode_s: float = 0.0
    explore_s: float = 0.0
    extract_s: float = 0.0
    measure_s: float = 0.0
    decode_s: float = 0.0
    verify_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Everything but the module and the graphs, as a JSON object."""
        skipped = {"mod", "alternatives", "exact", "graphs"}
        fields = {name: value for name, value in vars(self).items() if name not in skipped}
        for name in ("rules", "extractors"):
            fields[name] = {key: asdict(value) for key, value in fields[name].items()}
        fields["replacements"] = [asdict(replacement) for replacement in self.replacements]
        return fields
