"""What a scheduled kernel needs before TVM lowers it."""

from __future__ import annotations

import math
from typing import Any

from tvm import IRModule, tirx

__all__ = ["narrow_indices"]


def narrow_indices(function: Any) -> Any:
    """The scheduled PrimFunc with 32-bit loop variables, or the function itself where 32 bits do not suffice.

    Relax kernels have 64-bit loops. TVM narrows them while lowering, and loses on the way which loops were marked with
    "pragma_loop_partition_hint": ragged tiles then keep a condition around every element and run at a third of the
    speed. Narrowed before lowering, the mark survives.
    """
    for parameter in function.params:
        shape = getattr(parameter.ty, "shape", ())
        if str(parameter.dtype).startswith("int64") or math.prod(int(extent) for extent in shape) >= 2**31:
            return function
    mod = IRModule({"main": function})
    return tirx.transform.ForceNarrowIndexToInt32()(mod)["main"]
