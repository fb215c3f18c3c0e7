"""Loops of ONNX written out: a body once for each iteration, as TVM's importer and graph passes know no loops.

How often a body runs must follow from constants. What counts iterations is computed here while they are written; ONNX
Runtime folds it away afterwards (`model.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ...errors import UnsupportedModelError
from .nodes import bodies_of, every_node, opset_of
from .weights import MOST_SERIALIZED, weights_bytes

__all__ = ["has_loops", "with_loops_written_out"]

LOGGER = logging.getLogger(__name__)

MOST_NODES = 20_000
"""Of what is written out; TVM compiles some hundred kernel calls a second."""

MOST_ELEMENTS = 64
"""Of what is computed to know whether a loop goes on."""

_LOOPS = frozenset({"Loop", "Scan"})


def has_loops(graph: onnx.GraphProto) -> bool:
    """Whether there is something to write out, in a graph or in its branches."""
    return any(node.op_type in _LOOPS for node in every_node(graph.node))


def with_loops_written_out(model: onnx.ModelProto) -> onnx.ModelProto:
    """Write the body of each Loop and Scan once for each iteration.

    Parameters
    ----------
    model : ModelProto
        With constants folded, as far as that is possible without the loops.

    Raises
    ------
    UnsupportedModelError
        How often a loop runs, or which nodes run in it, depends on inputs; it has no end; it never runs and stacks
        results; the steps of a Scan are not known; or the iterations have more than `MOST_NODES` nodes.
    """
    inferred = onnx.shape_inference.infer_shapes(model) if weights_bytes(model) < MOST_SERIALIZED else model
    writer = _Writer(opset_of(model))
    for value, name in zip(model.graph.output, writer.write(inferred.graph, {}), strict=True):
        if value.name != name:
            writer.add("Identity", [name], value.name)
    written = onnx.ModelProto()
    written.CopyFrom(model)
    del written.graph.node[:]
    written.graph.node.extend(writer.nodes)
    written.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in writer.constants.items())
    return written


Names = Mapping[str, str]
"""What a name of a body is in the graph that is written."""


@dataclass
class _Writer:
    """Collects the nodes of a graph without loops.

    Attributes
    ----------
    opset
        The version of ONNX's operators.
    nodes
        What was written so far, in order.
    constants
        Initializers that the nodes need besides those of the graph.
    known
        Small constants by name, those that nodes compute among them.
    shapes
        Of what is written, as far as the model tells; 0 for an extent that it does not.
    suffixes
        How many were given out.
    initialized
        Bodies whose initializers are among `constants`, by identity, and what they are called there.
    """

    opset: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    known: dict[str, NDArray[Any]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    suffixes: int = 0
    initialized: dict[int, tuple[onnx.GraphProto, Names]] = field(default_factory=dict)

    def write(self, graph: onnx.GraphProto, names: Names, suffix: str = "") -> list[str]:
        """Write a graph's nodes; `suffix`, if given, makes their names unique. Returns what its outputs are called."""
        local = {**names, **self._initialized(graph, suffix)}
        if not suffix:
            self._take_shapes(graph.input, {})
        inferred = {value.name: value for value in (*graph.value_info, *graph.output)}
        for node in graph.node:
            self._check_size(len(self.nodes))
            inputs = [local.get(name, name) for name in node.input]
            outputs = self._written(node, inputs, local, suffix)
            local.update((name, value) for name, value in zip(node.output, outputs, strict=False) if name)
            self._take_shapes((inferred[name] for name in node.output if name in inferred), local)
        return [local.get(value.name, value.name) for value in graph.output]

    def _initialized(self, graph: onnx.GraphProto, suffix: str) -> Names:
        """Note a graph's initializers; what those of a body are called, which are written once."""
        if id(graph) not in self.initialized:
            names = {tensor.name: f"{tensor.name}{suffix}" for tensor in graph.initializer}
            for tensor in graph.initializer:
                name = names[tensor.name]
                self.shapes[name] = tuple(tensor.dims)
                if suffix:
                    self.constants[name] = numpy_helper.to_array(tensor)
                if np.prod(tensor.dims, dtype=np.int64) <= MOST_ELEMENTS:
                    self.known[name] = numpy_helper.to_array(tensor)
            self.initialized[id(graph)] = graph, names  # kept alive: its identity is the key
        return self.initialized[id(graph)][1]

    def _take_shapes(self, values: Iterable[onnx.ValueInfoProto], local: Names) -> None:
        for value in values:
            shape = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
            self.shapes.setdefault(local.get(value.name, value.name), shape)

    @staticmethod
    def _check_size(count: int) -> None:
        if count > MOST_NODES:
            raise UnsupportedModelError(
                f"its loops, written out, have more than {MOST_NODES} nodes; export the model with fewer steps"
            )

    def _written(self, node: onnx.NodeProto, inputs: list[str], local: dict[str, str], suffix: str) -> list[str]:
        """Write one node; what its outputs are called. `local` learns of what gets its former name back."""
        if node.op_type == "Loop":
            return self._loop(node, inputs, local)
        if node.op_type == "Scan":
            return self._scan(node, inputs, local)
        if node.op_type == "If" and inputs[0] in self.known:
            taken = "then_branch" if self.known[inputs[0]].item() else "else_branch"
            return self.write(_attributes(node)[taken], local, self._suffix())
        bodies = bodies_of(node)
        if bodies and (suffix or any(map(has_loops, bodies))):
            raise UnsupportedModelError(f"{_description(node)}: which nodes run depends on inputs; export one branch")
        for name in sorted({name for body in bodies for name in _read_by(body)} & local.keys()):
            if local[name] != name:  # a body that stays knows the former name
                written, local[name] = local[name], self.add("Identity", [local[name]], name)
                if written in self.known:
                    self.known[name] = self.known[written]
                if written in self.shapes:
                    self.shapes[name] = self.shapes[written]
        outputs = [f"{name}{suffix}" if name else "" for name in node.output]
        copied = onnx.NodeProto()
        copied.CopyFrom(node)
        copied.input[:], copied.output[:] = inputs, outputs
        copied.name = ""
        self.nodes.append(copied)
        if all(name in self.known for name in inputs if name) and not _is_large_constant(node):
            self.known.update(self._computed(copied))
        return outputs

    def _computed(self, node: onnx.NodeProto) -> Iterator[tuple[str, NDArray[Any]]]:
        """The outputs of a node whose inputs are known, if they are small."""
        feeds = {name: self.known[name] for name in node.input if name}
        inputs, outputs = ([onnx.ValueInfoProto(name=name) for name in names] for names in (feeds, node.output))
        graph = helper.make_graph([node], "node", inputs, outputs)
        try:
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)])
            values = ReferenceEvaluator(model).run(None, feeds)
        except Exception as error:  # noqa: BLE001 - what has no implementation there raises anything; it stays a node
            LOGGER.debug("%s is not computed: %s", node.op_type, error)
            return
        for name, value in zip(node.output, values, strict=True):
            if isinstance(value, np.ndarray | np.generic) and value.size <= MOST_ELEMENTS:  # no sequence, or nothing
                yield name, np.asarray(value)

    def _loop(self, node: onnx.NodeProto, inputs: list[str], names: Names) -> list[str]:
        trip_count, condition, *carried = inputs
        body = _attributes(node)["body"]
        count = len(carried)
        stacked: list[list[str]] = [[] for _ in body.output[1 + count :]]
        iteration = 0
        while self._goes_on(node, trip_count, condition, iteration):
            number = self._constant(np.asarray(iteration, np.int64))
            given = [number, condition or self._constant(np.asarray(True)), *carried]
            condition, *values = self._iterate(body, given, names)
            carried = values[:count]
            for rows, value in zip(stacked, values[count:], strict=True):
                rows.append(value)
            iteration += 1
            self._check_size(iteration)
        return [*carried, *(self._stack(node, rows, 0) for rows in stacked)]

    def _goes_on(self, node: onnx.NodeProto, trip_count: str, condition: str, iteration: int) -> bool:
        if condition and condition not in self.known:
            raise UnsupportedModelError(f"{_description(node)}: whether it goes on depends on inputs; {_ADVICE}")
        if trip_count and trip_count not in self.known:
            raise UnsupportedModelError(f"{_description(node)}: how often it runs depends on inputs; {_ADVICE}")
        if not trip_count and not condition:
            raise UnsupportedModelError(f"{_description(node)} has no end")
        within = not trip_count or iteration < self.known[trip_count].item()
        return within and (not condition or bool(self.known[condition].item()))

    def _scan(self, node: onnx.NodeProto, inputs: list[str], names: Names) -> list[str]:
        if self.opset < 9:
            raise UnsupportedModelError(f"{_description(node)} of opset 8 cannot be imported; export with a later one")
        given = _attributes(node)
        body, count = given["body"], given["num_scan_inputs"]
        states, scanned = inputs[:-count], inputs[-count:]
        outputs = len(body.output) - len(states)
        axes = given.get("scan_input_axes", [0] * count)
        backwards = given.get("scan_input_directions", [0] * count)
        steps = self._steps(node, scanned[0], axes[0])
        rows: list[list[str]] = [[] for _ in range(outputs)]
        for step in range(steps):
            slices = [
                self.add("Gather", [name, self._constant(np.asarray(steps - 1 - step if back else step))], axis=axis)
                for name, axis, back in zip(scanned, axes, backwards, strict=True)
            ]
            values = self._iterate(body, [*states, *slices], names)
            states = values[: len(states)]
            for row, value in zip(rows, values[len(states) :], strict=True):
                row.append(value)
        reverse = given.get("scan_output_directions", [0] * outputs)
        stack_axes = given.get("scan_output_axes", [0] * outputs)
        ordered = [row[::-1] if back else row for row, back in zip(rows, reverse, strict=True)]
        return [*states, *(self._stack(node, row, axis) for row, axis in zip(ordered, stack_axes, strict=True))]

    def _steps(self, node: onnx.NodeProto, name: str, axis: int) -> int:
        shape = self.shapes.get(name, ())
        steps = shape[axis] if -len(shape) <= axis < len(shape) else 0
        if not steps:
            raise UnsupportedModelError(f"{_description(node)}: the number of its steps is not known; {_ADVICE}")
        return steps

    def _iterate(self, body: onnx.GraphProto, given: Sequence[str], names: Names) -> list[str]:
        inner = {**names, **dict(zip((value.name for value in body.input), given, strict=True))}
        self._take_shapes(body.input, inner)
        return self.write(body, inner, self._suffix())

    def _stack(self, node: onnx.NodeProto, rows: Sequence[str], axis: int) -> str:
        """Rows of all iterations along a new axis."""
        if not rows:
            raise UnsupportedModelError(f"{_description(node)} never runs, and stacks results")
        if self.opset < 13:
            stretched = [self.add("Unsqueeze", [row], axes=[axis]) for row in rows]
        else:
            new = self._constant(np.asarray([axis], np.int64))
            stretched = [self.add("Unsqueeze", [row, new]) for row in rows]
        return self.add("Concat", stretched, axis=axis)

    def add(self, operator: str, inputs: Sequence[str], result: str = "", **attributes: Any) -> str:
        """Write a node of one output; what it is called."""
        result = result or f"{operator}{self._suffix()}"
        self.nodes.append(helper.make_node(operator, list(inputs), [result], **attributes))
        return result

    def _constant(self, value: NDArray[Any]) -> str:
        name = f"number{self._suffix()}"
        self.constants[name] = self.known[name] = value
        return name

    def _suffix(self) -> str:
        """The end of a name that nothing else has."""
        self.suffixes += 1
        return f"/eqtune_{self.suffixes}"


_ADVICE = "export the model with a constant number of steps"


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _read_by(graph: onnx.GraphProto) -> set[str]:
    """All names that a graph's nodes and outputs read, its own among them."""
    inner = {name for node in graph.node for body in bodies_of(node) for name in _read_by(body)}
    return inner | {name for node in graph.node for name in node.input} | {value.name for value in graph.output}


def _is_large_constant(node: onnx.NodeProto) -> bool:
    tensors = [attribute.t for attribute in node.attribute if attribute.type == onnx.AttributeProto.TENSOR]
    return any(np.prod(tensor.dims, dtype=np.int64) > MOST_ELEMENTS for tensor in tensors)


def _description(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name!r}" if node.name else node.op_type
