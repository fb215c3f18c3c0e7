"""TVM's JSON of an object, checked before TVM reads it.

Such text is a list of nodes that refer to each other by position. TVM follows the references without looking for
circles, and a node can be anything that TVM knows, compiled code among it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from eqtune.errors import RecordError

__all__ = ["INDEX_MAP_TYPES", "KERNEL_TYPES", "check_order", "checked_graph"]

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

_NUMBER_KINDS = frozenset((1, 2, 3, 5, 6))
"""TVM's type indices of what stands in a field itself: integers, bools, floats, dtypes, devices."""


def checked_graph(text: str, types: Collection[str]) -> str:
    """The same graph as text, for TVM to read: what Python saw and TVM sees cannot differ.

    Raises
    ------
    RecordError
        When it is not a graph, has nodes of other than the given types, is deeper than `MAX_DEPTH`, or has a node that
        refers to a later one, which TVM never writes: every circle has one.
    """
    graph, depths = _read(text, types)
    if max(depths, default=0) > MAX_DEPTH:
        raise RecordError(f"its objects are nested {max(depths)} deep; at most {MAX_DEPTH} are read")
    return json.dumps(graph)


def check_order(text: str) -> None:
    """Raise RecordError for what is no graph, or has a circle; nodes may be anything, however deep."""
    _read(text)


def _read(text: str, types: Collection[str] | None = None) -> tuple[Any, list[int]]:
    """The graph, and how many references in a row begin at each node."""
    try:
        graph = json.loads(text)
        depths: list[int] = []
        for place, node in enumerate(graph["nodes"]):
            if types is not None and not _is_permitted(node["type"], types):
                raise RecordError(f"it holds a {node['type']!r:.60}")
            references = list(_references(node))
            if max(references, default=-1) >= place:
                raise RecordError(f"its node {place} refers to node {max(references)}, which does not come before it")
            depths.append(1 + max((depths[index] for index in references), default=0))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise RecordError(f"it is not a graph of objects: {error}") from error
    return graph, depths


def _is_permitted(name: str, types: Collection[str]) -> bool:
    return name in types or f"{name.partition('.')[0]}." in types


def _references(node: Mapping[str, Any]) -> Iterator[int]:
    """Positions of the nodes that a node refers to; a negative one TVM itself refuses."""
    data = node.get("data")
    if isinstance(data, list) and node["type"] != "ffi.Shape":
        yield from (index for index in data if index >= 0)
    elif isinstance(data, dict):
        numbers = _numbers(node["type"])
        for name, value in data.items():
            if name not in numbers and isinstance(value, int) and value >= 0:
                yield value


@cache
def _numbers(type_key: str) -> frozenset[str]:
    """Fields of a type that are numbers; all other integers in a node are references. Raises ValueError for no type."""
    import tvm  # noqa: F401  registers its types
    from tvm_ffi import core

    names: set[str] = set()
    info: core.TypeInfo | None = core._lookup_or_register_type_info_from_type_key(type_key)
    while info is not None:
        names.update(field.name for field in info.fields or () if field.field_static_type_index in _NUMBER_KINDS)
        info = info.parent_type_info
    return frozenset(names)
