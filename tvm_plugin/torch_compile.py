"""`torch.compile(model, backend="eqtune", options={...})`: what Dynamo captures is tuned when it is first called.

PyTorch's own backend "tvm" went with Relay. This one is found by the entry point "torch_dynamo_backends". A captured
graph gets weights as arguments in each call; here they become constants, as tuning needs them, and each call looks
whether they are still what they were. What cannot be tuned, and what is no faster, stays with PyTorch; a warning says
so.
"""

from __future__ import annotations

import inspect
import math
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.export
from torch.export.graph_signature import OutputKind

from .errors import EqtuneError, InputError, MismatchError, UnsupportedModelError
from .frontends.torch_model import quiet
from .frontends.torch_state import decomposed
from .runtime import first_line
from .tune import tune_model

__all__ = ["CapturedGraph", "compile_graph"]

BUDGET_S = 120.0
"""Of one graph, unless options say otherwise: a model may be captured in several."""

EAGER_IS_ENOUGH_S = 30e-6
"""Graphs that PyTorch runs in less gain nothing: to hand tensors over takes as long."""

LOOKS = 3
"""So often PyTorch runs a graph before that is known: first runs are slow."""

LEAST_GAIN = 1.1
"""PyTorch takes so many times as long, or the graph stays there: what runs between tuned graphs costs both runtimes'
threads the cores of the other's for a while."""

TURNS, TURN_S, CALLS_A_TURN = 3, 0.1, 200
"""Both run this often in turns, each time for that long."""

MOST_CHANGES = 2
"""So often a graph is tuned with other values of a weight, as when a model loads others; then it becomes an input."""

ALIGNMENT = 64
"""Bytes."""

_CHANGES = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
_ANSWERED_HERE = ("model", "params", "example_inputs", "shapes", "target")
OPTIONS = tuple(name for name in inspect.signature(tune_model).parameters if name not in _ANSWERED_HERE)


def compile_graph(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> CapturedGraph:
    """What `torch.compile(..., backend="eqtune")` calls for each graph that it captures.

    Parameters
    ----------
    graph : torch.fx.GraphModule
    example_inputs : sequence
        Not used: they may be fake. The graph is tuned with what it is first called with.
    mode : str, optional
        Belongs to PyTorch's own backend, and is refused.
    options : mapping, optional
        Arguments of `tune_model` by name (`time_budget_s`, `trials`, `work_dir`, `fast_math`, ...). A graph gets 120 s
        unless `time_budget_s` or `trials` is given.

    Raises
    ------
    InputError
        An option that `tune_model` does not have, or a mode.
    """
    if mode is not None:
        raise InputError(f"mode={mode!r} belongs to PyTorch's own backend; give options={{'trials': 500}}, say")
    given = dict(options or {})
    for name in given:
        if name not in OPTIONS:
            raise InputError(f"the backend eqtune has no option {name!r}; its options are {', '.join(OPTIONS)}")
    if given.get("trials") is None and given.get("time_budget_s") is None:
        given["time_budget_s"] = BUDGET_S
    return CapturedGraph(graph, given)


class CapturedGraph:
    """A graph that Dynamo captured: called as it is, tuned when it is first called.

    Parameters
    ----------
    graph : torch.fx.GraphModule
    options : mapping
        Arguments of `tune_model`.
    """

    def __init__(self, graph: torch.fx.GraphModule, options: Mapping[str, Any]) -> None:
        self._graph, self._options = graph, dict(options)
        self._tuned: _Tuned | None = None
        self._stays = False
        self._changes: Counter[int] = Counter()
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        """The graph's outputs; arguments that it changes are changed."""
        tuned = self._tuned
        if tuned is None or not tuned.weights.are_unchanged(arguments):
            with self._lock:
                tuned = self._current(arguments)
        return self._graph(*arguments) if tuned is None else tuned(arguments)

    def _current(self, arguments: Sequence[Any]) -> _Tuned | None:
        """The graph, tuned with the weights that are given; None where it stays with PyTorch."""
        if self._stays:
            return None
        if self._tuned is not None:
            changed = self._tuned.weights.changed(arguments)
            if not changed:
                return self._tuned  # another thread has tuned it
            self._changes.update(changed)
            self._tuned = None
        try:
            self._tuned = self._tune(arguments)
        except _Stays as reason:
            self._stays = True
            if str(reason):
                warnings.warn(f"a graph stays with PyTorch: {reason}", stacklevel=3)
        return self._tuned

    def _tune(self, arguments: Sequence[Any]) -> _Tuned:
        _check_arguments(arguments)
        outputs = self._outputs(arguments)
        frozen = [index for index, value in enumerate(arguments) if self._is_constant(index, value)]
        computed = [index for index, value in enumerate(outputs) if isinstance(value, _Layout)]
        module = _Frozen(self._graph, arguments, frozen, computed)
        program = _exported(module, arguments)
        changed = _changed(program, module)
        if changed:
            frozen = [index for index in frozen if index not in changed]
            module = _Frozen(self._graph, arguments, frozen, computed, changed)
            program = _exported(module, arguments)
        if not computed and not changed:
            raise _Stays("")
        try:
            result = tune_model(program, **{"threads": torch.get_num_threads()} | self._options)
        except (UnsupportedModelError, MismatchError) as error:
            raise _Stays(str(error)) from error
        weights = _Weights(arguments, frozen)
        tuned = _Tuned(result, weights, module.inputs, changed, outputs)
        tuned_s, torch_s = _compared_s(tuned, self._graph, arguments, changed)
        if torch_s < LEAST_GAIN * tuned_s:
            raise _Stays(f"tuned it takes {tuned_s * 1e3:.3g} ms, with PyTorch {torch_s * 1e3:.3g} ms")
        return tuned

    def _is_constant(self, index: int, value: torch.Tensor) -> bool:
        """Whether an argument is the same tensor in each call, as far as one can know."""
        of_module = isinstance(value, torch.nn.Parameter) or hasattr(value, "_dynamo_static_input_type")
        return of_module and self._changes[index] <= MOST_CHANGES

    def _outputs(self, arguments: Sequence[torch.Tensor]) -> list[Any]:
        """What the graph returns for these, which it leaves as they are: layouts, views, and what is no tensor."""
        fastest_s = math.inf
        for _ in range(LOOKS):
            copies = [value.clone() for value in arguments]
            started = time.perf_counter()
            outputs = self._graph(*copies)
            fastest_s = min(fastest_s, time.perf_counter() - started)
        if fastest_s < EAGER_IS_ENOUGH_S:
            raise _Stays("")
        owners = {_address(copy): index for index, copy in enumerate(copies) if copy.numel()}
        described: list[Any] = []
        for value in outputs:
            owner = owners.get(_address(value)) if isinstance(value, torch.Tensor) else None
            if owner is not None:
                described.append(_View.of(value, owner, copies[owner], arguments[owner]))
            else:
                described.append(_Layout.of(value) if isinstance(value, torch.Tensor) else value)
        return described


class _Stays(Exception):
    """Why a graph is not tuned; empty where nobody need know."""


class _Frozen(torch.nn.Module):
    """A captured graph that takes its weights from itself, and returns what it changes behind its outputs.

    Parameters
    ----------
    graph : torch.fx.GraphModule
    arguments : sequence of Tensor
    frozen : sequence of int
        Which of them are weights.
    computed : sequence of int
        The outputs to return.
    changed : sequence of int
        The arguments that the graph changes.

    Attributes
    ----------
    inputs : list of int
        The arguments that are left.
    """

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        arguments: Sequence[torch.Tensor],
        frozen: Sequence[int],
        computed: Sequence[int],
        changed: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.graph = graph
        self._computed = tuple(computed)
        self.inputs = [index for index in range(len(arguments)) if index not in frozen]
        self._changed = tuple(changed)
        self._names = {index: f"argument_{index}" for index in frozen}
        for index, name in self._names.items():
            self.register_buffer(name, arguments[index].detach())

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The computed outputs, and what the graph has changed."""
        values = dict(zip(self.inputs, inputs, strict=True))
        values |= {index: self.get_buffer(name) for index, name in self._names.items()}
        values |= {index: values[index].clone() for index in self._changed}
        outputs = self.graph(*(values[index] for index in sorted(values)))
        return (*(outputs[index] for index in self._computed), *(values[index] for index in self._changed))

    def argument(self, buffer: str) -> int:
        """Which argument a buffer is."""
        return next(index for index, name in self._names.items() if name == buffer)


def _check_arguments(arguments: Sequence[Any]) -> None:
    """Raises _Stays for what cannot be tuned."""
    for value in arguments:
        if isinstance(value, int | float | torch.SymInt):
            raise _Stays("sizes differ from call to call; with torch.compile(dynamic=False) each is tuned by itself")
        if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise _Stays(f"it takes a {type(value).__name__}")
        if value.device.type != "cpu":
            raise _Stays(f"its tensors are on {value.device}, and this backend compiles for the CPU")
    if torch.is_grad_enabled() and any(value.requires_grad for value in arguments):
        raise _Stays("it needs gradients, which eqtune does not compute; call it under torch.inference_mode()")


def _exported(module: _Frozen, arguments: Sequence[Any]) -> torch.export.ExportedProgram:
    with torch.inference_mode(False), torch.no_grad(), quiet():
        inputs = tuple(arguments[index].detach().clone() for index in module.inputs)
        try:
            return torch.export.export(module, inputs, strict=False)
        except Exception as error:  # what torch cannot export it raises anything for
            raise _Stays(f"torch.export cannot export it: {first_line(error)}") from error


def _changed(program: torch.export.ExportedProgram, module: _Frozen) -> list[int]:
    """The arguments that a graph changes."""
    with quiet():
        try:
            functional = decomposed(program, {})
        except EqtuneError as error:
            raise _Stays(str(error)) from error
    inputs = list(functional.graph_signature.user_inputs)
    changed = []
    for spec in functional.graph_signature.output_specs:
        if spec.kind in _CHANGES and spec.target is not None:
            of_input = spec.kind == OutputKind.USER_INPUT_MUTATION
            changed.append(module.inputs[inputs.index(spec.target)] if of_input else module.argument(spec.target))
    return sorted(changed)


@dataclass(frozen=True)
class _State:
    """What tells that a tensor has been assigned to. Assignments to its `.data` show only where it moves."""

    tensor: torch.Tensor
    version: int
    address: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _State:
        return _State(tensor, -1 if tensor.is_inference() else tensor._version, tensor.data_ptr())

    def holds_for(self, tensor: torch.Tensor) -> bool:
        return (
            tensor is self.tensor
            and (self.version < 0 or tensor._version == self.version)
            and tensor.data_ptr() == self.address
        )


class _Weights:
    """The arguments that became constants, as they were."""

    def __init__(self, arguments: Sequence[Any], frozen: Sequence[int]) -> None:
        self._states = [(index, _State.of(arguments[index])) for index in frozen]

    def are_unchanged(self, arguments: Sequence[Any]) -> bool:
        return all(state.holds_for(arguments[index]) for index, state in self._states)

    def changed(self, arguments: Sequence[Any]) -> list[int]:
        return [index for index, state in self._states if not state.holds_for(arguments[index])]


class _Tuned:
    """A tuned graph, on PyTorch's tensors.

    Parameters
    ----------
    result : TuneResult
    weights : _Weights
    inputs : sequence of int
        Which arguments it takes.
    changed : sequence of int
        Which ones it returns changed, behind its outputs.
    outputs : sequence
        Layouts of what it computes, views of arguments, and what is no tensor.
    """

    def __init__(
        self,
        result: Any,
        weights: _Weights,
        inputs: Sequence[int],
        changed: Sequence[int],
        outputs: Sequence[Any],
    ) -> None:
        self.weights = weights
        self._run = result.run_tensors
        self._inputs, self._changed = tuple(inputs), tuple(changed)
        self._outputs = tuple(outputs)

    def __call__(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        returned = self.compute(arguments)
        for index in reversed(self._changed):
            with torch.no_grad():
                arguments[index].copy_(returned.pop())
        tensors, outputs = iter(returned), []
        for output in self._outputs:
            if isinstance(output, _Layout):
                output = output.laid_out(next(tensors))
            elif isinstance(output, _View):
                output = output.of_argument(arguments)
            outputs.append(output)
        return tuple(outputs)

    def compute(self, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The computed outputs, and what becomes of the arguments that the graph changes."""
        inputs = (_plain(arguments[index]) for index in self._inputs)
        return [torch.from_dlpack(tensor) for tensor in self._run(*inputs)]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """As TVM's kernels read tensors: in C order, beginning at a multiple of 64 bytes."""
    plain = tensor.detach().resolve_neg().contiguous()
    return plain if plain.data_ptr() % ALIGNMENT == 0 else plain.clone()


@dataclass(frozen=True)
class _Layout:
    """How PyTorch lays out an output, which code behind the graph may count on."""

    shape: torch.Size
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> _Layout:
        return _Layout(tensor.shape, tensor.stride())

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.stride() == self.strides:
            return tensor
        return torch.empty_strided(self.shape, self.strides, dtype=tensor.dtype).copy_(tensor)


@dataclass(frozen=True)
class _View:
    """An output that is an argument, or a part of it."""

    argument: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    @staticmethod
    def of(output: torch.Tensor, index: int, copy: torch.Tensor, argument: torch.Tensor) -> _View:
        if output.dtype != argument.dtype or copy.stride() != argument.stride():
            raise _Stays("it returns a view of what it is given")
        return _View(index, output.shape, output.stride(), output.storage_offset() - copy.storage_offset())

    def of_argument(self, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        argument = arguments[self.argument]
        if (self.shape, self.strides, self.offset) == (argument.shape, argument.stride(), 0):
            return argument
        return argument.as_strided(self.shape, self.strides, argument.storage_offset() + self.offset)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _compared_s(
    tuned: _Tuned, graph: Callable[..., Any], arguments: Sequence[torch.Tensor], changed: Sequence[int]
) -> tuple[float, float]:
    """Seconds of one call, tuned and with PyTorch: the minimum of several, in turns, on copies.

    A turn is many calls: after each change, the threads of the other one still wait on the cores for some more work.
    """
    copies = [value.clone() for value in arguments]
    runs, best = (lambda: tuned.compute(copies), lambda: graph(*copies)), [math.inf, math.inf]
    for _ in range(TURNS):
        for index, run in enumerate(runs):
            started = time.perf_counter()
            for _ in range(CALLS_A_TURN):
                for other in changed:
                    copies[other].copy_(arguments[other])
                before = time.perf_counter()
                run()
                now = time.perf_counter()
                best[index] = min(best[index], now - before)
                if now - started > TURN_S:
                    break
    return best[0], best[1]
