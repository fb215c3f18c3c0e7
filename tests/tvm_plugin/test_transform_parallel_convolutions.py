"""Convolutions of one tensor that are added become one; everything else stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from eqtune.compile.executable import build_executable
from eqtune.machine import detect_target
from eqtune.relax_ir.functions import operator
from eqtune.runtime import ModelRunner
from eqtune.tasks import lower_to_kernels
from eqtune.transform import JoinParallelConvolutions
from eqtune.transform.simplify import simplify

pytestmark = pytest.mark.unoptimised

TARGET = detect_target(1)
op = relax.op
Define = Callable[..., Any]
random = np.random.default_rng(0)


def constant(*shape: int, dtype: str = "float32") -> Any:
    return relax.const(random.standard_normal(shape).astype(dtype))


def module(define: Define, *shapes: tuple[Any, ...], dtype: str = "float32") -> Any:
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"x{number}", relax.TensorType(shape, dtype)) for number, shape in enumerate(shapes)]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(define(builder.emit, *inputs))
        builder.emit_func_output(result)
    return builder.get()


def convolutions(mod: Any) -> list[tuple[int, ...]]:
    """Shapes of the kernels."""
    values = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    return [tuple(map(int, v.args[1].ty.shape)) for v in values if operator(v).startswith("relax.nn.conv")]


def summed(emit: Any, *terms: Any) -> Any:
    total = terms[0]
    for term in terms[1:]:
        total = emit(op.add(total, emit(term) if isinstance(term, relax.Call) else term))
    return op.nn.relu(total)


def repvgg(emit: Any, x: Any) -> Any:
    """As batch norms leave it: a bias behind each, the data times a number a channel."""
    square = emit(op.add(emit(op.nn.conv2d(x, constant(8, 8, 3, 3), padding=1)), constant(1, 8, 1, 1)))
    point = emit(op.add(emit(op.nn.conv2d(x, constant(8, 8, 1, 1))), constant(8, 1, 1)))
    scaled = emit(op.add(emit(op.multiply(constant(1, 8, 1, 1), x)), constant(1, 8, 1, 1)))
    return summed(emit, scaled, square, point)


def depthwise(emit: Any, x: Any) -> Any:
    wide = emit(op.nn.conv2d(x, constant(8, 1, 5, 3), padding=(2, 1), groups=8))
    return summed(emit, x, wide, op.nn.conv2d(x, constant(8, 1, 3, 3), padding=1, groups=8))


def strided(emit: Any, x: Any) -> Any:
    wide = emit(op.nn.conv2d(x, constant(4, 8, 3, 3), strides=2, padding=1))
    return summed(emit, wide, op.nn.conv2d(x, constant(4, 8, 1, 1), strides=2))


def dilated(emit: Any, x: Any) -> Any:
    wide = emit(op.nn.conv2d(x, constant(4, 8, 3, 3), padding=2, dilation=2))
    return summed(emit, wide, op.nn.conv2d(x, constant(4, 8, 1, 1)))


def crossed(emit: Any, x: Any) -> Any:
    wide = emit(op.nn.conv2d(x, constant(4, 8, 3, 3), padding=1))
    high = op.nn.conv2d(x, constant(4, 8, 3, 1), padding=(1, 0))
    return summed(emit, wide, high, op.nn.conv2d(x, constant(4, 8, 1, 3), padding=(0, 1)))


def grouped(emit: Any, x: Any) -> Any:
    x_scaled = emit(op.multiply(x, constant(8, 1, 1)))
    return summed(emit, x, x_scaled, op.nn.conv2d(x, constant(8, 4, 3, 3), padding=1, groups=2))


def twice(emit: Any, x: Any) -> Any:
    pads = (0, 1, 2, 1)
    first = emit(op.nn.conv2d(x, constant(8, 8, 3, 3), padding=pads))
    return summed(emit, first, op.nn.conv2d(x, constant(8, 8, 3, 3), padding=pads))


def signal(emit: Any, x: Any) -> Any:
    return summed(emit, x, op.nn.conv1d(x, constant(8, 8, 3), padding=1))


def volume(emit: Any, x: Any) -> Any:
    return summed(emit, x, op.nn.conv3d(x, constant(8, 8, 3, 1, 3), padding=(1, 0, 1)))


def with_others(emit: Any, x: Any, y: Any) -> Any:
    """Another input, a constant image and a residual stay summands."""
    wide = emit(op.nn.conv2d(x, constant(8, 8, 3, 3), padding=1))
    other = op.nn.conv2d(y, constant(8, 8, 1, 1))
    return summed(emit, y, wide, constant(1, 8, 5, 6), other, op.nn.conv2d(x, constant(8, 8, 1, 1)))


IMAGE = (2, 8, 5, 6)
CASES: dict[str, tuple[Define, list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "repvgg": (repvgg, [IMAGE], [(8, 8, 3, 3)]),
    "depthwise": (depthwise, [IMAGE], [(8, 1, 5, 3)]),
    "strided": (strided, [IMAGE], [(4, 8, 3, 3)]),
    "dilated": (dilated, [IMAGE], [(4, 8, 3, 3)]),
    "crossed": (crossed, [IMAGE], [(4, 8, 3, 3)]),
    "grouped": (grouped, [IMAGE], [(8, 4, 3, 3)]),
    "twice": (twice, [IMAGE], [(8, 8, 3, 3)]),
    "signal": (signal, [(2, 8, 7)], [(8, 8, 3)]),
    "volume": (volume, [(1, 8, 3, 4, 5)], [(8, 8, 3, 1, 3)]),
    "with others": (with_others, [IMAGE, IMAGE], [(8, 8, 3, 3), (8, 8, 1, 1)]),
}


@pytest.mark.parametrize("name", CASES)
def test_branches_become_one_convolution(name: str) -> None:
    define, shapes, kernels = CASES[name]
    mod = module(define, *shapes)
    joined = JoinParallelConvolutions()(mod)
    assert len(convolutions(joined)) < len(convolutions(mod)) or name in ("grouped", "signal", "volume")
    assert sorted(convolutions(joined)) == sorted(kernels)
    inputs = [np.random.default_rng(1).standard_normal(shape).astype("float32") for shape in shapes]
    want, got = (
        ModelRunner(build_executable(lower_to_kernels(each, TARGET), TARGET))(*inputs)[0] for each in (mod, joined)
    )
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_every_model_is_joined_with_an_open_batch_as_well() -> None:
    batch = tvm.tirx.Var("n", "int64")
    for count in (2, batch):
        assert convolutions(simplify(module(repvgg, (count, *IMAGE[1:])), TARGET)) == [(8, 8, 3, 3)]


def of_two(emit: Any, x: Any, y: Any) -> Any:
    first = emit(op.nn.conv2d(x, constant(8, 8, 3, 3), padding=1))
    return summed(emit, first, op.nn.conv2d(y, constant(8, 8, 3, 3), padding=1))


def neither_holds_the_other(emit: Any, x: Any) -> Any:
    high = emit(op.nn.conv2d(x, constant(8, 8, 3, 1), padding=(1, 0)))
    return summed(emit, high, op.nn.conv2d(x, constant(8, 8, 1, 3), padding=(0, 1)))


def needed_elsewhere(emit: Any, x: Any) -> Any:
    first = emit(op.nn.conv2d(x, constant(8, 8, 3, 3), padding=1))
    point = emit(op.nn.conv2d(x, constant(8, 8, 1, 1)))
    return op.multiply(emit(op.add(first, point)), emit(op.add(emit(op.nn.relu(first)), emit(op.nn.relu(point)))))


def other_steps(emit: Any, x: Any) -> Any:
    wide = emit(op.nn.conv2d(x, constant(8, 8, 3, 3), padding=1))
    return summed(emit, wide, op.nn.conv2d(x, constant(8, 8, 3, 3), padding=2, dilation=2))


def other_groups(emit: Any, x: Any) -> Any:
    wide = emit(op.nn.conv2d(x, constant(8, 1, 3, 3), padding=1, groups=8))
    return summed(emit, wide, op.nn.conv2d(x, constant(8, 8, 1, 1)))


def residual(emit: Any, x: Any) -> Any:
    inside = emit(op.nn.relu(emit(op.nn.conv2d(x, constant(8, 8, 3, 3), padding=1))))
    return summed(emit, x, op.nn.conv2d(inside, constant(8, 8, 3, 3), padding=1))


def seen_otherwise(emit: Any, x: Any) -> Any:
    """What match_cast makes of a tensor is checked when it runs."""
    wide = emit(op.nn.conv2d(x, constant(8, 8, 3, 3), padding=1))
    seen = relax.MatchCast(relax.DataflowVar("seen", wide.ty), wide, wide.ty)
    relax.BlockBuilder.current().emit_normalized(seen)
    return summed(emit, seen.var, op.nn.conv2d(x, constant(8, 8, 1, 1)))


@pytest.mark.parametrize(
    "define", [seen_otherwise, of_two, neither_holds_the_other, needed_elsewhere, other_steps, other_groups, residual]
)
def test_other_sums_stay(define: Define) -> None:
    mod = module(define, *[IMAGE] * (2 if define is of_two else 1))
    tvm.ir.assert_structural_equal(JoinParallelConvolutions()(mod), mod)


def test_sums_of_short_numbers_stay() -> None:
    def integers(emit: Any, x: Any) -> Any:
        wide, point = (relax.const(np.full((8, 8, n, n), 100, "int8")) for n in (3, 1))
        wide = emit(op.nn.conv2d(x, wide, padding=1, out_dtype="float32"))
        return summed(emit, wide, op.nn.conv2d(x, point, out_dtype="float32"))

    mod = module(integers, IMAGE, dtype="int8")
    tvm.ir.assert_structural_equal(JoinParallelConvolutions()(mod), mod)


def test_packed_channels_stay() -> None:
    def packed(emit: Any, x: Any) -> Any:
        layouts = {"data_layout": "NCHW4c", "kernel_layout": "OIHW4i4o"}
        wide = emit(op.nn.conv2d(x, constant(2, 2, 3, 3, 4, 4), padding=1, **layouts))
        return summed(emit, wide, op.nn.conv2d(x, constant(2, 2, 1, 1, 4, 4), **layouts))

    mod = module(packed, (1, 2, 5, 6, 4))
    tvm.ir.assert_structural_equal(JoinParallelConvolutions()(mod), mod)


def test_roundings_of_short_floats_stay() -> None:
    def halves(emit: Any, x: Any) -> Any:
        wide = emit(op.nn.conv2d(x, constant(8, 8, 3, 3, dtype="float16"), padding=1))
        return summed(emit, wide, op.nn.conv2d(x, constant(8, 8, 1, 1, dtype="float16")))

    mod = module(halves, IMAGE, dtype="float16")
    tvm.ir.assert_structural_equal(JoinParallelConvolutions()(mod), mod)
