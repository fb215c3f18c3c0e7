"""Kernels in modules: how Relax functions call them, and what is known of them."""

from __future__ import annotations

from typing import Any

from tvm import tirx

__all__ = ["KERNEL_CALLS", "READY", "is_scheduled", "is_symbolic"]

KERNEL_CALLS = frozenset({"relax.call_tir", "relax.call_tir_inplace"})
"""Operators that call a kernel: its name is their first argument, its inputs the tuple that is the second."""

READY = "eqtune.ready"
"""Attribute of kernels that are scheduled and need nothing else before TVM lowers them."""


def is_scheduled(function: Any) -> bool:
    """Whether a function is a kernel that has a schedule, of eqtune's or, as its attribute tells, of TVM's."""
    attributes = (function.attrs or {}) if isinstance(function, tirx.PrimFunc) else {}
    return READY in attributes or "tirx.is_scheduled" in attributes


def is_symbolic(function: tirx.PrimFunc) -> bool:
    """Whether a kernel has an argument of symbolic shape, or a number that is known only when it runs."""
    shapes = [getattr(parameter.ty, "shape", None) for parameter in function.params]
    return any(shape is None or not all(isinstance(extent, tirx.IntImm) for extent in shape) for shape in shapes)
