"""Asks for operands before they are multiplied, where the prefetchers of a core do not reach far enough.

Weights have two distances, each for a reduction loop whose operand comes from beyond the first-level cache:

    for tile in rows:                         for tile in rows:
        for k in reduction: (marked)    ->        for k in reduction:
                                                      prefetch(panels[j, k + 64])
                                                      prefetch(panels[j + 1] + share of (tile, k))
            sums += a[tile, k] * panels[j, k]         sums += a[tile, k] * panels[j, k]

The first is for what the loop itself will read. The second is for weights: a model reads them once a run, from wherever
the last run left them, and the first rows of a panel wait for a last-level cache that is as slow as memory. All later
rows find the panel in the second-level cache, and leave time to fetch the next one.

One thread of a Xeon with 480 MiB of L3, tiles of 14 x 32 (us):

    rows x columns x reduction      neither    first    second    both
    196 x 256 x 2304, in L2            1247     1201      1307    1281
    the same, weights not in L2        1504     1366      1422    1237
    196 x 1024 x 256, not in L2         690      624       559     582
    49 x 512 x 4608, not in L2         2021     1480      1528    1292
    14 x 1024 x 1024, not in L2         515      281       413     230

Where L3 is fast, the weights of models that it holds are not asked for: that would cost 1 to 4 %. Those of models with
more are (`Hardware.weights_in_memory`); with 16 registers, those that products wait for (`asks_for_weights`).

Rows have one. A tile reads each of its rows as a stream of its own, which ends before a prefetcher follows it; the next
tile's rows are what lies behind this one's:

    for tile in rows:
        for k in reduction: (marked)
            prefetch(a[tile + 1] + share of k)
            sums += a[tile, k] * panels[j, k]

Two threads of Zen 3 whose last cache is busy, in the model, in turns (us):

    rows x columns x reduction   unasked   asked
    784 x 32 x 192                   147      81
    3136 x 24 x 144                  184     135
    3136 x 128 x 128                 761     637
    3136 x 128 x 640                3713    3208
    3136 x 64 x 256                  619     559
    784 x 256 x 256                  673     642
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tvm_ffi
from tvm import s_tir, sym, tirx
from tvm.ir.expr import TensorLoad

from ..access import dtype_bytes
from ..expressions import binding_of, nodes_of, substitute, uses
from ..marks import FETCH_AHEAD, NEXT_PANEL, NEXT_TILE
from ..statements import rewritten, with_body, with_code

__all__ = [
    "LINE_BYTES",
    "Operand",
    "loops_around",
    "prefetch_operands",
    "vectorised_operands",
    "with_fetches",
]

MOST_LINES = 32
"""Of the next panel or tile, that one step may ask for: where it takes more, all time goes into reading."""

LINE_BYTES = 64

NEAR, FAR = "eqtune_fetch_near", "eqtune_fetch_far"
"""Functions of an address, which fetch into the first-level cache, and into the second-level one. With a number behind
their name, they fetch so many lines that follow each other."""


def _code(functions: Iterable[tuple[str, int]]) -> str:
    """The functions, each with its lines, as a module of LLVM."""
    parts = ["declare void @llvm.prefetch.p0(ptr, i32 immarg, i32 immarg, i32 immarg)"]
    for level, lines in functions:
        locality = 3 if level == NEAR else 1
        parts.append(f"define void @{level}_{lines}(ptr %address) #0 {{")
        for line in range(lines):
            parts.append(f"  %p{line} = getelementptr i8, ptr %address, i64 {line * LINE_BYTES}")
            parts.append(f"  call void @llvm.prefetch.p0(ptr %p{line}, i32 0, i32 {locality}, i32 1) #1")
        parts += ["  ret void", "}"]
    parts.append("attributes #0 = { alwaysinline nounwind }")
    # Without this, LLVM takes a prefetch for one that may write the sums, and keeps none in a register.
    parts.append("attributes #1 = { memory(inaccessiblemem: readwrite) }")
    return "\n".join(parts)


class Fetch(NamedTuple):
    """Lines that follow each other, to be fetched into the cache of a level; `address` is the first one's."""

    level: str
    lines: int
    address: Any


_MARKS = (FETCH_AHEAD, NEXT_PANEL, NEXT_TILE)


def prefetch_operands(func: Any) -> Any:
    """Rewrite the loops of a scheduled PrimFunc that are marked FETCH_AHEAD, NEXT_PANEL or NEXT_TILE; the same object
    when there is none.

    Raises ValueError for a marked loop that multiplies nothing by vectors, or, for the next tile's rows, nothing else:
    marks may come from records of others.
    """

    def fetching(loop: Any) -> Any:
        if not any(mark in loop.annotations for mark in _MARKS):
            return loop
        operand = _vectorised_operand(loop)
        around = loops_around(func, loop)
        fetches: list[Fetch] = []
        if FETCH_AHEAD in loop.annotations:
            fetches += operand.ahead(loop, int(loop.annotations[FETCH_AHEAD]))
        if NEXT_PANEL in loop.annotations:
            reductions, fused, dimension = (int(value) for value in loop.annotations[NEXT_PANEL])
            first = len(around) - reductions
            fetches += operand.next_panel([*around[first:], loop], around[:first], fused, dimension)
        if NEXT_TILE in loop.annotations:
            reductions, elements = (int(value) for value in loop.annotations[NEXT_TILE])
            first = len(around) - reductions
            fetches += _operand_by_elements(loop).next_tile([*around[first:], loop], around[:first], elements)
        return with_body(loop, with_fetches(fetches, loop.body), *_MARKS)

    return rewritten(func, (tirx.For, fetching))


def loops_around(func: Any, loop: Any) -> list[Any]:
    """The loops of a PrimFunc around one of them, outermost first."""
    return [other for other in _loops_of(func) if _contains(other, loop)]


def with_fetches(fetches: Sequence[Fetch], body: Any) -> Any:
    """The body after the fetches."""
    if not fetches:
        return body
    calls = [tirx.Evaluate(tirx.call_extern("void", f"{one.level}_{one.lines}", one.address)) for one in fetches]
    code = _code(sorted({(one.level, one.lines) for one in fetches}))
    return with_code(code, tirx.SeqStmt([*calls, body]))


def _loops_of(func: Any) -> list[Any]:
    """All loops, outer ones before those inside."""
    loops: list[Any] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, loops.append), order="pre")
    return loops


def _contains(loop: Any, marked: Any) -> bool:
    return any(inner.loop_var.same_as(marked.loop_var) for inner in nodes_of(loop.body, tirx.For))


def _vectorised_operand(loop: Any) -> Operand:
    """What a loop reads by vectors: the first such operand of its products."""
    operand = next(vectorised_operands(loop), None)
    if operand is None:
        raise ValueError("a loop that is to fetch an operand multiplies none by vectors")
    return operand


def _operand_by_elements(loop: Any) -> Operand:
    """What a loop reads element by element: the first such operand of its products."""
    operand = next((operand for operand, by_vectors in _operands(loop) if not by_vectors), None)
    if operand is None:
        raise ValueError("a loop that is to fetch the next tile's rows multiplies none element by element")
    return operand


def vectorised_operands(loop: Any) -> Iterator[Operand]:
    """What a loop reads by vectors, in the order of its blocks, but not what a block writes itself."""
    return (operand for operand, by_vectors in _operands(loop) if by_vectors)


def _operands(loop: Any) -> Iterator[tuple[Operand, bool]]:
    """What a loop reads and its block does not write, in the order of its blocks; whether it is read by vectors.

    Not numbers without axes.
    """
    inside = nodes_of(loop.body, tirx.For)
    lanes = [inner.loop_var for inner in inside if inner.kind == tirx.ForKind.VECTORIZED]
    for realize in nodes_of(loop.body, s_tir.SBlockRealize):
        written = [store.buffer for store in nodes_of(realize.block.body, tirx.BufferStore)]
        for load in nodes_of(realize.block.body, TensorLoad):
            index = [substitute(part, binding_of(realize)) for part in load.indices]
            if index and not any(load.source.same_as(buffer) for buffer in written):
                yield Operand(load.source, index, inside), uses(index[-1], *lanes)


@dataclass(frozen=True)
class Operand:
    """An operand, where it is read, and the loops inside a step of the reduction."""

    source: Any
    index: Sequence[Any]
    inside: Sequence[Any]

    @property
    def _per_line(self) -> int:
        return LINE_BYTES // dtype_bytes(str(self.source.dtype))

    def ahead(self, loop: Any, steps: int) -> list[Fetch]:
        """All that the loop reads so many steps later, each line once."""
        later = [(loop.loop_var, loop.loop_var + _number(loop, steps))]
        read = [[substitute(part, [*later, *places]) for part in self.index] for places in self._vectors()]
        behind = [self._elements_between(read[0], index) for index in read]
        places, last = sorted(range(len(read)), key=lambda place: behind[place] or 0), -math.inf
        lines: list[int] = []
        for place in places:
            distance = behind[place]
            if distance is None or distance - last >= self._per_line:
                lines.append(place)
                last = last if distance is None else distance
        return [self._fetch(NEAR, 1, read[place]) for place in lines]

    def _elements_between(self, one: Sequence[Any], other: Sequence[Any]) -> int | None:
        """From one element of the operand, which is compact, to another; None where that depends on where they are."""
        apart: Any = 0
        for first, second, extent in zip(one, other, self.source.shape, strict=True):
            apart = apart * extent + (second - first)
        apart = sym.Analyzer().simplify(apart)
        return int(apart) if isinstance(apart, tirx.IntImm) else None

    def next_panel(self, reduction: Sequence[Any], around: Sequence[Any], fused: int, dimension: int) -> list[Fetch]:
        """A share of the next panel in each step; nothing where that would be too much.

        `reduction` are its loops, `around` those around them, outermost first, the rest as annotated. Raises ValueError
        where the annotation does not fit the operand.
        """
        if fused < 1 or not 0 <= dimension < len(self.index) - 1:
            raise ValueError(f"no dimension {dimension} of {len(self.index)} counts panels that {fused} loops read")
        index = self._at_zero([*self.inside, *reduction])
        step, steps = _steps_of(reduction)
        for outer in reversed(around):
            if uses(index[dimension], outer.loop_var):
                step, steps = step + outer.loop_var % _number(outer, fused) * _number(outer, steps), steps * fused
                break
            step, steps = _steps_of([outer], step, steps)
        share = math.ceil(math.prod(int(extent) for extent in self.source.shape[dimension + 1 :]) / steps)
        lines = math.ceil(share / self._per_line)
        if lines > MOST_LINES:
            return []
        panels = int(self.source.shape[dimension])
        index[dimension] = (index[dimension] + _number(reduction[0], 1)) % _number(reduction[0], panels)
        return [self._fetch(FAR, lines, [*index[:-1], index[-1] + step * _number(reduction[0], share)])]

    def next_tile(self, reduction: Sequence[Any], around: Sequence[Any], elements: int) -> list[Fetch]:
        """A share of what lies behind these `elements` in each step; nothing where that would be too much.

        The loops are those of `next_panel`. Raises ValueError for a tile of nothing.
        """
        if elements < 1:
            raise ValueError(f"a tile of {elements} elements")
        index = self._at_zero([*self.inside, *reduction, *(outer for outer in around if _is_unit(outer))])
        of_this_tile = itertools.takewhile(
            lambda outer: not any(uses(part, outer.loop_var) for part in index), reversed(around)
        )
        step, steps = _steps_of(reduction)
        for outer in of_this_tile:
            step, steps = _steps_of([outer], step, steps)
        share = math.ceil(elements / steps)
        lines = math.ceil(share / self._per_line)
        furthest = math.prod(int(extent) for extent in self.source.shape) + 2 * elements
        if lines > MOST_LINES or furthest >= 2**31:  # beyond the indices that a kernel may have (`narrow_indices`)
            return []
        behind = step * _number(reduction[0], share) + _number(reduction[0], elements)
        return [self._fetch(FAR, lines, [*index[:-1], index[-1] + behind])]

    def _vectors(self) -> Iterator[list[tuple[Any, Any]]]:
        """The variables of the loops inside for each line that one step reads."""
        used = [inner for inner in self.inside if any(uses(part, inner.loop_var) for part in self.index)]
        strides = [self._per_line if inner.kind == tirx.ForKind.VECTORIZED else 1 for inner in used]
        ranges = [range(0, int(inner.extent), stride) for inner, stride in zip(used, strides, strict=True)]
        for values in itertools.product(*ranges):
            yield [(inner.loop_var, _number(inner, value)) for inner, value in zip(used, values, strict=True)]

    def _at_zero(self, loops: Sequence[Any]) -> list[Any]:
        return [substitute(part, [(loop.loop_var, _number(loop, 0)) for loop in loops]) for part in self.index]

    def _fetch(self, level: str, lines: int, index: list[Any]) -> Fetch:
        """Lines that may lie beyond the operand: nothing is read."""
        simplified = [sym.Analyzer().simplify(part) for part in index]
        return Fetch(level, lines, tirx.address_of(tirx.BufferLoad(self.source, simplified)))


def _steps_of(loops: Sequence[Any], step: Any = 0, steps: int = 1) -> tuple[Any, int]:
    """Which step of all this is, and how many there are: of loops, outermost first, around `steps` of which one is
    `step`."""
    for loop in reversed(loops):
        step, steps = loop.loop_var * _number(loop, steps) + step, steps * int(loop.extent)
    return step, steps


def _is_unit(loop: Any) -> bool:
    return isinstance(loop.extent, tirx.IntImm) and int(loop.extent) == 1


def _number(loop: Any, value: int) -> Any:
    return tirx.IntImm(str(loop.loop_var.ty.dtype), value)
