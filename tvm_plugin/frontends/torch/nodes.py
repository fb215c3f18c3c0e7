"""What converters of PyTorch operators read of a node of the exported graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.export
import torch.fx
from numpy.typing import NDArray
from tvm import relax

from ...dtypes import is_integer, numpy_dtype
from ...relax_ir.constants import constant_of
from ...relax_ir.tensors import as_dtype
from .sizes import is_size, tensor_of_size

__all__ = [
    "Converter",
    "arguments",
    "array_of_torch",
    "calls_of",
    "cast",
    "compared_as",
    "dtype_of",
    "full",
    "operand",
    "scalar",
    "shape_in_torch",
    "torch_of_array",
    "wrapped",
]

Converter = Callable[[Any, Any], relax.Expr | tuple[relax.Expr, ...]]
"""Takes a node and the importer, and returns the Relax value."""


def calls_of(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    """The calls of a program, and those in the branches of its conditions."""
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes if node.op == "call_function"]


def arguments(node: Any, importer: Any, names: Sequence[str], defaults: Sequence[Any]) -> list[Any]:
    """Positional and keyword arguments of `node` in the order of `names`, nodes replaced by their values."""
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    defaulted = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    values = [given.get(name, defaulted.get(name)) for name in names]
    return [importer.env[value] if isinstance(value, torch.fx.Node) else value for value in values]


def shape_in_torch(node: Any, importer: Any) -> list[Any]:
    """The extents of what PyTorch computes for a node: ints, but for those that are known only when the model runs."""
    return [importer.sizes(dim) for dim in node.meta["val"].shape]


def scalar(value: Any, dtype: str, importer: Any) -> relax.Expr:
    """A number as a tensor without axes; also one that is known only when the model runs.

    Integers beyond a dtype begin anew at its other end, as in PyTorch: 240 is -16 of int8.
    """
    if not is_size(value):
        return relax.const(wrapped(value, dtype), dtype)
    return cast(tensor_of_size(importer.block_builder.emit, value), dtype, importer)


def wrapped(value: Any, dtype: str) -> Any:
    """A number as one of an integer dtype; another one, or of a dtype of fractions, as it is."""
    return int(np.array(value).astype(dtype)) if is_integer(dtype) and isinstance(value, int) else value


def dtype_of(node: Any) -> str:
    """What PyTorch computes the node in: its first result, where it has several."""
    value = node.meta["val"]
    return str((value[0] if isinstance(value, tuple | list) else value).dtype).removeprefix("torch.")


def compared_as(operands: Sequence[Any]) -> str:
    """The dtype in which PyTorch compares tensors and numbers. 0 and 1 are the same in any dtype, bool among them."""

    def alike(given: Any) -> Any:
        value = given.meta["val"] if isinstance(given, torch.fx.Node) else given
        if isinstance(value, torch.Tensor):
            return torch.empty([0] * min(value.ndim, 1), dtype=value.dtype)
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return 0 if isinstance(value, torch.SymInt) else 0.0
        return bool(value) if value in (0, 1) else value

    return str(torch.result_type(*map(alike, operands))).removeprefix("torch.")


def cast(value: relax.Expr, dtype: str, importer: Any) -> relax.Expr:
    """A tensor in another dtype, or as it is."""
    return as_dtype(importer.block_builder.emit, value, dtype)


def operand(value: Any, dtype: str, importer: Any) -> relax.Expr:
    """A number, or a value of another dtype, as an operand of `dtype`."""
    if not isinstance(value, relax.Expr) or is_size(value):
        return scalar(value, dtype, importer)
    return cast(value, dtype, importer)


def full(like: relax.Expr, shape: Sequence[int], number: float) -> relax.Expr:
    """A constant of one number, in the dtype of another tensor."""
    return constant_of(np.full(tuple(shape), number, numpy_dtype(str(like.ty.dtype))))


def array_of_torch(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor as numpy has it: PyTorch itself refuses to convert bfloat16."""
    tensor = tensor.detach().cpu().resolve_neg()
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    return tensor.contiguous().view(torch.int16).numpy().view(numpy_dtype("bfloat16"))


def torch_of_array(array: NDArray[Any]) -> torch.Tensor:
    """The inverse, of a copy."""
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(np.array(array))
    return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
