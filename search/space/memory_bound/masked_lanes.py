"""Vectors that hang over the edge of an image: what lies beside it is masked, neither copied nor branched around.

    for lane in vectorized(16):                           t[0:16] = masked_load(x + v * 16 + j - 1, a mask of lanes,
        sums[lane] += (x[v * 16 + lane + j - 1]       ->                        0.0)
                       if 1 <= v * 16 + lane + j          for lane in vectorized(16):
                       and v * 16 + lane + j < 29             sums[lane] += t[lane] * w[j]
                       else 0.0) * w[j]

A condition in a vector would make TVM compute lane by lane. Without one, a padded image costs a copy of it, and a row
that is no multiple of the vector a second loop. Conditions that do not depend on the lane stay as they are, so that
TVM can split the loops that they depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx
from tvm.ir.expr import TensorLoad

from ..expressions import binding_of, conditionals, is_conditional, nodes_of, substitute, uses
from ..marks import MASKED_LANES
from ..statements import rewrite_marked_loops, rewritten, stored_block

__all__ = ["guards_only_loads", "mask_lanes"]

_COMPARISONS = {tirx.LT: (-1, -1), tirx.LE: (-1, 0), tirx.GT: (1, -1), tirx.GE: (1, 0)}
"""For `a ? b` the sign of a - b and the constant with which it is at least zero."""

_DIVISIONS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)


def guards_only_loads(func: Any) -> bool:
    """Whether `mask_lanes` can put all conditions of a PrimFunc into masks: each decides about a load and no more.

    What stands for the load is the same everywhere. None is about bfloat16, which TVM takes for float32 in the
    intrinsics: twice the bytes. Nor about booleans, of which it has no vectors in memory. And nothing divides integers
    by what it loads: that is 0 in lanes that are masked, at which CPUs stop.
    """
    if any(str(getattr(parameter, "dtype", "")) in ("bfloat16", "bool") for parameter in func.params):
        return False
    divisors = [node.b for node in nodes_of(func.body, _DIVISIONS) if "int" in str(node.b.ty.dtype)]
    if any(nodes_of(divisor, TensorLoad) for divisor in divisors):
        return False
    return all(isinstance(c.args[1], TensorLoad) and not nodes_of(c.args[2], ir.Var) for c in conditionals(func.body))


def mask_lanes(func: Any) -> Any:
    """Rewrite the loops of a scheduled PrimFunc that are marked MASKED_LANES; the same object when there is none.

    Arguments of the function are read and written under a mask where a condition depends on the lane. Buffers of its
    own take whole vectors: those of a row that is shorter than a vector get room for a whole one.

    Raises
    ------
    ValueError
        When a condition is not linear in the lane, or guards more than a load, or the loop holds anything but one
        store; or when the loop, or a row of its own that it fills, is longer than the vector: marks may come from
        records of others.
    """
    arguments = [parameter for parameter in func.params if hasattr(parameter.ty, "shape")]
    whole = _with_room(func, arguments)
    return rewrite_marked_loops(whole, MASKED_LANES, lambda loop: _Vector(loop, arguments).statement())


def _with_room(func: Any, arguments: Sequence[Any]) -> Any:
    """The PrimFunc with whole vectors in those rows of its own buffers that marked loops fill."""
    wider: list[tuple[Any, Any]] = []
    for loop in nodes_of(func.body, tirx.For):
        lanes = int(loop.annotations.get(MASKED_LANES, 0))
        if not lanes or int(loop.extent) >= lanes:  # other loops may have extents that vary
            continue
        buffer = stored_block(loop).block.body.buffer
        if not any(buffer.same_as(known) for known in (*arguments, *(old for old, _ in wider))):
            if int(buffer.shape[-1]) > lanes:
                raise ValueError(f"rows of {buffer.name} are longer than {lanes}, as {loop.loop_var} is marked")
            shape = [*buffer.shape[:-1], tirx.IntImm(str(buffer.shape[-1].ty.dtype), lanes)]
            wider.append((buffer, tirx.decl_buffer(shape, str(buffer.dtype), str(buffer.name))))

    def wide(buffer: Any) -> Any:
        return next((new for old, new in wider if old.same_as(buffer)), buffer)

    return rewritten(func, (tirx.Buffer, wide)) if wider else func


class _Vector:
    """One marked loop and its block, on the way to vectors."""

    def __init__(self, loop: Any, arguments: Sequence[Any]) -> None:
        realize = stored_block(loop)
        self.lane, self.lanes, self.arguments = loop.loop_var, int(loop.annotations[MASKED_LANES]), arguments
        if int(loop.extent) > self.lanes:
            raise ValueError(f"the loop over {self.lane} is marked as a vector of {self.lanes}, but is longer")
        self.dtype = str(self.lane.ty.dtype)
        self.binding = binding_of(realize)
        self.store = realize.block.body
        self.analyzer = sym.Analyzer()
        self.always, self.within = self._split(realize.predicate)
        if int(loop.extent) < self.lanes:
            self.within.append((-1, loop.extent - 1))
        self.statements: list[Any] = []

    def statement(self) -> Any:
        """The vector's loads, its arithmetic, and its store."""
        value = self._loads_masked(self.store.value)
        indices = [substitute(index, self.binding) for index in self.store.indices]
        masked = self.within and self._is_argument(self.store.buffer)
        target, places = (self._register(str(value.ty.dtype)), [self.lane]) if masked else (self.store.buffer, indices)
        body = tirx.BufferStore(target, value, places)
        zero, extent = tirx.IntImm(self.dtype, 0), tirx.IntImm(self.dtype, self.lanes)
        self.statements.append(tirx.For(self.lane, zero, extent, tirx.ForKind.VECTORIZED, body))
        if masked:
            first = tirx.address_of(tirx.BufferLoad(self.store.buffer, [self._at_first(index) for index in indices]))
            whole = tirx.BufferLoad(target, [tirx.Ramp(0, 1, self.lanes)])
            call = tirx.call_llvm_intrin("void", "llvm.masked.store", whole, first, self._mask(self.within, 1, 0))
            self.statements.append(tirx.Evaluate(call))
        whole_body = tirx.SeqStmt(self.statements) if len(self.statements) > 1 else self.statements[0]
        for condition in self.always:
            whole_body = tirx.IfThenElse(condition, whole_body, None)
        return whole_body

    def _loads_masked(self, value: Any) -> Any:
        """The store's value with masked loads in registers, its block's variables replaced."""

        def guarded(call: Any) -> Any:
            if not is_conditional(call):
                return call
            condition, load, other = call.args
            if not isinstance(load, TensorLoad):
                raise ValueError(f"the condition {condition} guards more than a load")
            outside, inside = self._split(substitute(condition, self.binding))
            within = [] if self._ends_in_row(load, inside) else self.within or self._end_of_row(load)
            return self._load(load, [*inside, *within], outside, other)

        def plain(load: Any) -> Any:
            if not self.within or not self._is_argument(load.source) or not self._depends(load):
                return load
            return self._load(load, self.within, [], tirx.const(0, str(load.ty.dtype)))

        value = tvm_ffi.structural_map(value, (ir.Call, guarded))
        if self.within:
            value = tvm_ffi.structural_map(value, (TensorLoad, plain))
        return substitute(value, self.binding)

    def _load(self, load: Any, inside: list[Any], outside: list[Any], other: Any) -> Any:
        """`load` for all lanes, `other` where a condition fails, as an element of a register."""
        dtype = str(load.ty.dtype)
        indices = [substitute(index, self.binding) for index in load.indices]
        first = [self._at_first(index) for index in indices]
        stride = max(abs(self._linear(index)[0]) for index in indices)
        # Whole strides from a multiple of one, so that the window's elements between two lanes share the loads.
        extra = self.analyzer.simplify(tirx.floormod(first[-1], stride))
        parts = []
        for start in range(0, stride * self.lanes, self.lanes):
            mask = self._mask(inside, stride, start - extra)
            address = tirx.address_of(tirx.BufferLoad(load.source, [*first[:-1], first[-1] - extra + start]))
            beside = tirx.Broadcast(other, self.lanes)
            name = "llvm.masked.load"
            parts.append(tirx.call_llvm_pure_intrin(f"{dtype}x{self.lanes}", name, address, mask, beside))
        vector = self._every(stride, 0, parts)
        for place in range(1, stride):
            vector = tirx.if_then_else(
                tirx.EQ(extra, tirx.IntImm(self.dtype, place)), self._every(stride, place, parts), vector
            )
        for condition in outside:
            vector = tirx.if_then_else(condition, vector, tirx.Broadcast(other, self.lanes))
        register = self._register(dtype)
        self.statements.append(tirx.BufferStore(register, vector, [tirx.Ramp(0, 1, self.lanes)]))
        return tirx.BufferLoad(register, [self.lane])

    def _ends_in_row(self, load: Any, conditions: list[tuple[int, Any]]) -> bool:
        """Whether the conditions alone keep `load` from going beyond its row, also in lanes that are not written.

        Then all elements of a window have one mask, and those of a stride share their loads.
        """
        slope, last = self._row(load)
        for other, bound in conditions:
            room = self.analyzer.simplify(last - bound)
            if other == slope < 0 and isinstance(room, tirx.IntImm) and int(room) >= 0:
                return True
        return False

    def _end_of_row(self, load: Any) -> list[tuple[int, Any]]:
        """The condition without which lanes that skip columns would also read those behind the last one's."""
        end = self._row(load)
        return [end] if end[0] < -1 else []

    def _row(self, load: Any) -> tuple[int, Any]:
        """The condition that an element lies in the row of `load`, or in front of it."""
        slope, column = self._linear(substitute(load.indices[-1], self.binding))
        return -slope, load.source.shape[-1] - 1 - column

    def _every(self, stride: int, place: int, parts: list[Any]) -> Any:
        """Each element of `parts` that is `stride` from the one before, beginning with the one at `place`."""
        return parts[0] if stride == 1 else tirx.Shuffle(parts, list(range(place, stride * self.lanes, stride)))

    def _register(self, dtype: str) -> Any:
        buffer = tirx.decl_buffer([self.lanes], dtype, "vector")
        self.statements.append(tirx.AllocBuffer(buffer))
        return buffer

    def _split(self, condition: Any) -> tuple[list[Any], list[tuple[int, Any]]]:
        """The parts of a conjunction that do not depend on the lane, and the others as (k, d): d + k * lane >= 0."""
        if isinstance(condition, tirx.And):
            left, right = self._split(condition.a), self._split(condition.b)
            return left[0] + right[0], left[1] + right[1]
        if isinstance(condition, tirx.IntImm):
            return ([] if bool(condition.value) else [condition]), []
        if not self._depends(condition):
            return [condition], []
        if type(condition) not in _COMPARISONS:
            raise ValueError(f"{condition} depends on the lane {self.lane} and is no comparison")
        sign, constant = _COMPARISONS[type(condition)]
        difference = (condition.a - condition.b) if sign > 0 else (condition.b - condition.a)
        return [], [self._linear(difference + constant)]

    def _linear(self, index: Any) -> tuple[int, Any]:
        linear = sym.detect_linear_equation(self.analyzer.simplify(index), [self.lane])
        if not linear or not isinstance(linear[0], tirx.IntImm):
            raise ValueError(f"{index} is not linear in the lane {self.lane}")
        return int(linear[0]), linear[1]

    def _mask(self, conditions: list[tuple[int, Any]], stride: int, start: Any) -> Any:
        """Lanes whose elements, `stride` of them a lane and counted from `start`, meet all conditions."""
        masks = []
        for slope, first in conditions:
            offset = self.analyzer.simplify(first * stride + slope * start)
            line = tirx.Ramp(offset, tirx.IntImm(str(offset.ty.dtype), slope), self.lanes)
            masks.append(tirx.GE(line, tirx.Broadcast(tirx.const(0, str(offset.ty.dtype)), self.lanes)))
        mask = masks[0] if masks else tirx.Broadcast(tirx.IntImm("bool", 1), self.lanes)
        for more in masks[1:]:
            mask = tirx.And(mask, more)
        return mask

    def _at_first(self, index: Any) -> Any:
        return substitute(index, [(self.lane, tirx.IntImm(self.dtype, 0))])

    def _depends(self, expression: Any) -> bool:
        return uses(substitute(expression, self.binding), self.lane)

    def _is_argument(self, buffer: Any) -> bool:
        return any(buffer.same_as(argument) for argument in self.arguments)
