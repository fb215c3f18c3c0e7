"""Measured prices for the graph search: of terms, to extract by, and of whole graphs, to choose by.

A term is priced as the kernel that it becomes by itself; what is nearly free inside another's kernel (element-wise
functions, slices, reshapes) keeps its analytic price. That is only to find good graphs: they are then lowered, fused
and priced kernel by kernel.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax, transform

from .relax_ir.constants import constant_of
from .search.graph.attributes import TensorType
from .search.graph.cost import AnalyticCost, MeasuredCost, TermCost, TermKey, graph_cost_s, term_keys
from .search.graph.relax_ops import write_term
from .search.graph.terms import TermGraph
from .search.space.hardware import Hardware
from .tasks import Task, known_tasks, lower_to_kernels, permit_lossy_products
from .transform.layout import ChannelsLast

__all__ = ["GraphPrices"]

PriceKernels = Callable[[Sequence[Task]], list[float]]
"""Tasks -> seconds of one call of each."""

PRICED = frozenset(
    {"matmul", "conv2d", "blocked_conv2d", "pool2d", "softmax", "winograd_conv2d", "winograd_data", "winograd_result"}
)
"""Terms whose kernels are measured. What only moves data is estimated: by itself it is seldom what it is when fused."""

IMAGES = frozenset({"conv2d", "pool2d", "winograd_conv2d", "winograd_data", "winograd_result"})
"""Terms whose kernels are wanted with channels last: what only moves data to get there is not theirs to pay."""

PROMISING = 0.95
"""Of the given graph's cost, by what is known, what another may cost for its terms to be measured under a budget."""

PRICING = 2.5
"""How many times as long as lowering a module takes all that its price takes, estimating its kernels above all."""

FIRST_TERMS = 4
"""Terms that are lowered before it is known how long all of them would take (a slow machine, inceptionv3: 11 s for 77
terms, more than the graph search had, and no time was left to measure one)."""

MOST_WEIGHTS_BYTES = 1 << 30
"""A term with larger weights keeps its analytic price: only its shape is wanted, but TVM holds the weights."""


@dataclass
class GraphPrices:
    """A `Pricing` of terms, and the price of a module, both as sums over kernels.

    Parameters
    ----------
    kernels : callable
        Tasks -> seconds of one call of each, for example `eqtune.tune.prices.KernelPrices`.
    target : tvm.target.Target
    hardware : Hardware
        Of the target: what is not measured is estimated for it.
    terms : callable or None
        As `kernels`, for the terms that graphs are extracted by; None: terms are estimated, only modules measured.
    guess : callable or None
        Task -> seconds of one call, at no cost: for kernels that all modules have in common, where time is short. None:
        these are measured, too.
    fast_math : bool
        Whether kernels are priced with products that are less exact, where the machine has faster ones.
    terms_s : float
        Seconds that pricing terms may take; where they would take longer, they keep their estimates.
    """

    kernels: PriceKernels
    target: Any
    hardware: Hardware
    terms: PriceKernels | None
    guess: Callable[[Task], float] | None = None
    fast_math: bool = False
    terms_s: float = math.inf
    _prices_s: dict[TermKey, float] = field(default_factory=dict)
    _unpriced: set[TermKey] = field(default_factory=set)
    _lowered: dict[int, tuple[Any, Any, list[Task]]] = field(default_factory=dict)

    @property
    def cost(self) -> TermCost:
        """See `Pricing`."""
        return MeasuredCost(dict(self._prices_s), AnalyticCost(self.hardware))

    def learn(self, graphs: Sequence[TermGraph]) -> bool:
        """See `Pricing`. All new kernels are measured together.

        Where time is short, nothing is for graphs that promise little: their kernels need the time more; and nothing
        where all would take longer than `terms_s`.
        """
        if self.terms is None or (self.guess is not None and not self._promising(graphs)):
            return False
        started = time.monotonic()
        unknown = {
            key: result
            for key, result in _merged(term_keys(graph) for graph in graphs).items()
            if key[0] in PRICED and key not in self._prices_s and key not in self._unpriced
        }
        new: dict[TermKey, list[Task]] = {}
        for count, (key, result) in enumerate(unknown.items()):
            all_s = (time.monotonic() - started) / max(1, count) * len(unknown)
            if count >= FIRST_TERMS and PRICING * all_s > self.terms_s:
                return False
            tasks = self._tasks(key, result)
            if tasks is None:
                self._unpriced.add(key)
            else:
                new[key] = tasks
        prices = iter(self.terms([task for tasks in new.values() for task in tasks]))
        for key, tasks in new.items():
            self._prices_s[key] = sum(task.calls * next(prices) for task in tasks)
        return bool(new)

    def _promising(self, graphs: Sequence[TermGraph]) -> bool:
        given_s, *others_s = (graph_cost_s(graph, self.cost) for graph in graphs)
        return min(others_s, default=math.inf) < PROMISING * given_s

    def modules_s(self, mods: Sequence[Any], seconds: float = math.inf) -> list[float]:
        """Seconds of one run of each module, in channels last where it has convolutions, each kernel by its price.

        Parameters
        ----------
        mods : sequence of tvm.ir.IRModule
            Simplified: batch norms and weights folded.
        seconds : float
            What pricing may take, roughly; modules that are too many for it, from the third on, get `inf`.
        """
        started = time.monotonic()
        kernels: list[list[Task]] = []
        for mod in mods:
            if len(kernels) > 1 and PRICING * (time.monotonic() - started) > seconds:
                break
            kernels.append(self._kept(mod)[1])
        distinct = {task.workload_hash: task for tasks in kernels for task in tasks}
        common = set.intersection(*({task.workload_hash for task in tasks} for tasks in kernels))
        guessed = common if self.guess is not None and len(kernels) > 1 else set()
        measured = [task for workload, task in distinct.items() if workload not in guessed]
        price_s = {task.workload_hash: s for task, s in zip(measured, self.kernels(measured), strict=True)}
        if self.guess is not None:  # after the others, which tell how far estimates are off
            price_s |= {workload: self.guess(distinct[workload]) for workload in guessed}
        sums = [sum(task.calls * price_s[task.workload_hash] for task in tasks) for tasks in kernels]
        return sums + [math.inf] * (len(mods) - len(kernels))

    def lowered(self, mod: Any) -> Any:
        """The module in channels last, lowered. Kept: who asks for a price often wants the kernels."""
        return self._kept(mod)[0]

    def _kept(self, mod: Any) -> tuple[Any, list[Task]]:
        """The module in channels last, lowered, and the tasks that it is priced by."""
        if id(mod) not in self._lowered:
            kernels = lower_to_kernels(_channels_last(mod), self.target)
            self._lowered[id(mod)] = mod, kernels, self._priced(kernels)
        return self._lowered[id(mod)][1:]

    def _priced(self, kernels: Any) -> list[Task]:
        """The tasks of a lowered module, with what is permitted."""
        return known_tasks(permit_lossy_products(kernels, self.hardware) if self.fast_math else kernels)

    def _tasks(self, key: TermKey, result: TensorType) -> list[Task] | None:
        """The kernels of one term; None where it has none that can be priced."""
        op, attrs, types, weights = key
        weight_bytes = sum(ty.size_bytes for ty, weight in zip(types, weights, strict=True) if weight)
        if weight_bytes > MOST_WEIGHTS_BYTES or min(math.prod(ty.shape) for ty in (*types, result)) == 0:
            return None
        mod = _module(op, attrs, types, weights, result)
        if op not in IMAGES:
            return self._priced(lower_to_kernels(mod, self.target))
        tasks = self._priced(lower_to_kernels(_channels_last(mod), self.target))
        return [task for task in tasks if task.flops] or tasks


def _merged(mappings: Any) -> Mapping[TermKey, TensorType]:
    return {key: result for mapping in mappings for key, result in mapping.items()}


def _channels_last(mod: Any) -> Any:
    return transform.Sequential([ChannelsLast()])(mod)


def _module(
    op: str, attrs: Any, types: Sequence[TensorType], weights: Sequence[bool], result: TensorType
) -> tvm.ir.IRModule:
    """A function of one term: weights are constants, everything else is a parameter."""
    builder = relax.BlockBuilder()
    params: list[Any] = []
    arguments: list[Any] = []
    for position, (ty, weight) in enumerate(zip(types, weights, strict=True)):
        if weight:
            arguments.append(constant_of(np.zeros(ty.shape, ty.dtype)))
        else:
            params.append(relax.Var(f"x{position}", relax.TensorType(ty.shape, ty.dtype)))
            arguments.append(params[-1])
    with builder.function("main", params):
        with builder.dataflow():
            output = builder.emit_output(builder.normalize(write_term(op, attrs, arguments, types, result)))
        builder.emit_func_output(output)
    return builder.get()
