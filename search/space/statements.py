"""What the rewriters of scheduled functions share: going over a body, and putting statements and functions together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

__all__ = [
    "annotations_without",
    "block_with",
    "function_of",
    "in_order",
    "looped",
    "point",
    "rewrite_marked_loops",
    "rewritten",
    "stored_block",
    "with_body",
    "with_code",
]

_PARTS = (
    *("iter_vars", "reads", "writes", "name_hint", "body", "init", "alloc_buffers", "match_buffers", "annotations"),
    "span",
)


def rewritten(function: Any, callbacks: Any) -> Any:
    """A PrimFunc whose body `tvm_ffi.structural_map` has mapped by these; the same object where nothing changed."""
    body = tvm_ffi.structural_map(function.body, callbacks)
    return function if body.same_as(function.body) else function.with_body(body)


def rewrite_marked_loops(function: Any, mark: str, rewrite: Callable[[Any], Any]) -> Any:
    """A PrimFunc whose loops with a mark (marks.py) were rewritten, inner ones first; the same object where there are
    none."""
    return rewritten(function, (tirx.For, lambda loop: rewrite(loop) if mark in loop.annotations else loop))


def stored_block(loop: Any) -> Any:
    """The block in a marked loop that holds nothing but one, whose body is a store. Raises ValueError for any other."""
    realize = loop.body
    if not isinstance(realize, s_tir.SBlockRealize) or not isinstance(realize.block.body, tirx.BufferStore):
        raise ValueError(f"the loop over {loop.loop_var} is marked as one of a single store, but holds something else")
    return realize


def looped(loops: Sequence[Any], extents: Sequence[Any], body: Any, parallel: int | None = None) -> Any:
    """Nested loops, of 64 bits; threads share the one at the place `parallel`."""
    for place, loop, extent in reversed(list(zip(range(len(loops)), loops, extents, strict=True))):
        kind = tirx.ForKind.PARALLEL if place == parallel else tirx.ForKind.SERIAL
        body = tirx.For(loop, tirx.IntImm("int64", 0), extent, kind, body)
    return body


def in_order(statements: Sequence[Any]) -> Any:
    """One statement after another."""
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(list(statements))


def function_of(
    parameters: Sequence[Any], statements: Sequence[Any], attributes: Mapping[str, Any], own: Sequence[Any] = ()
) -> tirx.PrimFunc:
    """A kernel of these statements, with buffers of its own."""
    root = s_tir.SBlock([], [], [], "root", in_order(statements), alloc_buffers=list(own))
    return tirx.PrimFunc(list(parameters), s_tir.SBlockRealize([], True, root)).with_attr(dict(attributes))


def point(buffer: Any, indices: Sequence[Any]) -> Any:
    """The region of a single element."""
    one = tirx.IntImm("int64", 1)
    return tirx.BufferRegion(buffer, [ir.Range.from_min_extent(index, one) for index in indices])


def with_body(loop: Any, body: Any, *without: str, annotations: Mapping[str, Any] | None = None) -> Any:
    """The loop around another body, less the annotations of the names `without`, with `annotations`."""
    return tirx.For(
        loop.loop_var,
        loop.min,
        loop.extent,
        loop.kind,
        body,
        loop.thread_binding,
        annotations=annotations_without(loop, *without) | dict(annotations or {}),
        step=loop.step,
    )


def annotations_without(node: Any, *names: str) -> dict[str, Any]:
    """The annotations of a loop or a block, less those of these names."""
    return {name: value for name, value in node.annotations.items() if name not in names}


def block_with(block: Any, **changed: Any) -> Any:
    """The block with some of its parts changed, by the names of `s_tir.SBlock`'s parameters."""
    return s_tir.SBlock(**{name: getattr(block, name) for name in _PARTS} | changed)


def with_code(code: str, statement: Any) -> Any:
    """The statement, and with it functions in LLVM's language that it calls."""
    return tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", code, statement)
