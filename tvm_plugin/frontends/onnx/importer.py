"""TVM's importer of ONNX, with converters of its own for what TVM lacks or writes badly."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import tvm
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, _get_convert_map

from ...dtypes import HALVES
from ...errors import UnsupportedModelError
from ...relax_ir.constants import array_of
from ...relax_ir.tensors import BOUNDS, as_dtype, shape_of
from ...repairs.open_slices import from_begin, open_slice
from ...runtime import first_line
from ..imported import KNOWN_SHAPES
from ..recurrent import RECURRENT, convert_recurrent
from .attention import convert_attention
from .cached_attention import CACHED_ATTENTION
from .fourier import FOURIER, convert_fourier
from .images import CHOICES, IMAGES
from .narrow_weights import NARROW_WEIGHTS
from .nodes import Convert, opset_of, padded, text_of
from .norms import NORMS
from .operators import OPERATORS
from .quantized import QUANTIZED
from .reductions import REDUCTIONS
from .runtime_operators import ONNX_RUNTIME
from .sizes import SizeTensors

__all__ = ["known_operators", "translated"]

_OPERATOR = re.compile(r'ir\.Op\(.*?name="relax\.([\w.]+)".*?support_level=\d+\)')
"""How TVM's messages print an operator: all that is known of it."""

Own = Callable[[Any, Sequence[Any], dict[str, Any], Convert], Any]
"""Block builder, inputs and attributes of a node, and TVM's converters -> the result."""

_OF_ONNX = QUANTIZED.keys() | RECURRENT | FOURIER | IMAGES.keys() | NORMS.keys() | OPERATORS.keys()
_OURS = _OF_ONNX | ONNX_RUNTIME.keys() | NARROW_WEIGHTS.keys() | CACHED_ATTENTION.keys()


_OF_SEVERAL_STEPS = frozenset(
    {
        "GlobalLpPool",
        "InstanceNormalization",
        "LRN",
        "LpNormalization",
        "LpPool",
        "MeanVarianceNormalization",
        "ReduceL2",
        "ThresholdedRelu",
    }
)
"""Of 16 bits, computed in float32 and rounded once, as ONNX Runtime does: squares of 300 are infinite in float16."""

_OF_SEQUENCES = frozenset(
    {
        *("ConcatFromSequence", "Identity", "Optional", "OptionalGetElement", "OptionalHasElement", "SequenceAt"),
        *("SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength"),
        "SplitToSequence",
    }
)
"""Of which one result may be a tuple."""

_ZEROS = {onnx.AttributeProto.INT: 0, onnx.AttributeProto.FLOAT: 0.0}
"""What attributes of these types are that say nothing else."""


def known_operators() -> set[str]:
    """Of ONNX's own domain: what TVM converts, or a converter here."""
    return set(_get_convert_map()) | _OF_ONNX


class _Importer(ONNXGraphImporter):
    """TVM's importer, with converters whose results a graph pass can look into.

    TVM's own clip emits `call_tir` on sanitised bounds, and its gather computes on `shape_of` to wrap negative indices.
    It has no quantised convolution and but one quantised product, no recurrent layers, no Fourier transforms, no
    Col2Im, and of Attention a part of ONNX Runtime's; it resizes with aliases where it should not. Of other domains'
    operators, it knows only the names.
    """

    def __init__(self, any_size: bool) -> None:
        super().__init__(None, "float32", keep_params_in_input=False)
        self._sizes = SizeTensors(self.bb) if any_size else None
        self._converting = ""

    def blamed(self, what: str) -> str:
        """`what`, with the operator that is being converted, if one is."""
        return f"{self._converting} of {what}" if self._converting else what

    def with_bounds(self, mod: tvm.IRModule) -> tvm.IRModule:
        """The module, whose main function tells what open sizes are at most, as far as the model does."""
        if self._sizes is None or not self._sizes.most:
            return mod
        most = {str(size.name): extent for size, extent in self._sizes.most.items()}
        bounds = dict(zip(BOUNDS, (dict.fromkeys(most, 1), most), strict=True))
        mod.update_func(mod.get_global_var("main"), mod["main"].with_attrs(bounds))
        return mod

    def _check_for_unsupported_ops(self, graph: Any) -> None:
        known = SimpleNamespace(node=[node for node in graph.node if node.op_type not in _OURS])
        super()._check_for_unsupported_ops(known)

    def _convert_operator(self, op_name: str, inputs: Any, attrs: dict[str, Any], opset: int) -> relax.Expr:
        self._converting = op_name
        value = self._converted(op_name, inputs, attrs, _Plain(super()._convert_operator, opset))
        self._converting = ""
        return value if op_name in _OF_SEQUENCES else self._results(value, attrs["tvm_custom"]["num_outputs"])

    def _results(self, value: relax.Expr, count: int) -> relax.Expr:
        """Several results as variables, or the first of them where no other is used: in branches, TVM's importer takes
        all of them for one then, and its arithmetic takes parts that are no variables for constants."""
        if not isinstance(value, relax.Tuple):
            if not isinstance(getattr(value, "ty", None), relax.TupleType):
                return value
            whole = value if isinstance(value, relax.Var) else self.bb.emit(value)
            value = relax.Tuple([self.bb.emit(relax.TupleGetItem(whole, i)) for i in range(len(value.ty.fields))])
        return value[0] if count == 1 else value

    def _parse_attr(self, attr_proto: Sequence[onnx.AttributeProto]) -> dict[str, Any]:
        """With zeros, which protobuf's third version does not write, and without lists that are empty."""
        attrs: dict[str, Any] = super()._parse_attr([one for one in attr_proto if _is_written(one)])
        zeros = {one.name: _ZEROS[one.type] for one in attr_proto if one.type in _ZEROS and not _is_written(one)}
        return attrs | zeros

    def _converted(self, op_name: str, inputs: Any, attrs: dict[str, Any], convert: Convert) -> relax.Expr:
        if self._sizes is not None:
            value = self._sizes.convert(op_name, list(inputs), attrs)
            if value is not None:
                return self.bb.emit(value) if isinstance(value, relax.Call) else value
        if op_name in _OF_SEVERAL_STEPS or _adds_up(op_name, attrs):
            inputs, narrow = _widened(self.bb, inputs)
            if narrow:
                return as_dtype(self.bb.emit, self.bb.emit(self._converted(op_name, inputs, attrs, convert)), narrow)
        own = _CONVERTERS.get(op_name)
        value = None if own is None else own(self.bb, list(inputs), attrs, convert)
        return convert(op_name, inputs, attrs) if value is None else self.bb.normalize(value)


def _is_written(attribute: onnx.AttributeProto) -> bool:
    """Whether it has a value besides its name and type."""
    return not {field.name for field, _ in attribute.ListFields()} <= {"name", "type", "doc_string"}


def _adds_up(op_name: str, attrs: dict[str, Any]) -> bool:
    """Whether what is scattered to one place is added or multiplied there."""
    scatters = op_name in ("ScatterElements", "ScatterND")
    return scatters and text_of(attrs.get("reduction", "none")) in ("add", "mul")


def _widened(bb: Any, inputs: Sequence[Any]) -> tuple[list[Any], str]:
    """Tensors of 16-bit floats as float32, and the dtype that they had; "" where there are none."""
    dtypes = [str(getattr(getattr(x, "ty", None), "dtype", "")) for x in inputs]
    narrow = next((dtype for dtype in dtypes if dtype in HALVES), "")
    pairs = zip(inputs, dtypes, strict=True)
    return [bb.emit(relax.op.astype(x, "float32")) if dtype in HALVES else x for x, dtype in pairs], narrow


@dataclass(frozen=True)
class _Plain:
    """TVM's own converters: a `Convert`."""

    function: Callable[..., relax.Expr]
    opset: int

    def __call__(self, name: str, inputs: Any, attrs: dict[str, Any]) -> relax.Expr:
        return self.function(name, inputs, attrs, self.opset)


def _is_one_number(value: Any) -> bool:
    return isinstance(value, tvm.ir.GenericConst) and not value.ty.shape


def _bound(value: relax.Expr | None, missing: float) -> float | None:
    if value is None:
        return missing
    if not isinstance(value, tvm.ir.GenericConst):
        return None
    array = array_of(value)
    bound = array.item()
    if array.dtype.kind in "iu":  # the dtype's limits are no bounds, and no floats
        limits = np.iinfo(array.dtype)
        return missing if bound == (limits.min if missing < 0 else limits.max) else bound
    return missing if math.isnan(bound) else bound


def _clip(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> relax.Expr | None:
    x, least, most = padded(inputs, 3)
    low = _bound(least, -math.inf) if convert.opset >= 11 else float(attrs.get("min", -math.inf))
    high = _bound(most, math.inf) if convert.opset >= 11 else float(attrs.get("max", math.inf))
    return None if low is None or high is None else _limited(x, low, high)


def _limited(x: relax.Expr, low: float, high: float) -> relax.Expr:
    dtype = str(x.ty.dtype)
    if low == -math.inf and high == math.inf:
        return x
    if high == math.inf:
        return relax.op.nn.relu(x) if low == 0 else relax.op.maximum(x, relax.const(low, dtype))
    if low == -math.inf:
        return relax.op.minimum(x, relax.const(high, dtype))
    return relax.op.clip(x, min(low, high), high)  # TVM's lower bound counts where they cross, ONNX's upper


def _gather(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> relax.Expr | None:
    x, indices = inputs
    if any(not isinstance(value.ty, relax.TensorType) or value.ty.shape is None for value in (x, indices)):
        return None
    if isinstance(x, tvm.ir.GenericConst) and _is_one_number(indices):
        return None  # a constant, of which the model may make a shape
    axis = int(attrs.get("axis", 0)) % len(x.ty.shape)
    if _is_one_number(indices):
        index, extent = int(indices.value.numpy()), shape_of(x)[axis]
        if not isinstance(extent, int):
            begin = from_begin(index, extent)
            return relax.op.squeeze(open_slice(bb.emit, x, axis, begin, 1), axis=[axis])
        index %= extent
        sliced = relax.op.strided_slice(x, axes=[axis], begin=[index], end=[index + 1])
        return relax.op.squeeze(sliced, axis=[axis])
    return relax.op.take(x, indices, axis=axis, mode="wrap")


def _unsqueeze(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> relax.Expr | None:
    """PyTorch's exporter writes the one axis of shared keys as a number; ONNX Runtime takes it, TVM does not."""
    if len(inputs) < 2 or not _is_one_number(inputs[1]):
        return None
    return convert("Unsqueeze", [inputs[0], relax.const(inputs[1].value.numpy().reshape(1))], attrs)


def _attention(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> relax.Expr:
    """ONNX's, or ONNX Runtime's, which the importer does not tell apart by their domains."""
    if "num_heads" in attrs:
        return ONNX_RUNTIME["Attention"](bb, inputs, attrs, convert)
    return convert_attention(bb, list(inputs), attrs, convert.opset)


def _rotary_embedding(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> relax.Expr:
    """ONNX's, or ONNX Runtime's, of which the second input is integers; they have the same in another order."""
    x, second, third, fourth = padded(inputs, 4)
    is_onnx_runtime_s = str(second.ty.dtype).startswith("int")
    given = [x, second, third, fourth] if is_onnx_runtime_s else [x, fourth, second, third]
    result: relax.Expr = ONNX_RUNTIME["RotaryEmbedding"](bb, given, attrs, convert)
    return result


def _of_all(function: Callable[[Any, Any], relax.Expr]) -> Own:
    """Element by element, of one tensor after another; TVM's importer stacks them and looks along the new axis."""

    def convert_all(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> relax.Expr:
        return functools.reduce(lambda one, other: bb.emit(function(one, other)), inputs)

    return convert_all


def _recurrent(name: str) -> Own:
    def convert_layer(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], _: Convert) -> relax.Expr:
        every, *ends = convert_recurrent(bb, name, list(inputs), attrs)
        return relax.Tuple([bb.emit(relax.op.permute_dims(every, [0, 2, 1, 3])), *ends])

    return convert_layer


def _transform(name: str) -> Own:
    return lambda bb, inputs, attrs, convert: convert_fourier(bb, name, list(inputs), attrs, convert.opset)


def _channels_first(name: str, own: Own) -> Own:
    def convert_quantized(bb: Any, inputs: Sequence[Any], attrs: dict[str, Any], convert: Convert) -> relax.Expr:
        if attrs.get("channels_last"):
            raise UnsupportedModelError(f"{name} with channels_last=1; export the model with channels first")
        return own(bb, inputs, attrs, convert)

    return convert_quantized


_CONVERTERS: dict[str, Own] = {
    **{name: _channels_first(name, own) for name, own in QUANTIZED.items()},
    **ONNX_RUNTIME,
    **NARROW_WEIGHTS,
    **CACHED_ATTENTION,
    **IMAGES,
    **NORMS,
    **OPERATORS,
    **REDUCTIONS,
    **{name: _transform(name) for name in FOURIER},
    **{name: _recurrent(name) for name in RECURRENT},
    "Attention": _attention,
    "Clip": _clip,
    "Gather": _gather,
    "Max": _of_all(relax.op.maximum),
    "Min": _of_all(relax.op.minimum),
    "RotaryEmbedding": _rotary_embedding,
    "Unsqueeze": _unsqueeze,
}
"""Where one returns None, TVM's converter is right."""


def translated(model: onnx.ModelProto, name: str, is_open: bool) -> tvm.IRModule:
    """The model in Relax, as it is written; `is_open`: some of its inputs' sizes are.

    Raises
    ------
    UnsupportedModelError
        It has what cannot be translated.
    """
    opset = opset_of(model)
    chooses = any(node.op_type in CHOICES for node in model.graph.node)
    importer = _Importer(any_size=is_open or chooses)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # renamed inputs; it prints what it cannot convert before it raises
        try:
            return importer.with_bounds(importer.from_onnx(model.graph, opset))
        except UnsupportedModelError:  # of converters here
            raise
        except Exception as error:  # the importer fails by assertions and errors of any kind
            what, advice = (f"{name} with open sizes", f"; {KNOWN_SHAPES}") if is_open else (name, "")
            reason = _OPERATOR.sub(r"\1", first_line(error))
            message = f"TVM's importer cannot translate {importer.blamed(what)}: {reason}{advice}"
            raise UnsupportedModelError(message) from error
