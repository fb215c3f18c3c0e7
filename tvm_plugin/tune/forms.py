"""The equal forms of a model that compete: as given, rewritten by the graph search, with channels last."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import tvm
import tvm_ffi

from ..errors import InputError
from ..machine import describe_machine
from ..relax_ir.kernels import is_symbolic
from ..schedules.analytic import machine_running
from ..search.space.hardware import Hardware
from ..symbolic import tile_symbolic_kernels
from ..tasks import Task, known_tasks, lossy_products, lower_to_kernels, permit_lossy_products
from ..transform.layout import CHANNELS_FIRST, ChannelsLast
from ..transform.simplify import simplify
from .loop import Variant

if TYPE_CHECKING:
    from ..graph_prices import GraphPrices
    from ..graph_search import GraphConfig, GraphResult

__all__ = ["Form", "Forms", "check_graph", "graph_config", "model_forms"]

LOGGER = logging.getLogger(__name__)

REWRITTEN = "rewritten"

FAST_MATH = "rewritten with fast math"

BOTH_LAYOUTS_S = 0.5
"""With fewer seconds a kernel for finding forms, only channels last compete: in a network of many convolutions they
nearly always win, and lowering takes time. One convolution alone would have to pay for transposing its image."""

CLEARLY = 0.95
"""A rewritten graph that costs less than this share of the given one may do without it under a short budget..."""

MOST_GUESSED = 0.2
"""... unless kernels that only one of them has make up more than this share of its cost, and were not measured."""

FIRST_LOOK = 8
"""Candidates of each kernel that tell which form is faster..."""

GLANCE = 1
"""... and how many each kernel of a rewritten graph needs for it to lead."""


_Graph = tuple[str, Any, bool]
"""Its name, the module, and whether rules that lose accuracy may have made it."""


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
    lossy : bool
        Whether rules that lose floating-point accuracy may have: it is used only where it is found accurate enough.
    channels_first : bool
        Whether images have channels first that could be last.
    """

    name: str
    mod: Any
    tasks: Sequence[Task]
    rewritten: bool = False
    lossy: bool = False
    channels_first: bool = False

    @property
    def calls(self) -> Mapping[str, int]:
        """Workload hash to calls a run."""
        return {task.workload_hash: task.calls for task in self.tasks}

    @property
    def digest(self) -> str:
        """Names the form by its kernels: what one run calls "rewritten" may be another graph in the next."""
        return hashlib.blake2b(json.dumps(sorted(self.calls.items())).encode(), digest_size=8).hexdigest()


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

    @property
    def given_operations(self) -> float:
        """Operations of one run of the given model."""
        (given,) = self.of([self.given])
        return max(1.0, sum(task.calls * task.operations for task in given.tasks))

    def untuned_s_per_operation(self, latency_s: float) -> float:
        """Seconds an operation of kernels that nobody scheduled, where the given model takes `latency_s`."""
        return latency_s / self.given_operations

    def shortlist(
        self,
        price_s: Callable[[Task], float],
        affordable: Callable[[Sequence[Task], int], bool],
        is_measured: Callable[[Task], bool] = lambda task: False,
        winner: str = "",
    ) -> Forms:
        """The forms that are worth measuring under a budget, best first.

        The first is the one of the given graph whose kernels cost least, unless what the graph search made is clearly
        cheaper by prices that were measured and the budget reaches for all its kernels, or another form was the
        `winner` of an earlier run. The others follow by price while the budget reaches for a first look at them all:
        `affordable(kernels, candidates of each)`. The new graph always competes where its price is clearly lower:
        estimates stand in for what is not reached, and whole models are timed. A lossy form never competes alone.
        """
        prices = {task.workload_hash: price_s(task) for task in self.tasks}
        total_s = {
            form.name: Variant(form.name, form.calls).latency_s(prices) * (CHANNELS_FIRST if form.channels_first else 1)
            for form in self.forms
        }
        ranked = sorted(self.forms, key=lambda form: total_s[form.name])
        given = next(form for form in ranked if not form.rewritten)
        rewritten = [form for form in ranked if form.rewritten][:1]
        clearly = [form for form in rewritten if total_s[form.name] < CLEARLY * total_s[given.name]]
        order = [given, *rewritten, *ranked]
        for form in clearly:
            common = form.calls.keys() & given.calls.keys()
            differing = [t for t in (*form.tasks, *given.tasks) if t.workload_hash not in common]
            guessed_s = sum(t.calls * prices[t.workload_hash] for t in differing if not is_measured(t))
            if guessed_s < MOST_GUESSED * total_s[form.name] and affordable(form.tasks, GLANCE):
                order.insert(0, form)
        won = [form for form in self.forms if form.digest == winner]
        chosen: list[Form] = []
        for form in {form.name: form for form in [*won, *order]}.values():
            hopeful = form in clearly and not won
            if not chosen or hopeful or affordable(Forms([*chosen, form]).tasks, FIRST_LOOK):
                chosen.append(form)
            else:
                LOGGER.info("the budget does not reach for the form %r", form.name)
        if all(form.lossy for form in chosen):
            chosen.append(next(form for form in ranked if not form.lossy))
        return Forms(chosen)

    def exact(self, best_s: Mapping[str, float]) -> Form:
        """The form without fast math that costs least by these latencies of kernels, in seconds by workload hash."""
        return min(
            (form for form in self.forms if not form.lossy),
            key=lambda form: Variant(form.name, form.calls).latency_s(best_s),
        )


def graph_config(graph: Any, fast_math: bool = False) -> GraphConfig | None:
    """The configuration of the graph search; None where it is off.

    Parameters
    ----------
    graph : str or GraphConfig
        "saturate" or "off", or a configuration.
    fast_math : bool
        Permit lossy rules; so does a configuration that says so itself.

    Raises
    ------
    InputError
        For another value of `graph`, or fast math without a graph search.
    """
    check_graph(graph, fast_math)
    if graph == "off":
        return None
    from ..graph_search import GraphConfig

    if isinstance(graph, GraphConfig):
        return replace(graph, fast_math=graph.fast_math or fast_math)
    return GraphConfig(fast_math=fast_math)


def check_graph(graph: Any, fast_math: bool = False) -> None:
    """What `graph_config` raises; by name, without loading the graph search, which takes most of a second."""
    if graph == "off" and fast_math:
        raise InputError(
            "fast_math permits rules of the graph search, which graph='off' leaves out; drop one of the two"
        )
    if graph in ("off", "saturate"):
        return
    from ..graph_result import GraphConfig

    if not isinstance(graph, GraphConfig):
        raise InputError(f"graph must be 'saturate', 'off' or a GraphConfig, not {graph!r}")
    graph.check_permitted(fast_math)


def model_forms(
    mod: Any, target: Any, graph: Any, prices: GraphPrices | None = None, seconds: float = math.inf
) -> tuple[Forms, GraphResult | None]:
    """The forms of a Relax module with weights as constants, and the graph search's result (None when it is off).

    `graph` is as `graph_config` takes it. `prices` are what the graph search goes by; its best two graphs compete then.
    It takes `seconds` at most, roughly; 0 leaves it out, and so does a graph that takes longer to lower than that: an
    LSTM of 300 steps has thousands of calls, and its search ended after a minute where it had four seconds. With few
    seconds there are no forms with channels first where channels can be last. With fast math, the best graph without it
    competes, too.
    """
    config = graph_config(graph)
    mod = simplify(mod, target)
    graphs: list[_Graph] = []
    result = None
    if config is not None:
        hopeless = prices is not None and _takes_longer(partial(prices.lowered, mod), seconds)
        graphs, result = _rewritten(mod, config, prices, 0.0 if hopeless else seconds)
        if hopeless:
            result.kept_because = f"lowering one graph takes longer than the {seconds:.1f} s of the graph search"
    forms: list[Form] = []
    for name, candidate, lossy in [*graphs, ("as given", mod, False)]:
        last = tvm.transform.Sequential([ChannelsLast()])(candidate)
        can_be_last = not tvm_ffi.structural_equal(last, candidate)
        kernels = _tiled(lower_to_kernels(last, target) if prices is None else prices.lowered(candidate), target)
        rewritten = candidate is not mod
        last_name = f"{name}, channels last" if can_be_last else name
        forms.append(Form(last_name, kernels, known_tasks(kernels), rewritten, lossy))
        if can_be_last and seconds >= BOTH_LAYOUTS_S * len(forms[-1].tasks):
            kernels = _tiled(lower_to_kernels(candidate, target), target)
            forms.append(Form(name, kernels, known_tasks(kernels), rewritten, lossy, channels_first=True))
    if config is not None and config.fast_math:
        hardware = describe_machine(target, measure=False) if prices is None else prices.hardware
        forms = _with_lossy_products(forms, hardware)
    distinct = _distinct(forms)
    for form in distinct:
        LOGGER.info("form %r: %d kernels, %d calls", form.name, len(form.tasks), sum(t.calls for t in form.tasks))
    return Forms(distinct), result


def _tiled(kernels: Any, target: Any) -> Any:
    """With loops over tiles, by estimate, for kernels whose sizes are known only when the model runs: those behind a
    choice, such as of boxes. All others are tuned."""
    if not any(isinstance(kernel, tvm.tirx.PrimFunc) and is_symbolic(kernel) for kernel in kernels.functions.values()):
        return kernels
    with target:
        return tile_symbolic_kernels(kernels, machine_running(kernels, target))


def _distinct(forms: Sequence[Form]) -> list[Form]:
    """One form of each set of kernels: the given graph's, if it is among them, else an exact one, else the first.

    Graphs that differ may become the same kernels, once they are fused.
    """
    chosen: dict[str, Form] = {}
    for form in sorted(forms, key=lambda form: (form.rewritten, form.lossy)):
        chosen.setdefault(form.digest, form)
    return [form for form in forms if any(form is kept for kept in chosen.values())]


def _takes_longer(work: Callable[[], Any], seconds: float) -> bool:
    """Whether `work`, which is kept, takes longer; it is not tried where there is no time or no limit."""
    if not 0 < seconds < math.inf:
        return False
    started = time.monotonic()
    work()
    return time.monotonic() - started > seconds


def _rewritten(
    mod: Any, config: GraphConfig, prices: GraphPrices | None, seconds: float
) -> tuple[list[_Graph], GraphResult]:
    """The best two graphs that the search finds, and the best without fast math; its result."""
    from ..graph_search import optimize_graph

    # The tuned model is compared with the reference as a whole, and competes with the original on time.
    config = replace(config, verify=False, seconds=min(seconds, config.seconds))
    result = optimize_graph(mod, config, prices=prices)
    if not result.changed:
        return [], result
    lossy = config.fast_math
    name = FAST_MATH if lossy else REWRITTEN
    found: list[_Graph] = [(REWRITTEN, result.exact, False)] if lossy and result.exact is not None else []
    others = [other for other in result.alternatives if other is not result.exact]
    found += [(name, result.mod, lossy), *((f"{name} otherwise", other, lossy) for other in others[:1])]
    return found, result


def _with_lossy_products(forms: Sequence[Form], hardware: Hardware) -> list[Form]:
    """Forms, and after them those whose products of float32 may be three of smaller numbers each.

    A form that is lossy anyway has no use for exact ones.
    """
    kept, added = [], []
    for form in forms:
        kernels = permit_lossy_products(form.mod, hardware)
        if all(new.same_as(form.mod[variable]) for variable, new in kernels.functions.items()):
            kept.append(form)
            continue
        name = f"{form.name}, {lossy_products(hardware)}"
        lossy = replace(form, name=name, mod=kernels, tasks=known_tasks(kernels), lossy=True)
        if form.lossy:
            kept.append(lossy)
        else:
            kept.append(form)
            added.append(lossy)
    return [*kept, *added]
