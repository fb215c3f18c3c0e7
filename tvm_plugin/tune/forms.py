"""The equal forms of a model that compete: as given, rewritten by the graph search, with channels last."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import tvm
import tvm_ffi

from ..errors import InputError
from ..tasks import Task, extract_tasks, lower_to_kernels
from ..transform.batch_norm import FoldBatchNorm
from ..transform.fold_weights import FoldWeights
from ..transform.layout import ChannelsLast
from .loop import Variant

if TYPE_CHECKING:
    from ..graph_search import Prices

__all__ = ["Form", "Forms", "model_forms", "simplify"]

LOGGER = logging.getLogger(__name__)

REWRITTEN = "rewritten"

BOTH_LAYOUTS_S = 10.0
"""With fewer seconds for finding forms, only channels last compete: they nearly always win, and lowering takes time."""

CLEARLY = 0.95
"""A rewritten graph that costs less than this share of the given one may do without it under a short budget..."""

MOST_GUESSED = 0.2
"""... unless more than this share of its cost is estimated, not measured."""


@dataclass(frozen=True)
class Form:
    """One equal form of the model, lowered to kernels.

    Attributes
    ----------
    name : str
        For example "as given, channels last".
    mod : tvm.ir.IRModule
        Fused kernels and the main function that calls them; not scheduled.
    tasks : list of Task
    rewritten : bool
        Whether the graph search changed it.
    """

    name: str
    mod: Any
    tasks: Sequence[Task]
    rewritten: bool = False

    @property
    def calls(self) -> Mapping[str, int]:
        """Workload hash to calls a run."""
        return {task.workload_hash: task.calls for task in self.tasks}


@dataclass(frozen=True)
class Forms:
    """All forms that compete."""

    forms: Sequence[Form]

    @property
    def tasks(self) -> list[Task]:
        """Every distinct kernel of any form, once."""
        return list({task.workload_hash: task for form in reversed(self.forms) for task in form.tasks}.values())[::-1]

    @property
    def variants(self) -> list[Variant]:
        """What the tuning loop needs to know of each form."""
        return [Variant(form.name, form.calls) for form in self.forms]

    def of(self, variants: Sequence[Variant]) -> list[Form]:
        """The forms that these variants stand for, in their order."""
        by_name = {form.name: form for form in self.forms}
        return [by_name[variant.name] for variant in variants]

    @property
    def given(self) -> Variant:
        """A form of the given graph: the same one in every run, whatever the searches find."""
        return next(variant for variant, form in zip(self.variants, self.forms, strict=True) if not form.rewritten)

    def shortlist(
        self,
        price_s: Callable[[Task], float],
        affordable: Callable[[int], bool],
        is_measured: Callable[[Task], bool] = lambda task: False,
        winner: str = "",
    ) -> Forms:
        """The forms that are worth measuring under a budget, best first.

        The first is the one of the given graph whose kernels cost least, unless what the graph search made is clearly
        cheaper by prices that were measured, or another form was the `winner` of an earlier run. The others follow by
        price while `affordable(number of distinct kernels)`.
        """
        prices = {task.workload_hash: price_s(task) for task in self.tasks}
        total_s = {form.name: Variant(form.name, form.calls).latency_s(prices) for form in self.forms}
        ranked = sorted(self.forms, key=lambda form: total_s[form.name])
        given = next(form for form in ranked if not form.rewritten)
        rewritten = [form for form in ranked if form.rewritten][:1]
        order = [given, *rewritten, *ranked]
        for form in rewritten:
            guessed_s = sum(t.calls * prices[t.workload_hash] for t in form.tasks if not is_measured(t))
            if total_s[form.name] < CLEARLY * total_s[given.name] and guessed_s < MOST_GUESSED * total_s[form.name]:
                order.insert(0, form)
        order = [form for form in self.forms if form.name == winner] + order
        chosen: list[Form] = []
        for form in {form.name: form for form in order}.values():
            if not chosen or affordable(len(Forms([*chosen, form]).tasks)):
                chosen.append(form)
            else:
                LOGGER.info("the budget does not reach for the form %r", form.name)
        return Forms(chosen)


def simplify(mod: Any) -> Any:
    """Fold batch norms, and everything that depends on weights alone."""
    return tvm.transform.Sequential([FoldBatchNorm(), FoldWeights()])(mod)


def model_forms(
    mod: Any, target: Any, graph: Any, prices: Prices | None = None, seconds: float = math.inf
) -> tuple[Forms, Any]:
    """The forms of a Relax module with weights as constants, and the graph search's result (None when it is off).

    `prices` are what the graph search goes by; its best two graphs compete then. It takes `seconds` at most, roughly; 0
    leaves it out. With few seconds there are no forms with channels first where channels can be last. Raises InputError
    for an unknown value of `graph`.
    """
    mod = simplify(mod)
    graphs = [("as given", mod)]
    result = None
    if graph != "off":
        from ..graph_search import GraphConfig, optimize_graph

        if not isinstance(graph, GraphConfig) and graph != "saturate":
            raise InputError(f"graph must be 'saturate', 'off' or a GraphConfig, not {graph!r}")
        config = graph if isinstance(graph, GraphConfig) else GraphConfig()
        config = replace(config, verify=False, seconds=min(seconds, config.seconds))
        # The tuned model is compared with the reference as a whole, and competes with the original on time.
        result = optimize_graph(mod, config, prices=prices)
        if result.changed:
            others = [(f"{REWRITTEN} otherwise", simplify(other)) for other in result.alternatives[:1]]
            graphs = [(REWRITTEN, simplify(result.mod)), *others, *graphs]
    forms: list[Form] = []
    for name, candidate in graphs:
        last = tvm.transform.Sequential([ChannelsLast()])(candidate)
        can_be_last = not tvm_ffi.structural_equal(last, candidate)
        if can_be_last:
            forms.append(_lower(f"{name}, channels last", last, target, name.startswith(REWRITTEN)))
        if not can_be_last or seconds >= BOTH_LAYOUTS_S:
            forms.append(_lower(name, candidate, target, name.startswith(REWRITTEN)))
    distinct = list({tuple(sorted(form.calls.items())): form for form in reversed(forms)}.values())[::-1]
    for form in distinct:
        LOGGER.info("form %r: %d kernels, %d calls", form.name, len(form.tasks), sum(t.calls for t in form.tasks))
    return Forms(distinct), result


def _lower(name: str, mod: Any, target: Any, rewritten: bool) -> Form:
    kernels = lower_to_kernels(mod, target)
    return Form(name, kernels, extract_tasks(kernels), rewritten)
