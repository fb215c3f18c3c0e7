"""TabulateBytes: functions of a quantised byte become tables, which layers look up as they write their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from scipy import special
from tvm import relax

from eqtune.compile.executable import build_executable
from eqtune.compile.untuned import untuned_executable
from eqtune.relax_ir.constants import array_of
from eqtune.relax_ir.functions import operator, top_level_bindings
from eqtune.runtime import ModelRunner
from eqtune.search.space.byte_tables import BYTE_TABLES
from eqtune.tasks import extract_tasks, lower_to_kernels
from eqtune.transform.byte_tables import OPERATOR, TabulateBytes
from eqtune.transform.layout import ChannelsLast
from eqtune.transform.simplify import simplify

pytestmark = pytest.mark.unoptimised

op = relax.op
TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v2"})
VBMI = tvm.target.Target({"kind": "llvm", "mcpu": "znver4"})
BYTES = np.arange(256, dtype="uint8")


def model(dtype: str, make: Callable[[Any, Any], Any], shape: tuple[int, ...] = (1, 4, 8, 8)) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType(shape, dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            made = make(builder.emit, x)
            results = [builder.emit_output(one) for one in (made if isinstance(made, tuple) else (made,))]
        builder.emit_func_output(results if len(results) > 1 else results[0])
    return builder.get()


def number(value: float, dtype: str = "float32") -> Any:
    return relax.const(np.full((1, 1, 1, 1), value, dtype))


def real(emit: Any, stored: Any, scale: float = 0.05, zero: int = 3) -> Any:
    whole = emit(op.subtract(emit(op.astype(stored, "int32")), number(zero, "int32")))
    return emit(op.multiply(emit(op.astype(whole, "float32")), number(scale)))


def stored(emit: Any, value: Any, scale: float = 0.04, zero: int = -5, dtype: str = "int8") -> Any:
    limits = np.iinfo(dtype)
    steps = emit(op.round(emit(op.divide(value, number(scale)))))
    whole = emit(op.add(emit(op.astype(emit(op.clip(steps, -1e4, 1e4)), "int32")), number(zero, "int32")))
    return emit(op.astype(emit(op.clip(whole, int(limits.min), int(limits.max))), dtype))


def silu(emit: Any, x: Any) -> Any:
    """As TFLite has it: the sigmoid is quantised, too."""
    gate = stored(emit, emit(op.sigmoid(real(emit, x))), 1 / 256, -128)
    return stored(emit, emit(op.multiply(real(emit, x), real(emit, gate, 1 / 256, -128))))


def tables(mod: tvm.IRModule) -> list[Any]:
    return [binding.value for binding in top_level_bindings(mod["main"]) if operator(binding.value) == OPERATOR]


def looks_up(mod: tvm.IRModule, target: Any = TARGET) -> tvm.IRModule:
    return TabulateBytes(target)(mod)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_a_function_of_a_byte_with_roundings_between_is_one_table(dtype: str) -> None:
    after = looks_up(model(dtype, silu))
    assert relax.analysis.check_well_formed(after)
    (call,) = tables(after)
    assert {operator(binding.value) for binding in top_level_bindings(after["main"])} == {OPERATOR, ""}
    x = (BYTES.view(dtype).astype("int32") - 3).astype("float32") * np.float32(0.05)
    gate = np.clip(np.rint(special.expit(x) * 256) - 128, -128, 127)
    expected = np.clip(np.rint(x * ((gate + 128) / 256) / np.float32(0.04)) - 5, -128, 127)
    assert np.abs(array_of(call.args[1]).astype(int) - expected).max() <= 1  # of halves, by a last digit
    assert (array_of(call.args[1]) == expected).mean() > 0.98


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_results_stay(dtype: str) -> None:
    before = model(dtype, silu, (1, 4, 8, 24))
    x = np.random.default_rng(0).permutation(np.tile(BYTES, 3)).view(dtype).reshape(1, 4, 8, 24)
    (expected,) = ModelRunner(untuned_executable(before, TARGET))(x)
    (found,) = ModelRunner(build_executable(lower_to_kernels(looks_up(before), TARGET), TARGET))(x)
    np.testing.assert_array_equal(found, expected)


def test_what_others_read_is_where_the_next_table_begins() -> None:
    def chain(emit: Any, x: Any) -> Any:
        first = silu(emit, x)
        return first, stored(emit, emit(op.tanh(real(emit, first, 0.04, -5))), 1 / 128, 0)

    after = looks_up(model("int8", chain))
    first, second = (binding for binding in top_level_bindings(after["main"]) if operator(binding.value) == OPERATOR)
    assert first.value.args[0].same_as(after["main"].params[0])
    assert second.value.args[0].same_as(first.var)


def of_two_bytes(emit: Any, x: Any) -> Any:
    other = emit(op.flip(x, 3))
    return stored(emit, emit(op.multiply(real(emit, x), emit(op.sigmoid(real(emit, other))))))


def by_channel(emit: Any, x: Any) -> Any:
    scales = relax.const(np.arange(1, 5, dtype="float32").reshape(1, 4, 1, 1))
    return stored(emit, emit(op.sigmoid(emit(op.multiply(real(emit, x), scales)))))


def not_finite(emit: Any, x: Any) -> Any:
    return stored(emit, emit(op.log(real(emit, x))))


def limited(emit: Any, x: Any) -> Any:
    return emit(op.astype(emit(op.clip(emit(op.astype(x, "int32")), 3, 90)), "int8"))


def of_words(emit: Any, x: Any) -> Any:
    wide = emit(op.multiply(emit(op.astype(x, "float32")), number(7.5)))
    return emit(op.astype(emit(op.sigmoid(wide)), "float16"))


@pytest.mark.parametrize("make", [of_two_bytes, by_channel, not_finite, limited, of_words])
def test_what_is_no_table(make: Any) -> None:
    before = model("int8", make)
    assert looks_up(before, VBMI).same_as(before)


def test_many_cheap_operators_are_a_table_where_instructions_look_it_up() -> None:
    def twice(emit: Any, x: Any) -> Any:
        value = emit(op.clip(emit(op.add(real(emit, x), number(3.0))), 0.0, 6.0))
        return stored(emit, emit(op.multiply(emit(op.multiply(value, number(1 / 6))), real(emit, x))), dtype="uint8")

    def divided_by_multiplication(emit: Any, x: Any) -> Any:
        value = emit(op.clip(emit(op.add(real(emit, x), number(3.0))), 0.0, 6.0))
        product = emit(op.multiply(emit(op.multiply(value, number(1 / 6))), real(emit, x)))
        steps = emit(op.round(emit(op.multiply(product, number(25.0)))))
        return emit(op.astype(emit(op.clip(steps, 0.0, 255.0)), "uint8"))

    assert len(tables(looks_up(model("int8", twice)))) == 1  # it divides
    cheap = model("int8", divided_by_multiplication)
    assert not tables(looks_up(cheap))
    assert len(tables(looks_up(cheap, VBMI))) == 1


def test_a_layer_looks_up_what_it_writes() -> None:
    """Of channels first and last, with the instructions of the CPU."""
    rng = np.random.default_rng(0)
    weight = relax.const(rng.integers(-9, 9, (32, 4, 1, 1), "int8"))

    def layer(emit: Any, x: Any) -> Any:
        sums = emit(op.nn.conv2d(x, weight, out_dtype="int32"))
        value = emit(op.multiply(emit(op.astype(sums, "float32")), number(1 / 64)))
        return silu(emit, stored(emit, value, 0.05, 3))

    before = model("uint8", layer)
    after = looks_up(before)
    last = ChannelsLast()(after)
    assert not last.same_as(after)
    x = rng.integers(0, 255, (1, 4, 8, 8), "uint8")
    (expected,) = ModelRunner(untuned_executable(before, TARGET))(x)
    assert expected.std() > 5
    for form, target in ((after, TARGET), (last, TARGET), (last, VBMI)):
        kernels = lower_to_kernels(form, target)
        (task,) = [task for task in extract_tasks(kernels) if "byte_table" in task.name]
        assert task.name.startswith("conv2d")
        assert str(task.mod["main"].attrs[BYTE_TABLES]) == ("avx512vbmi" if target is VBMI else "")
        if target is TARGET:
            (found,) = ModelRunner(build_executable(kernels, target))(x)
            np.testing.assert_array_equal(found, expected)


def test_quantised_models_have_tables_on_cpus_alone() -> None:
    x = relax.Var("x", relax.TensorType((2, 64), "float32"))
    scale, zero = relax.const(np.float32(0.05)), relax.const(np.int8(3))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            known = builder.emit(op.dequantize(builder.emit(op.quantize(x, scale, zero)), scale, zero))
            result = builder.emit_output(op.quantize(builder.emit(op.nn.silu(known)), scale, zero))
        builder.emit_func_output(result)
    mod = builder.get()
    assert len(tables(simplify(mod, TARGET))) == 1
    assert not tables(simplify(mod, tvm.target.Target("nvidia/nvidia-h100")))
    assert not tables(simplify(mod))
