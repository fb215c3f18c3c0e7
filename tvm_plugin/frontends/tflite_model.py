"""TFLite models by TVM's importer; LiteRT's interpreter, where it is installed, tells what they compute."""

from __future__ import annotations

import functools
import importlib.util
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tflite
import tvm
from numpy.typing import NDArray
from tvm import relax
from tvm.relax.frontend.tflite import from_tflite
from tvm.relax.frontend.tflite.tflite_frontend import OperatorConverter, get_tensor_name

from ..errors import InputError, UnsupportedModelError
from ..runtime import first_line
from ..transform.fake_quantization import is_quantized
from ..transform.functions import operator, top_level_bindings
from .imported import ImportedModel, Reference, imported_model
from .relax_model import with_weights_bound

__all__ = ["from_tflite_file"]

_MOVES = frozenset(
    (
        *("EXPAND_DIMS", "GATHER", "GATHER_ND", "MIRROR_PAD", "PACK", "PAD", "PADV2", "RESIZE_NEAREST_NEIGHBOR"),
        *("REVERSE_V2", "SLICE", "SPLIT", "SPLIT_V", "SQUEEZE", "STRIDED_SLICE", "TILE", "TRANSPOSE", "UNPACK"),
        *("BROADCAST_TO", "DEPTH_TO_SPACE", "SPACE_TO_DEPTH"),
    )
)
"""Operators that only move elements: of quantised tensors, the integers."""

_IN_FLOATS = frozenset({"BATCH_MATMUL", "ELU", "GELU", "PRELU", "SELECT", "SELECT_V2"})
"""Operators that TVM's importer converts of floats alone: quantised tensors are floats around them."""

_HYBRID = frozenset({"BATCH_MATMUL", "CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV"})
"""Operators whose weights may be quantised where nothing else is ("dynamic range quantization"): floats for us."""


def from_tflite_file(path: Path, shapes: Mapping[str, Sequence[int]]) -> ImportedModel:
    """Load a .tflite file.

    Raises
    ------
    InputError
        The file is no TFLite model, or `shapes` are given: a TFLite model has those that it was converted with.
    UnsupportedModelError
        It has operators that TVM's importer cannot translate.
    """
    if shapes:
        raise InputError("a TFLite model has the shapes that it was converted with; convert it with other ones")
    try:
        content = path.read_bytes()
        if not tflite.Model.ModelBufferHasIdentifier(content, 0):
            raise InputError(f"{path} is not a TFLite model (it has no TFL3 in its header)")
        mod = from_tflite(tflite.Model.GetRootAsModel(content, 0), op_converter=_Converter)
    except InputError:
        raise
    except (OSError, struct.error, IndexError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a readable TFLite model: {first_line(error)}") from error
    except Exception as error:  # the importer fails by assertions and errors of any kind
        raise UnsupportedModelError(f"TVM's importer cannot translate {path.stem}: {first_line(error)}") from error
    mod = with_weights_bound(mod)
    references = () if _has_quantised_weights_alone(mod) else _references(content)
    return imported_model(mod, path.stem, "tflite", *references)


def _has_quantised_weights_alone(mod: tvm.IRModule) -> bool:
    """Beside such weights, LiteRT quantises activations anew for each input; here they stay floats, which is nearer."""
    bindings = top_level_bindings(mod["main"])
    return not is_quantized(mod) and any(operator(binding.value) == "relax.dequantize" for binding in bindings)


class _Converter(OperatorConverter):
    """TVM's converters, and quantised operators that it does not know."""

    _SUPPORTED_QUANTIZED_OPS = OperatorConverter._SUPPORTED_QUANTIZED_OPS | _MOVES | _IN_FLOATS

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._all_are_floats = False
        self._weights_are_floats = False
        for name in (_IN_FLOATS | _HYBRID) & self.convert_map.keys():
            self.convert_map[name] = functools.partial(self._in_floats, self.convert_map[name])

    def check_unsupported_ops(self) -> None:
        """TVM's, where weights that alone are quantised are floats."""
        self._weights_are_floats = True
        super().check_unsupported_ops()
        self._weights_are_floats = False

    def get_input_tensors(self, op: Any) -> list[Any]:
        """TVM's, where weights that alone are quantised may look like others."""
        tensors: list[Any] = super().get_input_tensors(op)
        if self._weights_are_floats and self._is_hybrid(op, tensors):
            for tensor in tensors:
                tensor.qnn_params = None
        return tensors

    def _is_hybrid(self, op: Any, tensors: Sequence[Any]) -> bool:
        name = self.get_op_code_str(op)
        data = tensors[2 if name == "TRANSPOSE_CONV" else 0]
        return name in _HYBRID and data.qnn_params is None and any(tensor.qnn_params is not None for tensor in tensors)

    def get_tensors(self, tensors_idx_list: Any) -> list[Any]:
        """TVM's, where quantised tensors may look like others."""
        tensors: list[Any] = super().get_tensors(tensors_idx_list)
        if self._all_are_floats:
            for tensor in tensors:
                tensor.qnn_params = None
        return tensors

    def get_tensor_type_str(self, tensor_type: int) -> str:
        """TVM's, where quantised tensors may look like others."""
        name = str(super().get_tensor_type_str(tensor_type))
        return "float32" if self._all_are_floats and name in ("int8", "uint8", "int16") else name

    def convert_gelu(self, op: Any) -> relax.Expr:
        """TVM's is the exact one, whichever was asked for."""
        options = tflite.GeluOptions()
        options.Init(op.BuiltinOptions().Bytes, op.BuiltinOptions().Pos)
        (x,) = self.get_input_tensors(op)
        return (relax.op.nn.gelu_tanh if options.Approximate() else relax.op.nn.gelu)(self.get_tensor_expr(x))

    def convert_pool2d(self, op: Any, pool_type: str) -> relax.Expr:
        """TVM's averages do not round; TFLite rounds halves away from zero, of the integers as they are stored."""
        (x,) = self.get_input_tensors(op)
        options = tflite.Pool2DOptions()
        options.Init(op.BuiltinOptions().Bytes, op.BuiltinOptions().Pos)
        if pool_type != "average" or x.qnn_params is None or options.FusedActivationFunction():
            return super().convert_pool2d(op, pool_type)
        with self._as_floats([x], lambda integers, _: relax.op.astype(integers, "float32")):
            mean = self.bb.normalize(super().convert_pool2d(op, pool_type))
        size = self.bb.normalize(relax.op.floor(relax.op.add(relax.op.abs(mean), relax.const(0.5))))
        rounded = self.bb.normalize(relax.op.multiply(relax.op.sign(mean), size))
        return relax.op.astype(rounded, self.get_tensor_type_str(x.tensor.Type()))

    def _in_floats(self, convert: Callable[..., relax.Expr], op: Any) -> relax.Expr:
        tensors = self.get_input_tensors(op)
        if self.get_op_code_str(op) not in _IN_FLOATS and not self._is_hybrid(op, tensors):
            return convert(op=op)
        (output,) = self.get_output_tensors(op)
        with self._as_floats(tensors, self.dequantize):
            result = convert(op=op)
        return result if output.qnn_params is None else self.quantize(self.bb.normalize(result), output)

    @contextmanager
    def _as_floats(self, tensors: Sequence[Any], floats_of: Callable[[relax.Expr, Any], relax.Expr]) -> Iterator[None]:
        """Let the quantised ones among some tensors be what `floats_of` makes of them."""
        known = dict(self.exp_tab.exprs)
        for tensor in tensors:
            if tensor.qnn_params is not None:
                floats = self.bb.normalize(floats_of(self.get_tensor_expr(tensor), tensor))
                self.exp_tab.set_expr(get_tensor_name(self.subgraph, tensor.tensor_idx), floats, force_override=True)
        self._all_are_floats = True
        yield
        self._all_are_floats = False
        self.exp_tab.exprs = known


def _references(content: bytes) -> tuple[Reference | None, Reference | None]:
    """What the interpreter computes, as by default and without XNNPACK."""
    if importlib.util.find_spec("ai_edge_litert") is None:
        return None, None
    from ai_edge_litert.interpreter import OpResolverType

    return _reference(content, OpResolverType.AUTO), _reference(
        content, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    )


def _reference(content: bytes, kernels: Any) -> Reference:
    @functools.cache
    def interpreter() -> Any:
        from ai_edge_litert.interpreter import Interpreter

        loaded = Interpreter(model_content=content, experimental_op_resolver_type=kernels)
        loaded.allocate_tensors()
        return loaded

    def reference(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
        loaded = interpreter()
        for details, array in zip(loaded.get_input_details(), arrays, strict=True):
            loaded.set_tensor(details["index"], array)
        loaded.invoke()
        return [np.array(loaded.get_tensor(details["index"])) for details in loaded.get_output_details()]

    return reference
