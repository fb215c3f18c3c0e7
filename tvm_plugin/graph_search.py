"""`optimize_graph`: a cheaper Relax module that computes the same, found by equality saturation.

The rules are verified one by one (search/graph/verify); what the search makes of a whole model is checked again
(graph_check.py): outputs are compared on random inputs, and with a timer the faster module is the one that is returned.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tvm import ir, relax, transform

from .errors import InputError, MismatchError
from .graph_check import Runner, Timer, why_refused
from .graph_result import ExtractorReport, GraphConfig, GraphResult, RuleReport
from .search.graph.cost import Pricing
from .search.graph.decode import decode_block
from .search.graph.encode import Encoded, NotEncodable, encode_block, exact_variables
from .search.graph.superoptimize import Candidate, SearchResult, superoptimize
from .transform.fold_weights import FoldWeights

__all__ = ["ExtractorReport", "GraphConfig", "GraphResult", "RuleReport", "optimize_graph"]

MOST_CANDIDATES = 3
"""Of the extracted graphs, how many are lowered and priced kernel by kernel."""

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
    search = _Search(mod, main, config, prices, time.perf_counter() + config.seconds, result)
    try:
        choices = search.cheaper_modules()
    except MismatchError as error:
        return _keep(result, f"the search contradicts itself: {error}")
    if not choices:
        return _keep(result, result.kept_because or "nothing cheaper was found")
    reasons: list[str] = []
    for rank, (candidate, chosen) in enumerate(choices):
        reason = why_refused(mod, candidate, config, run, timer, result)
        if not reason:
            result.mod, result.changed, result.kept_because = candidate, True, ""
            result.alternatives = [other for other, _ in choices[rank + 1 :]]
            if reasons and prices is not None:  # what was said of the refused ones
                result.price_before_s, result.price_after_s = prices.modules_s([mod, candidate])
                result.exact = search.first_exact(choices[rank:])
            _report_choice(result, chosen)
            return result
        reasons.append(reason)
    return _keep(result, reasons[0])


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


_Blocks = Sequence[_Rewritten | None]
"""For each block of a module, what is new; None where it stays."""

_Choice = tuple[Any, _Blocks]
"""A module, and what is new in its blocks."""


@dataclass(frozen=True)
class _Search:
    """The search for modules that cost less than `mod`, whose "main" is `main`.

    Attributes
    ----------
    mod : tvm.ir.IRModule
    main : relax.Function
    config : GraphConfig
    prices : Prices or None
    deadline : float
        Of `time.perf_counter()`.
    result : GraphResult
        Is filled.
    """

    mod: ir.IRModule
    main: Any
    config: GraphConfig
    prices: Prices | None
    deadline: float
    result: GraphResult

    def cheaper_modules(self) -> list[_Choice]:
        """Modules that cost less than the given one, the cheapest first."""
        choices = self._of_candidates()
        if self.prices is not None:
            choices = self._priced([*choices, *self._without_fast_math(choices)], self.prices)
            self.result.exact = self.first_exact(choices)
        return choices

    def first_exact(self, choices: Sequence[_Choice]) -> Any:
        """The first module without fast math, or None."""
        return next((module for module, blocks in choices if not self._needs_fast_math(blocks)), None)

    def _of_candidates(self) -> list[_Choice]:
        """Modules with new blocks, the cheapest first: the i-th has the i-th of each block's candidates."""
        exact = exact_variables(self.main.body.blocks)
        found = [
            self._search_block(block, exact) if isinstance(block, relax.DataflowBlock) else []
            for block in self.main.body.blocks
        ]
        choices: list[_Choice] = []
        for rank in range(max(map(len, found), default=0)):
            blocks = [candidates[min(rank, len(candidates) - 1)] if candidates else None for candidates in found]
            choices.append((self._with_blocks(blocks), blocks))
        return choices

    def _search_block(self, block: Any, exact: Collection[Any]) -> list[_Rewritten]:
        """Cheaper blocks, the cheapest first. The arithmetic of `exact` variables stays."""
        config, result = self.config, self.result
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
                pricing=self.prices,
                extractors=config.extractors,
                extract_seconds=config.extract_seconds,
                seconds=max(0.0, self.deadline - time.perf_counter()),
            )
            result.graphs.append((encoded.graph, encoded.graph))
            _add_to_report(result, found)
            started = time.perf_counter()
            # Where whole modules are priced afterwards, terms need not promise much; else they alone decide.
            least_gain, most = (0.0, MOST_CANDIDATES) if self.prices is not None else (config.min_gain, 1)
            rewritten = [
                self._decoded(encoded, found, candidate)
                for candidate in found.candidates[:most]
                if candidate.cost_s < found.cost_before_s * (1 - least_gain)
            ]
        except MismatchError as error:
            result.kept_because = f"the search contradicts itself: {error}"
            return []
        result.decode_s += time.perf_counter() - started
        return rewritten

    def _decoded(self, encoded: Encoded, search: SearchResult, candidate: Candidate) -> _Rewritten:
        block = decode_block(encoded, candidate.graph, list(self.main.params))
        return _Rewritten(encoded, search, candidate, block)

    def _with_blocks(self, blocks: _Blocks) -> ir.IRModule:
        """The module with other blocks in "main", its weights folded; MismatchError when it is not well-formed."""
        main = self.main
        chosen = [old if new is None else new.block for old, new in zip(main.body.blocks, blocks, strict=True)]
        builder = relax.BlockBuilder(self.mod)
        builder.begin_scope(list(main.params))
        body = builder.normalize(relax.SeqExpr(chosen, main.body.body))
        builder.end_scope()
        module = self.mod.clone()
        function = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs, main.span)
        module.update_func(self.mod.get_global_var("main"), function)
        module = transform.Sequential([FoldWeights()])(module)
        if not relax.analysis.check_well_formed(module):
            raise MismatchError("the new module is not well-formed")
        return module

    def _priced(self, choices: Sequence[_Choice], prices: Prices) -> list[_Choice]:
        """The modules whose fused kernels cost less than the given module's, the cheapest first."""
        if not choices:
            return []
        result, started = self.result, time.perf_counter()
        modules = [self.mod, *(module for module, _ in choices)]
        result.price_before_s, *after_s = prices.modules_s(modules, self.deadline - started)
        priced = sorted(zip(after_s, choices, strict=True), key=lambda item: item[0])
        fewer = self._with_rules_taken_back(priced[0], prices)
        if fewer is not None:
            priced.insert(0, fewer)
        result.measure_s += time.perf_counter() - started
        result.price_after_s = min(priced[0][0], result.price_before_s)
        enough_s = result.price_before_s * (1 - self.config.min_gain)
        if priced[0][0] >= enough_s:
            result.kept_because = (
                f"priced kernel by kernel, the best new graph takes {priced[0][0] * 1e6:.1f} us, "
                f"the given one {result.price_before_s * 1e6:.1f} us"
            )
        return [choice for price_s, choice in priced if price_s < enough_s]

    def _with_rules_taken_back(self, start: tuple[float, _Choice], prices: Prices) -> tuple[float, _Choice] | None:
        """A cheaper module than `start`, a module with its price, by leaving out rules that it used; None without any.

        Terms are priced one by one, so that a rewrite may seem to save what its kernels then lose by fusing less. It
        must not spoil the others.
        """
        best, dropped = start, frozenset[str]()
        used = Counter[str]()
        for new in start[1][1]:
            used.update({} if new is None else dict(new.candidate.rules_used))
        for name, _ in used.most_common(MOST_TAKEN_BACK):
            if time.perf_counter() >= self.deadline:
                break
            rules = dropped | {name}
            blocks = self._without(best[1][1], rules)
            if any(new is not None for new in blocks):
                module = self._with_blocks(blocks)
                best_s, price_s = prices.modules_s([best[1][0], module])
                if price_s < best_s:  # prices of two calls are not to be compared: their ratio is carried over
                    best, dropped = (best[0] * price_s / best_s, (module, blocks)), rules
        return best if dropped else None

    def _without(self, blocks: _Blocks, rules: frozenset[str]) -> _Blocks:
        """The same blocks without what these rules make; None where nothing cheaper is left."""
        time_limit_s = min(self.config.extract_seconds, self.config.seconds / 4)

        def without(new: _Rewritten | None) -> _Rewritten | None:
            if new is None or rules.isdisjoint(new.candidate.rules_used):
                return new
            candidate = new.search.without(rules, time_limit_s=time_limit_s)
            return None if candidate is None else self._decoded(new.encoded, new.search, candidate)

        return [without(new) for new in blocks]

    def _without_fast_math(self, choices: Sequence[_Choice]) -> list[_Choice]:
        """The best module without fast math, where the first of `choices` needs it."""
        if not choices or not self._needs_fast_math(choices[0][1]):
            return []
        if self._own_lossy:
            exact = replace(self, config=replace(self.config, fast_math=False), result=GraphResult(self.mod))
            return exact._of_candidates()[:1]
        blocks = self._without(choices[0][1], self._lossy)
        return [(self._with_blocks(blocks), blocks)] if any(blocks) else []

    def _needs_fast_math(self, blocks: _Blocks) -> bool:
        """Whether lossy rules made a part; where a lossy rule is the user's own, whether it was there at all.

        Exact rules can build on what a rule made. None of ours builds on what our lossy ones make.
        """
        lossy, own = self._lossy, self._own_lossy
        return any(
            not (lossy.isdisjoint(new.candidate.rules_used) and own.isdisjoint(rule.name for rule in new.search.rules))
            for new in blocks
            if new is not None
        )

    @property
    def _lossy(self) -> frozenset[str]:
        return frozenset(rule.name for rule in self.config.selected_rules if rule.fast_math)

    @property
    def _own_lossy(self) -> frozenset[str]:
        return frozenset(rule.name for rule in self.config.extra_rules if rule.fast_math)


def _report_choice(result: GraphResult, blocks: _Blocks) -> None:
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
