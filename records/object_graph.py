"""TVM's JSON of an object, checked before TVM reads it.

Such text is a list of nodes that refer to each other by position. TVM follows the references without looking for
circles, and a node can be anything that TVM knows, compiled code among it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from eqtune.errors import RecordError

__all__ = ["INDEX_MAP_TYPES", "KERNEL_TYPES", "checked_graph"]

_PLAIN_TYPES = ("None", "bool", "int", "float", "DataType", "ffi.String", "ffi.BigInt", "ffi.Array", "ffi.Map")
INDEX_MAP_TYPES = frozenset(
    (*_PLAIN_TYPES, "ir.Var", "ir.IntImm", "ir.FloatImm", "ir.PrimType", "tirx.IndexMap", "prim.")
)
"""Arithmetic, and nothing that is called. A type that ends in a dot stands for all that begin so."""
KERNEL_TYPES = frozenset(
    (*_PLAIN_TYPES, "ffi.List", "ffi.Dict", "ffi.Shape", "ffi.Tensor", "ir.", "prim.", "tirx.", "s_tir.", "relax.")
)
"""What kernels are made of: no `ffi.Module`."""

MAX_DEPTH = 1000
"""References in a row: TVM reads them by recursion. Kernels have some dozens."""

_SPAN = frozenset({"line", "column", "end_line", "end_column"})
_NUMBERS: Mapping[str, Collection[str]] = {
    "ir.Span": _SPAN,
    "ir.SequentialSpan": _SPAN,
    "ir.TupleGetItem": {"index"},
    "relax.ShapeType": {"ndim"},
    "relax.TensorType": {"ndim"},
    "tirx.BufferType": {"data_alignment", "offset_factor"},
    "tirx.For": {"kind"},
    "tirx.IterVar": {"iter_type"},
}
"""Fields that are numbers, by type; all other integers in a node are references."""


def checked_graph(text: str, types: Collection[str]) -> str:
    """The same graph as text, for TVM to read: what Python saw and TVM sees cannot differ.

    Raises
    ------
    RecordError
        When it is not a graph, has nodes of other than the given types, is deeper than `MAX_DEPTH`, or has a node that
        refers to a later one, which TVM never writes: every circle has one.
    """
    try:
        graph = json.loads(text)
        nodes = graph["nodes"]
        depths: list[int] = []
        for node in nodes:
            if not _is_permitted(node["type"], types):
                raise RecordError(f"it holds a {node['type']!r:.60}")
            depths.append(1 + max((depths[index] for index in _references(node)), default=0))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise RecordError(f"it is not a graph of objects in order: {error}") from error
    if max(depths, default=0) > MAX_DEPTH:
        raise RecordError(f"its objects are nested {max(depths)} deep; at most {MAX_DEPTH} are read")
    return json.dumps(graph)


def _is_permitted(name: str, types: Collection[str]) -> bool:
    return name in types or f"{name.partition('.')[0]}." in types


def _references(node: Mapping[str, Any]) -> Iterator[int]:
    """Positions of the nodes that a node refers to; a negative one TVM itself refuses."""
    data = node.get("data")
    if isinstance(data, list) and node["type"] != "ffi.Shape":
        yield from (index for index in data if index >= 0)
    elif isinstance(data, dict):
        numbers = _NUMBERS.get(node["type"], ())
        for name, value in data.items():
            if name not in numbers and isinstance(value, int) and value >= 0:
                yield value
