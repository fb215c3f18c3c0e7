"""Relay programs: read them, run passes the Relay way, print Relax as Relay.

TVM dropped Relay in 0.20. What people still hold of it, programs as text or JSON with their parameters, becomes Relax
here, and then goes the way of every other model.

>>> from eqtune import relay
>>> mod = relay.from_text(open("model.relay").read(), relay.load_params(open("model.params", "rb").read()))
... # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import tvm

from .. import _checked  # noqa: F401 - refuses versions that cannot work
from .arrays import load_params
from .convert import convert
from .errors import RelayError, UnsupportedRelayError
from .json_program import program_from_json
from .parser import parse
from .printer import astext, astext_and_params

if TYPE_CHECKING:
    from . import transform

__all__ = [
    "RelayError",
    "UnsupportedRelayError",
    "astext",
    "astext_and_params",
    "from_json",
    "from_text",
    "load_params",
    "transform",
]


def from_text(
    text: str,
    params: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> tvm.IRModule:
    """Convert a program in Relay's text format 0.0.5, as `mod.astext()` of TVM 0.8 to 0.19 prints it.

    A single function (`fn (%x: float32) {...}`) or expression (`free_var %x: float32; exp(%x)`) becomes "main".
    `print(mod)` leaves out the version line, which may be missing, and the constants, which may not.

    Parameters
    ----------
    text
        With its metadata section, if it has constants: `mod.astext(show_meta_data=True)`.
    params
        Weights by the names of parameters of "main", as numpy arrays or TVM tensors; they become constants. Entries
        that the program does not use are ignored.
    shapes
        Extents of parameters whose types have `?`.

    Returns
    -------
    tvm.ir.IRModule
        Relax. Functions are inlined where they are called; "main" takes the parameters that remain.

    Raises
    ------
    RelayError
        The text cannot be read, does not type-check, or `params` or `shapes` do not fit it; with line and column.
    UnsupportedRelayError
        Operators without a counterpart (all are listed), dynamic shapes, recursion, algebraic data types.
    """
    if not isinstance(text, str):
        raise RelayError(f"from_text takes the text of a program, not {type(text).__name__}")
    return convert(parse(text), params, shapes)


def from_json(
    text: str,
    params: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> tvm.IRModule:
    """Convert what `tvm.ir.save_json` of TVM 0.8 to 0.19 wrote for a Relay module or function; see `from_text`."""
    if not isinstance(text, str):
        raise RelayError(f"from_json takes text, not {type(text).__name__}")
    return convert(program_from_json(text), params, shapes)


def __getattr__(name: str) -> Any:
    # The passes bring the graph search along: an e-graph engine and a solver, which reading a program does not need.
    if name == "transform":
        return import_module(".transform", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
