"""Marked loops become products of tile registers, just before TVM lowers a scheduled kernel.

    for k in reduction: (marked)               configure; zero all sums
        for row, column, depth:          ->    for k in reduction:
            c[row, column] += a[..] * b[..]        sums += tiles at a[..] * tiles at b[..]
                                               store the sums at c[..]

The schedule itself stays one of plain loops: it says what is computed, and a trace of it replays anywhere. Loops marked
SPLIT_IN_HALVES split in place what they stored.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import ir, s_tir, sym, tirx

from ..access import dtype_bytes
from ..contraction.prefetch import Operand, loops_around, with_fetches
from ..expressions import binding_of, evaluate, nodes_of, substitute, uses
from ..marks import AMX_CONFIGURED, AMX_TILES, NEXT_PANEL, SPLIT_IN_HALVES
from ..statements import rewrite_marked_loops, with_body, with_code
from .code import (
    CONFIGURE,
    RELEASE,
    SPLIT_PANEL,
    SPLIT_ROW,
    configuration_code,
    split_code,
    store_name,
    sum_name,
    tile_code,
    zero_name,
)
from .products import PRODUCTS, SUM_TILES, TILE_ROWS

__all__ = ["multiply_tiles"]


def multiply_tiles(func: Any) -> Any:
    """Rewrite the loops of a scheduled PrimFunc that are marked AMX_CONFIGURED, AMX_TILES (perhaps with NEXT_PANEL) or
    SPLIT_IN_HALVES; the same object when there is none.

    Raises
    ------
    ValueError
        When a marked loop holds something else than what the schedule of AMX puts there: marks may come from records
        of others, and a wrong one would write anywhere.
    """
    result = rewrite_marked_loops(func, AMX_CONFIGURED, _configured)
    result = rewrite_marked_loops(result, AMX_TILES, lambda loop: _Tiles(loop).statement(func))
    return rewrite_marked_loops(result, SPLIT_IN_HALVES, _split)


def _configured(loop: Any) -> Any:
    """The loop with registers configured before it, and released behind; a parallel one: in each iteration."""
    heights = {_height(inner) for inner in nodes_of(loop.body, tirx.For) if AMX_TILES in inner.annotations}
    if len(heights) != 1:
        raise ValueError(f"tile registers are configured for tiles of {sorted(heights)} rows; expected one height")
    begin, end = _call(CONFIGURE, _number(*heights)), _call(RELEASE)
    if loop.kind == tirx.ForKind.PARALLEL:
        body = tirx.SeqStmt([begin, loop.body, end])
        return with_body(loop, with_code(configuration_code(), body), AMX_CONFIGURED)
    unmarked = with_body(loop, loop.body, AMX_CONFIGURED)
    return with_code(configuration_code(), tirx.SeqStmt([begin, unmarked, end]))


class _Tiles:
    """One marked loop nest."""

    def __init__(self, loop: Any) -> None:
        number, reductions, _ = (int(value) for value in loop.annotations[AMX_TILES])
        self.product = PRODUCTS[number]
        self.height = _height(loop)
        self._analyzer = sym.Analyzer()
        self.reduction, inside = _nest(loop, reductions)
        self.tile, realize = _nest(inside, 5)
        lines, rows, vectors, lanes, depth = (int(inner.extent) for inner in self.tile)
        self.rows, self.columns = lines * rows // self.height, vectors
        fits = rows % self.height == 0 and self.rows * self.columns <= SUM_TILES
        if not fits or (lanes, depth) != (TILE_ROWS, self.product.depth):
            raise ValueError(f"loops of {[lines, rows, vectors, lanes, depth]} are no tiles of {self.height} rows")
        if not isinstance(realize, s_tir.SBlockRealize) or not isinstance(realize.block.body, tirx.BufferStore):
            raise ValueError("a loop of tiles holds more than one store")
        store = substitute(realize.block.body, binding_of(realize))
        if not isinstance(store.value, tirx.Add):
            raise ValueError(f"{store.value} is no sum of products")
        product = store.value.b
        while isinstance(product, tirx.Cast):
            product = product.value
        factors = []
        for factor in (product.a, product.b):
            while isinstance(factor, tirx.Cast):
                factor = factor.value
            factors.append(factor)
        row, lane, depth = (self.tile[place].loop_var for place in (1, 3, 4))
        left, right = factors[::-1] if self._moves(factors[0], lane) else factors
        dtypes = tuple(str(access.source.dtype) for access in (left, right))
        if dtypes != (self.product.left, self.product.right) or str(store.buffer.dtype) != self.product.sums:
            raise ValueError(f"products of {dtypes} are not those of {self.product.instruction}")
        if not all(self._moves(factor, depth) for factor in (left, right)):
            raise ValueError("a factor of tiles does not depend on the reduction")
        self.left, self.right, self.sums = left, right, store
        self.step_bytes = dtype_bytes(self.product.left) * (self._place(left, row, 1) - self._place(left, row, 0))

    def statement(self, func: Any) -> Any:
        """Zeros, the products, the stores, as they are in a PrimFunc."""
        shape = self.rows, self.columns
        row_starts, parts = self._row_starts(), self.product.parts
        half = self.product.depth // parts
        multiply = _call(
            sum_name(self.product, *shape),
            _number(self.step_bytes),
            self._address(self.right, 0, 0),
            *(self._address(self.left, line, row, part * half) for part in range(parts) for line, row in row_starts),
            *self._kept(),
        )
        loops: Any = with_fetches(self._fetches(func), multiply)
        for loop in reversed(self.reduction):
            loops = with_body(loop, loops, AMX_TILES, NEXT_PANEL)
        end = [int(loop.extent) - 1 for loop in self.tile[:4]]
        store = _call(
            store_name(*shape),
            _number(4 * int(self.tile[2].extent) * int(self.tile[3].extent)),
            self._at(self.sums, *end, 0),
            *(self._address(self.sums, line, row) for line, row in row_starts),
        )
        body = tirx.SeqStmt([_call(zero_name(*shape)), loops, store])
        return with_code(tile_code(self.product, *shape), body)

    def _fetches(self, func: Any) -> list[Any]:
        """What each step asks for."""
        mark = self.reduction[0].annotations.get(NEXT_PANEL)
        if mark is None:
            return []
        _, fused, dimension = (int(value) for value in mark)
        operand = Operand(self.right.source, list(self.right.indices), self.tile)
        return operand.next_panel(self.reduction, loops_around(func, self.reduction[0]), fused, dimension)

    def _place(self, load: Any, variable: Any, value: int) -> int:
        """Where an operand is read, in elements, when a loop has a value and all others are zero."""
        known = nodes_of(list(load.indices), ir.Var)
        values = {v: np.int64(value if v.same_as(variable) else 0) for v in known}
        flat = 0
        for index, extent in zip(load.indices, load.source.shape, strict=True):
            flat = flat * int(extent) + int(evaluate(index, values))
        return flat

    def _kept(self) -> list[Any]:
        """Both operands' memory. TVM makes float32 of bfloat16 in buffers that nothing takes the memory of as such."""
        sources = self.left.source, self.right.source
        if self.product.left == "bfloat16":
            return [source.data for source in sources]
        return [self._address(operand, 0, 0) for operand in (self.left, self.right)]

    def _row_starts(self) -> list[tuple[int, int]]:
        """Line and row of each row of tiles."""
        lines, rows = (int(loop.extent) for loop in self.tile[:2])
        return [(line, row) for line in range(lines) for row in range(0, rows, self.height)]

    def _address(self, access: Any, line: int, row: int, depth: int = 0) -> Any:
        return self._at(access, line, row, 0, 0, depth)

    def _at(self, access: Any, *places: int) -> Any:
        """Where an element is, given the values of the loops of a tile."""
        values = [
            (loop.loop_var, tirx.IntImm(str(loop.loop_var.ty.dtype), place))
            for loop, place in zip(self.tile, places, strict=True)
        ]
        buffer = access.buffer if isinstance(access, tirx.BufferStore) else access.source
        indices = [self._analyzer.simplify(substitute(index, values)) for index in access.indices]
        return tirx.address_of(tirx.BufferLoad(buffer, indices))

    def _moves(self, load: Any, variable: Any) -> bool:
        return any(uses(index, variable) for index in load.indices)


def _height(loop: Any) -> int:
    """Rows of a tile, of a loop marked AMX_TILES."""
    height = int(loop.annotations[AMX_TILES][2])
    if not 0 < height <= TILE_ROWS:
        raise ValueError(f"tiles have 1 to {TILE_ROWS} rows, not {height}")
    return height


def _split(loop: Any) -> Any:
    """The loop with what its body stored split in place, at the end of each iteration."""
    stores = [
        (realize.block.body, binding_of(realize))
        for realize in nodes_of(loop.body, s_tir.SBlockRealize)
        if isinstance(realize.block.body, tirx.BufferStore)
    ]
    if len(stores) != 1:
        raise ValueError(f"a loop whose body is split in halves has {len(stores)} stores; expected one")
    store, binding = stores[0]
    analyzer = sym.Analyzer()
    tiles = int(loop.annotations[SPLIT_IN_HALVES])
    loops = nodes_of(loop.body, tirx.For)
    elements = math.prod(int(inner.extent) for inner in loops)
    if elements != (tiles * 2 * TILE_ROWS * TILE_ROWS or 2 * TILE_ROWS) or str(store.buffer.dtype) != "float32":
        raise ValueError(f"{elements} elements are not a row, or {tiles} tiles, of floats to be split in halves")

    def address(outermost: int) -> Any:
        """Of what is stored when the outermost variable has a value, and all others are zero."""
        first = loop.body.loop_var
        variables = [inner.loop_var for inner in loops]
        values = [(v, tirx.IntImm(str(v.ty.dtype), outermost if v.same_as(first) else 0)) for v in variables]
        start = [analyzer.simplify(substitute(substitute(index, binding), values)) for index in store.indices]
        return tirx.address_of(tirx.BufferLoad(store.buffer, start))

    call = _call(SPLIT_PANEL, address(0), _number(tiles)) if tiles else _call(SPLIT_ROW, address(0), address(1))
    return with_body(loop, tirx.SeqStmt([loop.body, with_code(split_code(), call)]), SPLIT_IN_HALVES)


def _nest(loop: Any, count: int) -> tuple[list[Any], Any]:
    """So many loops, and what is inside."""
    loops: list[Any] = []
    for _ in range(count):
        if not isinstance(loop, tirx.For):
            raise ValueError(f"expected {count} loops around a product of tiles, found {len(loops)}")
        loops.append(loop)
        loop = loop.body
    return loops, loop


def _call(name: str, *arguments: Any) -> Any:
    return tirx.Evaluate(tirx.call_extern("void", name, *arguments))


def _number(value: int) -> Any:
    """32 bits, as which other indices end."""
    return tirx.IntImm("int32", value)
