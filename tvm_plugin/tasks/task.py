"""A task: one distinct kernel of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Task"]


@dataclass(frozen=True)
class Task:
    """One distinct fused kernel.

    Attributes
    ----------
    name : str
        The kernel's name in the fused module (the first one, where several are equal).
    mod : tvm.ir.IRModule
        A module that holds just this kernel as "main", without a global symbol. The attribute
        `layout_free_buffers` names the arguments that are weights: a schedule may choose their layout.
    workload_hash : str
        Structural hash of `mod` as 16 hexadecimal digits: names and weights' contents do not count.
    calls : int
        How often one run of the model calls it.
    flops : float
        Floating-point operations of one call (an FMA counts two).
    bytes_moved : float
        Bytes of all inputs and outputs of one call, each counted once.
    weight_bytes : float
        Of these, what is constant in the model.
    integer_operations : float
        The same of integers, in quantised layers.
    functions : tuple of str
        Names of all functions of the fused module that are this kernel.
    """

    name: str
    mod: Any
    workload_hash: str
    calls: int
    flops: float
    bytes_moved: float
    functions: tuple[str, ...] = ()
    weight_bytes: float = 0.0
    integer_operations: float = 0.0

    @property
    def operations(self) -> float:
        """Of one call, of whatever numbers: what it takes time for."""
        return self.flops + self.integer_operations
