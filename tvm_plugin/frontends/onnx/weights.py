"""Large ONNX models without their weights: protobuf copies what it serialises, and refuses more than 2 GB."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
from onnx import numpy_helper

from ...arrays import Array
from .nodes import bodies_of, every_node

__all__ = ["LARGE_BYTES", "MOST_SERIALIZED", "on_graph", "weights_bytes", "with_dense_weights", "without_weights"]

LARGE_BYTES = 1 << 28
"""Weights that are worth being left out where a model is handed on."""

MOST_SERIALIZED = (1 << 31) - (1 << 24)
"""Bytes of weights that protobuf still serialises, with a graph."""

_SMALL_BYTES = 1024
"""Tensors that stay in the graph: shapes, axes and numbers are looked at where it is optimised."""

_EVERYWHERE = frozenset(
    getattr(onnx.TensorProto, name)
    for name in ("FLOAT", "DOUBLE", "FLOAT16", "INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64")
)
"""Data types that numpy has as well, so that ONNX Runtime takes its arrays."""


def weights_bytes(model: onnx.ModelProto) -> int:
    """Of the graph's initializers, about; `ModelProto.ByteSize` serialises the model to count."""
    return sum(map(_nbytes, model.graph.initializer))


def with_dense_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with sparse initializers written out, those of branches and bodies, too: TVM's importer reads none.

    Itself where it has none.
    """
    if not any(graph.sparse_initializer for graph in _graphs(model)):
        return model
    dense = onnx.ModelProto()
    dense.CopyFrom(model)
    for graph in _graphs(dense):
        graph.initializer.extend(map(_dense, graph.sparse_initializer))
        del graph.sparse_initializer[:]
    return dense


def _graphs(model: onnx.ModelProto) -> list[onnx.GraphProto]:
    """That of a model, and all that its nodes run."""
    return [model.graph, *(body for node in every_node(model.graph.node) for body in bodies_of(node))]


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    values = numpy_helper.to_array(sparse.values)
    array = np.zeros(tuple(sparse.dims), values.dtype)
    if values.size:
        places = numpy_helper.to_array(sparse.indices)  # one number for each value, or one for each axis
        array[tuple(places.T) if places.ndim == 2 else np.unravel_index(places, array.shape)] = values
    return numpy_helper.from_array(array, sparse.values.name)


def without_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A large model with its weights declared as external, and these by name; others as they are, and none."""
    if weights_bytes(model) < LARGE_BYTES:
        return model, {}
    light = onnx.ModelProto()
    for source, target in ((model, light), (model.graph, light.graph)):
        for field, value in source.ListFields():
            if field.name in ("graph", "initializer"):
                continue
            if hasattr(value, "extend"):
                getattr(target, field.name).extend(value)
            elif hasattr(value, "CopyFrom"):
                getattr(target, field.name).CopyFrom(value)
            else:
                setattr(target, field.name, value)
    weights = {}
    for tensor in model.graph.initializer:
        if not tensor.HasField("raw_data") or _nbytes(tensor) < _SMALL_BYTES or tensor.data_type not in _EVERYWHERE:
            light.graph.initializer.append(tensor)
            continue
        weights[tensor.name] = numpy_helper.to_array(tensor)
        light.graph.initializer.append(
            onnx.TensorProto(
                name=tensor.name,
                dims=tensor.dims,
                data_type=tensor.data_type,
                data_location=onnx.TensorProto.EXTERNAL,
                external_data=[onnx.StringStringEntryProto(key="location", value="in memory")],
            )
        )
    return light, weights


def on_graph(change: Callable[[onnx.ModelProto], onnx.ModelProto], model: onnx.ModelProto) -> onnx.ModelProto:
    """`change(model)`, of a change that looks at no weights and serialises the model."""
    light, weights = without_weights(model)
    changed = change(light)
    if weights:
        whole = {tensor.name: tensor for tensor in model.graph.initializer}
        for tensor in changed.graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                tensor.CopyFrom(whole[tensor.name])
    return changed


def _nbytes(tensor: onnx.TensorProto) -> int:
    count = math.prod(tensor.dims)
    try:
        return count * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    except (KeyError, TypeError):  # an unknown type, which the checker refuses
        return count
