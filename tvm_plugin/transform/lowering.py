"""LowerToKernels: `eqtune.tasks.lower_to_kernels` as a pass."""

from __future__ import annotations

from typing import Any

from tvm import ir, target, transform

from ..errors import InputError

__all__ = ["LowerToKernels"]


@transform.module_pass(opt_level=0, name="LowerToKernels")
class LowerToKernels:
    """Legalise and fuse, without scheduling: see `eqtune.tasks.lower_to_kernels`.

    Parameters
    ----------
    target : tvm.target.Target, optional
        The current target unless given.
    """

    def __init__(self, target: Any = None) -> None:
        self._target = target

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Lower. Raises InputError when there is no target."""
        from ..tasks import lower_to_kernels  # which imports this package's passes

        chosen = self._target or target.Target.current(allow_none=True)
        if not isinstance(chosen, target.Target):
            raise InputError(
                f"LowerToKernels needs a tvm.target.Target, not {chosen!r}: give eqtune.machine.detect_target(), or "
                "run it within `with target:`"
            )
        return lower_to_kernels(mod, chosen)
