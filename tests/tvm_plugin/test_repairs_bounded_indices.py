"""Indices of data that nobody has checked: negative ones count from the end, others mean the nearest element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import ir, relax, tirx
from tvm.relax import op

from eqtune.compile.executable import build_scheduled
from eqtune.compile.untuned import untuned_executable
from eqtune.frontends import load_model
from eqtune.machine import detect_target
from eqtune.relax_ir.constants import constant_of
from eqtune.repairs.bounded_indices import with_bounded_indices
from eqtune.runtime import ModelRunner
from eqtune.transform import ApplyTuned, LowerToKernels

pytestmark = pytest.mark.unoptimised

DATA = np.arange(60, dtype="float32").reshape(3, 4, 5)
ANYWHERE = np.array([[0, -1, 3, 99], [-99, 2, 1, 0], [1 << 20, -4, -5, 4]])
"""Of an axis of 4 elements: in bounds, counted from the end, and beyond both ends."""
COORDINATES = np.array([[0, -1], [2, 3], [-7, 1], [1, 1 << 20], [-2, -2]])


def nearest(indices: Any, extent: int) -> Any:
    return np.clip(np.where(indices < 0, indices + extent, indices), 0, extent - 1)


ROWS, COLUMNS = nearest(COORDINATES[:, 0], 3), nearest(COORDINATES[:, 1], 4)
ELEMENTS = np.broadcast_to(ANYWHERE[:, :, None], (3, 4, 5)).astype("int64")


def written(values: Any) -> Any:
    result = DATA.copy()
    result[ROWS, COLUMNS] = values
    return result


def added_elements() -> Any:
    result = DATA.copy()
    first, _, last = np.indices((3, 4, 5))
    np.add.at(result, (first, nearest(ELEMENTS, 4), last), 1.0)
    return result


def ones(*shape: int) -> relax.Expr:
    return constant_of(np.ones(shape, "float32"))


CASES: dict[str, tuple[Callable[..., Any], list[Any], Any]] = {
    "gather_elements": (
        lambda x, i: op.gather_elements(x, i, axis=-2),
        [ELEMENTS],
        np.take_along_axis(DATA, nearest(ELEMENTS, 4), 1),
    ),
    "gather_nd": (op.gather_nd, [COORDINATES], DATA[ROWS, COLUMNS]),
    "gather_nd of a batch": (
        lambda x, i: op.gather_nd(x, i, batch_dims=1),
        [ANYWHERE[:, :, None]],
        np.take_along_axis(DATA, nearest(ANYWHERE, 4)[:, :, None], 1),
    ),
    "index_tensor": (
        lambda x, i, j: op.index_tensor(x, [i, j]),
        [COORDINATES[:, 0], COORDINATES[:, 1]],
        DATA[ROWS, COLUMNS],
    ),
    "index_put": (
        lambda x, i, j, k: op.index_put(x, [i, j, k], ones(5)),
        [COORDINATES[:, 0], COORDINATES[:, 1].astype("int32"), np.array([9, 1, 2, 3, -1])],
        None,
    ),
    "scatter_elements": (
        lambda x, i: op.scatter_elements(x, i, ones(3, 4, 5), axis=1, reduction="add"),
        [ELEMENTS],
        added_elements(),
    ),
    "scatter_nd": (lambda x, i: op.scatter_nd(x, i, ones(5, 5)), [COORDINATES], written(1.0)),
    "bytes": (lambda x, i: op.gather_elements(x, i, axis=1), [ELEMENTS.clip(-128, 127).astype("int8")], None),
}
CASES["bytes"] = (*CASES["bytes"][:2], np.take_along_axis(DATA, nearest(CASES["bytes"][1][0], 4), 1))


def expected_of(name: str) -> Any:
    if name != "index_put":
        return CASES[name][2]
    result = DATA.copy()
    result[ROWS, COLUMNS, nearest(CASES[name][1][2], 5)] = 1.0
    return result


def module(make: Callable[..., Any], indices: list[Any], fixed: bool = False) -> ir.IRModule:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(DATA.shape, "float32"))
    inputs = [relax.Var(f"i{n}", relax.TensorType(i.shape, str(i.dtype))) for n, i in enumerate(indices)]
    with builder.function("main", [x] if fixed else [x, *inputs]):
        with builder.dataflow():
            made = builder.emit(make(x, *(map(constant_of, indices) if fixed else inputs)))
            result = builder.emit_output(made)
        builder.emit_func_output(result)
    return builder.get()


@pytest.mark.parametrize("fixed", [False, True], ids=["indices given", "indices constant"])
@pytest.mark.parametrize("tuned", [False, True], ids=["untuned", "tuned"])
@pytest.mark.parametrize("name", CASES)
def test_any_index_is_in_bounds(name: str, tuned: bool, fixed: bool) -> None:
    make, indices, _ = CASES[name]
    mod, target = load_model(module(make, indices, fixed)).mod, detect_target()
    if tuned:
        with target:
            executable = build_scheduled(ApplyTuned(estimate=True)(LowerToKernels()(mod)), target)
    else:
        executable = untuned_executable(mod, target, plain=True)
    (result,) = ModelRunner(executable)(DATA, *([] if fixed else indices))
    np.testing.assert_array_equal(result, expected_of(name))


@pytest.mark.parametrize("name", CASES)
def test_a_second_pass_changes_nothing(name: str) -> None:
    make, indices, _ = CASES[name]
    once = with_bounded_indices(module(make, indices))
    ir.assert_structural_equal(with_bounded_indices(once), once)


def operators(mod: ir.IRModule) -> list[str]:
    bindings = [binding for block in mod["main"].body.blocks for binding in block.bindings]
    return [binding.value.op.name for binding in bindings if isinstance(binding.value, relax.Call)]


def test_an_index_is_bounded_once() -> None:
    def twice(x: Any, i: Any) -> Any:
        return op.gather_elements(op.gather_elements(x, i, axis=1), i, axis=1)

    assert operators(with_bounded_indices(module(twice, [ELEMENTS]))).count("relax.minimum") == 1


@pytest.mark.parametrize(
    ("make", "is_safe"),
    [
        (lambda i: op.minimum(op.maximum(i, limit(0)), limit(3)), True),
        (lambda i: op.minimum(op.maximum(i, limit(-2)), limit(3)), False),
        (lambda i: op.minimum(i, limit(3)), False),
        (lambda i: op.maximum(op.argmax(op.reshape(i, [3, 1, 4, 5]), axis=2), limit(0)), True),
        (lambda i: op.argmax(op.reshape(i, [3, 1, 4, 5]), axis=2), False),
        (lambda i: op.maximum(op.argmax(op.reshape(i, [3, 1, 5, 4]), axis=2), limit(0)), False),
        (lambda i: op.broadcast_to(constant_of(nearest(ELEMENTS[:, :1], 4)), (3, 4, 5)), True),
        (lambda i: op.broadcast_to(constant_of(ELEMENTS[:, :1]), (3, 4, 5)), False),
    ],
)
def test_what_is_in_bounds_by_its_making_is_left(make: Callable[[Any], Any], is_safe: bool) -> None:
    before = module(lambda x, i: op.gather_elements(x, make(i), axis=1), [ELEMENTS])
    assert (len(operators(with_bounded_indices(before))) == len(operators(before))) == is_safe


def limit(number: int) -> relax.Expr:
    return constant_of(np.full((), number, "int64"))


def test_what_a_branch_bounds_is_not_known_behind_it() -> None:
    condition, data, index = (
        relax.Var("c", relax.TensorType((), "bool")),
        relax.Var("d", relax.TensorType((3, 4), "float32")),
        relax.Var("i", relax.TensorType((3, 2), "int64")),
    )
    builder = relax.BlockBuilder()

    def gathered() -> relax.Expr:
        return op.gather_elements(data, index, axis=1)

    with builder.function("main", [condition, data, index]):
        branches = []
        for combine in (op.add, op.multiply):
            inner = relax.BlockBuilder()
            inner.begin_scope([condition, data, index])
            inner._begin_binding_block()
            part = inner.emit(gathered())
            result = inner.emit(combine(part, part))
            branches.append(relax.SeqExpr([inner._end_block()], result))
            inner.end_scope()
        chosen = builder.emit(relax.If(condition, *branches))
        builder.emit_func_output(builder.emit(op.add(chosen, builder.emit(gathered()))))
    after = with_bounded_indices(builder.get())
    relax.analysis.well_formed(after)  # raises where it is not
    assert after["main"].script().count("R.minimum") == 3


def test_shapes_that_are_not_known_and_coordinates_of_nothing_stay() -> None:
    x, n = relax.Var("x", relax.TensorType((3, 4), "float32")), tirx.Var("n", "int64")
    for shape in ((n, 2), (2, 0)):
        index, builder = relax.Var("i", relax.TensorType(shape, "int64")), relax.BlockBuilder()
        with builder.function("main", [x, index]):
            builder.emit_func_output(builder.emit(op.gather_nd(x, index)))
        ir.assert_structural_equal(with_bounded_indices(builder.get()), builder.get())


def test_constants_in_bounds_stay() -> None:
    mod = module(lambda x, i: op.gather_elements(x, i, axis=1), [nearest(ELEMENTS, 4)], fixed=True)
    ir.assert_structural_equal(with_bounded_indices(mod), mod)


@pytest.mark.parametrize("made", ["outside", "by a call", "in another block"])
def test_indices_may_be_a_tuple_of_any_making(made: str) -> None:
    x, pair = relax.Var("x", relax.TensorType((3, 4), "float32")), relax.TensorType((2,), "int64")
    given = relax.Var(
        "given", relax.TensorType((2, 2), "int64") if made == "by a call" else relax.TupleType([pair] * 2)
    )
    builder = relax.BlockBuilder()
    with builder.function("main", [x, given]):
        indices: Any = given
        with builder.dataflow():
            if made == "by a call":
                indices = builder.emit(op.split(given, 2, 0))
            elif made == "in another block":
                negated = [builder.emit(op.negative(builder.emit(relax.TupleGetItem(given, i)))) for i in range(2)]
                indices = builder.emit_output(relax.Tuple(negated))
            if made != "in another block":
                result = builder.emit_output(op.index_tensor(x, indices))
        if made == "in another block":
            x = builder.emit(op.negative(x))
            with builder.dataflow():
                result = builder.emit_output(op.index_tensor(x, indices))
        builder.emit_func_output(result)
    after = with_bounded_indices(builder.get())
    relax.analysis.well_formed(after)  # raises where it is not
    assert after["main"].script().count("R.minimum") == 2
    ir.assert_structural_equal(with_bounded_indices(after), after)
