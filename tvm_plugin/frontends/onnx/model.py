"""ONNX models, as protos or files, with or without external data."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx.checker
import onnx.inliner
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tvm import relax

from ...errors import InputError, UnsupportedModelError
from ...runtime import first_line
from ..imported import (
    ANY_SIZE,
    NOT_IMPORTED,
    SUPPORTED_DTYPES,
    ImportedModel,
    check_shapes,
    foreign_dtype,
    imported_model,
)
from .attention import is_known_attention
from .fourier import with_precise_transforms
from .importer import known_operators, translated
from .loops import has_loops, with_loops_written_out
from .narrow_weights import with_exact_products, with_weights_in_bytes
from .nodes import every_node, opset_of
from .runtime_operators import ONNX_RUNTIME_DOMAIN
from .runtime_session import as_released, folded, references
from .weights import MOST_SERIALIZED, on_graph, weights_bytes, with_dense_weights

__all__ = ["from_onnx", "from_onnx_file"]

_FOLDED = frozenset(
    (
        *("ConstantOfShape", "If", "NonZero", "Range", "Shape", "Size"),
        *("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"),
    )
)
"""Operators whose results are shapes, or depend on them or on numbers: constants, once ONNX Runtime folded them."""

_MAKE_SEQUENCES = frozenset(
    ("SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SplitToSequence")
)

_OF_AS_MANY_RESULTS = frozenset(("If", "Split"))
"""Operators that compute as many results as there are names, used or not."""

_DTYPES = tuple(dtype for dtype in SUPPORTED_DTYPES if dtype != NOT_IMPORTED["onnx"])

_LONG_NAMES = {"float": "float32", "double": "float64"}

_NAMELESS = frozenset({"", "?", "-1"})
"""What exporters write as names of sizes that have none."""

_COMPUTING = re.compile(r"//|[-+*/]")
"""Where TVM's importer cuts the name of a size, to compute it of others."""

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
    model = _with_named_sizes(model)
    _check(model, name)
    model = with_dense_weights(model)
    if model.functions:
        model = on_graph(_inlined, model)
    model = as_released(model, name)
    _refuse_foreign(model)
    written = with_loops_written_out(_folded(model, name)) if has_loops(model.graph) else model
    known = _in_known_operators(written)
    constant = _without_nameless_ends(_folded(known, name) if _needs_folding(known.graph) else known)
    is_open = not all(map(_is_static_input, _inputs(constant.graph).values()))
    mod = relax.transform.DeadCodeElimination(["main"])(translated(with_weights_in_bytes(constant), name, is_open))
    model = with_exact_products(with_precise_transforms(model))
    return imported_model(mod, name, "onnx", *references(model, name), any_size=any_size)


def _check(model: onnx.ModelProto, name: str) -> None:
    if weights_bytes(model) < MOST_SERIALIZED:  # the checker serialises
        try:
            onnx.checker.check_model(_as_declared(model))
        except onnx.checker.ValidationError as error:
            raise InputError(f"{name} is not valid ONNX: {first_line(error)}") from error
    for value in _inputs(model.graph).values():
        dtype = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
        dtype = _LONG_NAMES.get(dtype, dtype)
        if dtype in ("string", "complex64", "complex128"):  # the importer's message would not name the input
            raise UnsupportedModelError(f"input {value.name!r} has dtype {dtype}; tuning knows numbers and bool only")
        if dtype not in _DTYPES:
            raise foreign_dtype(f"input {value.name!r}", dtype, _DTYPES)


def _as_declared(model: onnx.ModelProto) -> onnx.ModelProto:
    """With what ONNX Runtime puts into ONNX's domain, and ONNX does not know, in its own."""
    foreign = {"SimplifiedLayerNormalization", *(["LayerNormalization"] if opset_of(model) < 17 else [])}
    if not any(node.op_type in foreign for node in every_node(model.graph.node)):
        return model
    declared = onnx.ModelProto()
    declared.CopyFrom(model)
    for node in every_node(declared.graph.node):
        if node.op_type in foreign:
            node.domain = ONNX_RUNTIME_DOMAIN
    if all(entry.domain != ONNX_RUNTIME_DOMAIN for entry in declared.opset_import):
        declared.opset_import.append(onnx.helper.make_opsetid(ONNX_RUNTIME_DOMAIN, 1))
    return declared


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Without functions of its own.

    The inliner of onnx looks at no defaults of attributes: calls get those that they leave out. And it does not inline
    what declares another version of ONNX than the model: of a valid model, the operators are the same in both.
    """
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    versions = {_of_onnx(entry.domain): entry.version for entry in plain.opset_import}
    defaults = {}
    for function in plain.functions:
        defaults[function.domain, function.name, function.overload] = function.attribute_proto
        for entry in function.opset_import:
            domain = _of_onnx(entry.domain)
            if domain not in versions:
                versions[domain] = entry.version
                plain.opset_import.append(entry)
            entry.version = versions[domain]
    nodes = [*plain.graph.node, *(node for function in plain.functions for node in function.node)]
    for node in every_node(nodes):
        given = {attribute.name for attribute in node.attribute}
        known = defaults.get((node.domain, node.op_type, node.overload), ())
        node.attribute.extend([attribute for attribute in known if attribute.name not in given])
    return onnx.inliner.inline_local_functions(plain)


def _of_onnx(domain: str) -> str:
    """A domain; ONNX's own has two names."""
    return "" if domain == "ai.onnx" else domain


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
            if dim.dim_param not in _NAMELESS and symbols.setdefault(dim.dim_param, extent) != extent:
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


def _with_named_sizes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a name for each open size of its inputs that TVM's importer takes for one; itself where all have.

    TVM takes all sizes without a name for the same, -1 for a number, and "batch-size" for a difference of two sizes
    that no input has. What is computed of sizes that inputs have ("past + 1") stays.
    """
    given = {
        (name, place): dim.dim_param.replace(" ", "")
        for name, value in _inputs(model.graph).items()
        for place, dim in enumerate(value.type.tensor_type.shape.dim)
        if not _is_known(dim)
    }
    plain = {size for size in given.values() if size not in _NAMELESS and not _COMPUTING.search(size)}
    awkward = {
        (name, place): f"{name}_axis_{place}" if size in _NAMELESS else size
        for (name, place), size in given.items()
        if size not in plain and not _is_computed(size, plain)
    }
    if not awkward:
        return model
    taken = set(plain)
    names: dict[str, str] = {}
    for size in awkward.values():
        if size not in names:
            names[size] = re.sub(r"\W", "_", size)
            while names[size] in taken:
                names[size] += "_"
            taken.add(names[size])
    named = onnx.ModelProto()
    named.CopyFrom(model)
    inputs = _inputs(named.graph)
    for (name, place), size in awkward.items():
        inputs[name].type.tensor_type.shape.dim[place].dim_param = names[size]
    return named


def _is_computed(size: str, known: Collection[str]) -> bool:
    """Whether TVM's importer computes it, from the left to the right, of sizes that inputs have, and numbers."""
    in_order = not re.search(r"[-+].*[*/]", size)
    return in_order and all(part in known or part.isdigit() for part in _COMPUTING.split(size))


def _refuse_foreign(model: onnx.ModelProto) -> None:
    """Names alone do not tell: a model that ONNX Runtime laid out for one CPU has a Conv of another domain."""
    for node in every_node(model.graph.node):
        if node.domain not in ("", "ai.onnx", ONNX_RUNTIME_DOMAIN):
            advice = ": save it with ORT_ENABLE_EXTENDED, not ORT_ENABLE_ALL" if "nchwc" in node.domain else ""
            raise UnsupportedModelError(
                f"{node.op_type} of the domain {node.domain} cannot be imported; operators of ONNX and many of "
                f"{ONNX_RUNTIME_DOMAIN} can{advice}"
            )


def _folded(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """By ONNX Runtime, whose message does not name a dtype that it cannot compute in."""
    try:
        return folded(model, name)
    except InputError as error:
        for node in model.graph.node:
            if any(attribute.name == "to" and attribute.i == onnx.TensorProto.BFLOAT16 for attribute in node.attribute):
                raise foreign_dtype(f"the result of {node.op_type} ({node.output[0]})", "bfloat16", _DTYPES) from error
        raise


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
    known = (known_operators() | _FOLDED | others) - {"Attention"}
    nodes = [node for node in model.graph.node if node.domain in ("", "ai.onnx") and not is_known_attention(node)]
    unknown = [("", name) for name in sorted({node.op_type for node in nodes} - known)]
    if not unknown:
        return model
    try:
        return on_graph(
            lambda graph: onnx.inliner.inline_selected_functions(graph, unknown, inline_schema_functions=True), model
        )
    except (RuntimeError, TypeError) as error:
        LOGGER.info("%s are not written as other operators: %s", unknown, error)
        return model


def _needs_folding(graph: onnx.GraphProto) -> bool:
    """Whether ONNX Runtime folds the model before the import: TVM reads constants of tensors only, and takes the first
    tensor of a sequence for one that is identical to it."""
    names = {node.op_type for node in graph.node}
    has_same = "Identity" in names and not names.isdisjoint(_MAKE_SEQUENCES)
    return has_same or not names.isdisjoint(_FOLDED) or any(map(_is_number, graph.node))


def _is_number(node: onnx.NodeProto) -> bool:
    """Whether it is a constant that is not given as a tensor."""
    return node.op_type == "Constant" and not any(attribute.name == "value" for attribute in node.attribute)


def _without_nameless_ends(model: onnx.ModelProto) -> onnx.ModelProto:
    """Without last results that have no names, which TVM's importer counts as if they were used; the same model where
    there are none."""

    def ends_nameless(node: onnx.NodeProto) -> bool:
        return len(node.output) > 1 and not node.output[-1] and node.op_type not in _OF_AS_MANY_RESULTS

    if not any(map(ends_nameless, every_node(model.graph.node))):
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for node in every_node(changed.graph.node):
        while ends_nameless(node):
            del node.output[-1]
    return changed
