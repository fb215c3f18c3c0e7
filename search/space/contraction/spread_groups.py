"""Grouped convolutions with channels last, their groups smaller than a vector: one input of each group, spread over it.

    for rc in range(4):                                          pixel[0:16] = x[0:16]
        for lane in vectorized(16):                              spread[0:16] = shuffle(pixel, [0, 0, 0, 0, 4, .. 12])
            y[lane] += x[lane // 4 * 4 + rc] * w[rc, lane]   ->  y[0:16] += spread * w[0, 0:16]
                                                                 spread[0:16] = shuffle(pixel, [1, 1, 1, 1, 5, .. 13])
                                                                 ...

TVM would gather the elements of x one by one, and vectors of one group's channels alone leave most lanes empty. All of
a register tile is written out. A pixel is loaded once, and what is spread of it goes into all sums that it is part of
before the next is: only sums, pixels and the weights of one input of a group want registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import sym, tirx
from tvm.ir.expr import TensorLoad

from ..expressions import binding_of, conditionals, conjuncts, is_conditional, is_zero, nodes_of, substitute, uses
from ..marks import SPREAD_GROUPS
from ..statements import rewrite_marked_loops, stored_block

__all__ = ["spread_groups"]


def spread_groups(func: Any) -> Any:
    """Rewrite the loops of a scheduled PrimFunc that are marked SPREAD_GROUPS; the same object when there is none.

    Raises
    ------
    ValueError
        When a marked loop holds anything but unrolled loops around vectors of one product each, what a vector reads is
        not one input of whole groups, or a condition differs between its lanes.
    """
    return rewrite_marked_loops(func, SPREAD_GROUPS, lambda loop: _Tile(loop).statement())


@dataclass
class _Pixel:
    """A vector of whole groups in memory, read where all `conditions` hold, and the products that it is part of.

    `products` has for each input of a group the lanes' variables, what they store, and which factor is spread.
    """

    load: Any
    conditions: list[Any]
    otherwise: Any
    products: dict[int, list[tuple[Any, Any, Any]]] = field(default_factory=dict)


class _Tile:
    """The products of one marked loop, by pixels."""

    def __init__(self, loop: Any) -> None:
        self.size = int(loop.extent)
        self.pixels: list[_Pixel] = []
        self.lanes = 0
        self._analyzer = sym.Analyzer()
        for step in range(self.size):
            start = tirx.IntImm(str(loop.loop_var.ty.dtype), step)
            for vector in _vectors(substitute(loop.body, [(loop.loop_var, start)])):
                self._add(vector, step)

    def statement(self) -> Any:
        """All pixels, then the products, input by input and pixel by pixel; nothing where all pixels are zeros."""
        common = [c for c in self.pixels[0].conditions if all(_is_zero_unless(c, pixel) for pixel in self.pixels)]
        statements: list[Any] = []
        registers = []
        for pixel in self.pixels:
            value = pixel.load
            for condition in pixel.conditions:
                if not _among(condition, common):
                    value = tirx.if_then_else(condition, value, tirx.Broadcast(pixel.otherwise, self.lanes))
            register = tirx.decl_buffer([self.lanes], str(pixel.load.source.dtype), "pixel")
            registers.append(tirx.BufferLoad(register, [self._whole]))
            statements += [tirx.AllocBuffer(register), tirx.BufferStore(register, value, [self._whole])]
        for step in range(self.size):
            places = [place // self.size * self.size + step for place in range(self.lanes)]
            for pixel, register in zip(self.pixels, registers, strict=True):
                spread = tirx.Shuffle([register], places)
                statements += [self._product(*product, spread) for product in pixel.products.get(step, ())]
        body = tirx.SeqStmt(statements)
        for condition in common:
            body = tirx.IfThenElse(condition, body, None)
        return body

    @property
    def _whole(self) -> Any:
        return tirx.Ramp(0, 1, self.lanes)

    def _product(self, lane: Any, store: Any, factor: Any, spread: Any) -> Any:
        """A store of sums as one of vectors, with `spread` for a factor; LLVM computes that once for all stores."""

        def vector(value: Any) -> Any:
            if value.same_as(factor):
                return spread
            if isinstance(value, tirx.Cast):
                return tirx.Cast(f"{value.ty.dtype}x{self.lanes}", vector(value.value))
            if isinstance(value, (tirx.Add, tirx.Mul)):
                return type(value)(vector(value.a), vector(value.b))
            if isinstance(value, TensorLoad):
                return tirx.BufferLoad(value.source, self._run(value.indices, lane))
            raise ValueError(f"{value} is no part of a sum of products")

        return tirx.BufferStore(store.buffer, vector(store.value), self._run(store.indices, lane))

    def _run(self, indices: Any, lane: Any) -> list[Any]:
        """The indices of a vector whose lanes are neighbours, as those of its first element and a ramp."""
        *outer, last = (self._at(index, lane, 0) for index in indices)
        end = self._at(indices[-1], lane, self.lanes - 1)
        one = tirx.IntImm(str(lane.ty.dtype), 1)
        if not self._analyzer.can_prove_equal(end, last + tirx.IntImm(str(lane.ty.dtype), self.lanes - 1)):
            raise ValueError(f"{indices[-1]} is no run along {lane}")
        return [*outer, tirx.Ramp(last, one, self.lanes)]

    def _at(self, index: Any, lane: Any, place: int) -> Any:
        return self._analyzer.simplify(substitute(index, [(lane, tirx.IntImm(str(lane.ty.dtype), place))]))

    def _add(self, loop: Any, step: int) -> None:
        """Note one vector of products with input `step` of each group."""
        realize, lane = stored_block(loop), loop.loop_var
        if not self._analyzer.can_prove(realize.predicate):
            raise ValueError(f"products of a tile depend on {realize.predicate}; only whole tiles are written out")
        store = substitute(realize.block.body, binding_of(realize))
        factor = _spread_factor(store.value, lane)
        load, otherwise = factor, None
        conditions: list[Any] = []
        if is_conditional(factor):
            condition, load, otherwise = factor.args
            if uses(condition, lane) or uses(otherwise, lane):
                raise ValueError(f"{factor} chooses for each lane of a vector")
            conditions = [self._analyzer.simplify(part) for part in conjuncts(condition)]
        self.lanes = int(loop.extent)
        pixel = self._pixel(load, lane, step, conditions, otherwise)
        pixel.products.setdefault(step, []).append((lane, store, factor))

    def _pixel(self, load: Any, lane: Any, step: int, conditions: list[Any], otherwise: Any) -> _Pixel:
        """The pixel that a load picks its elements from; a new one where it is not known yet."""
        *outer, last = load.indices
        if any(uses(index, lane) for index in outer):
            raise ValueError(f"{load} reads other pixels in each lane")
        dtype = str(lane.ty.dtype)
        start = self._analyzer.simplify(self._at(last, lane, 0) - tirx.IntImm(dtype, step))
        whole = tirx.Ramp(start, tirx.IntImm(dtype, 1), self.lanes)
        vector = tirx.BufferLoad(load.source, [*map(self._analyzer.simplify, outer), whole])
        for pixel in self.pixels:
            if tvm_ffi.structural_equal(pixel.load, vector):
                return pixel
        for place in range(self.lanes):
            expected = start + tirx.IntImm(dtype, place // self.size * self.size + step)
            if not self._analyzer.can_prove_equal(self._at(last, lane, place), expected):
                raise ValueError(f"{last} is not input {step} of each group of {self.size}")
        self.pixels.append(_Pixel(vector, conditions, otherwise))
        return self.pixels[-1]


def _vectors(statement: Any) -> Iterator[Any]:
    """The vector loops inside unrolled ones, for each iteration of those."""
    if isinstance(statement, tirx.For) and statement.kind == tirx.ForKind.VECTORIZED:
        yield statement
        return
    if not isinstance(statement, tirx.For) or (statement.kind != tirx.ForKind.UNROLLED and int(statement.extent) != 1):
        raise ValueError("a loop over the inputs of groups holds more than unrolled loops around vectors")
    for iteration in range(int(statement.extent)):
        value = tirx.IntImm(str(statement.loop_var.ty.dtype), iteration)
        yield from _vectors(substitute(statement.body, [(statement.loop_var, value)]))


def _spread_factor(value: Any, lane: Any) -> Any:
    """The load that divides something that depends on the lane in its last index, with the condition around it."""

    def is_spread(load: Any) -> bool:
        quotients = nodes_of(load.indices[-1], tirx.FloorDiv) if isinstance(load, TensorLoad) else []
        return any(uses(quotient, lane) for quotient in quotients)

    found = [call for call in conditionals(value) if is_spread(call.args[1])]
    found = found or [load for load in nodes_of(value, TensorLoad) if is_spread(load)]
    if len(found) != 1:
        raise ValueError(f"{value} has {len(found)} factors that are spread over groups; expected one")
    return found[0]


def _is_zero_unless(condition: Any, pixel: _Pixel) -> bool:
    return is_zero(pixel.otherwise) and _among(condition, pixel.conditions)


def _among(condition: Any, conditions: list[Any]) -> bool:
    return any(tvm_ffi.structural_equal(condition, other) for other in conditions)
