"""What ONNX Runtime does for the import: it folds constants, and runs models for comparison."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx.helper
import onnxruntime
from numpy.typing import NDArray

from ...errors import InputError, UnsupportedModelError
from ...runtime import first_line
from ..imported import Reference
from .nodes import opset_of
from .weights import without_weights

__all__ = ["as_released", "folded", "references"]

_WRONG_OPTIMIZERS = ["Pad_Fusion"]
"""Optimisers of ONNX Runtime that change what is computed: a pooled maximum of a tensor padded by zeros becomes one
that knows no padding, as if it were of -inf (1.31, ResNet50V2 of Keras)."""

_EXACT_PRODUCTS = ("session.qdq_matmulnbits_accuracy_level", "1")
"""What is multiplied by weights of 8 bits or fewer stays float32; ONNX Runtime rounds it to 8 bits otherwise."""

_WEIGHTS_AS_GIVEN = ("session.disable_prepacking", "1")
"""Of a large model: products read its weights where they are, where packing them would make another copy."""

_WEIGHTS_FILE = "session.optimized_model_external_initializers_file_name"

_EXACT_SUMS = "session.x64quantprecision"
"""Without 8-bit dot products (AVX2 alone), ONNX Runtime's sums of two products would end at 16 bits otherwise. Models
with signed activations do not load with it, and do not need it; those with signed weights in blocks load and do not run
(1.31): they get zero points of another shape."""


def as_released(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The model, declared as of the latest versions that ONNX Runtime knows, if it is valid in those.

    onnx stamps models with its own latest versions, of which ONNX Runtime learns later. What is new in operators is
    types and attributes, mostly, and ONNX Runtime checks both.

    Raises
    ------
    UnsupportedModelError
        It needs what is new.
    """
    opset = opset_of(model)
    if _loads(model.ir_version, opset):
        return model
    known_format = _latest(model.ir_version, lambda version: _loads(version, 13))
    known = _latest(opset, lambda version: _loads(known_format, version))
    released = onnx.ModelProto()
    released.CopyFrom(model)
    released.ir_version = known_format
    for entry in released.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = known
    light, weights = without_weights(released)
    try:
        _session(light, name, weights=weights)
    except InputError as error:
        raise UnsupportedModelError(
            f"{name} is of opset {opset}; ONNX Runtime {onnxruntime.__version__} knows opsets up to {known}: export it "
            f"with that one ({error})"
        ) from error
    return released


def _latest(version: int, is_known: Callable[[int], bool]) -> int:
    """The latest version, up to this one, that is known; this one if none is."""
    return next((earlier for earlier in range(version, 0, -1) if is_known(earlier)), version)


@functools.cache
def _loads(ir_version: int, opset: int) -> bool:
    """Whether ONNX Runtime loads models of these versions."""
    ends = [onnx.helper.make_tensor_value_info(end, onnx.TensorProto.FLOAT, [1]) for end in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "versions", ends[:1], ends[1:])
    opsets = [onnx.helper.make_opsetid("", opset)]
    try:
        _session(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=ir_version), "versions")
    except InputError:
        return False
    return True


def references(model: onnx.ModelProto, name: str) -> tuple[Reference, Reference]:
    """The model as ONNX Runtime optimises it, and operator by operator."""
    light, weights = without_weights(model)
    return _reference(light, weights, name), _reference(light, weights, name, _unfused)


def _unfused() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def folded(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Return the model with shape arithmetic and constants folded by ONNX Runtime (its basic level)."""
    light, weights = without_weights(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "folded.onnx"

        def options() -> onnxruntime.SessionOptions:
            saving = onnxruntime.SessionOptions()
            saving.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
            saving.optimized_model_filepath = str(path)
            if weights:
                saving.add_session_config_entry(_WEIGHTS_FILE, "weights")
            return saving

        _session(light, name, options, weights)
        return onnx.load(path)


def _session(
    model: onnx.ModelProto,
    name: str,
    options: Callable[[], onnxruntime.SessionOptions] = onnxruntime.SessionOptions,
    weights: Mapping[str, NDArray[Any]] | None = None,
    exact_sums: bool = True,
) -> onnxruntime.InferenceSession:
    """ONNX Runtime with a model, of which `weights` are read where they are as long as it runs."""
    own = options()
    is_saved = bool(own.optimized_model_filepath)  # and keeps its weights
    exact_sums = exact_sums and not is_saved and not _has_blocks(model)
    own.log_severity_level = 3
    own.add_session_config_entry(*_EXACT_PRODUCTS)
    own.add_session_config_entry(_EXACT_SUMS, str(int(exact_sums)))
    if weights:
        own.add_session_config_entry(*_WEIGHTS_AS_GIVEN)
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        own.add_external_initializers(list(weights), values)
    try:
        return onnxruntime.InferenceSession(
            model.SerializeToString(),
            own,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=_WRONG_OPTIMIZERS,
        )
    except Exception as error:  # ONNX Runtime's errors have no other common base
        if exact_sums:
            return _session(model, name, options, weights, exact_sums=False)
        raise InputError(f"ONNX Runtime cannot load {name}: {first_line(error)}") from error


def _has_blocks(model: onnx.ModelProto) -> bool:
    nodes = (node for node in model.graph.node if node.op_type == "DequantizeLinear")
    return any(attribute.name == "block_size" and attribute.i for node in nodes for attribute in node.attribute)


def _reference(
    model: onnx.ModelProto,
    weights: Mapping[str, NDArray[Any]],
    name: str,
    options: Callable[[], onnxruntime.SessionOptions] = onnxruntime.SessionOptions,
) -> Reference:
    session = functools.cache(lambda: _session(model, name, options, weights))

    def reference(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
        feeds = {value.name: array for value, array in zip(session().get_inputs(), arrays, strict=True)}
        try:
            return list(session().run(None, feeds))
        except Exception as error:  # ONNX Runtime's errors have no other common base
            raise InputError(f"ONNX Runtime cannot run {name}: {first_line(error)}") from error

    return reference
