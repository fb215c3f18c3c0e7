"""Windows that overlap, added up where they lie: TVM could only scatter their elements one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax
from tvm.relax import op

from ..relax_ir.tensors import extents

__all__ = ["add_up", "fold"]


def fold(emit: Any, x: relax.Expr, axes: Sequence[tuple[int, int, int, int, int]]) -> relax.Expr:
    """Images [n, *sizes] of the windows [n * taps, places] of each: col2im, axis by axis, the last one first.

    `axes` holds size, taps, dilation, padding and stride of each axis of an image.
    """
    places = [(size + 2 * pad - (taps - 1) * dilation - 1) // stride + 1 for size, taps, dilation, pad, stride in axes]
    x = emit(op.reshape(x, [-1, *(taps for _, taps, *_ in axes), *places]))
    count = len(axes)
    names = ["n", *(f"tap {axis}" for axis in range(count)), *(f"place {axis}" for axis in range(count))]
    for axis in reversed(range(count)):
        added = [f"tap {axis}", f"place {axis}"]
        rest = [name for name in names if name not in added]
        windows = emit(op.permute_dims(x, [names.index(name) for name in (*rest, *added)]))
        x, names = add_up(emit, windows, *axes[axis]), [*rest, f"size {axis}"]
    return emit(op.permute_dims(x, [names.index(name) for name in ("n", *(f"size {axis}" for axis in range(count)))]))


def add_up(emit: Any, x: relax.Expr, size: int, taps: int, dilation: int, pad: int, stride: int) -> relax.Expr:
    """[..., taps, places] -> [..., size]: tap t of place p is added to element p * stride + t * dilation - pad.

    Strides taps make one line of all places; the lines of the next taps begin a stride later.
    """
    *rest, _, places = extents(x.ty)
    front = [0] * (2 * len(rest))
    if dilation > 1:
        spread = emit(op.nn.pad(emit(op.expand_dims(x, -2)), [*front, 0, 0, 0, dilation - 1, 0, 0]))
        x, taps = emit(op.reshape(spread, [*rest, taps * dilation, places])), taps * dilation
    lines = -(-taps // stride)
    x = emit(op.nn.pad(x, [*front, 0, lines * stride - taps, 0, 0]))
    split = emit(op.reshape(x, [*rest, lines, stride, places]))
    rank = len(rest)
    joined = emit(op.permute_dims(split, [*range(rank + 1), rank + 2, rank + 1]))
    joined = emit(op.reshape(joined, [*rest, lines, places * stride]))
    total = None
    for line in range(lines):
        own = emit(op.squeeze(emit(op.strided_slice(joined, [rank], [line], [line + 1])), [rank]))
        own = emit(op.nn.pad(own, [*front, line * stride, (lines - 1 - line) * stride]))
        total = own if total is None else emit(op.add(total, own))
    length = (places + lines - 1) * stride
    total = emit(op.nn.pad(total, [*front, 0, max(0, pad + size - length)]))
    return emit(op.strided_slice(total, [rank], [pad], [pad + size]))
