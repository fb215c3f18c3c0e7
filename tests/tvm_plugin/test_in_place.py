"""Results in the memory of what is read for the last time: where that may be, and where it would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.relax import op

from eqtune.compile.executable import after_kernels, build_scheduled
from eqtune.machine import detect_target
from eqtune.pipeline import cheapest_form

pytestmark = pytest.mark.unoptimised

RNG = np.random.default_rng(0)
ROWS, WIDTH = 640, 512
WEIGHTS = [RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 16 for _ in range(4)]
X = RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)

Emit = Callable[[Any], Any]


def times(emit: Emit, x: Any, number: int) -> Any:
    return emit(op.matmul(x, relax.const(WEIGHTS[number])))


def last_residual(emit: Emit, x: Any) -> Any:
    first = times(emit, x, 0)
    return emit(op.nn.relu(emit(op.add(times(emit, emit(op.nn.relu(times(emit, first, 1))), 2), first))))


def read_later(emit: Emit, x: Any) -> Any:
    first = times(emit, x, 0)
    second = emit(op.add(times(emit, times(emit, first, 1), 2), first))
    return relax.Tuple([second, times(emit, first, 3)])


def read_elsewhere_by_the_same_kernel(emit: Emit, x: Any) -> Any:
    first = times(emit, x, 0)
    return emit(op.add(times(emit, first, 1), first))


def an_input(emit: Emit, x: Any) -> Any:
    return emit(op.add(times(emit, times(emit, x, 0), 1), x))


def seen_as_another_shape(emit: Emit, x: Any) -> Any:
    first = times(emit, x, 0)
    view = emit(op.reshape(first, [ROWS * 2, WIDTH // 2]))
    second = emit(op.add(times(emit, times(emit, first, 1), 2), first))
    return relax.Tuple([second, emit(op.matmul(view, relax.const(WEIGHTS[3][: WIDTH // 2, : WIDTH // 2])))])


def returned(emit: Emit, x: Any) -> Any:
    first = times(emit, x, 0)
    return relax.Tuple([first, emit(op.add(times(emit, times(emit, first, 1), 2), first))])


def joined_in_place(emit: Emit, x: Any) -> Any:
    """Two kernels write their half of the result each; the first one reads something of the shape of the whole."""
    whole = emit(op.concat([times(emit, x, 0), times(emit, x, 1)], 1))
    second = times(emit, emit(op.nn.softmax(emit(op.strided_slice(whole, [1], [WIDTH], [2 * WIDTH])))), 2)
    first = emit(op.add(times(emit, emit(op.nn.softmax(x)), 3), emit(op.strided_slice(whole, [1], [0], [WIDTH]))))
    return emit(op.concat([first, second], 1))


def module(compute: Callable[[Emit, Any], Any], rows: Any = ROWS) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType((rows, WIDTH), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(compute(builder.emit, x))
        builder.emit_func_output(result)
    return builder.get()


def scheduled(mod: tvm.IRModule, target: Any) -> tvm.IRModule:
    with target:
        return cheapest_form(mod, target, {}, graph=False).scheduled()


def allocated(mod: tvm.IRModule, target: Any) -> int:
    """Tensors that a run allocates, but for those of other functions."""
    calls: list[Any] = []
    with target:
        main = tvm.transform.Sequential(after_kernels())(mod)["main"]
    tvm_ffi.structural_walk(main.body, (relax.Call, calls.append))
    return sum(getattr(call.op, "name", "") == "relax.vm.alloc_tensor" for call in calls)


def outputs(mod: tvm.IRModule, target: Any, x: np.ndarray) -> list[np.ndarray]:
    result = relax.VirtualMachine(build_scheduled(mod, target), tvm.cpu())["main"](tvm.runtime.tensor(x))
    return [one.numpy() for one in ([result] if isinstance(result, tvm.runtime.Tensor) else result)]


@pytest.mark.parametrize(
    ("compute", "overwritten"),
    [
        (last_residual, 1),
        (read_later, 0),
        (read_elsewhere_by_the_same_kernel, 0),
        (an_input, 0),
        (seen_as_another_shape, 0),
        (returned, 0),
        (joined_in_place, 0),
    ],
)
def test_what_is_read_for_the_last_time_is_overwritten(
    compute: Any, overwritten: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the sum may lie in its residual's memory, one tensor less is allocated; nothing else changes."""
    target = detect_target(threads=2)
    mod = scheduled(module(compute), target)
    tensors, found = allocated(mod, target), outputs(mod, target, X)
    monkeypatch.setattr("eqtune.compile.executable.WriteInPlace", relax.transform.ToNonDataflow)  # does nothing more
    assert allocated(mod, target) - tensors == overwritten
    for one, other in zip(found, outputs(mod, target, X), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_a_function_returns_is_not_overwritten() -> None:
    """Its argument, perhaps."""
    builder, target = relax.BlockBuilder(), detect_target(threads=2)
    ty = relax.TensorType((ROWS, WIDTH), "float32")
    given, x = relax.Var("given", ty), relax.Var("x", ty)
    with builder.function("same", [given], private=True):
        builder.emit_func_output(relax.Tuple([given, builder.emit(op.nn.softmax(given))]))
    with builder.function("main", [x]):
        first = builder.emit(op.nn.softmax(x))
        both = builder.emit(relax.Call(builder.get().get_global_var("same"), [first]))
        total = builder.emit(op.add(first, builder.emit(op.nn.softmax(builder.emit(op.multiply(x, x))))))
        builder.emit_func_output(relax.Tuple([total, builder.emit(op.nn.softmax(relax.TupleGetItem(both, 0)))]))
    _, found = outputs(scheduled(builder.get(), target), target, X)
    np.testing.assert_allclose(found, softmax(softmax(X)), rtol=1e-4)


def test_of_several_results_none_is_written_in_place() -> None:
    rows, columns = (tirx.IntImm("int64", extent) for extent in (ROWS, WIDTH))

    def twice(a: Any) -> list[Any]:
        single = te.compute((rows,), lambda i: tirx.const(1.0, "float32"))
        return [single, te.compute((rows, columns), lambda i, j: a[i, j] * tirx.const(2.0, "float32"))]

    builder, target = relax.BlockBuilder(), detect_target(threads=2)
    x = relax.Var("x", relax.TensorType((ROWS, WIDTH), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            first = builder.emit(op.nn.softmax(x))
            again = builder.emit(op.nn.softmax(first))
            both = builder.emit_te(twice, first)
            parts = [builder.emit(relax.TupleGetItem(both, place)) for place in range(2)]
            result = builder.emit_output(relax.Tuple([*parts, again]))
        builder.emit_func_output(result)
    single, found, _ = outputs(scheduled(builder.get(), target), target, X)
    np.testing.assert_array_equal(single, np.ones(ROWS, np.float32))
    np.testing.assert_allclose(found, 2 * softmax(X), rtol=1e-4)


def softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def test_small_results_stay_where_they_are() -> None:
    target = detect_target(threads=2)
    assert allocated(scheduled(module(last_residual, 16), target), target) == 3


def test_images_of_an_open_batch_are_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads compute an image each; rows of any number, some of which are computed twice, are not."""
    target, n = detect_target(threads=2), tirx.Var("n", "int64")
    filters = [RNG.standard_normal((3, 3, 64, 64)).astype(np.float32) / 24 for _ in range(3)]

    def convolved(emit: Emit, x: Any, number: int) -> Any:
        layout = {"data_layout": "NHWC", "kernel_layout": "HWIO"}
        return emit(op.nn.conv2d(x, relax.const(filters[number]), padding=(1, 1), **layout))

    x = relax.Var("x", relax.TensorType((n, 16, 16, 64), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            first = convolved(builder.emit, x, 0)
            second = convolved(builder.emit, builder.emit(op.nn.relu(convolved(builder.emit, first, 1))), 2)
            result = builder.emit_output(op.add(second, first))
        builder.emit_func_output(result)
    mod = scheduled(builder.get(), target)
    images = RNG.standard_normal((5, 16, 16, 64)).astype(np.float32)
    (together,) = outputs(mod, target, images)
    for image, found in zip(images, together, strict=True):
        (alone,) = outputs(mod, target, image[None])
        np.testing.assert_allclose(found, alone[0], rtol=1e-4, atol=1e-4)
    assert allocated(mod, target) == 2
    rows = scheduled(module(last_residual, n), target)
    assert allocated(rows, target) == 3
    monkeypatch.setattr("eqtune.compile.executable.WriteInPlace", relax.transform.ToNonDataflow)
    assert allocated(mod, target) == 3
    np.testing.assert_array_equal(together, outputs(mod, target, images)[0])
