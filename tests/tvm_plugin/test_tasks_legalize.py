"""Equal calls get one kernel, in every model: it is written once, and no schedule of one changes the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir
from tvm.relax import op

from eqtune.machine import detect_target
from eqtune.tasks.lower import lower_to_kernels

pytestmark = pytest.mark.unoptimised


def model(build: Any, *shapes: tuple[int, ...]) -> Any:
    inputs = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    builder = relax.BlockBuilder()
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(build(builder.emit, *inputs))
        builder.emit_func_output(result)
    return builder.get()


def products(emit: Any, x: Any, y: Any) -> Any:
    return op.nn.softmax(emit(op.matmul(emit(op.nn.relu(emit(op.matmul(x, y)))), y)))


def lowered(mod: Any) -> Any:
    return lower_to_kernels(mod, detect_target(2))


def test_a_kernel_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mod, written = model(products, (3, 41), (41, 41)), []
    write = relax.BlockBuilder.call_te
    monkeypatch.setattr(relax.BlockBuilder, "call_te", lambda *a, **k: written.append(a[1]) or write(*a, **k))
    first = lowered(mod)
    assert len(written) == 3, "two products are equal"
    tvm.ir.assert_structural_equal(lowered(mod), first)
    assert len(written) == 3


def test_schedules_change_their_own_copy() -> None:
    mod = model(products, (5, 43), (43, 43))
    first = lowered(mod)
    kept = tvm.ir.load_json(tvm.ir.save_json(first))
    for function in first.functions.values():
        if isinstance(function, tvm.tirx.PrimFunc):
            schedule = s_tir.Schedule(tvm.IRModule({"main": function}))
            for block in schedule.get_child_blocks(schedule.get_sblock("root")):
                schedule.split(schedule.get_loops(block)[0], [None, 1])
    del first, function, schedule
    tvm.ir.assert_structural_equal(lowered(mod), kept)


def test_scalars_sizes_and_places_of_operands_are_told_apart() -> None:
    def build(emit: Any, x: Any, y: Any) -> Any:
        parts = [emit(op.add(x, relax.const(number, "float32"))) for number in (1.0, 2.0)]
        parts += [emit(op.subtract(x, x)), emit(op.subtract(x, y)), emit(op.subtract(y, x))]
        cuts = ((parts[0], 1), (parts[1], 3), (parts[2], 3))
        first, second, _ = (emit(op.split(part, [cut], axis=1)) for part, cut in cuts)
        parts += [emit(op.concat([emit(relax.TupleGetItem(first, 1)), emit(relax.TupleGetItem(second, 0))], axis=1))]
        parts += [emit(op.strided_slice(x, [1], [begin], [begin + 3])) for begin in (0, 2)]
        return relax.Tuple([*parts, emit(op.sum(x, axis=[0])), emit(op.sum(x, axis=[1]))])

    executable = tvm.compile(lowered(model(build, (4, 6), (4, 6))), target=detect_target(2))
    x, y = np.random.default_rng(0).standard_normal((2, 4, 6)).astype("float32")
    found = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y))
    joined = np.concatenate([(x + 1)[:, 1:], (x + 2)[:, :3]], 1)
    wanted = [x + 1, x + 2, x - x, x - y, y - x, joined, x[:, :3], x[:, 2:5], x.sum(0), x.sum(1)]
    for array, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(array.numpy(), expected, rtol=1e-5)


def test_a_size_that_depends_on_data_is_computed_again() -> None:
    def build(emit: Any, x: Any, y: Any) -> Any:
        end = emit(op.astype(emit(op.sum(y, axis=[1])), "int64"))
        begin, strides = (relax.const(np.array([number], "int64"), "int64") for number in (0, 1))
        return op.dynamic_strided_slice(emit(op.squeeze(x, [0])), begin, end, strides)

    mod, x = model(build, (1, 7), (1, 2)), np.arange(7, dtype="float32")[None]
    for first in (2, 3):  # the second model has the same kernels
        executable = tvm.compile(lowered(mod), target=detect_target(2))
        given = [tvm.runtime.tensor(array) for array in (x, np.array([[first, 1]], "float32"))]
        np.testing.assert_array_equal(
            relax.VirtualMachine(executable, tvm.cpu())["main"](*given).numpy(), x[0, : first + 1]
        )


def test_images_are_resized_to_another_dtype() -> None:
    def build(emit: Any, x: Any, y: Any) -> Any:
        images = {"uint8": emit(op.astype(x, "uint8")), "float32": x}
        resized = [emit(op.image.resize2d(image, (4, 6), out_dtype="float32")) for image in images.values()]
        return relax.Tuple([*resized, emit(op.image.resize2d(y, (4, 6), out_dtype="int32"))])

    executable = tvm.compile(lowered(model(build, (1, 1, 2, 3), (1, 1, 2, 3))), target=detect_target(2))
    x = np.array([[[[0, 250, 3], [9, 40, 255]]]], "float32")
    given = [tvm.runtime.tensor(array) for array in (x, x + 0.9)]
    from_bytes, from_floats, whole = (
        array.numpy() for array in relax.VirtualMachine(executable, tvm.cpu())["main"](*given)
    )
    np.testing.assert_array_equal(from_bytes, from_floats)
    assert from_bytes[0, 0, 0, 1] == 62.5
    assert whole.dtype == "int32"
    assert whole[0, 0, 0, 1] == 63
