"""The metadata section: constants and attributes that a program refers to as `meta[relay.Constant][0]`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .attributes import attribute_class, decode_attributes
from .json_graph import JsonGraph
from .tokens import Token, Tokens

__all__ = ["Metadata", "split_metadata"]

_SECTION = re.compile(r"^[ \t]*#\[metadata\]", re.MULTILINE)
_REFERENCE = re.compile(r"meta\[\s*([\w.]+)\s*\]\[\s*(\d{1,9})\s*\]")


def split_metadata(text: str) -> tuple[str, Metadata]:
    """The program, and its metadata section, which goes to the end of the text."""
    section = _SECTION.search(text)
    if section is None:
        return text, Metadata(None)
    return text[: section.start()], Metadata(text[section.end() :])


class Metadata:
    """Looks references up. The JSON is read when the first one is met."""

    def __init__(self, text: str | None) -> None:
        self._text = text
        self._graph: JsonGraph | None = None
        self._lists: dict[str, list[int]] = {}

    def constant(self, token: Token, tokens: Tokens) -> NDArray[Any]:
        """The array of a `meta[relay.Constant][i]`."""
        graph, index = self._find(token, tokens)
        if graph.type_key(index) != "relay.Constant":
            raise tokens.error(token.position, f"{token.text} is a {graph.type_key(index)}; expected a relay.Constant")
        return np.asarray(graph.array(graph.field(index, "data") or ""))

    def attrs(self, token: Token, tokens: Tokens) -> dict[str, Any]:
        """The attributes of a call, which some printers put here as a whole."""
        graph, index = self._find(token, tokens)
        if attribute_class(graph.type_key(index)) is None:
            raise tokens.error(token.position, f"{token.text} is no attribute class that is known here")
        return decode_attributes(graph, index)

    def attribute(self, token: Token, tokens: Tokens) -> Any:
        """One attribute or extent. What only places code (VirtualDevice, Target, ...) is given by its class alone."""
        if self._text is None:
            return token.text
        graph, index = self._find(token, tokens)
        if graph.type_key(index) == "relay.Constant":
            return graph.array(graph.field(index, "data") or "").tolist()
        return graph.value(index)

    def _find(self, token: Token, tokens: Tokens) -> tuple[JsonGraph, int]:
        match = _REFERENCE.fullmatch(token.text)
        if match is None:
            raise tokens.error(
                token.position, f"found {token.text}, expected a reference as in meta[relay.Constant][0]"
            )
        if self._text is None:
            raise tokens.error(
                token.position,
                f"{token.text} refers to the metadata section, which the text does not have; print the module with its "
                "metadata: mod.astext(show_meta_data=True)",
            )
        if self._graph is None:
            self._graph = JsonGraph(self._text, "the metadata section")
            self._lists = {
                key: self._graph.children(values) for key, values in self._graph.items(self._graph.root).items()
            }
        key, position = match.group(1), int(match.group(2))
        entries = self._lists.get(key, [])
        if position >= len(entries):
            raise tokens.error(token.position, f"{token.text}, but the metadata section has {len(entries)} {key}")
        return self._graph, entries[position]
