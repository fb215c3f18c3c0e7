"""Kernels that are written as tensor expressions, in the place of several operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tvm import ir, relax, te
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .functions import map_functions, rewrite_calls

__all__ = ["Routine", "TeKernel", "extern_kernel", "with_te_kernels"]


class TeKernel(Protocol):
    """What computes the value of a variable."""

    @property
    def arguments(self) -> list[Any]:
        """The expressions that it reads."""

    def compute(self, *arguments: te.Tensor) -> te.Tensor:
        """The value, or several, from placeholders for them."""


@dataclass(frozen=True)
class Routine:
    """A `TeKernel` whose computation is a function of the placeholders alone."""

    arguments: list[Any]
    compute: Callable[..., Any]


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

    def rewritten(function: relax.Function) -> relax.Function:
        kernels = find(function)

        def rewrite(binding: relax.VarBinding) -> relax.VarBinding:
            kernel = kernels.get(binding.var)
            if kernel is None:
                return binding
            attrs = dict(attributes) if attributes else None
            call = builder.call_te(kernel.compute, *kernel.arguments, primfunc_name_hint=name, primfunc_attrs=attrs)
            return relax.VarBinding(binding.var, builder.normalize(call))

        return relax.analysis.remove_all_unused(rewrite_calls(function, rewrite)) if kernels else function

    return map_functions(mod, rewritten, builder)


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
