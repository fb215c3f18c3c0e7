"""Kernels that somebody permits to compute less exactly: an attribute, and thus part of their hash.

What was measured with a permission never serves a kernel without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import IRModule, tirx

from eqtune.records.workload import as_workload

from .analysis import Kernel, analyze

__all__ = ["sums_products_of_float32", "with_attribute"]


def with_attribute(mod: IRModule, name: str, value: int, wanted: Callable[[Kernel], bool]) -> IRModule:
    """The module with an attribute on each kernel that is `wanted`."""
    functions = {}
    for variable, function in mod.functions.items():
        is_wanted = isinstance(function, tirx.PrimFunc) and _is_wanted(function, wanted)
        functions[variable] = function.with_attr(name, value) if is_wanted else function
    return IRModule(functions, attrs=mod.attrs)


def sums_products_of_float32(kernel: Kernel) -> bool:
    """Whether the kernel is a matrix product or a convolution of float32."""
    contraction = kernel.contraction
    if contraction is None:
        return False
    dtypes = {contraction.left.access.dtype, contraction.right.access.dtype, contraction.block.write.dtype}
    return dtypes == {"float32"}


def _is_wanted(function: Any, wanted: Callable[[Kernel], bool]) -> bool:
    try:
        kernel = analyze(as_workload(function))
    except ValueError:  # a block that the analysis does not read
        return False
    return wanted(kernel)
