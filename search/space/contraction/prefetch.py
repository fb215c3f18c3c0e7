"""Asks for the vectorised operand before it is multiplied, where the prefetchers of a core do not reach far enough.

Two distances, each for a reduction loop whose operand comes from beyond the first-level cache:

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

Where L3 is fast, the second costs more than it gains (Zen 4: 1 to 15 %).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import tvm_ffi
from tvm import s_tir, sym, tirx
from tvm.ir.expr import TensorLoad

from ..access import dtype_bytes
from ..expressions import binding_of, substitute, uses

__all__ = ["FETCH_AHEAD", "NEXT_PANEL", "prefetch_operands"]

FETCH_AHEAD = "eqtune.fetch_ahead"
"""Annotation of the innermost loop of a reduction that is not unrolled: how many of its steps ahead to ask."""

NEXT_PANEL = "eqtune.next_panel"
"""Annotation of the same loop: how many loops of the reduction are around it; how many iterations of the loop over
panels read the same one, because other loops were fused into it; and which dimension of the packed weights counts
panels."""

MOST_LINES = 4
"""Of the next panel, that one step may ask for: with fewer rows, all time goes into reading."""

LINE_BYTES = 64

NEAR, FAR = "eqtune_fetch_near", "eqtune_fetch_far"
"""Functions of an address, which fetch into the first-level cache, and into the second-level one."""

_CODE = f"""
declare void @llvm.prefetch.p0(ptr, i32 immarg, i32 immarg, i32 immarg)
define void @{NEAR}(ptr %address) #0 {{
  call void @llvm.prefetch.p0(ptr %address, i32 0, i32 3, i32 1) #1
  ret void
}}
define void @{FAR}(ptr %address) #0 {{
  call void @llvm.prefetch.p0(ptr %address, i32 0, i32 2, i32 1) #1
  ret void
}}
attributes #0 = {{ alwaysinline nounwind }}
attributes #1 = {{ memory(inaccessiblemem: readwrite) }}
"""
"""Without the last line, LLVM takes a prefetch for one that may write the sums, and keeps none in a register."""


def prefetch_operands(func: Any) -> Any:
    """Rewrite the marked loops of a scheduled PrimFunc; the same object when there is none.

    Raises ValueError for a marked loop that multiplies nothing by vectors: marks may come from records of others.
    """
    loops: list[Any] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, loops.append), order="pre")
    if not any(map(_is_marked, loops)):
        return func

    def fetching(loop: Any) -> Any:
        if not _is_marked(loop):
            return loop
        reads = _Reads(loop)
        calls = []
        if FETCH_AHEAD in loop.annotations:
            calls += reads.ahead(int(loop.annotations[FETCH_AHEAD]))
        if NEXT_PANEL in loop.annotations:
            around = [other for other in loops if _contains(other, loop)]
            calls += reads.next_panel(around, *(int(value) for value in loop.annotations[NEXT_PANEL]))
        kept = {key: value for key, value in loop.annotations.items() if key not in (FETCH_AHEAD, NEXT_PANEL)}
        body = tirx.SeqStmt([*calls, loop.body])
        result = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, annotations=kept)
        return tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", _CODE, result)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, fetching)))


def _is_marked(loop: Any) -> bool:
    return FETCH_AHEAD in loop.annotations or NEXT_PANEL in loop.annotations


def _contains(loop: Any, marked: Any) -> bool:
    found: list[Any] = []
    tvm_ffi.structural_walk(loop.body, (tirx.For, lambda inner: found.append(inner.loop_var)))
    return any(variable.same_as(marked.loop_var) for variable in found)


class _Reads:
    """What a marked loop reads by vectors: the first such operand of its products."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._dtype = str(loop.loop_var.ty.dtype)
        self._inside: list[Any] = []
        realized: list[Any] = []
        tvm_ffi.structural_walk(loop.body, [(tirx.For, self._inside.append), (s_tir.SBlockRealize, realized.append)])
        lanes = [inner.loop_var for inner in self._inside if inner.kind == tirx.ForKind.VECTORIZED]
        for realize in realized:
            loads: list[Any] = []
            store = realize.block.body
            tvm_ffi.structural_walk(getattr(store, "value", store), (TensorLoad, loads.append))
            for load in loads:
                index = [substitute(part, binding_of(realize)) for part in load.indices]
                if uses(index[-1], *lanes) and not load.source.same_as(store.buffer):
                    self._source, self._index = load.source, index
                    self._per_line = LINE_BYTES // dtype_bytes(str(load.source.dtype))
                    return
        raise ValueError("a loop that is to fetch an operand multiplies none by vectors")

    def ahead(self, steps: int) -> list[Any]:
        """Ask for all that the loop reads so many steps later."""
        later = [(self._loop.loop_var, self._loop.loop_var + self._number(steps))]
        return [
            self._fetch(NEAR, [substitute(part, [*later, *places]) for part in self._index])
            for places in self._vectors()
        ]

    def next_panel(self, around: list[Any], reductions: int, fused: int, dimension: int) -> list[Any]:
        """Ask for a share of the next panel; `around` are the loops around, outermost first, the rest as annotated."""
        reduction = [*around[len(around) - reductions :], self._loop]
        index = self._at_zero([*self._inside, *reduction])
        step, steps = self._number(0), 1  # of all that read this panel, one after the other
        for inner in reversed(reduction):
            step, steps = step + inner.loop_var * self._number(steps), steps * int(inner.extent)
        for outer in reversed(around[: len(around) - reductions]):
            if uses(index[dimension], outer.loop_var):
                step, steps = step + outer.loop_var % self._number(fused) * self._number(steps), steps * fused
                break
            step, steps = step + outer.loop_var * self._number(steps), steps * int(outer.extent)
        share = math.ceil(math.prod(int(extent) for extent in self._source.shape[dimension + 1 :]) / steps)
        index[dimension] = (index[dimension] + self._number(1)) % self._number(int(self._source.shape[dimension]))
        lines = min(MOST_LINES, math.ceil(share / self._per_line))
        first = index[-1] + step * self._number(share)
        return [self._fetch(FAR, [*index[:-1], first + self._number(line * self._per_line)]) for line in range(lines)]

    def _vectors(self) -> Iterator[list[tuple[Any, Any]]]:
        """The variables of the loops inside for each line that one step reads."""
        used = [inner for inner in self._inside if any(uses(part, inner.loop_var) for part in self._index)]
        strides = [self._per_line if inner.kind == tirx.ForKind.VECTORIZED else 1 for inner in used]
        ranges = [range(0, int(inner.extent), stride) for inner, stride in zip(used, strides, strict=True)]
        for values in itertools.product(*ranges):
            yield [(inner.loop_var, self._number(value)) for inner, value in zip(used, values, strict=True)]

    def _at_zero(self, loops: list[Any]) -> list[Any]:
        zeros = [(loop.loop_var, tirx.IntImm(str(loop.loop_var.ty.dtype), 0)) for loop in loops]
        return [substitute(part, zeros) for part in self._index]

    def _fetch(self, function: str, index: list[Any]) -> Any:
        """Ask for one line. It may lie beyond the operand: nothing is read."""
        analyzer = sym.Analyzer()
        address = tirx.address_of(tirx.BufferLoad(self._source, [analyzer.simplify(part) for part in index]))
        return tirx.Evaluate(tirx.call_extern("void", function, address))

    def _number(self, value: int) -> Any:
        return tirx.IntImm(self._dtype, value)
