"""Loops over the taps of a window that LLVM must not write out, because it would then run out of registers.

A window's row of few taps is a loop that LLVM unrolls as a whole. Neighbouring pixels then meet most of the same
elements, which it loads once and holds: fine for small tiles, but beside 22 sums and more it spills them in every step.
LLVM copies no loop that has an instruction in it that may not be copied, even where that does nothing.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

__all__ = ["KEEP_LOOP", "keep_loops"]

KEEP_LOOP = "eqtune.keep_loop"
"""Annotation of a serial loop that stays one."""

_CODE = """\
define void @eqtune_keep_loop() #0 {
  call void asm sideeffect "", ""() #1
  ret void
}
attributes #0 = { alwaysinline nounwind }
attributes #1 = { noduplicate nounwind memory(inaccessiblemem: readwrite) }
"""


def keep_loops(func: Any) -> Any:
    """Put the instruction into the marked loops of a scheduled PrimFunc; the same object where there are none.

    Raises ValueError for a marked loop that is not serial: marks may come from records of others.
    """

    def keep(loop: Any) -> Any:
        if KEEP_LOOP not in loop.annotations:
            return loop
        if loop.kind != tirx.ForKind.SERIAL:
            raise ValueError(f"the loop over {loop.loop_var} is to be kept, but is not serial")
        others = {key: value for key, value in loop.annotations.items() if key != KEEP_LOOP}
        call = tirx.Evaluate(tirx.call_extern("void", "eqtune_keep_loop"))
        body = tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", _CODE, tirx.SeqStmt([call, loop.body]))
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, annotations=others, step=loop.step)

    body = tvm_ffi.structural_map(func.body, (tirx.For, keep))
    return func if body.same_as(func.body) else func.with_body(body)
