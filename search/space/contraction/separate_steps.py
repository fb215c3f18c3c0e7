"""Steps of a reduction that LLVM must not mix, because it would then run out of registers.

A window's row of few taps is a loop that LLVM writes out. Neighbouring pixels then meet most of the same elements,
which it loads once and holds: fine for small tiles, but beside 22 sums and more it spills them in every step. And
around requests for weights it loads the vectors of two steps together, before the first products. LLVM neither copies
an instruction that may not be copied nor moves a load across one whose effects it does not know, even where that does
nothing:

    for tap in serial(3): (marked)                for tap in serial(3):
        for step in unrolled(2): (marked)             for step in unrolled(2):
                                            ->            asm("")
            sums += a[tap, step] * b[step]                sums += a[tap, step] * b[step]
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ..marks import SEPARATE_STEPS
from ..statements import rewrite_marked_loops, with_body, with_code

__all__ = ["separate_steps"]

_CODE = """\
define void @eqtune_step() #0 {
  call void asm sideeffect "", ""() #1
  ret void
}
attributes #0 = { alwaysinline nounwind }
attributes #1 = { noduplicate nounwind memory(inaccessiblemem: readwrite) }
"""


def separate_steps(func: Any) -> Any:
    """Put the instruction into the loops of a scheduled PrimFunc that are marked SEPARATE_STEPS; the same object where
    there are none.

    Raises ValueError for a marked loop that is neither serial nor unrolled: marks may come from records of others.
    """
    return rewrite_marked_loops(func, SEPARATE_STEPS, _separate)


def _separate(loop: Any) -> Any:
    if loop.kind not in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED):
        raise ValueError(f"the loop over {loop.loop_var} is to take separate steps, but takes them at once")
    call = tirx.Evaluate(tirx.call_extern("void", "eqtune_step"))
    return with_body(loop, with_code(_CODE, tirx.SeqStmt([call, loop.body])), SEPARATE_STEPS)
