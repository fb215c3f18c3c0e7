"""FakeQuantizationToInteger: models that dequantise, compute and quantise give integers' results, by integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from eqtune.compile.executable import build_executable
from eqtune.compile.untuned import untuned_executable
from eqtune.relax_ir.functions import operator, top_level_bindings
from eqtune.runtime import ModelRunner
from eqtune.tasks import lower_to_kernels
from eqtune.transform import FakeQuantizationToInteger, FoldWeights
from eqtune.transform.fake_quantization import is_quantized

pytestmark = pytest.mark.unoptimised

op = relax.op
TARGET = tvm.target.Target("llvm")
RNG = np.random.default_rng(0)
Body = Callable[[Any, Any], Any]


def model(shape: tuple[Any, ...], dtype: str, body: Body) -> Any:
    """`body(emit, x)` of one input."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(body(builder.emit, x))
        builder.emit_func_output(result)
    return builder.get()


def real(emit: Any, stored: Any, scale: Any, zero: Any, axis: int = 1) -> Any:
    zero = relax.const(np.asarray(zero, str(stored.ty.dtype)))
    return emit(op.dequantize(stored, relax.const(np.asarray(scale, "float32")), zero, axis=axis))


def stored(emit: Any, value: Any, scale: float, zero: int, dtype: str = "uint8") -> Any:
    known = relax.const(np.asarray(scale, "float32")), relax.const(np.asarray(zero, dtype))
    return emit(op.quantize(value, *known, axis=-1, out_dtype=dtype))


def drawn(*shape: int, dtype: str = "int8") -> Any:
    limits = np.iinfo(dtype)
    return relax.const(RNG.integers(limits.min, limits.max, shape, dtype, endpoint=True))


def bias(emit: Any, scale: Any, *shape: int) -> Any:
    integers = relax.const(RNG.integers(-3000, 3000, np.size(scale) or 1, "int32"))
    return emit(op.reshape(real(emit, integers, scale, 0, axis=0), shape))


def convolution(groups: int = 1, zero: int = 7, **attributes: Any) -> Body:
    scales = RNG.uniform(0.001, 0.003, 12).astype("float32")

    def body(emit: Any, x: Any) -> Any:
        weight = real(emit, drawn(12, 6 // groups, 3, 3), scales, np.zeros(12), axis=0)
        value = emit(op.nn.conv2d(real(emit, x, 0.5, zero), weight, groups=groups, **attributes))
        value = emit(op.add(value, bias(emit, scales * np.float32(0.5), 1, 12, 1, 1)))
        return stored(emit, value, 0.75, 3)

    return body


def dense(transposed: bool, with_bias: bool) -> Body:
    def body(emit: Any, x: Any) -> Any:
        weight = real(emit, drawn(*((20, 24) if transposed else (24, 20)), dtype="uint8"), 0.002, 130)
        weight = emit(op.permute_dims(weight)) if transposed else weight
        value = emit(op.matmul(real(emit, x, 0.5, -7), weight))
        if with_bias:
            value = emit(op.add(value, bias(emit, np.float32(0.5) * np.float32(0.002), 1)))
        return stored(emit, value, 0.25, -3, "int8")

    return body


def pooled(emit: Any, x: Any) -> Any:
    value = emit(op.nn.max_pool2d(real(emit, x, 0.1, 7), (3, 3), (2, 2), (1, 1)))
    value = emit(op.permute_dims(value, [0, 2, 3, 1]))
    return stored(emit, emit(op.reshape(value, (1, -1))), 0.1, 7)


def residual(emit: Any, x: Any) -> Any:
    left, right = real(emit, x, 0.5, 7), real(emit, emit(op.reshape(x, (1, 6, 9, 9))), 0.5, 7)
    return stored(emit, emit(op.nn.relu(emit(op.add(left, right)))), 0.8, 0)


def joined(emit: Any, x: Any) -> Any:
    parts = [real(emit, x, 0.5, 7), real(emit, emit(op.reshape(x, (1, 6, 9, 9))), 0.2, 9)]
    return stored(emit, emit(op.concat(parts, axis=1)), 0.5, 7)


def depthwise(emit: Any, x: Any) -> Any:
    """As TFLite stores it: weights are (1, H, W, C), and the padding is the zero point."""
    scales = RNG.uniform(0.002, 0.004, 6).astype("float32")
    weight = emit(op.reshape(real(emit, drawn(1, 3, 3, 6), scales, np.zeros(6), axis=3), (3, 3, 6, 1)))
    layouts = {"data_layout": "NHWC", "kernel_layout": "HWOI", "out_layout": "NHWC"}
    value = emit(op.nn.conv2d(real(emit, x, 0.5, 9), weight, groups=6, padding=1, strides=2, **layouts))
    return stored(emit, value, 0.25, 3)


def averaged(axis: list[int], keepdims: bool) -> Body:
    def body(emit: Any, x: Any) -> Any:
        return stored(emit, emit(op.mean(real(emit, x, 0.5, 7), axis, keepdims)), 0.2, 3)

    return body


IMAGE = ((1, 6, 9, 9), "uint8")
CASES: dict[str, Callable[[], Any]] = {
    "conv": lambda: model(*IMAGE, convolution(padding=1)),
    "conv_grouped": lambda: model(*IMAGE, convolution(groups=3, padding=1, strides=2)),
    "conv_depthwise": lambda: model(*IMAGE, convolution(groups=6, zero=0, padding=1)),
    "dense": lambda: model((5, 24), "int8", dense(transposed=False, with_bias=True)),
    "dense_transposed": lambda: model((5, 24), "int8", dense(transposed=True, with_bias=False)),
    "pooled": lambda: model(*IMAGE, pooled),
    "residual": lambda: model(*IMAGE, residual),
    "joined": lambda: model(*IMAGE, joined),
    "depthwise": lambda: model((1, 9, 9, 6), "int8", depthwise),
    "averaged": lambda: model((8, 6, 3, 2), "int8", averaged([2, 3], keepdims=True)),
    "averaged_axis": lambda: model((4, 6, 3), "uint8", averaged([-1], keepdims=False)),
}


def operators(mod: Any) -> set[str]:
    return {operator(binding.value) for binding in top_level_bindings(mod["main"])} - {""}


def dtypes_of_products(mod: Any) -> set[str]:
    products = ("relax.nn.conv2d", "relax.matmul")
    return {str(b.var.ty.dtype) for b in top_level_bindings(mod["main"]) if operator(b.value) in products}


def assert_a_step_apart(before: Any) -> None:
    """At most, in any element."""
    shape = [int(extent) for extent in before["main"].params[0].ty.shape]
    data = np.random.default_rng(1).integers(0, 255, shape, "uint8", endpoint=True)
    after = FoldWeights()(FakeQuantizationToInteger()(before))
    (expected,) = ModelRunner(untuned_executable(before, TARGET))(data)
    (actual,) = ModelRunner(build_executable(lower_to_kernels(after, TARGET), TARGET))(data)
    assert expected.std() > 10  # neither all cut off nor all alike
    assert np.abs(actual.astype(int) - expected.astype(int)).max() <= 1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("products", [True, False])
def test_results_are_those_of_the_floats_but_for_roundings_between_two_steps(name: str, products: bool) -> None:
    before = CASES[name]()
    after = FakeQuantizationToInteger(products)(before)
    assert relax.analysis.check_well_formed(after)
    assert not {"relax.quantize", "relax.dequantize"} & operators(after)
    assert dtypes_of_products(after) <= {"int32" if products else "float32"}
    (parameter,) = before["main"].params
    limits = np.iinfo(str(parameter.ty.dtype))
    shape = [int(extent) for extent in parameter.ty.shape]
    data = np.random.default_rng(1).integers(limits.min, limits.max, shape, str(parameter.ty.dtype), endpoint=True)
    (expected,) = ModelRunner(untuned_executable(before, TARGET))(data)
    folded = FoldWeights()(after)
    (actual,) = ModelRunner(build_executable(lower_to_kernels(folded, TARGET), TARGET))(data)
    assert actual.dtype == expected.dtype
    difference = np.abs(actual.astype(int) - expected.astype(int))
    assert difference.max(initial=0) <= 1
    assert (difference > 0).mean() <= 0.01
    assert expected.std() > 10  # neither all cut off nor all alike


def test_what_only_moves_elements_moves_integers() -> None:
    after = FakeQuantizationToInteger()(CASES["pooled"]())
    assert operators(after) == {"relax.nn.max_pool2d", "relax.permute_dims", "relax.reshape"}


def test_a_part_of_the_same_scale_is_joined_as_it_is() -> None:
    after = FakeQuantizationToInteger()(CASES["joined"]())
    roundings = [b for b in top_level_bindings(after["main"]) if operator(b.value) == "relax.round"]
    assert len(roundings) == 1


def test_a_bias_is_added_to_the_sums_and_all_scales_become_one() -> None:
    after = FoldWeights()(FakeQuantizationToInteger()(CASES["conv"]()))
    values = [operator(binding.value) for binding in top_level_bindings(after["main"])]
    assert values.count("relax.multiply") == 1
    assert "relax.divide" not in values
    assert values.index("relax.add") == values.index("relax.nn.conv2d") + 1


def test_a_sum_that_32_bits_do_not_hold_stays_a_float() -> None:
    def body(emit: Any, x: Any) -> Any:
        weight = relax.const(np.full((70000, 1), 127, "int8"))
        return stored(emit, emit(op.matmul(real(emit, x, 1e-4, 0), real(emit, weight, 1e-2, 0))), 200.0, 0)

    assert dtypes_of_products(FakeQuantizationToInteger()(model((1, 70000), "uint8", body))) == {"float32"}


def test_a_bias_along_another_axis_than_the_scales_is_added_afterwards() -> None:
    """A square product: the bias is one of each row, the scales are one of each column, and all are alike."""
    scales = np.linspace(0.001, 0.002, 8, dtype="float32")

    def body(emit: Any, x: Any) -> Any:
        weight = real(emit, drawn(24, 8), scales, np.zeros(8))
        value = emit(op.matmul(real(emit, x, 1.0, 0), weight))
        return stored(emit, emit(op.add(value, bias(emit, scales, 8, 1))), 0.5, 100)

    assert_a_step_apart(model((8, 24), "uint8", body))


def test_a_constant_with_another_number_of_scales_is_added_afterwards() -> None:
    """Those of a product are its columns', those of the constant its rows'."""
    columns, rows = (np.linspace(0.001, 0.002, count, dtype="float32") for count in (8, 5))

    def body(emit: Any, x: Any) -> Any:
        value = emit(op.matmul(real(emit, x, 1.0, 0), real(emit, drawn(24, 8), columns, np.zeros(8))))
        integers = relax.const(RNG.integers(-3000, 3000, (5, 8), "int32"))
        return stored(emit, emit(op.add(value, real(emit, integers, rows, np.zeros(5), axis=0))), 0.5, 100)

    assert_a_step_apart(model((5, 24), "uint8", body))


def test_scales_along_the_axis_that_is_summed_stay_with_the_floats() -> None:
    """A weight that is a vector has but this axis."""

    def body(emit: Any, x: Any) -> Any:
        weight = real(emit, drawn(24), np.linspace(0.001, 0.01, 24), np.zeros(24), axis=0)
        return stored(emit, emit(op.matmul(real(emit, x, 1.0, 0), weight)), 0.5, 100)

    before = model((5, 24), "uint8", body)
    assert dtypes_of_products(FakeQuantizationToInteger()(before)) == {"float32"}
    assert_a_step_apart(before)


def test_zero_points_may_be_of_channels_where_the_scale_is_one_number() -> None:
    def body(emit: Any, x: Any) -> Any:
        value = emit(op.matmul(real(emit, x, 0.5, np.arange(8)), real(emit, drawn(8, 20), 0.02, 0)))
        zeros = relax.const(np.arange(100, 120, dtype="uint8"))
        return emit(op.quantize(value, relax.const(np.asarray(10, "float32")), zeros, axis=1, out_dtype="uint8"))

    assert_a_step_apart(model((5, 8), "uint8", body))


def test_zero_points_between_whole_numbers_are_left_to_tvm() -> None:
    def body(emit: Any, x: Any) -> Any:
        scale, zero = (relax.const(np.asarray(value, dtype)) for value, dtype in ((0.5, "float32"), (2.5, "float16")))
        return emit(op.dequantize(x, scale, zero, axis=1))

    assert "relax.dequantize" in operators(FakeQuantizationToInteger()(model((5, 8), "uint8", body)))


def test_integers_of_another_block_stay_there() -> None:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((5, 8), "float32"))
    known = relax.const(np.asarray(0.5, "float32")), relax.const(np.asarray(3, "uint8"))
    with builder.function("main", [x]):
        with builder.dataflow():
            first = builder.emit_output(op.dequantize(stored(builder.emit, x, 0.5, 3), *known, axis=1))
        builder.emit_func_output(stored(builder.emit, first, 0.5, 3))
    assert relax.analysis.check_well_formed(FakeQuantizationToInteger()(builder.get()))


def test_a_bias_is_not_added_to_integers_of_any_size() -> None:
    """32 bits might not hold the sums."""

    def body(emit: Any, x: Any) -> Any:
        scaled = emit(op.multiply(emit(op.astype(x, "float32")), relax.const(np.asarray([0.5], "float32"))))
        return op.add(scaled, real(emit, relax.const(np.full(8, 3000, "int32")), 0.5, 0, axis=0))

    mod = FakeQuantizationToInteger()(model((8,), "int32", body))
    data = np.full(8, 2**31 - 1, "int32")
    (result,) = ModelRunner(build_executable(lower_to_kernels(mod, TARGET), TARGET))(data)
    np.testing.assert_allclose(result, (data.astype("float64") + 3000) / 2, rtol=1e-6)


def test_zero_points_may_lie_outside_of_the_bytes() -> None:
    def body(emit: Any, x: Any) -> Any:
        known = relax.const(np.asarray(0.5, "float32")), relax.const(np.asarray(200, "int32"))
        whole = emit(op.quantize(x, *known, axis=-1, out_dtype="int8"))
        return op.dequantize(whole, *known, axis=-1)

    mod = FakeQuantizationToInteger()(model((4,), "float32", body))
    data = np.array([-100, -75, 0, 10], "float32")
    (result,) = ModelRunner(build_executable(lower_to_kernels(mod, TARGET), TARGET))(data)
    np.testing.assert_array_equal(result, (np.clip(data / 0.5 + 200, -128, 127) - 200) * 0.5)


def test_a_number_that_is_no_tensor_is_added_to_the_floats() -> None:
    def body(emit: Any, x: Any) -> Any:
        moved = emit(op.add(real(emit, x, 0.5, 7), relax.prim_value(3.0, "float32")))
        return stored(emit, moved, 0.8, 0)

    assert_a_step_apart(model(*IMAGE, body))


def test_a_stream_of_floats_is_summed_once() -> None:
    """And not for each layer again, in the scale of that."""

    def body(emit: Any, x: Any) -> Any:
        for _ in range(4):
            layer = emit(op.tanh(real(emit, stored(emit, x, 0.5, 0), 0.5, 0)))
            x = emit(op.add(emit(op.nn.relu(x)), layer))
        return x

    values = top_level_bindings(FakeQuantizationToInteger()(model((5, 8), "float32", body))["main"])
    assert [operator(binding.value) for binding in values].count("relax.add") == 4


def test_other_models_stay_as_they_are() -> None:
    mod = model((1, 6, 9, 9), "float32", lambda emit, x: emit(op.nn.relu(x)))
    assert FakeQuantizationToInteger()(mod).same_as(mod)
    assert not is_quantized(mod)
    assert is_quantized(CASES["conv"]())


@pytest.mark.parametrize("rounded", [True, False])
def test_models_that_quantise_by_arithmetic_are_quantised(rounded: bool) -> None:
    """As torchao's are, whose results are as far apart; floats cut off to bytes are not."""

    def body(emit: Any, x: Any) -> Any:
        steps = emit(op.multiply(x, relax.const(20.0)))
        steps = emit(op.add(emit(op.round(steps)), relax.const(3.0))) if rounded else steps
        return emit(op.astype(emit(op.clip(steps, -128, 127)), "int8"))

    assert is_quantized(model((4, 8), "float32", body)) == rounded


def test_means_over_open_sizes_are_those_of_floats() -> None:
    """Their type does not tell how many elements there are, though that of the result is known."""
    n = tvm.tirx.Var("n", "int64")

    def body(emit: Any, x: Any) -> Any:
        return op.mean(real(emit, stored(emit, x, 0.5, 3), 0.5, 3), [0])

    assert "relax.mean" in operators(FakeQuantizationToInteger()(model((n, 8), "float32", body)))


def test_means_are_sums_of_integers() -> None:
    """No image of floats is written for them."""
    for name in ("averaged", "averaged_axis"):
        after = FakeQuantizationToInteger()(CASES[name]())
        assert "relax.mean" not in operators(after)
        (total,) = (b.var for b in top_level_bindings(after["main"]) if operator(b.value) == "relax.sum")
        assert str(total.ty.dtype) == "int32"


def test_open_axes_that_are_summed_over_stay_as_they_are() -> None:
    """Their results have known shapes: a mean over places, and a product along them of a reshaped factor."""
    n = tirx.Var("n", "int64")

    def body(emit: Any, x: Any) -> Any:
        mean = emit(op.mean(real(emit, stored(emit, x, 0.5, 7), 0.5, 7), [0]))
        product = emit(op.matmul(emit(op.permute_dims(x)), emit(op.reshape(x, (n, 8)))))
        return emit(op.add(product, mean))

    after = FakeQuantizationToInteger()(model((n, 8), "float32", body))
    assert {"relax.mean", "relax.matmul"} <= operators(after)
