"""Operators of TFLite that TVM's importer converts wrongly, or not at all: each must be what LiteRT computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eqtune.compile.untuned import untuned_executable
from eqtune.errors import UnsupportedModelError
from eqtune.frontends import load_model, verify_import
from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner

pytest.importorskip("tflite")
schema = pytest.importorskip("ai_edge_litert.schema_py_generated")
flatbuffers = pytest.importorskip("flatbuffers")

pytestmark = pytest.mark.unoptimised


class Model:
    """Made operator by operator. Tensors are known by number; those of the shapes given to it are its inputs."""

    def __init__(self, *shapes: tuple[int, ...], dtype: str = "float32") -> None:
        self.graph = schema.SubGraphT(tensors=[], operators=[], inputs=list(range(len(shapes))), outputs=[])
        self.model = schema.ModelT(version=3, buffers=[schema.BufferT()], operatorCodes=[], subgraphs=[self.graph])
        for shape in shapes:
            self.tensor(shape, dtype)

    def tensor(
        self, shape: tuple[int, ...], dtype: str = "float32", scale: float | None = None, buffer: int = 0, zero: int = 0
    ) -> int:
        """Quantised if it has a scale."""
        tensor = schema.TensorT(shape=list(shape), type=getattr(schema.TensorType, dtype.upper()), buffer=buffer)
        tensor.name = f"t{len(self.graph.tensors)}"
        if scale is not None:
            tensor.quantization = schema.QuantizationParametersT(scale=[scale], zeroPoint=[zero])
        self.graph.tensors.append(tensor)
        return len(self.graph.tensors) - 1

    def constant(self, values: Any, scale: float | None = None) -> int:
        """Integers that are not of 8 bits are of 32."""
        array = np.asarray(values)
        array = array.astype({"int64": "int32", "float64": "float32"}.get(str(array.dtype), str(array.dtype)))
        self.model.buffers.append(schema.BufferT(data=np.frombuffer(array.tobytes(), "uint8")))
        return self.tensor(array.shape, str(array.dtype), scale, len(self.model.buffers) - 1)

    def add(self, name: str, inputs: list[int], output: int, options: Any = None) -> int:
        """Append an operator; return its output."""
        code = getattr(schema.BuiltinOperator, name)
        self.model.operatorCodes.append(schema.OperatorCodeT(min(code, 127), version=1, builtinCode=code))
        operator = schema.OperatorT(len(self.graph.operators), inputs, [output], builtinOptions=options)
        if options is not None:
            operator.builtinOptionsType = getattr(schema.BuiltinOptions, type(options).__name__.removesuffix("T"))
        self.graph.operators.append(operator)
        return output

    def write(self, directory: Path, *outputs: int) -> Path:
        self.graph.outputs = list(outputs)
        builder = flatbuffers.Builder(1024)
        builder.Finish(self.model.Pack(builder), b"TFL3")
        path = directory / "model.tflite"
        path.write_bytes(bytes(builder.Output()))
        return path


def check(path: Path) -> None:
    """The import is what the interpreter computes."""
    imported = load_model(path)
    assert imported.reference is not None
    assert verify_import(imported) < 1e-5


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_softmax_multiplies_by_beta(beta: float, tmp_path: Path) -> None:
    model = Model((2, 3, 5))
    check(model.write(tmp_path, model.add("SOFTMAX", [0], model.tensor((2, 3, 5)), schema.SoftmaxOptionsT(beta))))


@pytest.mark.parametrize("half_pixel_centers", [False, True])
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("size", [(9, 4), (10, 21), (3, 1), (13, 82)])
def test_nearest_pixels(size: tuple[int, int], align_corners: bool, half_pixel_centers: bool, tmp_path: Path) -> None:
    model = Model((1, 5, 7, 2))
    options = schema.ResizeNearestNeighborOptionsT(align_corners, half_pixel_centers)
    inputs = [0, model.constant(size)]
    check(model.write(tmp_path, model.add("RESIZE_NEAREST_NEIGHBOR", inputs, model.tensor((1, *size, 2)), options)))


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (3, 1)])
def test_bilinear_pixels_of_one_row_or_column(size: tuple[int, int], tmp_path: Path) -> None:
    model = Model((1, 5, 7, 2))
    options = schema.ResizeBilinearOptionsT(alignCorners=True)
    check(
        model.write(
            tmp_path, model.add("RESIZE_BILINEAR", [0, model.constant(size)], model.tensor((1, *size, 2)), options)
        )
    )


@pytest.mark.parametrize("pads", [[[0, 0], [0, 0]], [[1, 1], [2, 1]]])
def test_blocks_of_an_image_become_a_batch(pads: list[list[int]], tmp_path: Path) -> None:
    model = Model((2, 4, 6, 3))
    height, width = ((size + sum(pad)) // step for size, pad, step in zip((4, 6), pads, (2, 3), strict=True))
    inputs = [0, model.constant([2, 3]), model.constant(pads)]
    check(model.write(tmp_path, model.add("SPACE_TO_BATCH_ND", inputs, model.tensor((12, height, width, 3)))))


@pytest.mark.parametrize("crops", [[[0, 0], [0, 0]], [[1, 0], [1, 3]]])
def test_a_batch_becomes_blocks_of_an_image(crops: list[list[int]], tmp_path: Path) -> None:
    model = Model((12, 4, 3, 2))
    height, width = (size - sum(crop) for size, crop in zip((8, 9), crops, strict=True))
    inputs = [0, model.constant([2, 3]), model.constant(crops)]
    check(model.write(tmp_path, model.add("BATCH_TO_SPACE_ND", inputs, model.tensor((2, height, width, 2)))))


def test_quantised_zeros_are_around_the_blocks_of_quantised_images(tmp_path: Path) -> None:
    model = Model((1, 3, 2))
    blocks = model.tensor((2, 3, 2), "int8", 0.05, zero=-7)
    x = model.add("QUANTIZE", [0], model.tensor((1, 3, 2), "int8", 0.05, zero=-7))
    model.add("SPACE_TO_BATCH_ND", [x, model.constant([2]), model.constant([[1, 2]])], blocks)
    check(model.write(tmp_path, model.add("DEQUANTIZE", [blocks], model.tensor((2, 3, 2)))))


def test_quantised_elements_are_compared_as_integers(tmp_path: Path) -> None:
    model = Model((3, 8))
    x = model.add("QUANTIZE", [0], model.tensor((3, 8), "int8", 0.05, zero=-7))
    largest = model.tensor((3, 2), "int8", 0.05, zero=-7)
    model.add("TOPK_V2", [x, model.constant(2)], largest, schema.TopKV2OptionsT())
    places = model.tensor((3, 2), "int32")
    model.graph.operators[-1].outputs = [largest, places]
    options = schema.ArgMinOptionsT(schema.TensorType.INT32)
    smallest = model.add("ARG_MIN", [x, model.constant(1)], model.tensor((3,), "int32"), options)
    values = model.add("DEQUANTIZE", [largest], model.tensor((3, 2)))
    check(model.write(tmp_path, values, places, smallest))


def test_gelu_without_options_is_the_exact_one(tmp_path: Path) -> None:
    model = Model((3, 5))
    check(model.write(tmp_path, model.add("GELU", [0], model.tensor((3, 5)))))


def test_what_is_scattered_to_one_place_adds_up(tmp_path: Path) -> None:
    model = Model((3, 4))
    inputs = [model.constant([[1, 0], [0, 2], [1, 0]]), 0, model.constant([2, 3, 4])]
    check(model.write(tmp_path, model.add("SCATTER_ND", inputs, model.tensor((2, 3, 4)))))


def test_a_vector_selects_rows(tmp_path: Path) -> None:
    model = Model((3, 3), (3, 3))
    inputs = [model.constant([True, False, True]), 0, 1]
    check(model.write(tmp_path, model.add("SELECT", inputs, model.tensor((3, 3)))))


@pytest.mark.parametrize("sizes", [(-1, 2), (1, -1, 2)])
def test_one_part_is_what_the_others_leave(sizes: tuple[int, ...], tmp_path: Path) -> None:
    model = Model((2, 5))
    parts = [model.tensor((2, size if size > 0 else 6 - sum(sizes) - 2)) for size in sizes]
    inputs = [0, model.constant(sizes), model.constant(1)]
    model.add("SPLIT_V", inputs, parts[0], schema.SplitVOptionsT(len(sizes)))
    model.graph.operators[-1].outputs = parts
    check(model.write(tmp_path, *parts))


def test_all_axes_of_one_element_go_where_none_is_named(tmp_path: Path) -> None:
    model = Model((1, 3, 1, 4))
    check(model.write(tmp_path, model.add("SQUEEZE", [0], model.tensor((3, 4)), schema.SqueezeOptionsT())))


def test_what_equals_a_boundary_is_after_it(tmp_path: Path) -> None:
    model = Model((64,))
    rounded = model.add("CEIL", [0], model.tensor((64,)))
    options = schema.BucketizeOptionsT([-1.0, 0.0, 0.5])
    check(model.write(tmp_path, model.add("BUCKETIZE", [rounded], model.tensor((64,), "int32"), options)))


@pytest.mark.parametrize("shape", [(2, 4, 5), (1, 4, 5), (4, 5)])
def test_products_with_constants_and_batches_of_other_sizes(shape: tuple[int, ...], tmp_path: Path) -> None:
    model = Model((2, 4, 3), shape)
    weights = model.constant(np.arange(20.0).reshape(4, 5))
    first = model.add("BATCH_MATMUL", [0, 1], model.tensor((2, 3, 5)), schema.BatchMatMulOptionsT(adjX=True))
    second = model.add("BATCH_MATMUL", [first, weights], model.tensor((2, 3, 4)), schema.BatchMatMulOptionsT(adjY=True))
    check(model.write(tmp_path, second))


def test_rows_are_looked_up(tmp_path: Path) -> None:
    model = Model((5, 4))
    check(model.write(tmp_path, model.add("EMBEDDING_LOOKUP", [model.constant([4, 0, 2]), 0], model.tensor((3, 4)))))


@pytest.mark.parametrize("axis", [-1, [1]])
def test_an_axis_is_added(axis: int | list[int], tmp_path: Path) -> None:
    model = Model((3, 3))
    shape = (3, 3, 1) if axis == -1 else (3, 1, 3)
    inputs = [0, model.constant(axis)]
    check(model.write(tmp_path, model.add("EXPAND_DIMS", inputs, model.tensor(shape), schema.ExpandDimsOptionsT())))


@pytest.mark.parametrize("shape", [(2, 1, 1, 8), (2, 4, 4), (2, 2, 8), (32,)])
def test_rows_are_as_long_as_those_of_the_weights(shape: tuple[int, ...], tmp_path: Path) -> None:
    model = Model(shape)
    inputs = [0, model.constant(np.arange(40.0).reshape(5, 8)), model.constant(np.arange(5.0))]
    y = model.tensor((int(np.prod(shape)) // 8, 5))
    check(model.write(tmp_path, model.add("FULLY_CONNECTED", inputs, y, schema.FullyConnectedOptionsT())))


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("int32", -100, 100), ("int64", -100, 100), ("int32", 2**29, 2**30)]
)
def test_means_of_integers_are_integers(dtype: str, low: int, high: int, tmp_path: Path) -> None:
    """Of sums that 32 bits do not hold, too."""
    model = Model((2, 9, 4), dtype=dtype)
    mean = model.add("MEAN", [0, model.constant([1])], model.tensor((2, 4), dtype), schema.ReducerOptionsT())
    imported = load_model(model.write(tmp_path, mean))
    examples = (np.random.default_rng(0).integers(low, high, (2, 9, 4)).astype(dtype),)
    assert verify_import(replace(imported, examples=examples)) < 1e-5


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_weights_alone_of_8_bits_are_floats_in_the_reference(dtype: str, tmp_path: Path) -> None:
    model = Model((3, 8))
    weights = model.constant(np.arange(64).reshape(8, 8).astype(dtype), 0.01)
    hidden = model.add("FULLY_CONNECTED", [0, weights, -1], model.tensor((3, 8)), schema.FullyConnectedOptionsT())
    inputs = [hidden, weights, model.constant(np.arange(8.0))]
    y = model.add("FULLY_CONNECTED", inputs, model.tensor((3, 8)), schema.FullyConnectedOptionsT())
    check(model.write(tmp_path, y))


@pytest.mark.parametrize("exclusive", [False, True])
def test_sums_from_the_end(exclusive: bool, tmp_path: Path) -> None:
    model = Model((2, 5, 3))
    options = schema.CumsumOptionsT(exclusive, reverse=True)
    check(model.write(tmp_path, model.add("CUMSUM", [0, model.constant(-2)], model.tensor((2, 5, 3)), options)))


def test_a_mirror_shows_the_outermost_elements(tmp_path: Path) -> None:
    model = Model((2, 5, 4, 3))
    pads = model.constant([[0, 0], [2, 5], [1, 0], [0, 0]])
    options = schema.MirrorPadOptionsT(schema.MirrorPadMode.SYMMETRIC)
    check(model.write(tmp_path, model.add("MIRROR_PAD", [0, pads], model.tensor((2, 12, 5, 3)), options)))


@pytest.mark.parametrize("indices", [[[0, 3], [1, 0], [1, 2]], [[[1], [0]]], [[1, 4, 2]]], ids=str)
def test_elements_are_gathered_by_all_their_places(indices: Any, tmp_path: Path) -> None:
    model, places = Model((2, 5, 3)), np.array(indices)
    shape = (*places.shape[:-1], *(2, 5, 3)[places.shape[-1] :])
    check(model.write(tmp_path, model.add("GATHER_ND", [0, model.constant(places)], model.tensor(shape))))


@pytest.mark.parametrize(("batches", "axis"), [(1, 1), (1, 3), (2, 2), (2, 3), (1, -1)])
def test_each_of_a_batch_has_its_own_places(batches: int, axis: int, tmp_path: Path) -> None:
    model, shape = Model((2, 3, 4, 5)), (2, 3, 4, 5)
    indices = np.random.default_rng(0).integers(0, 3, (2, 3, 2) if batches == 2 else (2, 2, 2))
    result = model.tensor((*shape[: axis % 4], *indices.shape[batches:], *shape[axis % 4 + 1 :]))
    options = schema.GatherOptionsT(axis, batches)
    check(model.write(tmp_path, model.add("GATHER", [0, model.constant(indices)], result, options)))


@pytest.mark.parametrize(("batches", "axis"), [(1, 1), (1, 2), (2, 2), (2, 3)])
def test_each_of_a_batch_has_one_place(batches: int, axis: int, tmp_path: Path) -> None:
    model, shape = Model((2, 3, 4, 5)), (2, 3, 4, 5)
    indices = np.random.default_rng(0).integers(0, 3, shape[:batches])
    result = model.tensor((*shape[:axis], *shape[axis + 1 :]))
    options = schema.GatherOptionsT(axis, batches)
    check(model.write(tmp_path, model.add("GATHER", [0, model.constant(indices)], result, options)))


def test_several_axes_are_reversed(tmp_path: Path) -> None:
    model = Model((2, 5, 3))
    check(model.write(tmp_path, model.add("REVERSE_V2", [0, model.constant([1, 2])], model.tensor((2, 5, 3)))))


@pytest.mark.parametrize(("begin", "mask"), [([1, 2, 0], 0), ([0, -3, -3], 0), ([1, -4, 0], 1)])
def test_slices_that_say_how_long_they_are(begin: list[int], mask: int, tmp_path: Path) -> None:
    model = Model((4, 6, 3))
    options = schema.StridedSliceOptionsT(shrinkAxisMask=mask, offset=True)
    inputs = [0, *(model.constant(values) for values in (begin, [1, 3, 3], [1, 2, 1]))]
    result = model.tensor((2, 3) if mask else (1, 2, 3))
    check(model.write(tmp_path, model.add("STRIDED_SLICE", inputs, result, options)))


def test_a_slice_may_begin_where_it_is_as_long(tmp_path: Path) -> None:
    """Converters write equal constants once."""
    model = Model((4, 6, 3))
    numbers = model.constant([1, 2, 1])
    options = schema.StridedSliceOptionsT(shrinkAxisMask=1, offset=True)
    inputs = [0, numbers, numbers, model.constant([1, 1, 1])]
    check(model.write(tmp_path, model.add("STRIDED_SLICE", inputs, model.tensor((2, 1)), options)))


@pytest.mark.parametrize("start", [[0, 2, 0], [0, 1, 1], [1, 9, -3]], ids=str)
@pytest.mark.parametrize("computed", [False, True])
def test_a_slice_is_overwritten(start: list[int], computed: bool, tmp_path: Path) -> None:
    model = Model((2, 6, 3), (2, 2, 2))
    begin = model.constant(start)
    if computed:
        begin = model.add("ADD", [begin, model.constant([0, 0, 0])], model.tensor((3,), "int32"), schema.AddOptionsT())
    check(model.write(tmp_path, model.add("DYNAMIC_UPDATE_SLICE", [0, 1, begin], model.tensor((2, 6, 3)))))


def test_quantised_elements_are_moved_as_integers(tmp_path: Path) -> None:
    model = Model((2, 5, 3))
    scale: Any = ("int8", 0.05, 0, -7)
    x = model.add("QUANTIZE", [0], model.tensor((2, 5, 3), *scale))
    options = schema.MirrorPadOptionsT(schema.MirrorPadMode.SYMMETRIC)
    wide = model.tensor((2, 7, 3), *scale)
    model.add("MIRROR_PAD", [x, model.constant([[0, 0], [1, 1], [0, 0]])], wide, options)
    begin = model.constant([0, 1, 0])
    written = model.add("DYNAMIC_UPDATE_SLICE", [wide, x, begin], model.tensor((2, 7, 3), *scale))
    rows = model.add("GATHER_ND", [written, model.constant([[1, 6], [0, 2]])], model.tensor((2, 3), *scale))
    check(model.write(tmp_path, model.add("DEQUANTIZE", [rows], model.tensor((2, 3)))))


@pytest.mark.parametrize("axis", [0, -1])
def test_elements_are_gathered_along_an_axis(axis: int, tmp_path: Path) -> None:
    model = Model((3, 4))
    result = model.tensor((3, 2, 2) if axis else (2, 2, 4))
    inputs = [0, model.constant([[2, 0], [1, 1]])]
    check(model.write(tmp_path, model.add("GATHER", inputs, result, schema.GatherOptionsT(axis))))


@pytest.mark.parametrize("reduction", ["SUM", "PROD", "MAX", "MIN"])
def test_what_is_of_a_negative_segment_is_left_out(reduction: str, tmp_path: Path) -> None:
    model = Model((6, 2))
    segments = model.tensor((6,), "int32")
    model.graph.inputs.append(segments)
    inputs = [0, segments, model.constant(3)]
    imported = load_model(
        model.write(tmp_path, model.add(f"UNSORTED_SEGMENT_{reduction}", inputs, model.tensor((3, 2))))
    )
    examples = (np.zeros((6, 2), "float32"), np.array([2, -1, 0, 1, -1, 2], "int32"))
    assert verify_import(replace(imported, examples=examples)) < 1e-5


def test_small_rows_are_divided_by_the_least_norm(tmp_path: Path) -> None:
    model = Model((4, 5))
    small = model.add("MUL", [0, model.constant(1e-7)], model.tensor((4, 5)), schema.MulOptionsT())
    check(model.write(tmp_path, model.add("L2_NORMALIZATION", [small], model.tensor((4, 5)), schema.L2NormOptionsT())))


def test_remainders_of_large_quotients_are_exact(tmp_path: Path) -> None:
    model = Model((64,), (64,))
    large = model.add("MUL", [0, model.constant(1e6)], model.tensor((64,)), schema.MulOptionsT())
    check(model.write(tmp_path, model.add("FLOOR_MOD", [large, 1], model.tensor((64,)))))


@pytest.mark.parametrize("name", ["SPLIT", "SPLIT_V"])
def test_a_single_part_is_the_whole(name: str, tmp_path: Path) -> None:
    model = Model((2, 5))
    axis, part = model.constant(1), model.tensor((2, 5))
    if name == "SPLIT":
        model.add(name, [axis, 0], part, schema.SplitOptionsT(1))
    else:
        model.add(name, [0, model.constant([5]), axis], part, schema.SplitVOptionsT(1))
    check(model.write(tmp_path, model.add("TANH", [part], model.tensor((2, 5)))))


@pytest.mark.parametrize("name", ["", "x"])
def test_tensors_may_share_a_name(name: str, tmp_path: Path) -> None:
    model = Model((3, 3))
    y = model.add("TANH", [0], model.tensor((3, 3)))
    z = model.add("MUL", [y, 0], model.tensor((3, 3)), schema.MulOptionsT())
    for tensor in model.graph.tensors:
        tensor.name = name
    check(model.write(tmp_path, z))


def test_operators_may_have_no_inputs(tmp_path: Path) -> None:
    model = Model((3, 3))
    model.add("VAR_HANDLE", [], model.tensor((), "resource"), schema.VarHandleOptionsT("", "state"))
    check(model.write(tmp_path, model.add("TANH", [0], model.tensor((3, 3)))))


def test_one_scale_is_of_no_axis(tmp_path: Path) -> None:
    """Of the only channel there is, as converters write it."""
    model, shape = Model((1, 4, 4, 1)), (1, 4, 4, 1)
    x = model.add("QUANTIZE", [0], model.tensor(shape, "int8", 0.05))
    weights = model.constant(np.arange(9, dtype="int8").reshape(1, 3, 3, 1), 0.01)
    model.graph.tensors[weights].quantization.quantizedDimension = 3
    options = schema.DepthwiseConv2DOptionsT(strideW=1, strideH=1, depthMultiplier=1)
    inputs = [x, weights, model.constant(np.zeros(1, "int32"), 0.0005)]
    y = model.add("DEPTHWISE_CONV_2D", inputs, model.tensor(shape, "int8", 0.005), options)
    path = model.write(tmp_path, model.add("DEQUANTIZE", [y], model.tensor(shape)))
    assert verify_import(load_model(path), tolerance=0.05) < 0.05


@pytest.mark.parametrize("time_major", [False, True])
def test_recurrent_layers_begin_anew(time_major: bool, tmp_path: Path) -> None:
    model, generator = Model((2, 3, 4)), np.random.default_rng(0)
    weights = [model.constant(generator.standard_normal(shape)) for shape in ((5, 4), (5, 5), (5,))]
    state = model.tensor((3 if time_major else 2, 5))
    model.graph.tensors[state].isVariable = True
    options = schema.SequenceRNNOptionsT(time_major, schema.ActivationFunctionType.TANH)
    y = model.add("UNIDIRECTIONAL_SEQUENCE_RNN", [0, *weights, state], model.tensor((2, 3, 5)), options)
    imported = load_model(model.write(tmp_path, y))
    assert verify_import(imported) < 1e-5
    inputs = imported.random_inputs()
    (first,), (second,) = (imported.reference(*inputs) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_transposed_convolutions_may_leave_out_the_bias(tmp_path: Path) -> None:
    """As converters write it: the place is there, and no tensor."""
    model = Model((1, 3, 3, 2))
    weights = model.constant(np.random.default_rng(0).standard_normal((3, 2, 2, 2)))
    options = schema.TransposeConvOptionsT(schema.Padding.SAME, strideW=2, strideH=2)
    inputs = [model.constant([1, 6, 6, 3]), weights, 0, -1]
    check(model.write(tmp_path, model.add("TRANSPOSE_CONV", inputs, model.tensor((1, 6, 6, 3)), options)))


def test_constants_are_dequantised(tmp_path: Path) -> None:
    """For operators that know no weights of 8 bits."""
    model = Model((3, 8))
    stored = model.constant(np.arange(-12, 12, dtype="int8").reshape(3, 8), 0.01)
    floats = model.add("DEQUANTIZE", [stored], model.tensor((3, 8)))
    check(model.write(tmp_path, model.add("ADD", [0, floats], model.tensor((3, 8)), schema.AddOptionsT())))


@pytest.mark.parametrize(("low", "high", "bits"), [(-1, 1, 8), (-6, 6, 8), (0, 6, 4), (-0.3, 1.1, 8)])
def test_simulated_quantisation_begins_where_it_does_in_float32(
    low: float, high: float, bits: int, tmp_path: Path
) -> None:
    """The zero point of -1 to 1 is 127.49999 in float32, and 127.5 in float64."""
    model = Model((64,))
    wide = model.add("MUL", [0, model.constant(4.0)], model.tensor((64,)), schema.MulOptionsT())
    options = schema.FakeQuantOptionsT(float(low), float(high), bits)
    check(model.write(tmp_path, model.add("FAKE_QUANT", [wide], model.tensor((64,)), options)))


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_shifts_by_too_many_bits_leave_the_sign(dtype: str, tmp_path: Path) -> None:
    model = Model((256,), (256,), dtype=dtype)
    shifted = model.add("RIGHT_SHIFT", [0, 1], model.tensor((256,), dtype), schema.RightShiftOptionsT())
    check(model.write(tmp_path, shifted))


def test_a_slice_of_nothing_is_overwritten(tmp_path: Path) -> None:
    model = Model((2, 6, 3))
    inputs = [0, model.constant(np.zeros((2, 0, 3))), model.constant([0, 2, 0])]
    written = model.add("DYNAMIC_UPDATE_SLICE", inputs, model.tensor((2, 6, 3)))
    check(model.write(tmp_path, model.add("TANH", [written], model.tensor((2, 6, 3)))))


@pytest.mark.parametrize(("begin", "masks"), [([1, 2, 0], (2, 0)), ([1, 3, 0], (0, 2))], ids=str)
def test_slices_that_say_how_long_they_are_may_begin_or_end_with_the_whole(
    begin: list[int], masks: tuple[int, int], tmp_path: Path
) -> None:
    model = Model((4, 6, 3))
    options = schema.StridedSliceOptionsT(*masks, offset=True)
    inputs = [0, *(model.constant(values) for values in (begin, [1, 3, 3], [1, 1, 1]))]
    check(model.write(tmp_path, model.add("STRIDED_SLICE", inputs, model.tensor((1, 3, 3)), options)))


def test_slices_of_constants_may_say_how_long_they_are(tmp_path: Path) -> None:
    model = Model((1, 3, 3))
    values = (np.arange(72.0).reshape(4, 6, 3), [1, 2, 0], [1, 3, 3], [1, 1, 1])
    options = schema.StridedSliceOptionsT(offset=True)
    part = model.add("STRIDED_SLICE", [*map(model.constant, values)], model.tensor((1, 3, 3)), options)
    check(model.write(tmp_path, model.add("ADD", [0, part], model.tensor((1, 3, 3)), schema.AddOptionsT())))


def shape_of(model: Model, tensor: int, rank: int) -> int:
    options = schema.ShapeOptionsT(schema.TensorType.INT32)
    return model.add("SHAPE", [tensor], model.tensor((rank,), "int32"), options)


@pytest.mark.parametrize("declared", [False, True])
def test_shapes_that_follow_from_shapes_are_known(declared: bool, tmp_path: Path) -> None:
    """Keras's Flatten and Reshape, of an open batch. Of quotients, the declared shape tells."""
    model = Model((2, 3, 4))
    numbers = [model.constant([number]) for number in (0, 1, 1)]
    options = schema.StridedSliceOptionsT(shrinkAxisMask=1)
    inputs = [shape_of(model, 0, 3), *numbers]
    batch = model.add("STRIDED_SLICE", inputs, model.tensor((), "int32"), options)
    if declared:
        batch = model.add("FLOOR_DIV", [batch, model.constant(1)], model.tensor((), "int32"))
    inputs = [batch, model.constant(12)]
    shape = model.add("PACK", inputs, model.tensor((2,), "int32"), schema.PackOptionsT(len(inputs)))
    flat = model.add("RESHAPE", [0, shape], model.tensor((2, 12)), schema.ReshapeOptionsT())
    check(model.write(tmp_path, model.add("TANH", [flat], model.tensor((2, 12)))))


def test_what_has_the_shape_of_another_is_filled(tmp_path: Path) -> None:
    model = Model((2, 3))
    filled = model.add("FILL", [shape_of(model, 0, 2), model.constant(0.5)], model.tensor((2, 3)))
    check(model.write(tmp_path, model.add("ADD", [0, filled], model.tensor((2, 3)), schema.AddOptionsT())))


def test_constants_are_moved(tmp_path: Path) -> None:
    model = Model((2, 3))
    inputs = [model.constant(np.arange(6.0).reshape(3, 2)), model.constant([1, 0])]
    turned = model.add("TRANSPOSE", inputs, model.tensor((2, 3)), schema.TransposeOptionsT())
    check(model.write(tmp_path, model.add("ADD", [0, turned], model.tensor((2, 3)), schema.AddOptionsT())))


def test_one_element_becomes_a_scalar(tmp_path: Path) -> None:
    model = Model((1, 1))
    shape = model.tensor((0,), "int32")
    check(model.write(tmp_path, model.add("RESHAPE", [0, shape], model.tensor(()), schema.ReshapeOptionsT())))


@pytest.mark.parametrize(("name", "message"), [("RESHAPE", "RESHAPE to a shape"), ("TILE", "TILE by numbers")])
def test_numbers_that_inputs_say_are_refused(name: str, message: str, tmp_path: Path) -> None:
    model = Model((2, 6))
    numbers = model.tensor((2,), "int32")
    model.graph.inputs.append(numbers)
    path = model.write(tmp_path, model.add(name, [0, numbers], model.tensor((1, 1))))
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(path)


def test_states_that_runs_leave_to_each_other_are_refused(tmp_path: Path) -> None:
    model = Model((2, 3))
    weights = [model.constant(np.ones(shape)) for shape in ((4, 3), (4, 5))]
    state = model.tensor((2, 20))
    model.graph.tensors[state].isVariable = True
    options = schema.SVDFOptionsT(rank=1)
    path = model.write(tmp_path, model.add("SVDF", [0, *weights, -1, state], model.tensor((2, 4)), options))
    with pytest.raises(UnsupportedModelError, match="SVDF keeps a state from run to run"):
        load_model(path)


def lstm(model: Model, coupled: bool, weights: Callable[[Any], int]) -> list[int]:
    """Operands of one of 4 inputs and 5 states, whose input is tensor 0."""
    generator, gates = np.random.default_rng(0), range(coupled, 4)
    inputs = [-1] * 24
    for gate in gates:
        for first, shape in ((1, (5, 4)), (5, (5, 5))):
            inputs[first + gate] = weights(generator.uniform(-1, 1, shape))
        inputs[12 + gate] = model.constant(generator.uniform(-1, 1, 5))
    for state in (18, 19):
        inputs[state] = model.tensor((2, 5))
        model.graph.tensors[inputs[state]].isVariable = True
    inputs[0] = 0
    return inputs


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_lstms_of_several_steps(coupled: bool, time_major: bool, clip: float, tmp_path: Path) -> None:
    """As Keras 2 writes them: with four gates, and memories that are cut."""
    shape = (6, 2) if time_major else (2, 6)
    model = Model((*shape, 4))
    inputs = lstm(model, coupled, model.constant)
    options = schema.UnidirectionalSequenceLSTMOptionsT(schema.ActivationFunctionType.TANH, clip, 0.0, time_major)
    check(model.write(tmp_path, model.add("UNIDIRECTIONAL_SEQUENCE_LSTM", inputs, model.tensor((*shape, 5)), options)))


def test_lstms_whose_weights_alone_are_of_8_bits(tmp_path: Path) -> None:
    model = Model((2, 6, 4))
    inputs = lstm(model, False, lambda values: model.constant((values * 100).astype("int8"), 0.01))
    options = schema.UnidirectionalSequenceLSTMOptionsT(schema.ActivationFunctionType.TANH, cellClip=10.0)
    check(model.write(tmp_path, model.add("UNIDIRECTIONAL_SEQUENCE_LSTM", inputs, model.tensor((2, 6, 5)), options)))


@pytest.mark.parametrize("most", [6, 30])
@pytest.mark.parametrize("sigma", [None, 0.0, 0.5])
def test_zeros_are_behind_the_boxes_that_are_selected(most: int, sigma: float | None, tmp_path: Path) -> None:
    """Among scores of both signs."""
    model = Model((20, 4), (20,))
    numbers = [most, 0.3, -0.5] if sigma is None else [most, 0.3, -0.5, sigma]
    outputs = [model.tensor((most,), "int32"), *([] if sigma is None else [model.tensor((most,))])]
    outputs.append(model.tensor((), "int32"))
    name = "NON_MAX_SUPPRESSION_V4" if sigma is None else "NON_MAX_SUPPRESSION_V5"
    model.add(name, [0, 1, *map(model.constant, numbers)], outputs[0])
    model.graph.operators[-1].outputs = outputs
    check(model.write(tmp_path, *outputs))


def test_custom_operators_are_named(tmp_path: Path) -> None:
    model = Model((2, 3))
    y = model.add("CUSTOM", [0], model.tensor((2, 3)))
    model.model.operatorCodes[-1].customCode = "FlexErf"
    with pytest.raises(UnsupportedModelError, match="the custom operator 'FlexErf'"):
        load_model(model.write(tmp_path, y))


@pytest.mark.parametrize("name", ["ADD", "UNIDIRECTIONAL_SEQUENCE_LSTM"])
def test_operators_with_activations_of_16_bits_are_named(name: str, tmp_path: Path) -> None:
    """Of a quantised LSTM, whose memory has them in any case, it is none of the model's."""
    model = Model((2, 3))
    wide = model.add("QUANTIZE", [0], model.tensor((2, 3), "int16", 0.001))
    path = model.write(tmp_path, model.add(name, [wide, wide], model.tensor((2, 3), "int16", 0.002)))
    with pytest.raises(UnsupportedModelError, match=name) as caught:
        load_model(path)
    assert ("16 bits" in str(caught.value)) == (name == "ADD")


def test_each_of_several_results_must_be_as_declared(tmp_path: Path) -> None:
    model = Model((2, 6))
    parts = [model.tensor((2, 2)), model.tensor((2, 4))]
    model.add("SPLIT", [model.constant(1), 0], parts[0], schema.SplitOptionsT(2))
    model.graph.operators[-1].outputs = parts
    with pytest.raises(UnsupportedModelError, match=r"result .* of SPLIT"):
        load_model(model.write(tmp_path, *parts))


def test_transforms_of_images_are_complex_in_between(tmp_path: Path) -> None:
    model = Model((1, 8, 16))
    spectrum = model.tensor((1, 8, 9), "complex64")
    model.add("RFFT2D", [0, model.constant([8, 16])], spectrum, schema.Rfft2dOptionsT())
    check(model.write(tmp_path, model.add("COMPLEX_ABS", [spectrum], model.tensor((1, 8, 9)))))


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8"])
def test_numbers_become_what_the_file_declares(dtype: str, tmp_path: Path) -> None:
    """Options that say nothing say float32."""
    model = Model((8, 16))
    large = model.add("MUL", [0, model.constant(9.0)], model.tensor((8, 16)), schema.MulOptionsT())
    size = model.add("ABS", [large], model.tensor((8, 16)), schema.AbsOptionsT())
    check(model.write(tmp_path, model.add("CAST", [size], model.tensor((8, 16), dtype), schema.CastOptionsT())))


@pytest.mark.parametrize("taps", [(2, 3, 2), (3, 4, 4)])
def test_transposed_convolutions_of_volumes(taps: tuple[int, ...], tmp_path: Path) -> None:
    model = Model((1, 3, 3, 3, 2))
    weights = model.constant(np.random.default_rng(0).standard_normal((*taps, 4, 2)))
    options = schema.Conv3DOptionsT(schema.Padding.SAME, strideD=1, strideW=3, strideH=2)
    inputs = [model.constant([1, 3, 6, 9, 4]), weights, 0, model.constant(np.arange(4.0))]
    check(model.write(tmp_path, model.add("CONV_3D_TRANSPOSE", inputs, model.tensor((1, 3, 6, 9, 4)), options)))


@pytest.mark.parametrize(("scale", "zero"), [(0.8, 0), (0.8, 1), (0.4, -5), (4 / 7, -128)])
@pytest.mark.parametrize("name", ["RELU", "RELU6", "RELU_N1_TO_1"])
def test_limits_between_two_steps_of_a_scale(scale: float, zero: int, name: str, tmp_path: Path) -> None:
    model, generator = Model((8, 16)), np.random.default_rng(0)
    x = model.add("QUANTIZE", [0], model.tensor((8, 16), "int8", 0.1, zero=3))
    weights = model.constant(generator.integers(-127, 127, (32, 16), "int8"), 0.02)
    bias = model.constant(np.zeros(32, "int32"), 0.002)
    options = schema.FullyConnectedOptionsT(getattr(schema.ActivationFunctionType, name))
    y = model.add("FULLY_CONNECTED", [x, weights, bias], model.tensor((8, 32), "int8", scale, zero=zero), options)
    path = model.write(tmp_path, model.add("DEQUANTIZE", [y], model.tensor((8, 32))))
    imported = load_model(path)
    inputs = imported.random_inputs()
    run = ModelRunner(untuned_executable(imported.mod, detect_target(), plain=True))
    (got,), (wanted,) = run(*inputs), imported.reference(*inputs)
    assert (got.min(), got.max()) == (wanted.min(), wanted.max())
