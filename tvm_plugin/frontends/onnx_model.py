"""ONNX models, as protos or files, with or without external data."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnx.inliner
import onnxruntime
import tvm
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, _get_convert_map

from ..errors import InputError, UnsupportedModelError
from ..runtime import first_line
from ..transform.constants import array_of
from ..transform.functions import shape_of
from ..transform.known_slices import BOUNDS
from ..transform.open_slices import from_begin, open_slice
from .imported import ANY_SIZE, KNOWN_SHAPES, ImportedModel, Reference, check_shapes, imported_model
from .onnx_attention import convert_attention, is_plain_attention
from .onnx_cached_attention import CACHED_ATTENTION
from .onnx_fourier import FOURIER, convert_fourier, with_precise_transforms
from .onnx_images import IMAGES
from .onnx_loops import has_loops, with_loops_written_out
from .onnx_narrow_weights import NARROW_WEIGHTS, with_exact_products, with_weights_in_bytes
from .onnx_nodes import Convert, opset_of, padded
from .onnx_norms import NORMS
from .onnx_operators import OPERATORS
from .onnx_quantized import QUANTIZED
from .onnx_reductions import REDUCTIONS
from .onnx_runtime_operators import ONNX_RUNTIME, ONNX_RUNTIME_DOMAIN
from .onnx_sizes import SizeTensors
from .recurrent import RECURRENT, convert_recurrent

__all__ = ["from_onnx", "from_onnx_file"]

_FOLDED = frozenset(
    (
        *("ConstantOfShape", "If", "NonZero", "Range", "Shape", "Size"),
        *("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"),
    )
)
"""Operators whose results are shapes, or depend on them or on numbers: constants, once ONNX Runtime folded them."""

_WRONG_OPTIMIZERS = ["Pad_Fusion"]
"""Optimisers of ONNX Runtime that change what is computed: a pooled maximum of a tensor padded by zeros becomes one
that knows no padding, as if it were of -inf (1.31, ResNet50V2 of Keras)."""

_EXACT_PRODUCTS = ("session.qdq_matmulnbits_accuracy_level", "1")
"""What is multiplied by weights of 8 bits or fewer stays float32; ONNX Runtime rounds it to 8 bits otherwise."""

_EXACT_SUMS = "session.x64quantprecision"
"""Without 8-bit dot products (AVX2 alone), ONNX Runtime's sums of two products would end at 16 bits otherwise. Models
with signed activations do not load with it, and do not need it; those with signed weights in blocks load and do not run
(1.31): they get zero points of another shape."""

_OPERATOR = re.compile(r'ir\.Op\(.*?name="relax\.([\w.]+)".*?support_level=\d+\)')
"""How TVM's messages print an operator: all that is known of it."""

LOGGER = logging.getLogger(__name__)


def from_onnx_file(path: Path, shapes: Mapping[str, Sequence[int]], any_size: bool = False) -> ImportedModel:
    """Load a .onnx file; external data is looked for beside it.

    Raises
    ------
    InputError
        The file is corrupt, or its external data is missing.
    """
    try:
        model = onnx.load(path)
    except (DecodeError, OSError, ValueError, onnx.checker.ValidationError) as error:
        raise InputError(f"{path} is not a readable ONNX model: {first_line(error)}") from error
    return from_onnx(model, shapes, path.stem, any_size)


def from_onnx(
    model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]], name: str = "", any_size: bool = False
) -> ImportedModel:
    """Import `model`, which stays as it is; `shapes` replaces the shapes of inputs, of which `any_size` leaves others.

    Raises
    ------
    InputError
        The model is not valid ONNX, or `shapes` does not fit it.
    UnsupportedModelError
        It has symbolic shapes, or operators that TVM's importer cannot translate.
    """
    name = name or model.graph.name or "onnx"
    if not model.graph.output:
        raise InputError(f"{name} holds no ONNX graph (it has no outputs)")
    if shapes:
        model = _with_shapes(model, shapes)
    _refuse_symbolic(model, any_size)
    _check(model, name)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    _refuse_foreign(model)
    written = with_loops_written_out(_folded(model, name)) if has_loops(model.graph) else model
    known = _in_known_operators(written)
    folded = _folded(known, name) if any(map(_needs_folding, known.graph.node)) else known
    mod = relax.transform.DeadCodeElimination(["main"])(_translated(with_weights_in_bytes(folded), name))
    unfused = onnxruntime.SessionOptions()
    unfused.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = with_exact_products(with_precise_transforms(model))
    references = _reference(model, name), _reference(model, name, unfused)
    return imported_model(mod, name, "onnx", *references, any_size=any_size)


def _check(model: onnx.ModelProto, name: str) -> None:
    if model.ByteSize() < 2**31:  # protobuf cannot serialise more, which the checker does
        try:
            onnx.checker.check_model(_as_declared(model))
        except onnx.checker.ValidationError as error:
            raise InputError(f"{name} is not valid ONNX: {first_line(error)}") from error
    for value in _inputs(model.graph).values():
        dtype = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
        if dtype in ("string", "complex64", "complex128"):  # the importer's message would not name the input
            raise UnsupportedModelError(f"input {value.name!r} has dtype {dtype}; tuning knows numbers and bool only")


def _as_declared(model: onnx.ModelProto) -> onnx.ModelProto:
    """With what ONNX Runtime puts into ONNX's domain, and ONNX does not know, in its own."""
    foreign = [index for index, node in enumerate(model.graph.node) if node.op_type == "SimplifiedLayerNormalization"]
    if not foreign:
        return model
    declared = onnx.ModelProto()
    declared.CopyFrom(model)
    for index in foreign:
        declared.graph.node[index].domain = ONNX_RUNTIME_DOMAIN
    if all(entry.domain != ONNX_RUNTIME_DOMAIN for entry in declared.opset_import):
        declared.opset_import.append(onnx.helper.make_opsetid(ONNX_RUNTIME_DOMAIN, 1))
    return declared


def _inputs(graph: onnx.GraphProto) -> dict[str, onnx.ValueInfoProto]:
    initialized = {tensor.name for tensor in graph.initializer}
    return {value.name: value for value in graph.input if value.name not in initialized}


def _with_shapes(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    inputs = _inputs(changed.graph)
    check_shapes(shapes, list(inputs))
    symbols: dict[str, int] = {}
    for name, shape in shapes.items():
        if _has_no_rank(inputs[name]):
            inputs[name].type.tensor_type.shape.dim.extend(onnx.TensorShapeProto.Dimension() for _ in shape)
        dims = inputs[name].type.tensor_type.shape.dim
        if len(dims) != len(shape) or any(
            _is_known(dim) and dim.dim_value != extent for dim, extent in zip(dims, shape, strict=False)
        ):
            raise InputError(f"input {name!r} has shape {_shape_text(dims)}, which {tuple(shape)} does not fit")
        for dim, extent in zip(dims, shape, strict=True):
            if dim.dim_param and symbols.setdefault(dim.dim_param, extent) != extent:
                raise InputError(
                    f"the symbolic dimension {dim.dim_param!r} would be both {symbols[dim.dim_param]} and {extent}"
                )
            dim.dim_value = extent
    for value in (*changed.graph.input, *changed.graph.output, *changed.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in symbols:
                dim.dim_value = symbols[dim.dim_param]
    return changed


def _refuse_symbolic(model: onnx.ModelProto, any_size: bool) -> None:
    for name, value in _inputs(model.graph).items():
        if _has_no_rank(value):
            raise UnsupportedModelError(
                f"input {name!r} has no shape; only static shapes can be tuned. Give it, for example "
                f"shapes={{{name!r}: (1, 3, 224, 224)}} or --shape {name}=1,3,224,224"
            )
        if not value.type.HasField("tensor_type"):
            raise UnsupportedModelError(f"input {name!r} is not a tensor; only tensors can be tuned")
        dims = value.type.tensor_type.shape.dim
        symbolic = [index for index, dim in enumerate(dims) if not _is_known(dim)]
        if symbolic and not any_size:
            named = ", ".join(f"dimension {index} ({dims[index].dim_param or 'unnamed'})" for index in symbolic)
            example = ",".join(str(dim.dim_value if _is_known(dim) else 1) for dim in dims)
            raise UnsupportedModelError(
                f"input {name!r} has the dynamic {named}; only static shapes can be tuned. Give its shape, for example "
                f"shapes={{{name!r}: ({example})}} or --shape {name}={example}; {ANY_SIZE}"
            )


def _refuse_foreign(model: onnx.ModelProto) -> None:
    """Names alone do not tell: a model that ONNX Runtime laid out for one CPU has a Conv of another domain."""
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx", ONNX_RUNTIME_DOMAIN):
            advice = ": save it with ORT_ENABLE_EXTENDED, not ORT_ENABLE_ALL" if "nchwc" in node.domain else ""
            raise UnsupportedModelError(
                f"{node.op_type} of the domain {node.domain} cannot be imported; operators of ONNX and many of "
                f"{ONNX_RUNTIME_DOMAIN} can{advice}"
            )


def _is_static_input(value: onnx.ValueInfoProto) -> bool:
    return all(map(_is_known, value.type.tensor_type.shape.dim))


def _has_no_rank(value: onnx.ValueInfoProto) -> bool:
    return value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")


def _is_known(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """Some exporters write 0 or -1 for an extent that varies."""
    return bool(dim.HasField("dim_value") and dim.dim_value > 0)


def _shape_text(dims: Sequence[Any]) -> str:
    return "(" + ", ".join(str(dim.dim_value) if _is_known(dim) else dim.dim_param or "?" for dim in dims) + ")"


def _in_known_operators(model: onnx.ModelProto) -> onnx.ModelProto:
    """With what ONNX itself writes as functions of other operators (Celu, Swish) in place of unknown ones.

    Where that needs types that the model does not tell, or a later version of onnx, they stay.
    """
    others = {"RotaryEmbedding", "SimplifiedLayerNormalization"}  # of both ONNX and ONNX Runtime
    known = (_get_convert_map().keys() | _OF_ONNX | _FOLDED | others) - {"Attention"}
    nodes = [node for node in model.graph.node if node.domain in ("", "ai.onnx") and not is_plain_attention(node)]
    unknown = [("", name) for name in sorted({node.op_type for node in nodes} - known)]
    if not unknown:
        return model
    try:
        return onnx.inliner.inline_selected_functions(model, unknown, inline_schema_functions=True)
    except (RuntimeError, TypeError) as error:
        LOGGER.info("%s are not written as other operators: %s", unknown, error)
        return model


def _needs_folding(node: onnx.NodeProto) -> bool:
    """Whether ONNX Runtime folds the node before the import: TVM reads constants of tensors only."""
    is_number = node.op_type == "Constant" and not any(attribute.name == "value" for attribute in node.attribute)
    return node.op_type in _FOLDED or is_number


def _folded(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Return the model with shape arithmetic and constants folded by ONNX Runtime (its basic level)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "folded.onnx"
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(path)
        _session(model, name, options)
        return onnx.load(path)


def _session(
    model: onnx.ModelProto, name: str, options: onnxruntime.SessionOptions | None = None, exact_sums: bool = True
) -> onnxruntime.InferenceSession:
    own = options or onnxruntime.SessionOptions()
    is_saved = bool(own.optimized_model_filepath)  # and keeps its weights
    exact_sums = exact_sums and not is_saved and not _has_blocks(model)
    own.log_severity_level = 3
    own.add_session_config_entry(*_EXACT_PRODUCTS)
    own.add_session_config_entry(_EXACT_SUMS, str(int(exact_sums)))
    try:
        return onnxruntime.InferenceSession(
            model.SerializeToString(),
            own,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=_WRONG_OPTIMIZERS,
        )
    except Exception as error:  # ONNX Runtime's errors have no other common base
        if exact_sums:
            return _session(model, name, options, exact_sums=False)
        raise InputError(f"ONNX Runtime cannot load {name}: {first_line(error)}") from error


def _has_blocks(model: onnx.ModelProto) -> bool:
    nodes = (node for node in model.graph.node if node.op_type == "DequantizeLinear")
    return any(attribute.name == "block_size" and attribute.i for node in nodes for attribute in node.attribute)


Own = Callable[[Any, Sequence[Any], dict[str, Any], Convert], Any]
"""Block builder, inputs and attributes of a node, and TVM's converters -> the result."""

_OF_ONNX = QUANTIZED.keys() | RECURRENT | FOURIER | IMAGES.keys() | NORMS.keys() | OPERATORS.keys()
_OURS = _OF_ONNX | ONNX_RUNTIME.keys() | NARROW_WEIGHTS.keys() | CACHED_ATTENTION.keys()


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
        convert = _Plain(super()._convert_operator, opset)
        if self._sizes is not None:
            value = self._sizes.convert(op_name, list(inputs), attrs)
            if value is not None:
                return self.bb.emit(value) if isinstance(value, relax.Call) else value
        own = _CONVERTERS.get(op_name)
        value = None if own is None else own(self.bb, list(inputs), attrs, convert)
        return convert(op_name, inputs, attrs) if value is None else self.bb.normalize(value)


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
    return convert_attention(bb, list(inputs), attrs)


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


def _translated(model: onnx.ModelProto, name: str) -> tvm.IRModule:
    opset = opset_of(model)
    is_open = not all(map(_is_static_input, _inputs(model.graph).values()))
    importer = _Importer(any_size=is_open)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # renamed inputs; it prints what it cannot convert before it raises
        try:
            return importer.with_bounds(importer.from_onnx(model.graph, opset))
        except UnsupportedModelError:  # of converters here
            raise
        except Exception as error:  # the importer fails by assertions and errors of any kind
            what, advice = (f"{name} with open sizes", f"; {KNOWN_SHAPES}") if is_open else (name, "")
            reason = _OPERATOR.sub(r"\1", first_line(error))
            message = f"TVM's importer cannot translate {what}: {reason}{advice}"
            raise UnsupportedModelError(message) from error


def _reference(model: onnx.ModelProto, name: str, options: onnxruntime.SessionOptions | None = None) -> Reference:
    session = functools.cache(lambda: _session(model, name, options))

    def reference(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
        feeds = {value.name: array for value, array in zip(session().get_inputs(), arrays, strict=True)}
        try:
            return list(session().run(None, feeds))
        except Exception as error:  # ONNX Runtime's errors have no other common base
            raise InputError(f"ONNX Runtime cannot run {name}: {first_line(error)}") from error

    return reference
