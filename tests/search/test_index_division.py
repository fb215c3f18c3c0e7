"""Reversed and rolled indices that are divided: kernels read what the index says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.ir.expr import TensorLoad
from tvm.script import tirx as T

from eqtune.compile.executable import build_scheduled
from eqtune.compile.untuned import untuned_executable
from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner
from eqtune.search.space.byte_tables import table_index
from eqtune.search.space.expressions import evaluate, nodes_of
from eqtune.search.space.index_division import keep_index_divisions
from eqtune.transform import ApplyTuned, LowerToKernels

op = relax.op
div, mod = tirx.floordiv, tirx.floormod
PIXELS = np.arange(24, dtype="float32").reshape(1, 12, 2)

INDICES: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    "reversed": ((48,), lambda v: div(mod(47 - v, 4), 2)),
    "reversed quotient": ((12,), lambda v: div(11 - div(v, 2), 3)),
    "reversed below zero": ((12,), lambda v: 4 + div(5 - v, 3)),
    "reversed rows of columns": ((6, 8), lambda i, j: mod(div(47 - i * 8 - j, 3), 4)),
    "offsets within offsets": ((16,), lambda v: div(mod(v + 2, 12) + 1, 12)),
    "below zero within": ((24,), lambda v: 1 + div(div(v - 1, 3), 3)),
}


def indexed(name: str) -> tuple[Any, Any]:
    """A kernel that reads a table of places at that index, and the places that it must read."""
    shape, index = INDICES[name]
    table = te.placeholder((64,), name="table", dtype="int32")
    found = []

    def value(*axes: Any) -> Any:
        found.append(evaluate(index(*axes), dict(zip(axes, np.indices(shape, "int32"), strict=True))))
        return table[index(*axes)]

    kernel = te.create_prim_func([table, te.compute(shape, value, name="places")])
    return kernel, np.broadcast_to(found[0], shape)


def read(kernel: Any, shape: tuple[int, ...]) -> Any:
    library = tvm.compile(tvm.IRModule({"main": kernel}), tvm.target.Target("llvm")).jit()
    output = tvm.runtime.tensor(np.full(shape, -1, "int32"))
    library["main"](tvm.runtime.tensor(np.arange(64, dtype="int32")), output)
    return output.numpy()


@pytest.mark.parametrize("name", INDICES)
def test_kernels_read_where_the_index_says(name: str) -> None:
    kernel, places = indexed(name)
    np.testing.assert_array_equal(read(keep_index_divisions(kernel), places.shape), places)


@pytest.mark.parametrize("name", ["reversed rows of columns", "reversed quotient"])
def test_loops_that_are_fused_and_split(name: str) -> None:
    kernel, places = indexed(name)
    schedule = tvm.s_tir.Schedule(kernel)
    loops = schedule.get_loops("places")
    schedule.split(schedule.fuse(*loops) if len(loops) > 1 else loops[0], [None, 4])
    np.testing.assert_array_equal(read(keep_index_divisions(schedule.mod["main"]), places.shape), places)


def test_rising_indices_stay() -> None:
    table = te.placeholder((64,), name="table")
    kernel = te.create_prim_func([table, te.compute((48,), lambda v: table[div(v, 4) + 3 - mod(v, 4)])])
    assert keep_index_divisions(kernel).same_as(kernel)


@pytest.mark.parametrize(("divide", "of_numpy"), [(div, np.floor_divide), (mod, np.mod)], ids=["quotient", "remainder"])
def test_bytes_by_which_a_table_is_asked_are_divided_as_bytes(divide: Any, of_numpy: Any) -> None:
    """Not in 32 bits, as indices are."""
    x, table = te.placeholder((200,), "int8", "x"), te.placeholder((256,), "int32", "table")
    three, two = (tirx.const(number, "int8") for number in (3, 2))
    y = te.compute((200,), lambda i: table[table_index(divide(x[i] + three, two))])
    kernel = te.create_prim_func([x, table, y])
    assert keep_index_divisions(kernel).same_as(kernel)
    library = tvm.compile(tvm.IRModule({"main": kernel}), tvm.target.Target("llvm")).jit()
    bytes_, places = np.arange(-100, 100).astype("int8"), np.arange(256, dtype="int32")
    output = tvm.runtime.tensor(np.full(200, -1, "int32"))
    library["main"](tvm.runtime.tensor(bytes_), tvm.runtime.tensor(places), output)
    np.testing.assert_array_equal(output.numpy(), of_numpy(bytes_ + np.int8(3), np.int8(2)).view("uint8"))


def repeated_and_reversed() -> Any:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(PIXELS.shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            flat = builder.emit(op.reshape(builder.emit(op.repeat(x, 2, axis=2)), (48,)))
            y = builder.emit_output(op.multiply(builder.emit(op.flip(flat, 0)), relax.const(2.0)))
        builder.emit_func_output(y)
    return builder.get()


def test_repeated_and_reversed_pixels_in_one_kernel() -> None:
    model, target = repeated_and_reversed(), detect_target()
    want = 2 * np.repeat(PIXELS, 2, 2).reshape(48)[::-1]
    built = relax.build(model, target, relax_pipeline="eqtune")
    np.testing.assert_array_equal(ModelRunner(built)(PIXELS)[0], want)
    with target:
        kernels = ApplyTuned(estimate=True)(LowerToKernels()(model))
    assert sum(isinstance(function, tirx.PrimFunc) for function in kernels.functions.values()) == 1
    np.testing.assert_array_equal(ModelRunner(build_scheduled(kernels, target))(PIXELS)[0], want)


@pytest.mark.parametrize("plain", [False, True])
def test_the_reference_of_a_kernel_of_the_users_own(plain: bool) -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(PIXELS.shape, "float32"))

    def reverse(pixels: Any) -> Any:
        return te.compute((48,), lambda v: pixels[0, div(mod(47 - v, 48), 4), div(mod(47 - v, 4), 2)])

    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(builder.call_te(reverse, x))
        builder.emit_func_output(y)
    (got,) = ModelRunner(untuned_executable(builder.get(), detect_target(), plain=plain))(PIXELS)
    np.testing.assert_array_equal(got, np.repeat(PIXELS, 2, 2).reshape(48)[::-1])


def test_a_kernel_without_a_schedule() -> None:
    kernel, _ = indexed("reversed")
    module = tvm.IRModule({"kernel": kernel.with_attr("global_symbol", "kernel")})
    assert not tvm_ffi.structural_equal(ApplyTuned()(module)["kernel"], module["kernel"])


@T.prim_func(s_tir=True)
def joined(x: T.Buffer((8, 32), "float32"), z: T.Buffer((8, 16), "float32"), y: T.Buffer((8, 64), "float32")) -> None:
    for i, j in T.grid(8, 64):
        with T.sblock("y"):
            row, column = T.axis.remap("SS", [i, j])
            y[row, column] = T.if_then_else(
                column >= 16,
                T.if_then_else(
                    column < 48, x[(row + (column - 16) // 32) % 8, (column - 16) % 32], z[row, column % 16]
                ),
                z[row, column % 16],
            )


def test_what_a_condition_says_of_a_dividend() -> None:
    """As where reshaped images are joined: with divisions that stay, elements would be read one by one."""
    kept = keep_index_divisions(joined)
    (store,) = nodes_of(kept.body, tirx.BufferStore)
    loads = nodes_of(store.value, TensorLoad)
    indices = [[str(index) for index in load.indices] for load in loads]
    assert indices == [["row", "column - 16"], ["row", "column - 48"], ["row", "column"]]
    library = tvm.compile(tvm.IRModule({"main": kept}), tvm.target.Target("llvm")).jit()
    values = [np.arange(8 * width, dtype="float32").reshape(8, width) for width in (32, 16)]
    output = tvm.runtime.tensor(np.full((8, 64), -1, "float32"))
    library["main"](*map(tvm.runtime.tensor, values), output)
    np.testing.assert_array_equal(output.numpy(), np.concatenate([values[1], values[0], values[1]], 1))
