"""Padding by the lowest number of a type, or the largest, which nobody is to take for an infinity."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from tvm import ir, relax, te, tirx, topi

from ..relax_ir.functions import operator, top_level_bindings
from ..relax_ir.te_kernels import Routine, with_te_kernels

__all__ = ["write_pads_by_limits"]


def write_pads_by_limits(mod: ir.IRModule) -> ir.IRModule:
    """A kernel for each padding by such a number, which is written by its bits; others stay.

    TVM pads the windows of its poolings by the lowest number where it means none, and kernels of maxima make minus
    infinity of that (search/space/extrema.py). The largest element of a row that a model pads so is that number.
    """
    return with_te_kernels(mod, "pad", _found)


def _found(function: relax.Function) -> dict[relax.Var, Routine]:
    kernels = {}
    for binding in top_level_bindings(function):
        call = binding.value
        if operator(call) == "relax.nn.pad" and str(call.attrs.pad_mode) == "constant" and _is_limit(call):
            compute = partial(_padded, [int(width) for width in call.attrs.pad_width], float(call.attrs.pad_value))
            kernels[binding.var] = Routine([call.args[0]], compute)
    return kernels


def _is_limit(pad: relax.Call) -> bool:
    dtype = str(pad.ty.dtype)
    return dtype.startswith("float") and abs(float(pad.attrs.pad_value)) == float(np.finfo(dtype).max)


def _padded(widths: Sequence[int], value: float, x: te.Tensor) -> te.Tensor:
    bits = np.asarray(value, str(x.dtype)).view(f"int{np.finfo(str(x.dtype)).bits}")
    number = tirx.reinterpret(str(x.dtype), tirx.const(int(bits), str(bits.dtype)))
    return topi.nn.pad(x, widths[::2], widths[1::2], number)
