"""Loops of ONNX written out: a body once for each iteration, as TVM's importer and graph passes know no loops.

How often a body runs must follow from constants. What counts iterations is computed here while they are written; ONNX
Runtime folds it away afterwards (`onnx_model`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ..errors import UnsupportedModelError

__all__ = ["has_loops", "with_loops_written_out"]

MOST_NODES = 20_000
"""Of what is written out; TVM compiles some hundred kernel calls a second."""

MOST_ELEMENTS = 64
"""Of what is computed to know whether a loop goes on."""

_LOOPS = frozenset({"Loop", "Scan"})


def has_loops(model: onnx.ModelProto) -> bool:
    """Whether there is something to write out."""
    return any(node.op_type in _LOOPS for node in model.graph.node)


def with_loops_written_out(model: onnx.ModelProto) -> onnx.ModelProto:
    """Write the body of each Loop and Scan once for each iteration.

    Parameters
    ----------
    model : ModelProto
        With constants folded, as far as that is possible without the loops.

    Raises
    ------
    UnsupportedModelError
        How often a loop runs depends on inputs, or its iterations have more than `MOST_NODES` nodes.
    """
    inferred = onnx.shape_inference.infer_shapes(model) if model.ByteSize() < 2**31 else model
    writer = _Writer(_opset(model), _shapes(inferred.graph))
    writer.write(model.graph, {})
    written = onnx.ModelProto()
    written.CopyFrom(model)
    del written.graph.node[:]
    written.graph.node.extend(writer.nodes)
    written.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in writer.constants.items())
    return written


def _opset(model: onnx.ModelProto) -> int:
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)


def _shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Shapes by name; 0 for an extent that is not known."""
    values = (*graph.input, *graph.value_info, *graph.output)
    shapes = {value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim) for value in values}
    return {**shapes, **{tensor.name: tuple(tensor.dims) for tensor in graph.initializer}}


Names = Mapping[str, str]
"""What a name inside of a body is called outside."""


@dataclass
class _Writer:
    """Collects the nodes of a graph without loops.

    Attributes
    ----------
    opset
        The version of ONNX's operators.
    shapes
        Shapes of what the graph itself names.
    nodes
        What was written so far, in order.
    constants
        Initializers that the nodes need besides those of the graph.
    known
        Small constants by name, those that nodes compute among them.
    """

    opset: int
    shapes: Mapping[str, tuple[int, ...]]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    known: dict[str, NDArray[Any]] = field(default_factory=dict)
    count: int = 0

    def write(self, graph: onnx.GraphProto, names: Names, where: str = "") -> list[str]:
        """Write a graph's nodes; `where`, if given, makes their names unique. Returns what its outputs are called."""
        local = dict(names)
        for tensor in graph.initializer:
            self._initialize(tensor, local, where)
        for node in graph.node:
            if len(self.nodes) > MOST_NODES:
                raise UnsupportedModelError(
                    f"its loops, written out, have more than {MOST_NODES} nodes; export fewer steps"
                )
            inputs = [local.get(name, name) for name in node.input]
            outputs = self._outputs(node, inputs, local, where)
            local.update(zip(node.output, outputs, strict=True))
        return [local.get(value.name, value.name) for value in graph.output]

    def _initialize(self, tensor: onnx.TensorProto, local: dict[str, str], where: str) -> None:
        name = tensor.name
        if where:
            name = local[tensor.name] = f"{tensor.name}{where}"
            self.constants[name] = numpy_helper.to_array(tensor)
        if np.prod(tensor.dims, dtype=np.int64) <= MOST_ELEMENTS:
            self.known[name] = numpy_helper.to_array(tensor)

    def _outputs(self, node: onnx.NodeProto, inputs: list[str], local: Names, where: str) -> list[str]:
        """Write one node; what its outputs are called."""
        results = [f"{name}{where}" if name else "" for name in node.output]
        if node.op_type == "Loop":
            self._give(results, self._loop(node, inputs, local))
        elif node.op_type == "Scan":
            self._give(results, self._scan(node, inputs, local))
        elif node.op_type == "If" and inputs[0] in self.known:
            taken = "then_branch" if self.known[inputs[0]].item() else "else_branch"
            self._give(results, self.write(_attributes(node)[taken], local, self._place()))
        elif any(attribute.type == onnx.AttributeProto.GRAPH for attribute in node.attribute):
            raise UnsupportedModelError(f"{_called(node)}: which nodes run depends on inputs")
        else:
            self._copy(node, inputs, results)
        return results

    def _give(self, results: Sequence[str], values: Sequence[str]) -> None:
        """Call values what a node's outputs are called."""
        for result, value in zip(results, values, strict=False):  # outputs that nothing needs may be left out
            if result:
                self._add("Identity", [value], result)
                if value in self.known:
                    self.known[result] = self.known[value]

    def _copy(self, node: onnx.NodeProto, inputs: list[str], outputs: list[str]) -> None:
        copied = onnx.NodeProto()
        copied.CopyFrom(node)
        copied.input[:], copied.output[:] = inputs, outputs
        copied.name = ""
        self.nodes.append(copied)
        if all(name in self.known for name in inputs if name):
            self.known.update(self._computed(copied))

    def _computed(self, node: onnx.NodeProto) -> Iterator[tuple[str, NDArray[Any]]]:
        """The outputs of a node whose inputs are known, if they are small."""
        feeds = {name: self.known[name] for name in node.input if name}
        inputs, outputs = ([onnx.ValueInfoProto(name=name) for name in names] for names in (feeds, node.output))
        graph = helper.make_graph([node], "node", inputs, outputs)
        try:
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)])
            values = ReferenceEvaluator(model).run(None, feeds)
        except Exception:  # noqa: BLE001 - operators without an implementation there raise anything; it stays a node
            return
        for name, value in zip(node.output, values, strict=True):
            if np.size(value) <= MOST_ELEMENTS:
                yield name, np.asarray(value)

    def _loop(self, node: onnx.NodeProto, inputs: list[str], names: Names) -> list[str]:
        most, condition, *carried = inputs
        body = _attributes(node)["body"]
        count = len(carried)
        scanned: list[list[str]] = [[] for _ in body.output[1 + count :]]
        iteration = 0
        while self._goes_on(node, most, condition, iteration):
            number = self._constant(np.asarray(iteration, np.int64))
            given = [number, condition or self._constant(np.asarray(True)), *carried]
            condition, *values = self._iterate(body, given, names)
            carried = values[:count]
            for rows, value in zip(scanned, values[count:], strict=True):
                rows.append(value)
            iteration += 1
        return [*carried, *(self._stacked(rows, 0) for rows in scanned)]

    def _goes_on(self, node: onnx.NodeProto, most: str, condition: str, iteration: int) -> bool:
        if condition and condition not in self.known:
            raise UnsupportedModelError(f"{_called(node)}: whether it goes on depends on inputs")
        if most and most not in self.known:
            raise UnsupportedModelError(f"{_called(node)}: how often it runs depends on inputs")
        if not most and not condition:
            raise UnsupportedModelError(f"{_called(node)} has no end")
        return (not most or iteration < self.known[most].item()) and (
            not condition or bool(self.known[condition].item())
        )

    def _scan(self, node: onnx.NodeProto, inputs: list[str], names: Names) -> list[str]:
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
                self._add("Gather", [name, self._constant(np.asarray(steps - 1 - step if back else step))], axis=axis)
                for name, axis, back in zip(scanned, axes, backwards, strict=True)
            ]
            values = self._iterate(body, [*states, *slices], names)
            states = values[: len(states)]
            for row, value in zip(rows, values[len(states) :], strict=True):
                row.append(value)
        reverse = given.get("scan_output_directions", [0] * outputs)
        placed = given.get("scan_output_axes", [0] * outputs)
        ordered = [row[::-1] if back else row for row, back in zip(rows, reverse, strict=True)]
        return [*states, *(self._stacked(row, axis) for row, axis in zip(ordered, placed, strict=True))]

    def _steps(self, node: onnx.NodeProto, name: str, axis: int) -> int:
        shape = self.shapes.get(name, ())
        steps = shape[axis] if -len(shape) <= axis < len(shape) else 0
        if self.opset < 9 or not steps:
            raise UnsupportedModelError(f"{_called(node)}: the number of its steps is not known")
        return steps

    def _iterate(self, body: onnx.GraphProto, given: Iterable[str], names: Names) -> list[str]:
        inner = {**names, **dict(zip((value.name for value in body.input), given, strict=True))}
        return self.write(body, inner, self._place())

    def _stacked(self, rows: Sequence[str], axis: int) -> str:
        """Rows of all iterations along a new axis."""
        if not rows:
            raise UnsupportedModelError("a loop that never runs has outputs of no rows")
        if self.opset < 13:
            stretched = [self._add("Unsqueeze", [row], axes=[axis]) for row in rows]
        else:
            new = self._constant(np.asarray([axis], np.int64))
            stretched = [self._add("Unsqueeze", [row, new]) for row in rows]
        return self._add("Concat", stretched, axis=axis)

    def _add(self, operator: str, inputs: Sequence[str], result: str = "", **attributes: Any) -> str:
        result = result or f"{operator}{self._place()}"
        self.nodes.append(helper.make_node(operator, list(inputs), [result], **attributes))
        return result

    def _constant(self, value: NDArray[Any]) -> str:
        name = f"number{self._place()}"
        self.constants[name] = self.known[name] = value
        return name

    def _place(self) -> str:
        """The end of a name that nothing else has."""
        self.count += 1
        return f"/eqtune_{self.count}"


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _called(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name!r}" if node.name else node.op_type
