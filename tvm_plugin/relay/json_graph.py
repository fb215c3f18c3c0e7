"""The JSON that `tvm.ir.save_json` of TVM 0.8 to 0.19 wrote: a list of nodes that refer to each other by number.

    {"root": 1, "nodes": [{"type_key": ""}, {"type_key": "relay.Constant", "attrs": {"data": "0", ...}}, ...],
     "b64ndarrays": ["P6G0lvBA..."], "attrs": {"tvm_version": "0.14.0"}}

Every value in a node's "attrs" is text: a number, a string, or the number of a node. Which of these it is depends on
the class. Nodes with "repr_str" or "repr_b64" are strings and operators; arrays have "data", maps "data" and "keys".
"""

from __future__ import annotations

import base64
import binascii
import json
from functools import lru_cache
from typing import Any

from numpy.typing import NDArray

from .arrays import read_array
from .errors import RelayError

__all__ = ["JsonGraph"]

_STRINGS = frozenset({"runtime.String", "StringImm", "tir.StringImm"})
_NUMBERS = frozenset({"IntImm", "FloatImm", "tir.IntImm", "tir.FloatImm"})
_BOXES = frozenset({"runtime.BoxInt", "runtime.BoxFloat", "runtime.BoxBool"})  # since 0.17, with "repr_str"


class JsonGraph:
    """Checked access to the nodes.

    Parameters
    ----------
    text
        The JSON.
    what
        Where it comes from, for errors.
    """

    def __init__(self, text: str, what: str) -> None:
        self._what = what
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RelayError(f"{what} is not JSON: {error}") from error
        if isinstance(data, dict) and "root_index" in data:
            raise RelayError(f"{what} is of TVM 0.20 or newer, which had no Relay; read it with tvm.ir.load_json")
        nodes = data.get("nodes") if isinstance(data, dict) else None
        if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
            raise RelayError(f'{what} is not what tvm.ir.save_json writes: it has no list of "nodes"')
        self._nodes: list[dict[str, Any]] = nodes
        blobs = data.get("b64ndarrays", [])
        self._blobs: list[Any] = blobs if isinstance(blobs, list) else []
        self.root = self._index(data.get("root"), "root")
        self.array = lru_cache(maxsize=None)(self._array)

    def error(self, index: int, message: str) -> RelayError:
        """An error about a node, to raise."""
        return RelayError(f"{self._what}, node {index}: {message}")

    def type_key(self, index: int) -> str:
        """The class of a node; "" for None."""
        return str(self._nodes[index].get("type_key", ""))

    def field(self, index: int, name: str) -> str | None:
        """The text of a field, or None when the node has none of that name."""
        fields = self._nodes[index].get("attrs")
        value = fields.get(name) if isinstance(fields, dict) else None
        return None if value is None else str(value)

    def child(self, index: int, name: str, optional: bool = False) -> int:
        """The node that a field refers to; 0, which is None, when an optional field is missing."""
        value = self.field(index, name)
        if value is None:
            if optional:
                return 0
            raise self.error(index, f"{self.type_key(index)} has no field {name!r}")
        return self._index(value, name, index)

    def children(self, index: int) -> list[int]:
        """The elements of an array node, or the values of a map; of None, none."""
        data = self._nodes[index].get("data", [])
        if not isinstance(data, list):
            raise self.error(index, '"data" is not a list')
        return [self._index(value, "data", index) for value in data]

    def items(self, index: int) -> dict[str, int]:
        """The nodes of a map with text as keys."""
        keys, values = self._nodes[index].get("keys", []), self.children(index)
        if not isinstance(keys, list) or len(keys) != len(values):
            raise self.error(index, "as many keys as values are expected in a map")
        return {str(key): value for key, value in zip(keys, values, strict=True)}

    def text(self, index: int) -> str:
        """What a string, operator or constructor node says."""
        node = self._nodes[index]
        if "repr_str" in node:
            return str(node["repr_str"])
        if "repr_b64" in node:
            return self._decode(str(node["repr_b64"]), index)[8:].decode("utf-8", "replace")  # a u64 length first
        name = self.field(index, "value") if self.type_key(index) in _STRINGS else self.field(index, "name")
        if name is None:
            raise self.error(index, f"{self.type_key(index) or 'None'} where text is expected")
        return name

    def value(self, index: int) -> Any:
        """A node of an attribute as plain data: None, a number, text or a list; the class's name for anything else."""
        return self._value(index, 0)

    def _value(self, index: int, depth: int) -> Any:
        key = self.type_key(index)
        if key == "Array":
            if depth > 4:
                raise self.error(index, "arrays are nested too deeply for an attribute")
            return [self._value(child, depth + 1) for child in self.children(index)]
        if key == "":
            return None
        if key in _NUMBERS:
            return number(self.field(index, "value"))
        if key in _BOXES:
            text = self.text(index)
            return text == "true" if key == "runtime.BoxBool" else number(text)
        if key in _STRINGS:
            return self.text(index)
        return key

    def _array(self, number_text: str) -> NDArray[Any]:
        position = number(number_text)
        if not isinstance(position, int) or not 0 <= position < len(self._blobs):
            raise RelayError(f"{self._what}: there is no array {number_text} among {len(self._blobs)}")
        what = f"{self._what}, array {position}"
        return read_array(self._decode(str(self._blobs[position]), position), what)

    def _decode(self, text: str, index: int) -> bytes:
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise self.error(index, f"not base64: {error}") from error

    def _index(self, value: Any, name: str, owner: int = 0) -> int:
        index = number(value)
        if not isinstance(index, int) or not 0 <= index < len(self._nodes):
            raise self.error(owner, f"{name!r} refers to node {value!r}, of {len(self._nodes)}")
        return index


def number(text: Any) -> int | float | None:
    """Text as a number, or None."""
    try:
        return int(text)
    except (TypeError, ValueError):
        pass
    try:
        return float(text)
    except (TypeError, ValueError):
        return None
