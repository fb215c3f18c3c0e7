"""Kernels whose loops depend on the data, or on what they wrote before: no schedule is searched for them.

TVM has them as routines. Those that lose a factor on a CPU are written anew here: `scatter_nd` starts a parallel region
for every index, `topk` selects on one thread, sums along an axis that is not the last (`cumsum`) read one element of
each line, and `grid_sample` computes every place for every channel. Two threads of a Zen 4, us: 5000 x 128 added to
rows of 1000 x 128, 30532 -> 85 (4410 in a worker, whose threads do not sleep); the first 10 of 256 x 1000, 780 -> 72
(ONNX Runtime 101); 1000 x 256 summed along its first axis, 560 -> 23; 64 channels sampled at 56 x 56 places, 414 -> 127
(216).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tvm import ir, relax, te, tirx
from tvm.script.ir_builder import tirx as T

from ..relax_ir.constants import is_static_tensor
from ..relax_ir.functions import operator, top_level_bindings
from ..relax_ir.te_kernels import Routine, extern_kernel, with_te_kernels
from ..relax_ir.tensors import extents
from .grid_sample import LEAST_CHANNELS, grid_sample
from .workers import rest, share, variable, workers, worthwhile_threads

__all__ = ["scatter", "write_routines"]

LEAST_COLUMNS = 64
"""Of a row's elements for one thread: a few lines, so that no two threads write the same."""

FEWEST_COLUMNS = 8
"""Of a row for threads with rows of their own: all of them read all indices."""

MOST_SELECTED = 128
"""Larger `k` of `topk` are left to TVM: each of n elements may have to find its place among k."""

_LANES = 16
"""Of the vectors in which rows are scattered."""

AT_ONCE = 16
"""Elements of a row that `topk` compares with the last of the k before it looks at each one."""

_REDUCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "update": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "min": tirx.min,
    "max": tirx.max,
}


def write_routines(mod: ir.IRModule, threads: int) -> ir.IRModule:
    """Replace calls by kernels of this module, for a CPU, where shapes are known; all others stay.

    Indices of `scatter_nd` that lie outside, along any axis, write nothing.
    """
    for name, routine in _ROUTINES.items():
        mod = with_te_kernels(mod, name.split(".")[-1], partial(_found, f"relax.{name}", routine, threads))
    return mod


def _found(
    name: str, routine: Callable[[relax.Call, int], Any], threads: int, function: relax.Function
) -> dict[relax.Var, Routine]:
    kernels = {}
    for binding in top_level_bindings(function):
        call: Any = getattr(binding, "value", None)
        if operator(call) != name or not all(is_static_tensor(one.ty) for one in call.args):
            continue
        compute = routine(call, threads) if all(extents(call.args[0].ty)) else None
        if compute is not None:
            kernels[binding.var] = Routine(list(call.args), compute)
    return kernels


def _scatter_of(call: relax.Call, threads: int) -> Callable[..., Any]:
    return partial(_scatter, reduction=str(call.attrs.reduction), threads=threads)


def _largest_of(call: relax.Call, threads: int) -> Callable[..., Any] | None:
    attrs, ty = call.attrs, call.args[0].ty
    last = int(attrs.axis) % ty.ndim == ty.ndim - 1
    few = 0 < int(attrs.k) <= min(MOST_SELECTED, extents(ty)[-1])
    if not last or not few or str(attrs.ret_type) != "both" or str(ty.dtype) == "bfloat16":
        return None
    dtype = str(attrs.dtype)
    return partial(_largest, k=int(attrs.k), largest=bool(attrs.largest), index_dtype=dtype, threads=threads)


def _sum_of(call: relax.Call, threads: int) -> Callable[..., Any] | None:
    attrs, ty = call.attrs, call.args[0].ty
    if attrs.axis is None or bool(attrs.exclusive):
        return None
    axis = int(attrs.axis) % ty.ndim
    if math.prod(extents(ty)[axis + 1 :]) < LEAST_COLUMNS:
        return None
    return partial(_cumulative_sum, axis=axis, dtype=str(call.ty.dtype), threads=threads)


def _samples_of(call: relax.Call, threads: int) -> Callable[..., Any] | None:
    attrs, ty = call.attrs, call.args[0].ty
    known = str(attrs.method) == "bilinear" and str(attrs.padding_mode) in ("zeros", "border")
    if not known or str(attrs.layout) != "NCHW" or {str(arg.ty.dtype) for arg in call.args} != {"float32"}:
        return None
    if ty.ndim != 4 or extents(ty)[1] < LEAST_CHANNELS:
        return None
    return partial(
        grid_sample, corners=bool(attrs.align_corners), border=str(attrs.padding_mode) == "border", threads=threads
    )


_ROUTINES: Mapping[str, Callable[[relax.Call, int], Callable[..., Any] | None]] = {
    "scatter_nd": _scatter_of,
    "topk": _largest_of,
    "cumsum": _sum_of,
    "image.grid_sample": _samples_of,
}


def _scatter(data: te.Tensor, indices: te.Tensor, updates: te.Tensor, reduction: str, threads: int) -> te.Tensor:
    columns = math.prod(int(extent) for extent in data.shape[int(indices.shape[-1]) :])

    def update(sources: list[Any], number: Any, column: Any) -> Any:
        return sources[0][number * columns + column]

    return scatter(data, indices, [updates], update, reduction, threads)


def scatter(
    data: te.Tensor,
    indices: te.Tensor,
    sources: list[te.Tensor],
    update_of: Callable[[list[Any], Any, Any], Any],
    reduction: str,
    threads: int,
) -> te.Tensor:
    """`data` with updates at some of its rows: indices are [..., depth] into its first axes, one update after another.

    `update_of(sources, number, column)` is a column of an update, from flat buffers. Threads have their own columns of
    all rows, or their own rows, and skip what is not theirs.
    """
    depth = int(indices.shape[-1])
    shape = [int(extent) for extent in data.shape]
    rows, columns = math.prod(shape[:depth]), math.prod(shape[depth:])
    count = math.prod(int(extent) for extent in indices.shape[:-1])
    threads = worthwhile_threads(threads, (rows + count) * columns)
    across = max(1, min(threads, columns // LEAST_COLUMNS))
    down = threads // across if columns >= FEWEST_COLUMNS else 1
    wide, high = share(columns, across), share(rows, down)
    combine = _REDUCTIONS[reduction]

    def body(given: Any, places: Any, *others: Any) -> None:
        *new, result = others

        def coordinates(update: Any) -> list[Any]:
            return [places[update * depth + axis].astype("int64") for axis in range(depth)]

        def write(row: Any, update: Any, column: Any) -> None:
            at = row * columns + column
            result[at] = combine(result[at], update_of(new, update, column))

        with workers(across * down, threads) as worker:
            left, top = worker % across * wide, worker // across * high
            own, end = rest(columns, left, wide), top + rest(rows, top, high)
            with T.serial(0, end - top) as row, T.serial(0, own) as column:
                at = (top + row) * columns + left + column
                result[at] = given[at]
            with T.serial(0, tirx.IntImm("int64", count)) as update:
                parts = coordinates(update)
                row = sum(part * math.prod(shape[axis + 1 : depth]) for axis, part in enumerate(parts))
                # Where these are inside, the row tells it of the first.
                inside = [tirx.all(part >= 0, part < shape[axis]) for axis, part in enumerate(parts) if axis]
                with T.If(tirx.all(row >= top, row < end, *inside)), T.Then():
                    if columns % (across * _LANES) == 0:  # LLVM does not know that what is read is written by nobody
                        step, lanes = T.serial(0, tirx.IntImm("int64", wide // _LANES)), tirx.IntImm("int64", _LANES)
                        with step as vector, T.vectorized(0, lanes) as lane:
                            write(row, update, left + vector * _LANES + lane)
                    else:
                        with T.serial(0, own) as column:
                            write(row, update, left + column)

    return extern_kernel("scatter_nd", body, [data, indices, *sources], [(data.shape, data.dtype)])


def _cumulative_sum(data: te.Tensor, axis: int, dtype: str, threads: int) -> te.Tensor:
    """Sums along an axis, a line of those behind it at a time."""
    shape = [int(extent) for extent in data.shape]
    outer, steps, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    threads = worthwhile_threads(threads, math.prod(shape))
    across = max(1, min(share(threads, outer), inner // LEAST_COLUMNS))
    wide = share(inner, across)

    def body(given: Any, result: Any) -> None:
        with workers(outer * across, threads) as worker:
            left = worker % across * wide
            first, own = worker // across * (steps * inner) + left, rest(inner, left, wide)
            with T.serial(0, own) as column:
                result[first + column] = given[first + column].astype(dtype)
            with T.serial(0, tirx.IntImm("int64", steps - 1)) as step, T.serial(0, own) as column:
                at = first + (step + 1) * inner + column
                result[at] = result[at - inner] + given[at].astype(dtype)

    return extern_kernel("cumsum", body, [data], [(data.shape, dtype)])


def _largest(data: te.Tensor, k: int, largest: bool, index_dtype: str, threads: int) -> list[te.Tensor]:
    """The k largest (or smallest) of each row in order, and their places; of equal ones the first.

    They are kept sorted; most elements are no better than the last of them. NaN is larger than all numbers, as in
    PyTorch.
    """
    shape = [int(extent) for extent in data.shape]
    length, rows, dtype = shape[-1], math.prod(shape[:-1]), str(data.dtype)

    def better(new: Any, old: Any) -> Any:
        order = new > old if largest else new < old
        if not dtype.startswith("float"):
            return order
        return tirx.all(may_be_better(new, old) > 0, tirx.Not(tirx.isnan(old if largest else new)))

    def may_be_better(new: Any, old: Any) -> Any:
        """1 or 0: whether it is, or one of the two is NaN."""
        # Not "not (new <= old)", which TVM takes for new > old.
        return tirx.Select(new <= old if largest else new >= old, tirx.IntImm("int32", 0), tirx.IntImm("int32", 1))

    def body(given: Any, values: Any, places: Any) -> None:
        def put(row: Any, place: Any, at: Any) -> None:
            """The element at `at` to a place that is free or the last one, or rather to where it belongs."""
            first, new, now = row * k, variable(dtype), variable("int64")
            new[0] = given[row * length + at]
            now[0] = place
            before = first + tirx.max(now[0] - 1, 0)
            with T.While(tirx.all(now[0] > 0, better(new[0], values[before]))):
                for kept in (values, places):
                    kept[first + now[0]] = kept[before]
                now[0] = now[0] - 1
            values[first + now[0]] = new[0]
            places[first + now[0]] = at.astype(index_dtype)

        with workers(rows, worthwhile_threads(threads, rows * length)) as row:
            with T.serial(0, tirx.IntImm("int64", k)) as at:
                put(row, at, at)
            last = row * k + (k - 1)

            def look_at(place: Any) -> None:
                with T.If(better(given[row * length + place], values[last])), T.Then():
                    put(row, tirx.IntImm("int64", k - 1), place)

            whole = (length - k) // AT_ONCE
            with T.serial(0, tirx.IntImm("int64", whole)) as block:
                first = k + block * AT_ONCE
                hopeful = variable("int32")  # LLVM makes vectors of the loop
                hopeful[0] = tirx.IntImm("int32", 0)
                with T.serial(0, AT_ONCE) as one:
                    hopeful[0] = hopeful[0] | may_be_better(given[row * length + first + one], values[last])
                with T.If(hopeful[0] > 0), T.Then(), T.serial(0, AT_ONCE) as one:
                    look_at(first + one)
            with T.serial(k + whole * AT_ONCE, tirx.IntImm("int64", length)) as place:
                look_at(place)

    shape = [*shape[:-1], k]
    return extern_kernel("topk", body, [data], [(shape, dtype), (shape, index_dtype)])
