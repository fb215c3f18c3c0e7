"""A graph that Dynamo captured, and what was tuned of it."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ..errors import InputError, RecordError, SetupError, UnsupportedModelError
from ..runtime import first_line
from ..tune import tune_model
from .any_size import NUMBERS_DIFFER, check_other_sizes, compiled, in_order, sizes_of
from .described import check_arguments, check_operators, described
from .exported import Frozen, changed_arguments, program_of
from .floats import floats_of, with_floats
from .memory import Layout
from .stays import Stays
from .tuned import Tuned, compared_s
from .weights import Number, State, Weights

__all__ = ["CapturedGraph"]

LEAST_GAIN = 1.1
"""PyTorch takes so many times as long, or the graph stays there: what runs between tuned graphs costs both runtimes'
threads the cores of the other's for a while."""

MOST_CHANGES = 2
"""So often a graph is tuned with other values of a weight, as when a model loads others; then it becomes an input."""

MOST_MODULES = 64
"""So many modules may share a graph, as blocks of one kind that are compiled one by one; each has its own constants."""

_TUNING = threading.Lock()
"""Exports in several threads change each other's dispatch tables."""


class CapturedGraph:
    """A graph that Dynamo captured: called as it is, tuned when it is first called.

    It runs as it is in a forked process, where TVM's threads are missing, and while PyTorch differentiates forwards.

    Parameters
    ----------
    graph : torch.fx.GraphModule
    options : mapping
        Arguments of `tune_model`.
    """

    def __init__(self, graph: torch.fx.GraphModule, options: Mapping[str, Any]) -> None:
        self._graph, self._options = graph, dict(options)
        self._floats = floats_of(graph)
        self._tuned: list[Tuned] = []
        self._stays = False
        self._changes: Counter[int] = Counter()
        self._process = os.getpid()

    def __call__(self, *arguments: Any) -> Any:
        """The graph's outputs; arguments that it changes are changed."""
        if self._stays or os.getpid() != self._process or forward_ad._current_level >= 0:
            return self._graph(*arguments)
        tuned = self._fitting(arguments)
        if tuned is None:
            with _TUNING:
                tuned = self._fitting(arguments) or self._newly_tuned(arguments)
        if tuned is None or not tuned.fits(arguments) or tuned.overlap(arguments):
            return self._graph(*arguments)
        return tuned(arguments)

    def _fitting(self, arguments: Sequence[Any]) -> Tuned | None:
        """What was tuned with these weights."""
        return next((tuned for tuned in self._tuned if tuned.weights.are_unchanged(arguments)), None)

    def _newly_tuned(self, arguments: Sequence[Any]) -> Tuned | None:
        """The graph, tuned with the weights that are given; None where it stays with PyTorch."""
        if self._stays:
            return None
        if self._tuned:
            gc.collect()  # programs that were exported keep parameters in cycles
        weights = [(tuned, tuned.weights) for tuned in self._tuned]
        former = next((tuned for tuned, its in weights if its.are_of_one_module(arguments) or its.are_gone()), None)
        if former is None and len(self._tuned) == MOST_MODULES:
            former = self._tuned[0]
        if former is not None:
            self._changes.update(former.weights.changed(arguments))
            self._tuned.remove(former)
        try:
            with torch.random.fork_rng(devices=[]):
                self._tuned.append(self._tune(arguments))
        except Stays as reason:
            self._stays = True
            self._tuned.clear()
            if str(reason):
                warnings.warn(f"a graph stays with PyTorch: {reason}", stacklevel=3)
            return None
        return self._tuned[-1]

    def _tune(self, arguments: Sequence[Any]) -> Tuned:
        check_arguments(arguments)
        check_operators(self._graph)
        sizes = sizes_of(self._graph, arguments)
        outputs = described(self._graph, arguments)
        frozen = [index for index, value in enumerate(arguments) if self._is_constant(index, value)]
        states = {index: (Number if index in self._floats else State).of(arguments[index]) for index in frozen}
        graph = with_floats(self._graph, {index: arguments[index].item() for index in self._floats if index in frozen})
        computed = [index for index, value in enumerate(outputs) if isinstance(value, Layout)]
        laid_out = in_order(outputs) if sizes else outputs
        module = Frozen(graph, arguments, frozen, computed, numbers=sizes.numbers)
        try:
            program = program_of(module, arguments, sizes.dimensions)
        except Stays as error:
            raise (Stays(NUMBERS_DIFFER) if any(map(self._changes.get, self._floats)) else error) from error
        changed = changed_arguments(program, module)
        if changed and sizes:
            raise Stays("it changes what it is given, and sizes differ from call to call")
        if changed:
            frozen = [index for index in frozen if index not in changed]
            module = Frozen(graph, arguments, frozen, computed, changed)
            program = program_of(module, arguments)
        if not computed and not changed:
            raise Stays("")
        weights = Weights({index: states[index] for index in frozen}, arguments, self._graph)
        options = {"threads": torch.get_num_threads()} | self._options
        if sizes:
            model = compiled(program, options["threads"], bool(options.get("fast_math", False)))
            try:
                tuned = Tuned(model, weights, module.inputs, (), laid_out, arguments, model.limits)
            except Exception as error:  # TVM raises anything
                raise Stays(f"compiled for any size, it fails: {first_line(error)}") from error
            check_other_sizes(tuned, self._graph, arguments, sizes)
        else:
            tuned = Tuned(_result(program, options), weights, module.inputs, changed, laid_out, arguments)
        tuned_s, torch_s = compared_s(tuned, self._graph, arguments, changed)
        if torch_s < LEAST_GAIN * tuned_s:
            raise Stays(f"tuned it takes {tuned_s * 1e3:.3g} ms, with PyTorch {torch_s * 1e3:.3g} ms")
        return tuned

    def _is_constant(self, index: int, value: torch.Tensor) -> bool:
        """Whether an argument is the same tensor in each call, as far as one can know, and changes can be seen."""
        if index in self._floats:
            return not self._changes[index]
        of_module = isinstance(value, torch.nn.Parameter) or hasattr(value, "_dynamo_static_input_type")
        return of_module and not value.is_inference() and self._changes[index] <= MOST_CHANGES


def _result(program: torch.export.ExportedProgram, options: Mapping[str, Any]) -> Any:
    """The tuned program. Raises Stays where it cannot be tuned."""
    try:
        return tune_model(program, **options)
    except UnsupportedModelError as error:
        raise Stays(str(error)) from error
    except (InputError, RecordError, SetupError):
        raise
    except Exception as error:  # of TVM, or of the model's own code with other numbers
        raise Stays(f"it cannot be tuned: {first_line(error)}") from error
