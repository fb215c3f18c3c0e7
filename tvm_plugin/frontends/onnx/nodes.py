"""What is read of nodes of ONNX: their attributes, inputs that must be constants, and the graphs that they run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from tvm import ir

from ...errors import UnsupportedModelError
from ...relax_ir.constants import array_of

__all__ = ["Convert", "bodies_of", "every_node", "numbers_of", "opset_of", "padded", "text_of"]


class Convert(Protocol):
    """What TVM's importer makes of nodes of ONNX."""

    @property
    def opset(self) -> int:
        """The version of ONNX's operators that the model uses."""

    def __call__(self, name: str, inputs: Sequence[Any], attrs: dict[str, Any], /) -> Any:
        """The result of a node."""


def opset_of(model: Any) -> int:
    """The version of ONNX's own operators in an `onnx.ModelProto`."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)


def bodies_of(node: Any) -> list[Any]:
    """The graphs of an `onnx.NodeProto`: branches, or what a loop repeats."""
    return [attribute.g for attribute in node.attribute if attribute.HasField("g")]


def every_node(nodes: Iterable[Any]) -> Iterator[Any]:
    """Nodes, each before those of its branches and bodies."""
    for node in nodes:
        yield node
        for body in bodies_of(node):
            yield from every_node(body.node)


def numbers_of(name: str, what: str, value: Any) -> list[Any]:
    """The elements of an input of the operator `name`, which calls it `what`.

    Raises
    ------
    UnsupportedModelError
        It is no constant.
    """
    if not isinstance(value, ir.GenericConst):
        raise UnsupportedModelError(f"{name} needs a constant {what}; this one is computed, or missing")
    return list(array_of(value).reshape(-1).tolist())


def padded(inputs: Sequence[Any], count: int) -> list[Any]:
    """At least `count` inputs: those that are left out at the end are None."""
    return [*inputs, *([None] * (count - len(inputs)))]


def text_of(value: Any) -> str:
    """An attribute that is a string: ONNX stores bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
