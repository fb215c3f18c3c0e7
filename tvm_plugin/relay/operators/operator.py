"""What a row of the operator tables says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

from ..attributes import attribute_class
from ..builder import Builder

__all__ = ["Convert", "Operator", "row"]

Convert: TypeAlias = Callable[[Builder, Sequence[Any], SimpleNamespace], Any]
"""(builder, arguments, attributes) to an expression that is not emitted yet, or a list of values for a tuple."""


@dataclass(frozen=True)
class Operator:
    """One Relay operator.

    Attributes
    ----------
    name
        As in the text: `nn.conv2d`.
    min_args, max_args
        How many arguments it takes.
    attrs
        The class of its attributes, see `attributes`; "" for none.
    convert
        Its meaning in Relax.
    """

    name: str
    min_args: int
    max_args: int
    attrs: str
    convert: Convert


def row(name: str, args: int | tuple[int, int], attrs: str, convert: Convert) -> Operator:
    """A row: `args` is a number or a range. Raises KeyError when the attribute class does not exist."""
    if attribute_class(attrs) is None:
        raise KeyError(f"{name}: no attribute class {attrs!r}")
    least, most = args if isinstance(args, tuple) else (args, args)
    return Operator(name, least, most, attrs, convert)
