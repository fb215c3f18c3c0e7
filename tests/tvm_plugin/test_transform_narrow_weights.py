"""KeepNarrowWeights: few rows are multiplied by weights as a model stores them; all else becomes floats as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

import eqtune
from eqtune.compile.executable import build_executable
from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner
from eqtune.search.space.hardware import Hardware
from eqtune.tasks import extract_tasks, lower_to_kernels
from eqtune.transform import KeepNarrowWeights
from eqtune.transform.simplify import simplify
from eqtune.tune.advice import fast_math_advice

op = relax.op
TARGET = detect_target(1)
RNG = np.random.default_rng(0)
PLACES, COLUMNS = 512, 576

Emit = Callable[[Any], Any]


def codes(*shape: int, dtype: str = "int8", span: int = 256) -> Any:
    low = -span // 2 if dtype == "int8" else 0
    return relax.const(RNG.integers(low, low + span, shape).astype(dtype))


def floats(*shape: int) -> Any:
    return relax.const((RNG.random(shape, np.float32) + 0.5) * 0.02)


def whole(*shape: int) -> Any:
    return relax.const(RNG.integers(0, 20, shape).astype("float32"))


def scaled(emit: Emit, x: Any) -> Any:
    """A scale for each column, behind the product (torchao's weights of 8 bits)."""
    wide = emit(op.astype(codes(COLUMNS, PLACES), "float32"))
    return op.multiply(emit(op.matmul(x, emit(op.permute_dims(wide)))), floats(COLUMNS))


def dequantized(emit: Emit, x: Any) -> Any:
    """ONNX's, for each column."""
    zeros = relax.const(RNG.integers(-5, 5, COLUMNS).astype("int8"))
    return op.matmul(x, emit(op.dequantize(codes(PLACES, COLUMNS), floats(COLUMNS), zeros, axis=1)))


def in_groups(emit: Emit, x: Any) -> Any:
    """A scale and a zero for each 32 places of a column (GPTQ)."""
    shape = [COLUMNS, PLACES // 32, 32]
    wide = emit(op.astype(codes(*shape, dtype="uint8", span=16), "float32"))
    weights = emit(op.multiply(floats(COLUMNS, PLACES // 32, 1), emit(op.subtract(wide, whole(*shape[:2], 1)))))
    return op.matmul(x, emit(op.permute_dims(emit(op.reshape(weights, [COLUMNS, PLACES])))))


def of_integers(emit: Emit, x: Any) -> Any:
    """The zero comes off in integers, and the scale divides."""
    wide = emit(op.astype(codes(PLACES, COLUMNS, dtype="uint8", span=4), "int32"))
    centred = emit(op.astype(emit(op.subtract(wide, relax.const(2, "int32"))), "float32"))
    return op.matmul(x, emit(op.divide(centred, floats(1, COLUMNS))))


def dequantized_differences(emit: Emit, x: Any) -> Any:
    """Two zeros come off, one before `dequantize` and one in it."""
    wide = emit(op.astype(codes(PLACES, COLUMNS), "int32"))
    less = emit(op.subtract(wide, relax.const(40, "int32")))
    return op.matmul(x, emit(op.dequantize(less, floats(COLUMNS), relax.const(3, "int32"), axis=1)))


def whole_floats(emit: Emit, x: Any) -> Any:
    """An importer made the codes floats."""
    return op.matmul(x, emit(op.multiply(whole(PLACES, COLUMNS), floats(COLUMNS))))


def filled_up(emit: Emit, x: Any) -> Any:
    """No whole vectors of columns; another kernel reads the result."""
    weights = emit(op.multiply(emit(op.astype(codes(PLACES, 101), "float32")), floats(101)))
    return op.nn.softmax(emit(op.matmul(x, weights)))


KEPT = (scaled, dequantized, in_groups, of_integers, dequantized_differences, whole_floats, filled_up)


def small_groups(emit: Emit, x: Any) -> Any:
    wide = emit(op.astype(codes(PLACES // 8, 8, COLUMNS), "float32"))
    weights = emit(op.multiply(wide, floats(PLACES // 8, 1, COLUMNS)))
    return op.matmul(x, emit(op.reshape(weights, [PLACES, COLUMNS])))


def wide_codes(emit: Emit, x: Any) -> Any:
    return op.matmul(
        x, emit(op.astype(relax.const(RNG.integers(0, 999, (PLACES, COLUMNS)).astype("int16")), "float32"))
    )


def few_weights(emit: Emit, x: Any) -> Any:
    return op.matmul(x, emit(op.astype(codes(PLACES, 4), "float32")))


def half_precision(emit: Emit, x: Any) -> Any:
    """Numbers between -1 and 1 are no codes."""
    return op.matmul(x, emit(op.astype(relax.const(RNG.random((PLACES, COLUMNS)).astype("float16")), "float32")))


def rounded(emit: Emit, x: Any) -> Any:
    """What was scaled is made whole again."""
    wide = emit(op.multiply(emit(op.astype(codes(PLACES, COLUMNS), "float32")), relax.const(0.3, "float32")))
    return op.matmul(x, emit(op.astype(emit(op.astype(wide, "int32")), "float32")))


def wrapped_around(emit: Emit, x: Any) -> Any:
    """The difference does not fit 16 bits."""
    wide = emit(op.astype(codes(PLACES, COLUMNS), "int16"))
    return op.matmul(x, emit(op.astype(emit(op.subtract(wide, relax.const(-32700, "int16"))), "float32")))


def differences(emit: Emit, x: Any) -> Any:
    """No weights that somebody quantised: floats compute exactly by it."""
    return op.matmul(x, relax.const((np.eye(PLACES) - np.eye(PLACES, k=1)).astype("float32")))


def plain_floats(emit: Emit, x: Any) -> Any:
    return op.matmul(x, emit(op.multiply(floats(PLACES, COLUMNS), floats(COLUMNS))))


LEFT_ALONE = (
    small_groups,
    wide_codes,
    few_weights,
    plain_floats,
    half_precision,
    rounded,
    wrapped_around,
    differences,
)


def module(define: Callable[[Emit, Any], Any], *rows: int) -> Any:
    global RNG
    RNG = np.random.default_rng(0)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([*rows, PLACES], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(define(builder.emit, x))
        builder.emit_func_output(result)
    return builder.get()


def kernels(define: Callable[[Emit, Any], Any], *rows: int) -> list[str]:
    mod = simplify(KeepNarrowWeights(1)(module(define, *rows)), TARGET)
    return [task.name for task in extract_tasks(lower_to_kernels(mod, TARGET))]


@pytest.mark.parametrize("define", KEPT, ids=lambda function: str(function.__name__))
def test_what_is_stored_narrow_computes_what_floats_do(define: Callable[[Emit, Any], Any]) -> None:
    mod = module(define, 1, 3)
    assert any("narrow_product" in name for name in kernels(define, 1, 3))
    assert not any("narrow_product" in name for name in kernels(define, 17))
    x = np.random.default_rng(1).standard_normal((1, 3, PLACES)).astype("float32")
    narrow, plain = (
        ModelRunner(build_executable(lower_to_kernels(given, TARGET), TARGET))(x)[0]
        for given in (simplify(KeepNarrowWeights(1)(mod), TARGET), simplify(mod))
    )
    np.testing.assert_allclose(narrow, plain, atol=5e-6 * np.abs(plain).max())


@pytest.mark.parametrize("define", LEFT_ALONE, ids=lambda function: str(function.__name__))
def test_what_cannot_be_stored_narrow_becomes_floats(define: Callable[[Emit, Any], Any]) -> None:
    assert not any("narrow" in name for name in kernels(define, 1))


def test_products_of_integers_stay_such() -> None:
    def both(emit: Emit, x: Any) -> Any:
        scale, zero = relax.const(0.1, "float32"), relax.const(0, "int8")
        stored = emit(op.quantize(x, scale, zero, axis=-1, out_dtype="int8"))
        weights = emit(op.dequantize(codes(PLACES, COLUMNS), relax.const(0.1, "float32"), zero, axis=-1))
        return op.matmul(emit(op.nn.batch_flatten(emit(op.dequantize(stored, scale, zero, axis=-1)))), weights)

    assert not any("narrow" in name for name in kernels(both, 1))


def test_weights_that_caches_hold_become_floats() -> None:
    def small(emit: Emit, x: Any) -> Any:
        return op.matmul(x, emit(op.astype(codes(PLACES, 128), "float32")))

    given = module(small, 1)
    assert tvm_ffi.structural_equal(KeepNarrowWeights()(given), given)
    assert not tvm_ffi.structural_equal(KeepNarrowWeights(1)(given), given)


@pytest.mark.parametrize("value", [np.inf, 1e37])
def test_inputs_out_of_the_ordinary_give_what_floats_do(value: float) -> None:
    def positive(emit: Emit, x: Any) -> Any:
        return op.matmul(x, emit(op.astype(codes(PLACES, COLUMNS, dtype="uint8", span=16), "float32")))

    x = np.ones((1, PLACES), "float32")
    x[0, 7] = value
    narrow, plain = (
        ModelRunner(build_executable(lower_to_kernels(given, TARGET), TARGET))(x)[0]
        for given in (KeepNarrowWeights(1)(module(positive, 1)), simplify(module(positive, 1)))
    )
    np.testing.assert_allclose(narrow, plain, rtol=1e-6)


def test_fast_math_is_not_advised_for_what_it_does_not_change() -> None:
    tiles = Hardware(dot_products=("amx-bf16",))
    flops = 2.0 * 4 * PLACES * COLUMNS
    assert not fast_math_advice(module(in_groups, 4), flops, tiles)
    assert fast_math_advice(module(plain_floats, 4), flops, tiles)


def test_tuned_models_keep_their_weights_narrow(tmp_path: Any) -> None:
    result = eqtune.tune_model(module(in_groups, 1), work_dir=tmp_path / "work", trials=6, seed=0)
    assert [task.name for task in result.tasks] == ["narrow_product"]
    assert result.max_rel_error < 1e-5
    path = tmp_path / "model.so"
    result.export(path)
    assert path.stat().st_size < 4 * PLACES * COLUMNS  # of float32 alone, the weights take that
    x = np.random.default_rng(2).standard_normal((1, PLACES)).astype("float32")
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
    np.testing.assert_array_equal(machine["main"](tvm.runtime.tensor(x)).numpy(), result.run(x)[0])
