"""What TFLite's operators see of quantised tensors, and the types that their results have."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tflite
from tvm import relax
from tvm.relax import op as relax_op
from tvm.relax.frontend.tflite.tflite_frontend import OperatorConverter, get_tensor_name

from ...errors import UnsupportedModelError
from ...relax_ir.constants import is_static_tensor
from ...relax_ir.tensors import extents
from .moves import MOVES, Moves

__all__ = ["IN_FLOATS", "Quantised"]

_ORDERS = frozenset({"ARG_MAX", "ARG_MIN", "TOPK_V2"})
"""Operators that only compare elements: of quantised tensors, the integers, whose order is the same."""

_IN_FLOATS = frozenset({"BATCH_MATMUL", "ELU", "GELU", "PRELU", "SELECT", "SELECT_V2", "TRANSPOSE_CONV"})
"""Operators that are converted for floats alone: quantised tensors are floats around them."""

_HYBRID = frozenset({"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "UNIDIRECTIONAL_SEQUENCE_LSTM"})
"""Operators whose weights may be quantised where nothing else is ("dynamic range quantization"): floats for us."""

IN_FLOATS = _IN_FLOATS | _HYBRID
"""Operators whose weights, quantised where nothing else is, are floats here."""

_LIMITS = {
    tflite.ActivationFunctionType.RELU: (0.0, math.inf),
    tflite.ActivationFunctionType.RELU6: (0.0, 6.0),
    tflite.ActivationFunctionType.RELU_N1_TO_1: (-1.0, 1.0),
}
"""Of activations that are fused with others."""


class Quantised(Moves):
    """TVM's converters, for integers or floats as the file means them. Results are of the shape that it declares.

    Raises
    ------
    UnsupportedModelError
        For activations of 16 bits, and results of another shape than the file declares.
    """

    _SUPPORTED_QUANTIZED_OPS = OperatorConverter._SUPPORTED_QUANTIZED_OPS | MOVES | _ORDERS | _IN_FLOATS

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._quantised_look_plain = False
        self._hybrid_look_plain = False
        for name, convert in self.convert_map.items():
            if name in IN_FLOATS:
                convert = functools.partial(self._in_floats, convert)
            self.convert_map[name] = functools.partial(self._as_declared, convert)

    def check_unsupported_ops(self) -> None:
        """TVM's, where weights that alone are quantised are floats."""
        wide = set()
        for op in map(self.subgraph.Operators, range(self.subgraph.OperatorsLength())):
            name = self.get_op_code_str(op)
            if name in self._SUPPORTED_QUANTIZED_OPS and any(map(_is_of_16_bits, super().get_input_tensors(op))):
                wide.add(name)
        if wide:
            names = ", ".join(sorted(wide))
            raise UnsupportedModelError(f"activations of 16 bits ({names}) cannot be imported; quantise them to 8 bits")
        self._hybrid_look_plain = True
        super().check_unsupported_ops()
        self._hybrid_look_plain = False

    def get_input_tensors(self, op: Any) -> list[Any]:
        """TVM's, where weights that alone are quantised may look like others."""
        tensors: list[Any] = super().get_input_tensors(op)
        if self._hybrid_look_plain and self._is_hybrid(op, tensors):
            for tensor in tensors:
                tensor.qnn_params = None
        return tensors

    def get_tensors(self, tensors_idx_list: Any) -> list[Any]:
        """TVM's, where quantised tensors may look like others. One scale is of no axis, whichever the file names."""
        tensors: list[Any] = super().get_tensors(tensors_idx_list)
        for tensor in tensors:
            if self._quantised_look_plain:
                tensor.qnn_params = None
            elif tensor.qnn_params is not None and not tensor.qnn_params["scale"].value.shape:
                tensor.qnn_params["axis"] = 0
        return tensors

    def get_tensor_type_str(self, tensor_type: int) -> str:
        """TVM's, where quantised tensors may look like others."""
        name = str(super().get_tensor_type_str(tensor_type))
        return "float32" if self._quantised_look_plain and name in ("int8", "uint8") else name

    def convert_qnn_fused_activation_function(
        self, expr: relax.Expr, fused_activation_fn: int, scale: float, zero_point: int, dtype: str
    ) -> relax.Expr:
        """TVM's rounds limits in float64, before the zero point is added; XNNPACK in float32, and behind it."""
        limits = _LIMITS.get(fused_activation_fn)
        if limits is None:
            return super().convert_qnn_fused_activation_function(expr, fused_activation_fn, scale, zero_point, dtype)
        least, most = (np.rint(np.float32(limit) / np.float32(scale) + np.float32(zero_point)) for limit in limits)
        integers = np.iinfo(dtype)
        return relax_op.clip(expr, float(max(least, integers.min)), float(min(most, integers.max)))

    def _as_declared(self, convert: Callable[..., Any], op: Any) -> Any:
        """The results of a converter, integers of the declared types."""
        self._operator = self.get_op_code_str(op)
        result, outputs = convert(op=op), self.get_output_tensors(op)
        if not isinstance(result, relax.Expr):
            return result
        result = self.bb.normalize(result)
        if len(outputs) == 1:
            return self._declared(result, *outputs)
        if not isinstance(result.ty, relax.TupleType):
            return result
        whole = result if isinstance(result, relax.Tuple) else self.bb.emit(result)
        return relax.Tuple([self._declared(self.bb.normalize(whole[n]), output) for n, output in enumerate(outputs)])

    def _declared(self, result: relax.Expr, output: Any) -> relax.Expr:
        shape = self._get_relax_tensor_shape(output) if output.tensor.ShapeLength() else ()
        found = tuple(extents(result.ty)) if is_static_tensor(result.ty) else shape
        if shape and found != shape:
            name = self._operator
            raise UnsupportedModelError(f"TVM's importer makes a result {found} of {name} where the file has {shape}")
        declared = self.get_tensor_type_str(output.tensor.Type())
        if {str(getattr(result.ty, "dtype", "")), declared} == {"int32", "int64"}:
            result = self.bb.normalize(relax_op.astype(result, declared))
        return self._remembered(result, output)

    def _in_float(self, tensor: Any) -> relax.Expr:
        value = self.get_tensor_expr(tensor)
        return self.bb.normalize(value if tensor.qnn_params is None else self.dequantize(value, tensor))

    def _is_hybrid(self, op: Any, tensors: Sequence[Any]) -> bool:
        """Whether, of an operator's inputs, weights alone are quantised."""
        name = self.get_op_code_str(op)
        if name not in IN_FLOATS:  # others may have no inputs
            return False
        data = tensors[2 if name == "TRANSPOSE_CONV" else 0]
        quantised = [tensor for tensor in tensors if tensor.qnn_params is not None]
        return data.qnn_params is None and bool(quantised)

    def _in_floats(self, convert: Callable[..., relax.Expr], op: Any) -> relax.Expr:
        tensors = self.get_input_tensors(op)
        if self.get_op_code_str(op) in _HYBRID and not self._is_hybrid(op, tensors):
            return convert(op=op)
        (output,) = self.get_output_tensors(op)
        with self._replaced(tensors, self.dequantize):
            result = convert(op=op)
        return result if output.qnn_params is None else self.quantize(self.bb.normalize(result), output)

    @contextmanager
    def _replaced(self, tensors: Sequence[Any], replace: Callable[[relax.Expr, Any], relax.Expr]) -> Iterator[None]:
        """Let the quantised ones among some tensors be what `replace` makes of them, and look like others."""
        replacements: Mapping[str, relax.Expr] = {
            get_tensor_name(self.subgraph, tensor.tensor_idx): self.bb.normalize(
                replace(self.get_tensor_expr(tensor), tensor)
            )
            for tensor in tensors
            if tensor.qnn_params is not None
        }
        known = dict(self.exp_tab.exprs)
        self.exp_tab.exprs.update(replacements)
        self._quantised_look_plain = bool(replacements)
        try:
            yield
        finally:
            self._quantised_look_plain = False
            self.exp_tab.exprs = known


def _is_of_16_bits(tensor: Any) -> bool:
    return tensor.qnn_params is not None and tensor.tensor.Type() == tflite.TensorType.INT16
