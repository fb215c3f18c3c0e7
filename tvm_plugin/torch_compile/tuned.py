"""A tuned graph, called as the captured one is, and timed beside it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..tune.result import Limit
from .memory import InOrder, Layout, View, copy_of, meet, memory, plain
from .weights import Weights

__all__ = ["Tuned", "compared_s"]

TURNS, TURN_S, CALLS_A_TURN = 3, 0.1, 200
"""Both run this often in turns, each time for that long."""


class Tuned:
    """A tuned graph, on PyTorch's tensors.

    Parameters
    ----------
    result : TuneResult or AnySize
    weights : Weights
    inputs : sequence of int
        Which arguments it takes.
    changed : sequence of int
        Which ones it returns changed, behind its outputs.
    outputs : sequence
        Layouts of what it computes, views, and what is no tensor.
    arguments : sequence of Tensor
        Any that it can be called with: to find out which of TVM's results have no memory of their own.
    limits : sequence of Limit
        What the sizes of inputs have to be.
    """

    def __init__(
        self,
        result: Any,
        weights: Weights,
        inputs: Sequence[int],
        changed: Sequence[int],
        outputs: Sequence[Any],
        arguments: Sequence[torch.Tensor],
        limits: Sequence[Limit] = (),
    ) -> None:
        self.weights, self._limits = weights, tuple(limits)
        self._run = result.run_tensors
        self._inputs, self._changed = tuple(inputs), tuple(changed)
        self._outputs = tuple(outputs)
        self._borrowed = self._without_own_memory(arguments)

    def __call__(self, arguments: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """What the captured graph returns for these, some of which it may change."""
        returned = self.compute(arguments)
        for index in reversed(self._changed):
            with torch.no_grad():
                arguments[index].copy_(returned.pop())
        tensors = iter(returned)
        computed = Layout | InOrder
        outputs = [one.laid_out(next(tensors)) if isinstance(one, computed) else one for one in self._outputs]
        for index, output in enumerate(outputs):
            if isinstance(output, View):
                outputs[index] = output.made_of(arguments, outputs)
        return tuple(outputs)

    def compute(self, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The computed outputs, and what becomes of the arguments that the graph changes."""
        tensors = self._results([arguments[index] for index in self._inputs])
        for index in self._borrowed:
            tensors[index] = tensors[index].clone()
        return tensors

    def _results(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.from_dlpack(tensor) for tensor in self._run(*map(plain, inputs))]

    def fits(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether it takes arguments of these sizes: torch.export may have permitted less than Dynamo."""
        return all(
            limit.size.permits(arguments[self._inputs[limit.input]].size(limit.dimension)) for limit in self._limits
        )

    def overlap(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether an argument that the graph changes lies where another one does."""
        if not self._changed:
            return False
        places = [memory(argument) for argument in arguments]
        return any(
            meet(places[index], place)
            for index in self._changed
            for other, place in enumerate(places)
            if other != index
        )

    def _without_own_memory(self, arguments: Sequence[torch.Tensor]) -> list[int]:
        """Which results are constants, inputs, or the memory of results before them: TVM makes no copies of those."""
        inputs = [plain(arguments[index]).clone() for index in self._inputs]
        kept = self._results(inputs)
        taken = [memory(tensor) for tensor in itertools.chain(inputs, kept)]
        borrowed = []
        for index, tensor in enumerate(self._results(inputs)):
            if any(meet(memory(tensor), place) for place in taken):
                borrowed.append(index)
            taken.append(memory(tensor))
        return borrowed


def compared_s(
    tuned: Tuned, graph: Callable[..., Any], arguments: Sequence[torch.Tensor], changed: Sequence[int]
) -> tuple[float, float]:
    """Seconds of one call, tuned and with PyTorch: the minimum of several, in turns, on copies.

    A turn is many calls: after each change, the threads of the other one still wait on the cores for some more work.
    """
    copies = [copy_of(value) for value in arguments]
    runs, best = (lambda: tuned.compute(copies), lambda: graph(*copies)), [math.inf, math.inf]
    for _ in range(TURNS):
        for index, run in enumerate(runs):
            started = time.perf_counter()
            for _ in range(CALLS_A_TURN):
                with torch.no_grad():  # of weights that the graph changes without gradients
                    for other in changed:
                        copies[other].copy_(arguments[other])
                before = time.perf_counter()
                run()
                now = time.perf_counter()
                best[index] = min(best[index], now - before)
                if now - started > TURN_S:
                    break
    return best[0], best[1]
