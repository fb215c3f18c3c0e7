"""Replaces transcendental functions in scheduled kernels by forms that vectorise (math_forms.py).

The forms name intermediate values with `Let`. While generating code, TVM simplifies the value of each `Let` with all
that it depends on put in, so that every level of nested calls multiplies the compile time: 0.06 s with one, more than a
minute with the four of NasRNN's cells. Therefore the result of each call is stored in a buffer of one vector, which
LLVM keeps in a register (TVM puts buffers of scope "global" under 1024 bytes on the stack; "local" ones would be
allocated and freed in every call of the kernel):

    for j in vectorized(16):                    t = alloc_buffer(16)
        y[i + j] = tanh(a * sigmoid(x[i + j]))  ->  for j in vectorized(16):
                                                        t[j] = 1 / (1 + exp form of -x[i + j])
                                                        y[i + j] = tanh form of a * t[j]
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.ir.expr import TensorLoad

from ..expressions import is_conditional, nodes_of, uses
from ..statements import rewritten, with_body
from .math_forms import math_form

__all__ = ["vectorizable_math"]


def vectorizable_math(func: Any) -> Any:
    """Replace float32 `exp`, `tanh`, `sigmoid`, `erf`, `log` and simple powers by forms that vectorise.

    Results differ from libm's by a few units in the last place; infinities and NaN are kept, but by roots of minus
    infinity. Results of `exp` below 2^-125 (1.7e-38 at most) become zero. Calls of other types stay as they are. Where
    a condition guards a load (padding, concatenation) nothing may be computed ahead of it: where calls are nested, each
    of its sides becomes a statement of its own. In what `and` and `or` guard, and where the kernel has a Let that names
    what a call is of, only the innermost call is replaced.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Scheduled: its blocks may hold several statements afterwards, which TVM's schedules do not take.

    Returns
    -------
    tvm.tirx.PrimFunc, the same object when there was nothing to replace.
    """

    def vector_loop(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.VECTORIZED:
            return loop
        buffers: list[Any] = []
        body = tvm_ffi.structural_map(loop.body, (tirx.BufferStore, _staging(buffers, loop.extent, loop.loop_var)))
        if body.same_as(loop.body):
            return loop
        return _allocated(buffers, with_body(loop, body))

    def scalar_store(store: Any) -> Any:
        if any(store.same_as(other) for other in in_vectors):
            return store
        buffers: list[Any] = []
        return _allocated(buffers, _staging(buffers, 1, 0)(store))

    result = rewritten(func, (tirx.For, vector_loop))
    loops = [loop for loop in nodes_of(result.body, tirx.For) if loop.kind == tirx.ForKind.VECTORIZED]
    in_vectors = [store for loop in loops for store in nodes_of(loop.body, tirx.BufferStore)]
    return rewritten(result, (tirx.BufferStore, scalar_store))


def _allocated(buffers: list[Any], statement: Any) -> Any:
    return tirx.SeqStmt([*map(tirx.AllocBuffer, buffers), statement]) if buffers else statement


def _staging(buffers: list[Any], extent: Any, place: Any) -> Callable[[Any], Any]:
    """Rewrites a store into stores of the results of its calls, each at `place` of a new buffer, and of its value."""

    def staged(store: Any) -> Any:
        if _guards_calls(store.value) or _calls_depend_on_names(store.value):
            value = tvm_ffi.structural_map(store.value, (ir.Call, _replace_innermost))
            is_nested = _has(value, ir.Call, _has_form) and not _has(store.value, tirx.Let)  # whose names end there
            return (split(store) if is_nested else None) or with_value(store, value)
        return staged_calls(store)

    def split(store: Any) -> Any:
        """The store as statements that the conditions in its value choose; None without such conditions."""
        if is_conditional(store.value):
            condition, *sides = store.value.args
            condition = tvm_ffi.structural_map(condition, (ir.Call, _replace_innermost))
            return tirx.IfThenElse(condition, *(staged(with_value(store, side)) for side in sides))
        before: list[Any] = []

        def chosen_before(call: Any) -> Any:
            if not is_conditional(call):
                return call
            buffer = tirx.decl_buffer([extent], str(call.ty.dtype), "math")
            buffers.append(buffer)
            before.append(staged(tirx.BufferStore(buffer, call, [place])))
            return tirx.BufferLoad(buffer, [place])

        value = tvm_ffi.structural_map(store.value, (ir.Call, chosen_before), order="pre")
        return tirx.SeqStmt([*before, staged(with_value(store, value))]) if before else None

    def staged_calls(store: Any) -> Any:
        before: list[Any] = []
        results: list[tuple[Any, Any]] = []

        def stored(value: Any) -> Any:
            buffer = tirx.decl_buffer([extent], str(value.ty.dtype), "math")
            buffers.append(buffer)
            before.append(tirx.BufferStore(buffer, value, [place]))
            return tirx.BufferLoad(buffer, [place])

        def replace(call: Any) -> Any:
            if math_form(call) is None:
                return call
            for known, result in results:
                if tvm_ffi.structural_equal(known, call):
                    return result
            arguments = [stored(value) if _has(value, tirx.Cast, _breaks_in_let) else value for value in call.args]
            results.append((call, stored(math_form(SimpleNamespace(op=call.op, ty=call.ty, args=arguments)))))
            return results[-1][1]

        value = store.value
        if _visits_let_twice(value) and not _has(value, ir.Call, is_conditional):
            value = tvm_ffi.structural_map(value, (tirx.Let, stored), order="pre")
        value = tvm_ffi.structural_map(value, (ir.Call, replace))
        return tirx.SeqStmt([*before, with_value(store, value)]) if before else store

    def with_value(store: Any, value: Any) -> Any:
        return tirx.BufferStore(store.buffer, value, store.indices)

    return staged


def _replace_innermost(call: Any) -> Any:
    form = None if _has(call, tirx.Let) or _has(call, tirx.Cast, _breaks_in_let) else math_form(call)
    return call if form is None else form


def _guards_calls(expression: Any) -> bool:
    """Whether a condition decides if a load happens at all, and a call with a vectorising form depends on it."""
    nodes = nodes_of(expression, (ir.Call, tirx.And, tirx.Or))
    guarded = [node for node in nodes if not isinstance(node, ir.Call) or is_conditional(node)]
    return any(_has(node, ir.Call, _has_form) and _has(node, TensorLoad) for node in guarded)


def _calls_depend_on_names(expression: Any) -> bool:
    """Whether a call with a vectorising form is of what a Let names: outside of it the name means nothing."""
    names = [let.var for let in nodes_of(expression, tirx.Let)]
    return any(uses(call, *names) for call in nodes_of(expression, ir.Call) if _has_form(call))


def _breaks_in_let(cast: Any) -> bool:
    """Whether it may not be part of the value of a Let: of vectors of truths, TVM wants a number, and of bfloat16, it
    legalises none there, at which LLVM crashes."""
    return _converts_bfloat16(cast) or str(cast.value.ty.dtype) == "bool"


def _converts_bfloat16(cast: Any) -> bool:
    """To it, or from it: what is read as it is would be taken for an integer."""
    return "bfloat16" in (str(cast.ty.dtype), str(cast.value.ty.dtype))


def _visits_let_twice(expression: Any) -> bool:
    """Whether TVM, which binds a name once, fails at a Let: it writes down twice what it rounds to bfloat16, and
    simplifies twice what it selects by."""

    def rounds(cast: Any) -> bool:
        return str(cast.ty.dtype) == "bfloat16" and _has(cast.value, tirx.Let)

    def selects(choice: Any) -> bool:
        return _has(choice.condition, tirx.Let)

    return _has(expression, tirx.Cast, rounds) or _has(expression, tirx.Select, selects)


def _has_form(call: Any) -> bool:
    return math_form(call) is not None


def _has(expression: Any, kind: Any, condition: Callable[[Any], bool] = lambda _: True) -> bool:
    return any(map(condition, nodes_of(expression, kind)))
