"""NarrowProducts: quantised layers multiply bytes or pairs of 16 bits, and give the very same integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from eqtune import relay
from eqtune.compile.executable import build_executable
from eqtune.compile.untuned import untuned_executable
from eqtune.runtime import ModelRunner
from eqtune.tasks import extract_tasks, lower_to_kernels
from eqtune.transform import ChannelsLast, FoldWeights, NarrowProducts
from eqtune.transform.narrow_products import product_bits

pytestmark = pytest.mark.unoptimised

op = relax.op
TARGET = tvm.target.Target("llvm")
RNG = np.random.default_rng(0)


def layer(shape: tuple[int, ...], dtype: str, zero: int, weight: Any, product: Callable[..., Any]) -> Any:
    """`product(x - zero, weight)` in int32, as front ends write it."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            data = builder.emit(op.astype(x, "int32"))
            if zero:
                data = builder.emit(op.subtract(data, relax.const(zero, "int32")))
            result = builder.emit_output(product(data, relax.const(weight.astype("int32"), "int32")))
        builder.emit_func_output(result)
    return builder.get()


def matmul(data: Any, weight: Any) -> Any:
    return op.matmul(data, weight, out_dtype="int32")


def conv(**attributes: Any) -> Callable[..., Any]:
    return lambda data, weight: op.nn.conv2d(data, weight, out_dtype="int32", **attributes)


def drawn(*shape: int, low: int = -128, high: int = 127) -> Any:
    return RNG.integers(low, high, shape, endpoint=True)


CASES = {
    "unsigned": lambda: layer((5, 24), "uint8", 0, drawn(24, 40), matmul),
    "zero_point": lambda: layer((5, 24), "uint8", 131, drawn(24, 40), matmul),
    "signed_and_wide": lambda: layer((5, 24), "int8", -7, drawn(24, 100), matmul),
    "signed_and_thin": lambda: layer((5, 24), "int8", -7, drawn(24, 8), matmul),
    "weights_off_centre": lambda: layer((5, 24), "uint8", 3, drawn(24, 40, low=-20, high=200), matmul),
    "batch": lambda: layer((2, 5, 24), "uint8", 3, drawn(2, 24, 40), matmul),
    "conv_padded": lambda: layer((1, 6, 9, 9), "uint8", 5, drawn(20, 6, 3, 3), conv(padding=(1, 0, 2, 1))),
    "conv_signed": lambda: layer((2, 6, 9, 9), "int8", -3, drawn(20, 6, 3, 3), conv(padding=1, strides=2)),
    "conv_grouped": lambda: layer((1, 6, 9, 9), "int8", 4, drawn(12, 2, 3, 3), conv(padding=1, groups=3)),
    "conv_depthwise": lambda: layer((1, 6, 9, 9), "uint8", 5, drawn(6, 1, 3, 3), conv(padding=1, strides=2, groups=6)),
    "conv_off_centre": lambda: layer((1, 6, 9, 9), "uint8", 9, drawn(20, 6, 3, 3, low=-255, high=-1), conv(padding=1)),
    "conv_channels_last": lambda: layer(
        (1, 9, 9, 6), "int8", 4, drawn(3, 3, 6, 70), conv(padding=1, data_layout="NHWC", kernel_layout="HWIO")
    ),
}


def products(mod: Any) -> list[list[str]]:
    """The dtypes that each product reads."""
    found: list[list[str]] = []

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call) and getattr(expr.op, "name", "") in ("relax.matmul", "relax.nn.conv2d"):
            found.append([str(arg.ty.dtype) for arg in expr.args])

    relax.analysis.post_order_visit(mod["main"], visit)
    return found


def outputs(mod: Any, data: Any) -> Any:
    return ModelRunner(build_executable(lower_to_kernels(mod, TARGET), TARGET))(data)[0]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("name", CASES)
def test_the_integers_stay_the_same(name: str, bits: int) -> None:
    before = CASES[name]()
    after = NarrowProducts(bits)(before)
    (parameter,) = before["main"].params
    limits = np.iinfo(str(parameter.ty.dtype))
    shape = [int(extent) for extent in parameter.ty.shape]
    data = RNG.integers(limits.min, limits.max, shape, str(parameter.ty.dtype), endpoint=True)
    assert {right for _, right in products(after)} == {f"int{bits}"}
    assert relax.analysis.check_well_formed(after)
    np.testing.assert_array_equal(outputs(after, data), ModelRunner(untuned_executable(before, TARGET))(data)[0])


@pytest.mark.parametrize(("name", "left"), [("signed_and_wide", "uint8"), ("signed_and_thin", "int8")])
def test_signed_data_is_flipped_where_that_pays(name: str, left: str) -> None:
    assert products(NarrowProducts()(CASES[name]())) == [[left, "int8"]]


@pytest.mark.parametrize(
    "mod",
    [
        layer((5, 24), "uint8", 0, drawn(24, 40, low=-200, high=200), matmul),
        layer((5, 24), "int16", 0, drawn(24, 40), matmul),
        layer((1, 6, 9, 9), "uint8", 0, drawn(6, 1, 3, 3, low=0, high=255), conv(groups=6)),
        layer((1, 6, 9, 9), "uint8", 300, drawn(20, 6, 3, 3), conv(padding=1)),
    ],
)
def test_what_does_not_fit_bytes_is_left_alone(mod: Any) -> None:
    assert products(NarrowProducts()(mod)) == products(mod)


@pytest.mark.parametrize("known", [True, False])
def test_bytes_that_are_read_as_others_are_left_alone(known: bool) -> None:
    """uint8 as int8: 200 is -56."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(name, relax.TensorType(shape, "uint8")) for name, shape in (("x", (5, 24)), ("y", (24, 7)))]
    weight = relax.const(drawn(24, 7).astype("int8"))
    with builder.function("main", inputs):
        with builder.dataflow():
            left = builder.emit(op.astype(inputs[0], "int8"))
            right = weight if known else builder.emit(op.astype(inputs[1], "int8"))
            result = builder.emit_output(matmul(left, right))
        builder.emit_func_output(result)
    before = builder.get()
    after = NarrowProducts()(before)
    data = [RNG.integers(0, 255, shape, "uint8", endpoint=True) for shape in ((5, 24), (24, 7))]
    actual = ModelRunner(build_executable(lower_to_kernels(after, TARGET), TARGET))(*data)[0]
    np.testing.assert_array_equal(actual, ModelRunner(untuned_executable(before, TARGET))(*data)[0])


@pytest.mark.parametrize(
    "mod",
    [
        layer((5, 24), "uint8", 0, drawn(24, 40, low=-40_000, high=40_000), matmul),
        layer((5, 24), "uint8", 20_000, drawn(24, 40), matmul),
        layer((5, 24), "int16", 0, drawn(24, 40), matmul),
    ],
)
def test_what_does_not_fit_pairs_is_left_alone(mod: Any) -> None:
    assert products(NarrowProducts(16)(mod)) == products(mod)


@pytest.mark.parametrize(
    ("cpu", "bits"), [("znver4", 8), ("alderlake", 8), ("skylake-avx512", 16), ("haswell", 16), ("x86-64", 16)]
)
def test_the_processor_chooses_the_products(cpu: str, bits: int) -> None:
    assert product_bits(tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu})) == bits


def test_elsewhere_products_stay_as_they_are() -> None:
    arm = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"})
    assert product_bits(arm) == 0
    assert product_bits(tvm.target.Target("nvidia/nvidia-a100")) == 0


def test_two_inputs_are_multiplied_as_bytes() -> None:
    builder = relax.BlockBuilder()
    inputs = [relax.Var("x", relax.TensorType((5, 24), "int8")), relax.Var("y", relax.TensorType((24, 7), "uint8"))]
    with builder.function("main", inputs):
        with builder.dataflow():
            wide = [builder.emit(op.astype(value, "int32")) for value in inputs]
            result = builder.emit_output(matmul(*wide))
        builder.emit_func_output(result)
    assert products(NarrowProducts()(builder.get())) == [["int8", "uint8"]]
    assert products(NarrowProducts(16)(builder.get())) == [["int16", "int16"]]


def test_a_bias_and_the_correction_of_a_zero_point_are_one_addition() -> None:
    def with_bias(data: Any, weight: Any) -> Any:
        return op.add(conv(padding=1)(data, weight), relax.const(RNG.integers(-999, 999, (1, 20, 1, 1), "int32")))

    before = layer((1, 6, 9, 9), "uint8", 5, drawn(20, 6, 3, 3), with_bias)
    after = NarrowProducts()(before)
    assert "R.subtract" not in after.script()
    assert after.script().count("R.add") == 1
    data = RNG.integers(0, 255, (1, 6, 9, 9), "uint8", endpoint=True)
    np.testing.assert_array_equal(outputs(after, data), ModelRunner(untuned_executable(before, TARGET))(data)[0])


@pytest.mark.parametrize(("bits", "dtypes"), [(8, ["uint8", "int8"]), (16, ["int16", "int16"])])
def test_a_zero_point_may_be_computed(bits: int, dtypes: list[str]) -> None:
    """As dynamic quantisation does."""
    builder = relax.BlockBuilder()
    x, zero = relax.Var("x", relax.TensorType((5, 24), "uint8")), relax.Var("zero", relax.TensorType((), "uint8"))
    with builder.function("main", [x, zero]):
        with builder.dataflow():
            wide = [builder.emit(op.astype(value, "int32")) for value in (x, zero)]
            result = builder.emit_output(matmul(builder.emit(op.subtract(*wide)), relax.const(drawn(24, 40), "int32")))
        builder.emit_func_output(result)
    before = builder.get()
    after = NarrowProducts(bits)(before)
    assert products(after) == [dtypes]
    data = RNG.integers(0, 255, (5, 24), "uint8", endpoint=True), np.array(37, "uint8")
    expected = ModelRunner(untuned_executable(before, TARGET))(*data)[0]
    actual = ModelRunner(build_executable(lower_to_kernels(after, TARGET), TARGET))(*data)[0]
    np.testing.assert_array_equal(actual, expected)


def test_a_chain_has_one_kernel_a_layer_and_no_transposes_between() -> None:
    """Two quantised convolutions: bytes are rescaled where they are summed, and padded in a kernel of their own."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 16, 8, 8), "uint8"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value: Any = x
            for _ in range(2):
                data = builder.emit(op.subtract(builder.emit(op.astype(value, "int32")), relax.const(3, "int32")))
                weight = builder.emit(op.astype(relax.const(drawn(16, 16, 3, 3).astype("int8")), "int32"))
                sums = builder.emit(conv(padding=1)(data, weight))
                real = builder.emit(op.multiply(builder.emit(op.astype(sums, "float32")), relax.const(0.01)))
                value = builder.emit(
                    op.astype(builder.emit(op.clip(builder.emit(op.round(real)), 0.0, 255.0)), "uint8")
                )
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    before = builder.get()
    after = tvm.transform.Sequential([FoldWeights(), NarrowProducts(), ChannelsLast()])(before)
    names = [task.name for task in extract_tasks(lower_to_kernels(after, TARGET))]
    assert sorted(names) == ["conv2d_subtract_cast_multiply_round_clip_cast", "pad", "pad_transpose", "transpose"]
    assert products(after) == [["uint8", "int8"]] * 2
    data = RNG.integers(0, 255, (1, 16, 8, 8), "uint8", endpoint=True)
    np.testing.assert_array_equal(outputs(after, data), ModelRunner(untuned_executable(before, TARGET))(data)[0])


def test_relay_programs_reach_products_of_bytes() -> None:
    text = """#[version = "0.0.5"]
    def @main(%x: Tensor[(1, 4, 6, 6), int8], %w: Tensor[(64, 4, 3, 3), int8]) -> Tensor[(1, 64, 6, 6), int8] {
      %1 = qnn.conv2d(%x, %w, 3, 0, 0.5f, 0.1f, channels=64, kernel_size=[3, 3], padding=[1, 1, 1, 1],
                      out_dtype="int32");
      qnn.requantize(%1, 0.05f, 0, 10f, -5, axis=1, out_dtype="int8")
    }"""
    mod = relay.from_text(text, {"w": drawn(64, 4, 3, 3).astype("int8")})
    after = tvm.transform.Sequential([FoldWeights(), NarrowProducts()])(mod)
    assert products(after) == [["uint8", "int8"]]
    data = drawn(1, 4, 6, 6).astype("int8")
    np.testing.assert_array_equal(outputs(after, data), ModelRunner(untuned_executable(mod, TARGET))(data)[0])


def test_an_empty_sum_stays_as_it_is() -> None:
    mod = layer((3, 0), "uint8", 5, drawn(0, 4), matmul)
    assert tvm_ffi.structural_equal(NarrowProducts()(mod), mod)


def test_bytes_of_another_block_stay_there() -> None:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((5, 24), "uint8"))
    with builder.function("main", [x]):
        with builder.dataflow():
            least = builder.emit(op.maximum(x, relax.const(np.asarray(3, "uint8"))))
            wide = builder.emit_output(op.astype(least, "int32"))
        builder.emit_func_output(builder.emit(matmul(wide, relax.const(drawn(24, 40).astype("int32")))))
    after = NarrowProducts()(builder.get())
    assert relax.analysis.check_well_formed(after)
    assert products(after) == [["int32", "int32"]]
