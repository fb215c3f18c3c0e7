"""LowerToKernels: `eqtune.tasks.lower_to_kernels` as a pass."""

from __future__ import annotations

from typing import Any

from tvm import ir, target, transform

from ..errors import InputError
from ..machine import describe_machine
from ..symbolic import TYPICAL_SIZE, permit_winograd, typical_sizes
from ..tasks import lower_to_kernels, permit_lossy_products

__all__ = ["LowerToKernels"]


@transform.module_pass(opt_level=0, name="LowerToKernels")
class LowerToKernels:
    """Legalise and fuse, without scheduling: see `eqtune.tasks.lower_to_kernels`.

    Parameters
    ----------
    target : tvm.target.Target, optional
        The current target unless given.
    fast_math : bool
        Whether products of float32 may be made of smaller numbers, where the machine is faster at that: those kernels
        have other records than exact ones. And whether convolutions of open images may be Winograd's, where that is
        said to be faster with images of typical sizes.
    """

    def __init__(self, target: Any = None, fast_math: bool = False) -> None:
        self._target = target
        self._fast_math = fast_math

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Lower. Raises InputError when there is no target."""
        chosen = self._target or target.Target.current(allow_none=True)
        if not isinstance(chosen, target.Target):
            raise InputError(
                f"LowerToKernels needs a tvm.target.Target, not {chosen!r}: give eqtune.machine.detect_target(), or "
                "run it within `with target:`"
            )
        kernels = lower_to_kernels(mod, chosen)
        if not self._fast_math:
            return kernels
        hardware = describe_machine(chosen, measure=False)
        return permit_winograd(permit_lossy_products(kernels, hardware), hardware, typical_sizes(mod), TYPICAL_SIZE)
