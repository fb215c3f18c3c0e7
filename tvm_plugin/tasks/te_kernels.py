"""Kernels that are written as tensor expressions, in the place of several operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tvm import ir, relax, te
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..transform.functions import rewrite_calls

__all__ = ["OPAQUE", "TeKernel", "extern_kernel", "with_te_kernels"]

OPAQUE = 8
"""What TVM's OpPatternKind, the attribute `op_pattern`, says of a kernel that must not be fused."""


class TeKernel(Protocol):
    """What computes the value of a variable."""

    @property
    def arguments(self) -> list[Any]:
        """The expressions that it reads."""

    def compute(self, *arguments: te.Tensor) -> te.Tensor:
        """The value, from placeholders for them."""


def with_te_kernels(
    mod: ir.IRModule,
    name: str,
    find: Callable[[relax.Function], Mapping[relax.Var, TeKernel]],
    attributes: Mapping[str, Any] | None = None,
) -> ir.IRModule:
    """Bind the variables that `find` returns to calls of their kernels, called `name`, and drop what nobody reads.

    The kernels get `attributes`.
    """
    builder = relax.BlockBuilder(mod)
    rewritten = {}
    for variable, function in mod.functions_items():
        kernels = find(function) if isinstance(function, relax.Function) else {}
        if kernels:
            rewritten[variable] = _rewrite(function, name, kernels, builder, dict(attributes or {}))
    if not rewritten:
        return mod
    result = builder.get()
    for variable, function in rewritten.items():
        result.update_func(variable, function)
    return result


def _rewrite(
    function: relax.Function,
    name: str,
    kernels: Mapping[relax.Var, TeKernel],
    builder: relax.BlockBuilder,
    attributes: dict[str, Any],
) -> relax.Function:
    def rewrite(binding: relax.VarBinding) -> relax.VarBinding:
        kernel = kernels.get(binding.var)
        if kernel is None:
            return binding
        call = builder.call_te(
            kernel.compute, *kernel.arguments, primfunc_name_hint=name, primfunc_attrs=attributes or None
        )
        return relax.VarBinding(binding.var, builder.normalize(call))

    return relax.analysis.remove_all_unused(rewrite_calls(function, rewrite))


def extern_kernel(
    name: str, body: Callable[..., None], inputs: list[te.Tensor], outputs: list[tuple[Any, Any]]
) -> te.Tensor | list[te.Tensor]:
    """A tensor, or several, that `body` computes as statements, from flat buffers: inputs, then outputs.

    Outputs are pairs of shape and dtype.
    """

    def generate(given: Any, results: Any) -> Any:
        with IRBuilder() as builder, T.prim_func():
            T.func_name(name)
            body(*[_flat(buffer) for buffer in (*given, *results)])
        return builder.get().body

    shapes, dtypes = zip(*outputs, strict=True)
    return te.extern(list(shapes), inputs, generate, dtype=list(dtypes), name=name, tag=name)


def _flat(buffer: Any) -> Any:
    size = math.prod(int(extent) for extent in buffer.shape)
    return T.buffer_proxy(T.decl_buffer((size,), str(buffer.dtype), data=buffer.data))
