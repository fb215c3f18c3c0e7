"""Products of float32 on tensor cores, which take factors of 10 bits (tfloat32): somebody must permit it.

With one product, each factor is rounded: off by 2^-11 at most, where float32 is off by 2^-24. With three, a factor is
the sum of two such numbers, and only the product of the two small ones is left out (Ootomo and Yokota, "Recovering
single precision accuracy from Tensor Cores", 2022): about as exact as float32, for three times the work. Sums are
float32.

The permission is an attribute of the kernel and thus part of its hash: what was measured with it never serves a kernel
without it.
"""

from __future__ import annotations

from typing import Any

from tvm import IRModule

from ..permission import sums_products_of_float32, with_attribute

__all__ = ["permit_tf32", "permitted_products"]

ATTRIBUTE = "eqtune.tf32_products"


def permitted_products(function: Any) -> int:
    """How many products of tfloat32 may stand for one of float32 in this PrimFunc: 1, 3, or 0 where none may."""
    return int(function.attrs.get(ATTRIBUTE, 0)) if function.attrs else 0


def permit_tf32(mod: IRModule, products: int = 3) -> IRModule:
    """The module with the permission for every kernel that sums products of float32.

    Parameters
    ----------
    mod : tvm.ir.IRModule
        Kernels that are not scheduled.
    products : int
        3: about as exact as float32. 1: factors are rounded to 10 bits.

    Raises
    ------
    ValueError
        For another number of products.
    """
    if products not in (1, 3):
        raise ValueError(f"one product of float32 can be 1 or 3 of tfloat32, not {products}")
    return with_attribute(mod, ATTRIBUTE, products, sums_products_of_float32)
