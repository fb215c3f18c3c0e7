"""What TFLite's operators must know to be converted, shapes and axes: constants, and integers that follow from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import ir, relax
from tvm.relax.frontend.tflite.tflite_frontend import OperatorConverter, get_tensor_name

from ...arrays import Array
from ...errors import UnsupportedModelError
from ...relax_ir.constants import array_of, constant_of, is_static_tensor
from ...relax_ir.evaluate import Value, evaluate
from ...relax_ir.functions import leaves
from ...relax_ir.tensors import extents

__all__ = ["Values"]

_MOST_KNOWN = 1024
"""Elements of a tensor of integers that is computed beforehand: shapes have few."""


class Values(OperatorConverter):
    """TVM's converters, for which shapes, and what is computed of them, are constants.

    Raises
    ------
    UnsupportedModelError
        Where a converter needs a value that is known only when the model runs.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._operator = ""  # that is being converted
        self._asked_next: list[Any] = []
        self._known: dict[str, Array] = {}
        self._computed: dict[relax.Var, Value | None] = {}

    def has_expr(self, input_tensor_idx: int) -> bool:
        """TVM's: whether a tensor is computed when the model runs, or an input. -1 is a tensor that is left out."""
        if input_tensor_idx < 0 or get_tensor_name(self.subgraph, input_tensor_idx) in self._known:
            return False
        return bool(super().has_expr(input_tensor_idx))

    def get_expr(self, input_tensor_idx: int) -> relax.Expr:
        """TVM's, of constants as well."""
        if super().has_expr(input_tensor_idx):
            return super().get_expr(input_tensor_idx)
        asked_next, self._asked_next = self._asked_next, []  # not of this tensor
        try:
            return self.get_tensor_expr(*self.get_tensors([input_tensor_idx]))
        finally:
            self._asked_next = asked_next

    def get_tensor_value(self, tensor: Any, is_sparse: bool = False) -> Any:
        """TVM's, of what follows from constants, too; or what a converter puts in the place of those asked for next."""
        if self._asked_next:
            return self._asked_next.pop(0)
        if tensor.tensor_idx < 0:
            raise UnsupportedModelError(f"{self._operator} without one of its inputs cannot be imported")
        name = get_tensor_name(self.subgraph, tensor.tensor_idx)
        if name in self._known:
            return self._known[name]
        if tensor.buffer.DataLength():
            return super().get_tensor_value(tensor, is_sparse)
        shape = tuple(map(int, tensor.tensor.ShapeAsNumpy())) if tensor.tensor.ShapeLength() else ()
        if 0 in shape:
            return np.zeros(shape, self.get_tensor_type_as_numpy(tensor))
        if tensor.tensor.IsVariable():
            raise UnsupportedModelError(f"{self._operator} keeps a state from run to run, which cannot be imported")
        if self.has_expr(tensor.tensor_idx):
            raise UnsupportedModelError(f"{self._operator} by numbers that the model computes cannot be imported")
        raise UnsupportedModelError(f"the tensor {name!r} is neither computed nor a constant of the file")

    def convert_shape(self, op: Any) -> relax.Expr:
        """TVM's is computed when the model runs."""
        (x,), (output,) = self.get_input_tensors(op), self.get_output_tensors(op)
        value = self.bb.normalize(self.get_tensor_expr(x))
        if not is_static_tensor(value.ty):
            return super().convert_shape(op)
        return constant_of(np.array(extents(value.ty), self.get_tensor_type_as_numpy(output)))

    def convert_reshape(self, op: Any) -> relax.Expr:
        """TVM's wants a shape that is known. If one is not, and as many elements are declared as there are, it is that
        one: files declare what they leave open as 1."""
        x, *shape = self.get_input_tensors(op)
        if not shape or not self.has_expr(shape[0].tensor_idx):
            return super().convert_reshape(op)
        (output,) = self.get_output_tensors(op)
        declared = [int(extent) for extent in output.tensor.ShapeAsNumpy()] if output.tensor.ShapeLength() else []
        if math.prod(declared) != math.prod(extents(self.get_expr(x.tensor_idx).ty)):
            raise UnsupportedModelError("RESHAPE to a shape that the model computes cannot be imported")
        name = get_tensor_name(self.subgraph, shape[0].tensor_idx)
        self._known[name] = np.array(declared)
        try:
            return super().convert_reshape(op)
        finally:
            del self._known[name]

    def _remembered(self, result: relax.Expr, tensor: Any) -> relax.Expr:
        """What an operator makes a tensor: few integers that follow from constants are one, too."""
        value = self._value(result) if _are_few_integers(result.ty) else None
        if not isinstance(value, np.ndarray):
            return result
        self._known[get_tensor_name(self.subgraph, tensor.tensor_idx)] = value
        return constant_of(value)

    def _value(self, expr: Any) -> Value | None:
        """What numpy makes of an expression; None where it cannot, or inputs decide."""
        if isinstance(expr, ir.GenericConst):
            return array_of(expr)
        if isinstance(expr, relax.Var):
            if expr not in self._computed:
                bound = self.bb.lookup_binding(expr) if _are_few_integers(expr.ty) else None
                self._computed[expr] = self._value(bound)
            return self._computed[expr]
        if isinstance(expr, relax.TupleGetItem):
            parts = self._value(expr.tuple_value)
            return parts[expr.index] if isinstance(parts, tuple) else None
        if not isinstance(expr, relax.Call):
            return None
        values = [self._value(leaf) for leaf in leaves(expr)]
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        return evaluate(expr, arrays) if len(arrays) == len(values) else None


def _are_few_integers(ty: Any) -> bool:
    """Whether a type is of tensors whose values are looked for, one or several: not through a whole model."""
    if isinstance(ty, relax.TupleType):
        return all(map(_are_few_integers, ty.fields))
    return is_static_tensor(ty) and str(ty.dtype) in ("int32", "int64") and math.prod(extents(ty)) <= _MOST_KNOWN
