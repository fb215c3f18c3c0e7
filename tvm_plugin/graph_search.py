"""`optimize_graph`: a cheaper Relax module that computes the same, found by equality saturation.

The rules are verified one by one (search/graph/verify); what the search makes of a whole model is checked again here:
outputs are compared on random inputs, and with a timer the faster module is the one that is returned.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tvm import ir, relax, transform

from .errors import InputError, MismatchError
from .frontends.imported import InputInfo, random_input
from .graph_result import ExtractorReport, GraphConfig, GraphResult, RuleReport
from .search.graph.cost import Pricing
from .search.graph.decode import decode_block
from .search.graph.encode import Encoded, NotEncodable, encode_block, exact_variables
from .search.graph.superoptimize import Candidate, SearchResult, superoptimize

__all__ = ["ExtractorReport", "GraphConfig", "GraphResult", "RuleReport", "optimize_graph"]

Outputs = list[NDArray[Any]]
Runner = Callable[[ir.IRModule, Sequence[NDArray[Any]]], Outputs]
Timer = Callable[[ir.IRModule], float]

MOST_CANDIDATES = 3
"""Of the extracted graphs, how many are lowered and priced kernel by kernel."""

COARSER = {"float16": 100, "bfloat16": 800}
"""How many times the tolerance outputs may differ: TVM sums in their own precision, of 11 and 8 bits."""

MOST_TAKEN_BACK = 5
"""Of the best one's rules, those used most, how many it is tried without: their kernels are mostly priced already."""


class Prices(Pricing, Protocol):
    """Prices of terms and of modules, for example `eqtune.graph_prices.GraphPrices`."""

    def modules_s(self, mods: Sequence[ir.IRModule], seconds: float = ...) -> list[float]:
        """Seconds of one run of each module, the sums of their fused kernels; to be compared with each other.

        `inf` for those that `seconds` do not suffice for; always enough for the first two.
        """


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
        (module, inputs) -> outputs, all numpy arrays; to compare outputs. By default with plain schedules.
    timer : callable
        module -> seconds of one run. With it, the original is kept unless the new module is faster.
    prices : Prices
        Where prices come from, instead of `config.cost`. With it, the best few graphs are also lowered and priced
        kernel by kernel, and the original is kept unless one of them is cheaper. With fast math, so is the best graph
        without it. Where one must not be used, the next is tried.

    Raises
    ------
    InputError
        For what is no GraphConfig, or one with rules that need fast math without it.
    """
    config = config or GraphConfig()
    if not isinstance(config, GraphConfig):
        raise InputError(f"config is an eqtune.GraphConfig, not {config!r}")
    config.check_permitted()
    result = GraphResult(mod)
    main = _main_function(mod)
    if main is None:
        result.kept_because = "the module has no Relax function named 'main'"
        return result
    try:
        choices = _search(mod, main, config, prices, result)
    except MismatchError as error:
        return _keep(result, f"the search contradicts itself: {error}")
    if not choices:
        return _keep(result, result.kept_because or "nothing cheaper was found")
    reasons: list[str] = []
    for rank, (candidate, chosen) in enumerate(choices):
        reason = _refused(mod, candidate, config, run, timer, result)
        if not reason:
            result.mod, result.changed, result.kept_because = candidate, True, ""
            result.alternatives = [other for other, _ in choices[rank + 1 :]]
            if reasons and prices is not None:  # what was said of the refused ones
                result.price_before_s, result.price_after_s = prices.modules_s([mod, candidate])
                result.exact = _exact(choices[rank:], config)
            _report_choice(result, chosen)
            return result
        reasons.append(reason)
    return _keep(result, reasons[0])


def _refused(
    mod: ir.IRModule,
    candidate: ir.IRModule,
    config: GraphConfig,
    run: Runner | None,
    timer: Timer | None,
    result: GraphResult,
) -> str:
    """Why the candidate must not be used; "" where its outputs are the original's, and it is faster if timed."""
    reason = _compare(mod, candidate, config, run, result) if config.verify else ""
    if not reason and timer is not None:
        result.latency_before_s, result.latency_after_s = timer(mod), timer(candidate)
        if result.latency_after_s >= result.latency_before_s:
            reason = "the new module is not faster"
    return reason


@dataclass(frozen=True)
class _Rewritten:
    """One cheaper block."""

    encoded: Encoded
    search: SearchResult
    candidate: Candidate
    block: Any

    @property
    def saved_s(self) -> float:
        """By the prices of its terms."""
        return self.search.cost_before_s - self.candidate.cost_s


_Choice = tuple[Any, list[_Rewritten | None]]
"""A module, and for each of its blocks what is new."""


def _search(
    mod: ir.IRModule, main: Any, config: GraphConfig, prices: Prices | None, result: GraphResult
) -> list[_Choice]:
    """Modules that cost less than the given one, the cheapest first; fills `result`."""
    deadline = time.perf_counter() + config.seconds
    choices = _search_blocks(mod, main, config, prices, deadline, result)
    if prices is not None:
        choices += _without_fast_math(mod, main, choices, config, prices, deadline)
        choices = _cheaper_modules(mod, main, choices, prices, config, deadline, result)
        result.exact = _exact(choices, config)
    return choices


def _search_blocks(
    mod: ir.IRModule, main: Any, config: GraphConfig, prices: Prices | None, deadline: float, result: GraphResult
) -> list[_Choice]:
    """Modules of each block's candidates; fills `result`."""
    exact = exact_variables(main.body.blocks)
    found = [
        _search_block(block, exact, main, config, prices, deadline, result)
        if isinstance(block, relax.DataflowBlock)
        else []
        for block in main.body.blocks
    ]
    return _choices(mod, main, found)


def _choices(mod: ir.IRModule, main: Any, found: Sequence[Sequence[_Rewritten]]) -> list[_Choice]:
    """Modules with new blocks, the cheapest first: the i-th has the i-th of each block's candidates."""
    choices = []
    for rank in range(max(map(len, found), default=0)):
        chosen = [candidates[min(rank, len(candidates) - 1)] if candidates else None for candidates in found]
        choices.append((_with_blocks(mod, main, chosen), chosen))
    return choices


def _needs_fast_math(blocks: Sequence[_Rewritten | None], config: GraphConfig) -> bool:
    """Whether lossy rules made a part; where a lossy rule is the user's own, whether it was there at all.

    Exact rules can build on what a rule made. None of ours builds on what our lossy ones make.
    """
    lossy, own = _lossy(config), _own_lossy(config)
    return any(
        new is not None
        and not (lossy.isdisjoint(new.candidate.rules_used) and own.isdisjoint(rule.name for rule in new.search.rules))
        for new in blocks
    )


def _exact(choices: Sequence[_Choice], config: GraphConfig) -> Any:
    """The first module without fast math, or None."""
    return next((module for module, blocks in choices if not _needs_fast_math(blocks, config)), None)


def _lossy(config: GraphConfig) -> frozenset[str]:
    return frozenset(rule.name for rule in config.selected_rules if rule.fast_math)


def _own_lossy(config: GraphConfig) -> frozenset[str]:
    return frozenset(rule.name for rule in config.extra_rules if rule.fast_math)


def _without_fast_math(
    mod: ir.IRModule, main: Any, choices: Sequence[_Choice], config: GraphConfig, prices: Prices, deadline: float
) -> list[_Choice]:
    """The best module without fast math, where the first of `choices` needs it."""
    if not choices or not _needs_fast_math(choices[0][1], config):
        return []
    if _own_lossy(config):
        return _search_blocks(mod, main, replace(config, fast_math=False), prices, deadline, GraphResult(mod))[:1]
    exact = [None if new is None else _without(new, _lossy(config), main, config) for new in choices[0][1]]
    return [(_with_blocks(mod, main, exact), exact)] if any(exact) else []


def _cheaper_modules(
    mod: ir.IRModule,
    main: Any,
    choices: Sequence[_Choice],
    prices: Prices,
    config: GraphConfig,
    deadline: float,
    result: GraphResult,
) -> list[_Choice]:
    """The modules whose fused kernels cost less than the given module's, the cheapest first."""
    if not choices:
        return []
    started = time.perf_counter()
    modules = [mod, *(module for module, _ in choices)]
    result.price_before_s, *after_s = prices.modules_s(modules, deadline - started)
    priced = sorted(zip(after_s, choices, strict=True), key=lambda item: item[0])
    fewer = _take_back_rules(mod, main, priced[0], prices, config, deadline)
    if fewer is not None:
        priced.insert(0, fewer)
    result.measure_s += time.perf_counter() - started
    result.price_after_s = min(priced[0][0], result.price_before_s)
    enough_s = result.price_before_s * (1 - config.min_gain)
    if priced[0][0] >= enough_s:
        result.kept_because = (
            f"priced kernel by kernel, the best new graph takes {priced[0][0] * 1e6:.1f} us, "
            f"the given one {result.price_before_s * 1e6:.1f} us"
        )
    return [choice for price_s, choice in priced if price_s < enough_s]


def _take_back_rules(
    mod: ir.IRModule,
    main: Any,
    start: tuple[float, _Choice],
    prices: Prices,
    config: GraphConfig,
    deadline: float,
) -> tuple[float, _Choice] | None:
    """A cheaper module than `start`, a module with its price, by leaving out rules that it used; None without any.

    Terms are priced one by one, so that a rewrite may seem to save what its kernels then lose by fusing less. It must
    not spoil the others.
    """
    best, dropped = start, frozenset[str]()
    used = Counter[str]()
    for new in start[1][1]:
        used.update({} if new is None else dict(new.candidate.rules_used))
    for name, _ in used.most_common(MOST_TAKEN_BACK):
        if time.perf_counter() >= deadline:
            break
        rules = dropped | {name}
        chosen = [None if new is None else _without(new, rules, main, config) for new in best[1][1]]
        if any(new is not None for new in chosen):
            module = _with_blocks(mod, main, chosen)
            best_s, price_s = prices.modules_s([best[1][0], module])
            if price_s < best_s:  # prices of two calls are not to be compared: their ratio is carried over
                best, dropped = (best[0] * price_s / best_s, (module, chosen)), rules
    return best if dropped else None


def _without(new: _Rewritten, rules: frozenset[str], main: Any, config: GraphConfig) -> _Rewritten | None:
    """The same block without what these rules make; None where nothing cheaper is left."""
    if rules.isdisjoint(new.candidate.rules_used):
        return new
    candidate = new.search.without(rules, time_limit_s=min(config.extract_seconds, config.seconds / 4))
    return None if candidate is None else _decoded(new.encoded, new.search, candidate, main)


def _decoded(encoded: Encoded, search: SearchResult, candidate: Candidate, main: Any) -> _Rewritten:
    return _Rewritten(encoded, search, candidate, decode_block(encoded, candidate.graph, list(main.params)))


def _report_choice(result: GraphResult, blocks: Sequence[_Rewritten | None]) -> None:
    """Note which rules made the chosen blocks."""
    chosen = [new for new in blocks if new is not None]
    result.cost_after_s = result.cost_before_s - sum(new.saved_s for new in chosen)
    for new in chosen:
        before = new.encoded.graph
        result.graphs = [(b, new.candidate.graph if b is before else after) for b, after in result.graphs]
        result.replacements += new.search.explain(new.candidate)
        for name, used in new.candidate.rules_used.items():
            rule = result.rules.get(name, RuleReport(0, 0.0, 0))
            result.rules[name] = replace(rule, used=rule.used + used)


def _keep(result: GraphResult, reason: str) -> GraphResult:
    result.kept_because, result.cost_after_s, result.exact = reason, result.cost_before_s, None
    return result


def _main_function(mod: ir.IRModule) -> Any:
    for name, function in mod.functions_items():
        if name.name_hint == "main" and isinstance(function, relax.Function):
            return function if isinstance(function.body, relax.SeqExpr) else None
    return None


def _search_block(
    block: Any,
    exact: Collection[Any],
    main: Any,
    config: GraphConfig,
    prices: Prices | None,
    deadline: float,
    result: GraphResult,
) -> list[_Rewritten]:
    """Cheaper blocks, the cheapest first; fills `result`. The arithmetic of `exact` variables stays."""
    started = time.perf_counter()
    try:
        encoded = encode_block(block, exact)
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
            seconds=max(0.0, deadline - time.perf_counter()),
        )
        result.graphs.append((encoded.graph, encoded.graph))
        _add_to_report(result, found)
        started = time.perf_counter()
        # Where whole modules are priced afterwards, terms need not promise much; else they alone decide.
        least_gain, most = (0.0, MOST_CANDIDATES) if prices is not None else (config.min_gain, 1)
        rewritten = [
            _decoded(encoded, found, candidate, main)
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


def _with_blocks(mod: ir.IRModule, main: Any, chosen: Sequence[_Rewritten | None]) -> ir.IRModule:
    """The module with other blocks in "main", its weights folded; None keeps a block.

    Raises MismatchError when it is not well-formed.
    """
    from .transform.fold_weights import FoldWeights

    blocks = [old if new is None else new.block for old, new in zip(main.body.blocks, chosen, strict=True)]
    builder = relax.BlockBuilder(mod)
    builder.begin_scope(list(main.params))
    body = builder.normalize(relax.SeqExpr(blocks, main.body.body))
    builder.end_scope()
    candidate = mod.clone()
    candidate.update_func(
        mod.get_global_var("main"), relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs, main.span)
    )
    candidate = transform.Sequential([FoldWeights()])(candidate)
    if not relax.analysis.check_well_formed(candidate):
        raise MismatchError("the new module is not well-formed")
    return candidate


def _compare(
    mod: ir.IRModule, candidate: ir.IRModule, config: GraphConfig, run: Runner | None, result: GraphResult
) -> str:
    """Why the candidate must not be used; "" when its outputs are the original's."""
    from .frontends.verify import compare

    started = time.perf_counter()
    inputs = _random_inputs(_main_function(mod), config.seed)
    if inputs is None:
        return "the outputs cannot be compared: an input has a symbolic shape or is no tensor"
    run = run or _run_plain
    try:
        expected, actual = run(mod, inputs), run(candidate, inputs)
    except (RuntimeError, ValueError, TypeError) as error:  # what TVM raises for a module it cannot compile or run
        return f"the outputs cannot be compared: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
    result.verify_s += time.perf_counter() - started
    result.rel_err = 0.0
    for before, after in zip(expected, actual, strict=True):
        if before.shape != after.shape or before.dtype != after.dtype:
            return f"an output changed from {before.dtype}{before.shape} to {after.dtype}{after.shape}"
        difference = compare([after], [before])[1]
        result.rel_err = max(result.rel_err, difference)
        allowed = config.tolerance * COARSER.get(before.dtype.name, 1)
        if difference > allowed:
            return f"an output differs by {difference:.2e} relative to its largest element; {allowed:g} is allowed"
    return ""


def _random_inputs(main: Any, seed: int) -> list[NDArray[Any]] | None:
    """An array for each parameter, as models get them; None where a parameter is no static tensor."""
    from .search.graph.relax_ops import static_type

    generator = np.random.default_rng(seed)
    inputs = []
    for param in main.params:
        ty = static_type(param.ty)
        if ty is None:
            return None
        inputs.append(random_input(generator, InputInfo(str(param.name), ty.shape, ty.dtype)))
    return inputs


def _run_plain(mod: ir.IRModule, inputs: Sequence[NDArray[Any]]) -> Outputs:
    """Run "main" with plain schedules, on this machine's CPU."""
    from .machine import detect_target
    from .runtime import ModelRunner
    from .transform.apply_tuned import untuned_executable

    return ModelRunner(untuned_executable(mod, detect_target(), plain=True))(*inputs)
