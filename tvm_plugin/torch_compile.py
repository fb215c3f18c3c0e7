"""`torch.compile(model, backend="eqtune", options={...})`: what Dynamo captures is tuned when it is first called.

PyTorch's own backend "tvm" went with Relay. This one is found by the entry point "torch_dynamo_backends". A captured
graph gets weights as arguments in each call; here they become constants, as tuning needs them, and each call looks
whether they are still what they were. What the graph does to memory is done again: arguments that it changes, outputs
that are views of arguments or of each other, strides. What cannot be tuned, and what is no faster, stays with PyTorch;
a warning says so.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.export
from torch.autograd import forward_ad
from torch.export.graph_signature import OutputKind

from .errors import EqtuneError, InputError, RecordError, SetupError, UnsupportedModelError
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

MOST_MODULES = 64
"""So many modules may share a graph, as blocks of one kind that are compiled one by one; each has its own constants."""

ALIGNMENT = 64
"""Bytes."""

_TUNING = threading.Lock()
"""Exports in several threads change each other's dispatch tables."""

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

    It runs as it is in a forked process, where TVM's threads are missing, and while PyTorch differentiates forwards.

    Parameters
    ----------
    graph : torch.fx.GraphModule
    options : mapping
        Arguments of `tune_model`.
    """

    def __init__(self, graph: torch.fx.GraphModule, options: Mapping[str, Any]) -> None:
        self._graph, self._options = graph, dict(options)
        self._tuned: list[_Tuned] = []
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
        if tuned is None or tuned.overlap(arguments):
            return self._graph(*arguments)
        return tuned(arguments)

    def _fitting(self, arguments: Sequence[Any]) -> _Tuned | None:
        """What was tuned with these weights."""
        return next((tuned for tuned in self._tuned if tuned.weights.are_unchanged(arguments)), None)

    def _newly_tuned(self, arguments: Sequence[Any]) -> _Tuned | None:
        """The graph, tuned with the weights that are given; None where it stays with PyTorch."""
        if self._stays:
            return None
        former = next((tuned for tuned in self._tuned if tuned.weights.are_of_one_module(arguments)), None)
        if former is None and len(self._tuned) == MOST_MODULES:
            former = self._tuned[0]
        if former is not None:
            self._changes.update(former.weights.changed(arguments))
            self._tuned.remove(former)
        try:
            with torch.random.fork_rng(devices=[]):
                self._tuned.append(self._tune(arguments))
        except _Stays as reason:
            self._stays = True
            self._tuned.clear()
            if str(reason):
                warnings.warn(f"a graph stays with PyTorch: {reason}", stacklevel=3)
            return None
        return self._tuned[-1]

    def _tune(self, arguments: Sequence[Any]) -> _Tuned:
        _check_arguments(arguments)
        _check_operators(self._graph)
        outputs = _described(self._graph, arguments)
        frozen = [index for index, value in enumerate(arguments) if self._is_constant(index, value)]
        states = {index: _State.of(arguments[index]) for index in frozen}
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
        except UnsupportedModelError as error:
            raise _Stays(str(error)) from error
        except (InputError, RecordError, SetupError):
            raise
        except Exception as error:  # of TVM, or of the model's own code with other numbers
            raise _Stays(f"it cannot be tuned: {first_line(error)}") from error
        weights = _Weights({index: states[index] for index in frozen}, arguments, self._graph)
        tuned = _Tuned(result, weights, module.inputs, changed, outputs, arguments)
        tuned_s, torch_s = _compared_s(tuned, self._graph, arguments, changed)
        if torch_s < LEAST_GAIN * tuned_s:
            raise _Stays(f"tuned it takes {tuned_s * 1e3:.3g} ms, with PyTorch {torch_s * 1e3:.3g} ms")
        return tuned

    def _is_constant(self, index: int, value: torch.Tensor) -> bool:
        """Whether an argument is the same tensor in each call, as far as one can know, and changes can be seen."""
        of_module = isinstance(value, torch.nn.Parameter) or hasattr(value, "_dynamo_static_input_type")
        return of_module and not value.is_inference() and self._changes[index] <= MOST_CHANGES


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
            raise _Stays(
                "sizes or numbers differ from call to call; with torch.compile(dynamic=False) each is tuned by itself"
            )
        if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or value.layout != torch.strided:
            raise _Stays(f"it takes a {type(value).__name__}")
        if value.device.type != "cpu":
            raise _Stays(f"its tensors are on {value.device}, and this backend compiles for the CPU")


_NOT_REPEATED = ("as_strided", "_assert_async", "_assert_scalar")
"""Reads memory that no argument holds; raises what a tuned graph would not."""


def _check_operators(graph: torch.fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op.startswith("call") and name.split(".")[0] in _NOT_REPEATED:
            raise _Stays(f"it calls {name}")


def _described(graph: torch.fx.GraphModule, arguments: Sequence[torch.Tensor]) -> list[Any]:
    """What the graph returns for these, which it leaves as they are: layouts, views, and what is no tensor.

    Raises
    ------
    _Stays
        It changes what it holds itself, takes no time, needs gradients, or returns what cannot be made again.
    """
    graph = copy.deepcopy(graph) if _own_tensors(graph) else graph
    before = [_State.of(tensor) for tensor in _own_tensors(graph)]
    fastest_s = math.inf
    for _ in range(LOOKS):
        copies = [_copy(value) for value in arguments]
        started = time.perf_counter()
        outputs = graph(*copies)
        fastest_s = min(fastest_s, time.perf_counter() - started)
    if any(not state.holds_for(state.tensor) for state in before):
        raise _Stays("it changes tensors that are not among its arguments")
    if fastest_s < EAGER_IS_ENOUGH_S:
        raise _Stays("")
    (returned,) = graph.graph.output_node().args
    for value, node in zip(outputs, returned, strict=True):
        if not isinstance(value, torch.Tensor) and isinstance(node, torch.fx.Node):
            raise _Stays("it returns numbers that it computes")
    tensors = {index: value for index, value in enumerate(outputs) if isinstance(value, torch.Tensor)}
    for value in tensors.values():
        if value.requires_grad:
            raise _Stays("it needs gradients, which eqtune does not compute; call it under torch.inference_mode()")
        if value.layout != torch.strided or value.is_neg() or value.is_conj():
            raise _Stays("it returns a tensor of another kind than plain ones")
    return [
        _described_tensor(index, tensors, copies, arguments) if index in tensors else value
        for index, value in enumerate(outputs)
    ]


def _described_tensor(
    index: int, tensors: Mapping[int, torch.Tensor], copies: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]
) -> _Layout | _View:
    """An output: computed, or a view of an argument or of another output, the first that spans the most memory."""
    tensor = tensors[index]
    for owner, (given, argument) in enumerate(zip(copies, arguments, strict=True)):
        if _shares_storage(tensor, given):
            if given.stride() != argument.stride():
                raise _Stays("it returns a view of what it is given")
            return _View.of(tensor, given, argument=owner)
    siblings = [other for other, value in tensors.items() if _shares_storage(tensor, value)]
    base = max(siblings, key=lambda other: (_extent(tensors[other]), -other)) if siblings else index
    if base == index:
        return _Layout.of(tensor)
    (first, end), (base_first, base_end) = _memory(tensor), _memory(tensors[base])
    if not base_first <= first <= end <= base_end or not _is_dense(tensors[base]):
        raise _Stays("its outputs share memory")
    return _View.of(tensor, tensors[base], output=base)


def _own_tensors(graph: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Tensors that a graph holds: what it was made with, and parameters where an optimizer was captured."""
    held = (_attribute(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr")
    return [value for value in held if isinstance(value, torch.Tensor)]


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


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
        return _State(tensor, _version(tensor), tensor.data_ptr())

    def holds_for(self, tensor: torch.Tensor) -> bool:
        return tensor is self.tensor and _version(tensor) == self.version and tensor.data_ptr() == self.address


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class _Weights:
    """The arguments that became constants, and what the graph holds, as they were.

    Parameters
    ----------
    states : mapping of int to _State
        Of the arguments that became constants.
    arguments : sequence of Tensor
    graph : torch.fx.GraphModule
    """

    def __init__(
        self, states: Mapping[int, _State], arguments: Sequence[torch.Tensor], graph: torch.fx.GraphModule
    ) -> None:
        self._states = list(states.items())
        self._own = [_State.of(tensor) for tensor in _own_tensors(graph)]
        self._parameters = {i: value for i, value in enumerate(arguments) if isinstance(value, torch.nn.Parameter)}

    def are_unchanged(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether all are the same tensors with the same values."""
        return all(state.holds_for(arguments[index]) for index, state in self._states) and all(
            state.holds_for(state.tensor) for state in self._own
        )

    def are_of_one_module(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether the parameters are the same ones, whatever their values."""
        return all(arguments[index] is value for index, value in self._parameters.items())

    def changed(self, arguments: Sequence[torch.Tensor]) -> list[int]:
        """The arguments that are others, or have other values."""
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
        Layouts of what it computes, views, and what is no tensor.
    arguments : sequence of Tensor
        Any that it can be called with: to find out which of TVM's results have no memory of their own.
    """

    def __init__(
        self,
        result: Any,
        weights: _Weights,
        inputs: Sequence[int],
        changed: Sequence[int],
        outputs: Sequence[Any],
        arguments: Sequence[torch.Tensor],
    ) -> None:
        self.weights = weights
        self._run = result.run_tensors
        self._inputs, self._changed = tuple(inputs), tuple(changed)
        self._outputs = tuple(outputs)
        self._borrowed: tuple[int, ...] = ()
        self._borrowed = self._without_own_memory(arguments)

    def __call__(self, arguments: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        returned = self.compute(arguments)
        for index in reversed(self._changed):
            with torch.no_grad():
                arguments[index].copy_(returned.pop())
        tensors = iter(returned)
        outputs = [
            output.laid_out(next(tensors)) if isinstance(output, _Layout) else output for output in self._outputs
        ]
        for index, output in enumerate(outputs):
            if isinstance(output, _View):
                outputs[index] = output.made_of(arguments, outputs)
        return tuple(outputs)

    def compute(self, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The computed outputs, and what becomes of the arguments that the graph changes."""
        inputs = (_plain(arguments[index]) for index in self._inputs)
        tensors = [torch.from_dlpack(tensor) for tensor in self._run(*inputs)]
        for index in self._borrowed:
            tensors[index] = tensors[index].clone()
        return tensors

    def overlap(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether an argument that the graph changes lies where another one does."""
        if not self._changed:
            return False
        places = [_memory(argument) for argument in arguments]
        return any(
            _meet(places[index], place)
            for index in self._changed
            for other, place in enumerate(places)
            if other != index
        )

    def _without_own_memory(self, arguments: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Which results are constants, inputs, or the memory of results before them: TVM makes no copies of those."""
        inputs = list(arguments)
        for index in self._inputs:
            inputs[index] = _plain(inputs[index]).clone()
        kept = self.compute(inputs)
        taken = [_memory(tensor) for tensor in itertools.chain(inputs, kept)]
        borrowed = []
        for index, tensor in enumerate(self.compute(inputs)):
            if any(_meet(_memory(tensor), place) for place in taken):
                borrowed.append(index)
            taken.append(_memory(tensor))
        return tuple(borrowed)


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from its first element to behind its last one."""
    return tensor.data_ptr(), tensor.data_ptr() + _extent(tensor)


def _extent(tensor: torch.Tensor) -> int:
    """The bytes from its first element to behind its last one."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _shares_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    address = tensor.untyped_storage().data_ptr()
    return address != 0 and address == other.untyped_storage().data_ptr()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether no memory lies between its elements, and no element in two places."""
    return _extent(tensor) == tensor.numel() * tensor.element_size()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """As TVM's kernels read tensors: in C order, beginning at a multiple of 64 bytes."""
    plain = tensor.detach().resolve_neg().contiguous()
    return plain if plain.data_ptr() % ALIGNMENT == 0 else plain.clone()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """With the same strides, and gradients where it has them, also where only the graph itself asks for them."""
    given = tensor.detach()
    result = given.clone() if _is_dense(given) else _Layout.of(given).copied(given)
    return result.requires_grad_(tensor.requires_grad and not torch.is_inference_mode_enabled())


@dataclass(frozen=True)
class _Layout:
    """How PyTorch lays out a tensor, which code behind the graph may count on."""

    shape: torch.Size
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> _Layout:
        return _Layout(tensor.shape, tensor.stride())

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself where it lies so, or a copy."""
        return tensor if tensor.stride() == self.strides else self.copied(tensor)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy; an axis along which all elements are one stays so."""
        once = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in self.strides)]
        return torch.empty_strided(once.shape, self.strides, dtype=tensor.dtype).copy_(once).expand(self.shape)


@dataclass(frozen=True)
class _View:
    """An output that is an argument or another output, or a part of one: shape, strides and offset in elements."""

    layout: _Layout
    offset: int
    argument: int | None = None
    output: int | None = None

    @staticmethod
    def of(tensor: torch.Tensor, base: torch.Tensor, argument: int | None = None, output: int | None = None) -> _View:
        if tensor.dtype != base.dtype:
            raise _Stays("it returns a view of what it is given, as another dtype")
        return _View(_Layout.of(tensor), tensor.storage_offset() - base.storage_offset(), argument, output)

    def made_of(self, arguments: Sequence[torch.Tensor], outputs: Sequence[Any]) -> torch.Tensor:
        base: torch.Tensor = outputs[self.output] if self.output is not None else arguments[self.argument or 0]
        base = base.detach() if base.requires_grad else base
        if self.layout == _Layout.of(base) and self.offset == 0 and self.output is None:
            return base
        return base.as_strided(self.layout.shape, self.layout.strides, base.storage_offset() + self.offset)


def _compared_s(
    tuned: _Tuned, graph: Callable[..., Any], arguments: Sequence[torch.Tensor], changed: Sequence[int]
) -> tuple[float, float]:
    """Seconds of one call, tuned and with PyTorch: the minimum of several, in turns, on copies.

    A turn is many calls: after each change, the threads of the other one still wait on the cores for some more work.
    """
    copies = [_copy(value) for value in arguments]
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
