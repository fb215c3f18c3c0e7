"""Heads that share keys and values multiply them as they are, and the larger operand of a product is not copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from eqtune.compile.executable import build_executable
from eqtune.machine import detect_target
from eqtune.relax_ir.functions import operator, top_level_bindings
from eqtune.relax_ir.tensors import extents
from eqtune.runtime import ModelRunner
from eqtune.tasks import lower_to_kernels
from eqtune.transform import JoinSharedHeads, ScaleSmallerOperand, SimplifyShapes

pytestmark = pytest.mark.unoptimised

op = relax.op
TARGET = detect_target(1)
KEYS, GROUP, PLACES, DEPTH = 2, 4, 24, 8

Emit = Callable[[Any], Any]
Shapes = dict[str, tuple[int, ...]]


def module(define: Callable[..., Any], shapes: Shapes) -> Any:
    builder = relax.BlockBuilder()
    inputs = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()}
    with builder.function("main", list(inputs.values())):
        with builder.dataflow():
            result = builder.emit_output(define(builder.emit, **inputs))
        builder.emit_func_output(result)
    return builder.get()


def operators(mod: Any) -> list[str]:
    return [operator(binding.value) for binding in top_level_bindings(mod["main"])]


def outputs(mod: Any) -> Any:
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(extents(param.ty), np.float32) for param in mod["main"].params]
    return ModelRunner(build_executable(lower_to_kernels(mod, TARGET), TARGET))(*inputs)[0]


def assert_rewritten(given: Any, *passes: Any) -> Any:
    """That the passes change the module, and not what it computes."""
    changed = tvm.transform.Sequential(list(passes))(given)
    assert not tvm_ffi.structural_equal(changed, given)
    expected = outputs(given)
    np.testing.assert_allclose(outputs(changed), expected, atol=1e-6 * np.abs(expected).max())
    return changed


def expanded(emit: Emit, keys: Any) -> Any:
    """[1, keys, ..] as [1, keys * group, ..], as PyTorch's exporter and Hugging Face write it."""
    rest = extents(keys.ty)[2:]
    every = emit(op.broadcast_to(emit(op.expand_dims(keys, 2)), [1, KEYS, GROUP, *rest]))
    return emit(op.reshape(every, [1, KEYS * GROUP, *rest]))


def values(emit: Emit, x: Any, cache: Any) -> Any:
    return op.matmul(x, expanded(emit, cache))


def scaled_keys(emit: Emit, x: Any, cache: Any) -> Any:
    """PyTorch's attention: the keys are flattened, turned and scaled."""
    flat = emit(op.reshape(expanded(emit, cache), [KEYS * GROUP, PLACES, DEPTH]))
    turned = emit(op.reshape(emit(op.permute_dims(flat, [0, 2, 1])), [1, KEYS * GROUP, DEPTH, PLACES]))
    return op.matmul(x, emit(op.multiply(turned, relax.const(np.full((1, 1, 1, 1), 0.5, "float32")))))


def repeated(emit: Emit, x: Any, cache: Any) -> Any:
    return op.matmul(x, emit(op.repeat(cache, GROUP, 1)))


def one_for_all(emit: Emit, x: Any, cache: Any) -> Any:
    return op.matmul(x, emit(op.strided_slice(cache, [1], [0], [1])))


def shapes(rows: int, transposed: bool = False) -> Shapes:
    return {
        "x": (1, KEYS * GROUP, rows, DEPTH if transposed else PLACES),
        "cache": (1, KEYS, PLACES, DEPTH),
    }


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("define", [values, scaled_keys, repeated, one_for_all], ids=lambda f: str(f.__name__))
def test_shared_keys_and_values_are_not_repeated(define: Callable[..., Any], rows: int) -> None:
    given = module(define, shapes(rows, define is scaled_keys))
    changed = assert_rewritten(given, JoinSharedHeads())
    assert not {"relax.broadcast_to", "relax.repeat"} & set(operators(changed))
    (product,) = (b.value for b in top_level_bindings(changed["main"]) if operator(b.value) == "relax.matmul")
    heads = 1 if define is one_for_all else KEYS
    assert extents(product.args[0].ty)[1:3] == [heads, KEYS * GROUP // heads * rows]


def test_heads_of_many_rows_stay_apart() -> None:
    given = module(values, shapes(4))
    assert tvm_ffi.structural_equal(JoinSharedHeads()(given), given)


def test_what_is_repeated_in_turns_stays_so() -> None:
    """Heads 0, 1, 0, 1 ... share what does not lie together."""

    def in_turns(emit: Emit, x: Any, cache: Any) -> Any:
        rest = extents(cache.ty)[2:]
        every = emit(op.broadcast_to(emit(op.expand_dims(cache, 1)), [1, GROUP, KEYS, *rest]))
        return op.matmul(x, emit(op.reshape(every, [1, KEYS * GROUP, *rest])))

    given = module(in_turns, shapes(1))
    assert outputs(JoinSharedHeads()(given)).shape == outputs(given).shape
    np.testing.assert_allclose(outputs(JoinSharedHeads()(given)), outputs(given), rtol=1e-5)


def test_the_query_is_scaled_and_not_the_keys() -> None:
    given = module(scaled_keys, shapes(1, True))
    changed = assert_rewritten(given, ScaleSmallerOperand(), JoinSharedHeads(), SimplifyShapes())
    (scale,) = (b.value for b in top_level_bindings(changed["main"]) if operator(b.value) == "relax.multiply")
    assert extents(scale.ty) == [1, KEYS * GROUP, 1, DEPTH]
    (turned,) = (b.value for b in top_level_bindings(changed["main"]) if operator(b.value) == "relax.permute_dims")
    assert extents(turned.args[0].ty) == list(shapes(1)["cache"])  # as it is, without a copy in another shape


def test_a_larger_query_stays_as_it_is() -> None:
    given = module(scaled_keys, {"x": (1, KEYS * GROUP, 64, DEPTH), "cache": (1, KEYS, PLACES, DEPTH)})
    assert tvm_ffi.structural_equal(ScaleSmallerOperand()(given), given)


@pytest.mark.parametrize("number", [0.0, np.inf, 1e30])
def test_numbers_that_floats_do_not_survive_stay_where_they_are(number: float) -> None:
    def scaled(emit: Emit, x: Any, y: Any) -> Any:
        return op.matmul(x, emit(op.multiply(y, relax.const(number, "float32"))))

    given = module(scaled, {"x": (2, 8), "y": (8, 40)})
    assert tvm_ffi.structural_equal(ScaleSmallerOperand()(given), given)


def test_deep_models_are_passed_through() -> None:
    def deep(emit: Emit, x: Any, cache: Any) -> Any:
        for _ in range(1500):
            cache = emit(op.nn.relu(cache))
        return op.matmul(x, emit(op.multiply(cache, relax.const(2.0, "float32"))))

    given = module(deep, {"x": (1, KEYS, 1, PLACES), "cache": (1, KEYS, PLACES, DEPTH)})
    changed = ScaleSmallerOperand()(JoinSharedHeads()(given))
    assert operators(changed).count("relax.nn.relu") == 1500


def test_what_another_block_computes_stays_there() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, KEYS * GROUP, 1, PLACES), "float32"))
    cache = relax.Var("cache", relax.TensorType((1, KEYS, PLACES, DEPTH), "float32"))
    with builder.function("main", [x, cache]):
        with builder.dataflow():
            own = builder.emit(op.nn.relu(cache))
            y = builder.emit_output(op.repeat(own, GROUP, 1))
        builder.emit_func_output(builder.emit(op.matmul(x, y)))
    changed = ScaleSmallerOperand()(JoinSharedHeads()(builder.get()))
    relax.analysis.well_formed(changed)  # raises where it is not
    np.testing.assert_allclose(outputs(changed), outputs(builder.get()), rtol=1e-5)


def test_numbers_of_float16_stay_with_their_operand() -> None:
    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType(shape, "float16")) for name, shape in (("x", (2, 8)), ("y", (8, 40))))
    with builder.function("main", [x, y]):
        with builder.dataflow():
            scaled = builder.emit(op.multiply(y, relax.const(1000.0, "float16")))
            result = builder.emit_output(op.matmul(x, scaled))
        builder.emit_func_output(result)
    given = builder.get()
    assert tvm_ffi.structural_equal(ScaleSmallerOperand()(given), given)
