"""`optimize_graph`: a cheaper Relax module that computes the same, found by equality saturation.

The rules are verified one by one (search/graph/verify); what the search makes of a whole model is checked again here:
outputs are compared on random inputs, and with a timer the faster module is the one that is returned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tvm import ir, relax, transform

from .errors import InputError, MismatchError
from .search.graph.cost import Pricing, TermCost
from .search.graph.decode import decode_block
from .search.graph.encode import NotEncodable, encode_block
from .search.graph.extract import EXTRACTORS
from .search.graph.rules import EXTENDED_RULES, Group, Rule, select
from .search.graph.saturate import Limits
from .search.graph.superoptimize import Candidate, Replacement, SearchResult, superoptimize
from .search.graph.terms import TermGraph
from .search.graph.verify import Verdict, verify_rule

__all__ = ["ExtractorReport", "GraphConfig", "GraphResult", "RuleReport", "optimize_graph"]

Outputs = list[NDArray[Any]]
Runner = Callable[[ir.IRModule, Sequence[NDArray[Any]]], Outputs]
Timer = Callable[[ir.IRModule], float]

MOST_CANDIDATES = 3
"""Of the extracted graphs, how many are lowered and priced kernel by kernel."""


class Prices(Pricing, Protocol):
    """Prices of terms and of modules, for example `eqtune.graph_prices.GraphPrices`."""

    def module_s(self, mod: ir.IRModule) -> float:
        """Seconds of one run of a module, the sum of its fused kernels."""


@dataclass(frozen=True)
class GraphConfig:
    """How to search equal graphs.

    Attributes
    ----------
    rules : tuple of str or None
        Names of the rules to use (`eqtune.search.graph.rules.RULES`); None: all.
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
        Largest difference that is accepted, relative to the largest magnitude of an output; for float16 a hundred
        times as much.
    seed : int
        Of the random inputs.

    Raises
    ------
    InputError
        For unknown rules or extractors, negative seconds, and a rule of your own that is wrong, cannot be verified, or
        has the name of another.
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
        unknown = set(self.extractors) - set(EXTRACTORS)
        if unknown or not self.extractors:
            raise InputError(f"extractors {list(self.extractors)}: choose from {list(EXTRACTORS)}")
        if not (self.seconds >= 0 and self.extract_seconds >= 0):
            raise InputError(f"seconds {self.seconds}, extract_seconds {self.extract_seconds}: must not be negative")
        names = [rule.name for rule in (*EXTENDED_RULES, *self.extra_rules)]
        taken = sorted({rule.name for rule in self.extra_rules if names.count(rule.name) > 1})
        if taken:
            raise InputError(f"there are other rules named {taken}: give yours names of their own")
        select(self.rules)
        for rule in self.extra_rules:
            verdict = _verdict(rule)
            if not verdict.sound:
                raise InputError(f"a rule must hold before it is used: {verdict}")

    @property
    def selected_rules(self) -> tuple[Rule | Group, ...]:
        """The rules that the search uses."""
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
    cost_before_s, cost_after_s : float
        Estimated seconds of one run: the sum of the terms' prices.
    price_before_s, price_after_s : float or None
        Seconds of one run as the sum of the fused kernels' measured prices; with `prices` only.
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

    mod: Any
    changed: bool = False
    kept_because: str = ""
    alternatives: list[Any] = field(default_factory=list)
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
    graphs: list[tuple[TermGraph, TermGraph]] = field(default_factory=list)
    encode_s: float = 0.0
    explore_s: float = 0.0
    extract_s: float = 0.0
    measure_s: float = 0.0
    decode_s: float = 0.0
    verify_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Everything but the module and the graphs, as a JSON object."""
        skipped = {"mod", "alternatives", "graphs"}
        fields = {name: value for name, value in vars(self).items() if name not in skipped}
        for name in ("rules", "extractors"):
            fields[name] = {key: asdict(value) for key, value in fields[name].items()}
        fields["replacements"] = [asdict(replacement) for replacement in self.replacements]
        return fields


def optimize_graph(
    mod: ir.IRModule,
    config: GraphConfig | None = None,
    *,
    run: Runner | None = None,
    timer: Timer | None = None,
    prices: Prices | None = None,
) -> GraphResult:
    """Search for an equal, cheaper graph of the module's "main".

    Anything that cannot be searched (no Relax "main", no dataflow block, symbolic shapes) is returned as it is; what
    the rules do not know keeps its place. Signature, dtypes, names of parameters and other functions never change.
    Weights are best given as constants, folded (`eqtune.transform.FoldWeights`); new weights are folded the same way.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    config : GraphConfig
    run : callable
        (module, inputs) -> outputs, all numpy arrays; to compare outputs. By default TVM without schedules.
    timer : callable
        module -> seconds of one run. With it, the original is kept unless the new module is faster.
    prices : Prices
        Where prices come from, instead of `config.cost`. With it, the best few graphs are also lowered and priced
        kernel by kernel, and the original is kept unless one of them is cheaper.

    Raises
    ------
    InputError
        For a configuration that names unknown rules or extractors.
    """
    config = config or GraphConfig()
    result = GraphResult(mod)
    main = _main_function(mod)
    if main is None:
        result.kept_because = "the module has no Relax function named 'main'"
        return result
    found = [
        _search_block(block, main, config, prices, result) if isinstance(block, relax.DataflowBlock) else []
        for block in main.body.blocks
    ]
    choices = _choices(mod, main, found)
    if prices is not None:
        choices = _cheaper_modules(mod, choices, prices, config, result)
    if not choices:
        return _keep(result, result.kept_because or "nothing cheaper was found")
    candidate, chosen = choices[0]
    if not relax.analysis.check_well_formed(candidate):
        return _keep(result, "the new module is not well-formed")
    reason = _compare(mod, candidate, config, run, result) if config.verify else ""
    if not reason and timer is not None:
        result.latency_before_s, result.latency_after_s = timer(mod), timer(candidate)
        if result.latency_after_s >= result.latency_before_s:
            reason = "the new module is not faster"
    if reason:
        return _keep(result, reason)
    result.mod, result.changed = candidate, True
    result.alternatives = [other for other, _ in choices[1:] if relax.analysis.check_well_formed(other)]
    _report_choice(result, chosen)
    return result


@dataclass(frozen=True)
class _Rewritten:
    """One cheaper block."""

    block: Any
    before: TermGraph
    candidate: Candidate
    saved_s: float


_Choice = tuple[Any, list[_Rewritten]]
"""A module, and the blocks in it that are new."""


def _choices(mod: ir.IRModule, main: Any, found: Sequence[Sequence[_Rewritten]]) -> list[_Choice]:
    """Modules with new blocks, the cheapest first: the i-th has the i-th of each block's candidates."""
    choices = []
    for rank in range(max(map(len, found), default=0)):
        chosen = [candidates[min(rank, len(candidates) - 1)] if candidates else None for candidates in found]
        blocks = [old if new is None else new.block for old, new in zip(main.body.blocks, chosen, strict=True)]
        choices.append((_with_blocks(mod, main, blocks), [new for new in chosen if new is not None]))
    return choices


def _cheaper_modules(
    mod: ir.IRModule, choices: Sequence[_Choice], prices: Prices, config: GraphConfig, result: GraphResult
) -> list[_Choice]:
    """The modules whose fused kernels cost less than the given module's, the cheapest first."""
    if not choices:
        return []
    started = time.perf_counter()
    result.price_before_s = prices.module_s(mod)
    spent_s = result.explore_s + result.extract_s + result.measure_s
    priced = list[tuple[float, int]]()
    for i, (module, _) in enumerate(choices):
        if priced and spent_s + time.perf_counter() - started > config.seconds:
            break
        priced.append((prices.module_s(module), i))
    priced.sort()
    result.measure_s += time.perf_counter() - started
    result.price_after_s = min(priced[0][0], result.price_before_s)
    enough_s = result.price_before_s * (1 - config.min_gain)
    if priced[0][0] >= enough_s:
        result.kept_because = (
            f"priced kernel by kernel, the best new graph takes {priced[0][0] * 1e6:.1f} us, "
            f"the given one {result.price_before_s * 1e6:.1f} us"
        )
    return [choices[i] for price_s, i in priced if price_s < enough_s]


def _report_choice(result: GraphResult, chosen: Sequence[_Rewritten]) -> None:
    """Note which rules made the chosen blocks."""
    result.cost_after_s = result.cost_before_s - sum(new.saved_s for new in chosen)
    for new in chosen:
        result.graphs = [(b, new.candidate.graph if b is new.before else after) for b, after in result.graphs]
        result.replacements += new.candidate.replacements
        for name, used in new.candidate.rules_used.items():
            rule = result.rules.get(name, RuleReport(0, 0.0, 0))
            result.rules[name] = replace(rule, used=rule.used + used)


def _keep(result: GraphResult, reason: str) -> GraphResult:
    result.kept_because, result.cost_after_s = reason, result.cost_before_s
    return result


def _main_function(mod: ir.IRModule) -> Any:
    for name, function in mod.functions_items():
        if name.name_hint == "main" and isinstance(function, relax.Function):
            return function if isinstance(function.body, relax.SeqExpr) else None
    return None


def _search_block(
    block: Any, main: Any, config: GraphConfig, prices: Prices | None, result: GraphResult
) -> list[_Rewritten]:
    """Cheaper blocks, the cheapest first; fills `result`."""
    started = time.perf_counter()
    try:
        encoded = encode_block(block)
    except NotEncodable as error:
        result.kept_because = f"a dataflow block was left as it is: {error}"
        return []
    result.encode_s += time.perf_counter() - started
    try:
        found = superoptimize(
            encoded.graph,
            config.selected_rules,
            limits=config.limits,
            cost=config.cost,
            pricing=prices,
            extractors=config.extractors,
            extract_seconds=config.extract_seconds,
            seconds=config.seconds,
        )
        result.graphs.append((encoded.graph, encoded.graph))
        _add_to_report(result, found)
        started = time.perf_counter()
        # Where whole modules are priced afterwards, terms need not promise much; else they alone decide.
        least_gain, most = (0.0, MOST_CANDIDATES) if prices is not None else (config.min_gain, 1)
        rewritten = [
            _Rewritten(
                decode_block(encoded, candidate.graph, list(main.params)),
                encoded.graph,
                candidate,
                found.cost_before_s - candidate.cost_s,
            )
            for candidate in found.candidates[:most]
            if candidate.cost_s < found.cost_before_s * (1 - least_gain)
        ]
    except MismatchError as error:
        result.kept_because = f"the search contradicts itself: {error}"
        return []
    result.decode_s += time.perf_counter() - started
    return rewritten


def _add_to_report(result: GraphResult, found: SearchResult) -> None:
    saturation = found.saturation
    if saturation.e_nodes > result.e_nodes or not result.stop_reason:
        result.stop_reason = saturation.stop_reason
    result.e_nodes += saturation.e_nodes
    result.e_classes += found.classes
    result.iterations = max(result.iterations, saturation.iterations)
    result.cost_before_s += found.cost_before_s
    result.cost_after_s += found.cost_before_s
    result.explore_s += found.load_s + found.explore_s
    result.extract_s += found.extract_s
    result.measure_s += found.price_s
    for name, matches in saturation.matches.items():
        before = result.rules.get(name, RuleReport(0, 0.0, 0))
        seconds = before.seconds + saturation.rule_seconds.get(name, 0.0)
        if matches or before.matches:
            result.rules[name] = RuleReport(before.matches + matches, seconds, before.used)
    for extraction in found.extractions:
        old = result.extractors.get(extraction.extractor, ExtractorReport(0.0, 0.0, None))
        gaps = [gap for gap in (old.gap, extraction.gap) if gap is not None]
        result.extractors[extraction.extractor] = ExtractorReport(
            old.cost_s + extraction.cost_s, old.seconds + extraction.seconds, max(gaps) if gaps else None
        )


def _with_blocks(mod: ir.IRModule, main: Any, blocks: list[Any]) -> ir.IRModule:
    """The module with other blocks in "main", its weights folded."""
    from .transform.fold_weights import FoldWeights

    builder = relax.BlockBuilder(mod)
    builder.begin_scope(list(main.params))
    body = builder.normalize(relax.SeqExpr(blocks, main.body.body))
    builder.end_scope()
    candidate = mod.clone()
    candidate.update_func(
        mod.get_global_var("main"), relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs, main.span)
    )
    return transform.Sequential([FoldWeights()])(candidate)


def _compare(
    mod: ir.IRModule, candidate: ir.IRModule, config: GraphConfig, run: Runner | None, result: GraphResult
) -> str:
    """Why the candidate must not be used; "" when its outputs are the original's."""
    from .frontends.verify import compare

    started = time.perf_counter()
    inputs = _random_inputs(_main_function(mod), config.seed)
    if inputs is None:
        return "the outputs cannot be compared: an input has a symbolic shape or is no tensor"
    run = run or _run_untuned
    try:
        expected, actual = run(mod, inputs), run(candidate, inputs)
    except (RuntimeError, ValueError, TypeError) as error:  # what TVM raises for a module it cannot compile or run
        return f"the outputs cannot be compared: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
    result.verify_s = time.perf_counter() - started
    result.rel_err, allowed = 0.0, config.tolerance
    for before, after in zip(expected, actual, strict=True):
        if before.shape != after.shape or before.dtype != after.dtype:
            return f"an output changed from {before.dtype}{before.shape} to {after.dtype}{after.shape}"
        difference = compare([after], [before])[1]
        result.rel_err = max(result.rel_err, difference)
        if difference > allowed * (100 if before.dtype == np.float16 else 1):
            return f"an output differs by {difference:.2e} relative to its largest element; {allowed:g} is allowed"
    return ""


def _random_inputs(main: Any, seed: int) -> list[NDArray[Any]] | None:
    """Normal floats and small integers for each parameter; None where a parameter is no static tensor."""
    from .search.graph.relax_ops import static_type

    generator = np.random.default_rng(seed)
    inputs = []
    for param in main.params:
        ty = static_type(param.ty)
        if ty is None or ty.dtype == "bfloat16":
            return None
        floats = ty.dtype.startswith("float")
        values = generator.standard_normal(ty.shape) if floats else generator.integers(0, 2, ty.shape)
        inputs.append(values.astype(ty.dtype))
    return inputs


def _run_untuned(mod: ir.IRModule, inputs: Sequence[NDArray[Any]]) -> Outputs:
    """Run "main" as TVM compiles it without schedules, on this machine's CPU."""
    from .machine import detect_target
    from .runtime import ModelRunner
    from .transform.apply_tuned import untuned_executable

    return ModelRunner(untuned_executable(mod, detect_target()))(*inputs)
