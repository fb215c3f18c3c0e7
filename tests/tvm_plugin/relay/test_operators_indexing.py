"""Access by index and detection, compiled by TVM and compared with numpy or PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm

from eqtune.relay.operators.detection import DETECTION
from eqtune.relay.operators.indexing import INDEXING

from .cases import Array, Case, Random, assert_computes, by_torch, not_read_back

RANDOM = Random()
f32, i32 = RANDOM.f32, RANDOM.i32

X = f32(2, 3, 4)
IMAGE = f32(1, 4, 6, 6)
POSITIONS = i32(2, 3, low=0, high=4, dtype="int64")
HOT_AT_44 = np.stack([np.arange(300) == 44, np.zeros(300, bool)])
INDICES = np.array([2, 0, 9, -3], "int64")
# Class, score, left, top, right, bottom: the second box overlaps the first, the last scores too little.
BOXES = np.array(
    [[[0, 0.9, 0, 0, 1, 1], [0, 0.8, 0, 0, 1, 0.9], [0, 0.7, 2, 2, 3, 3], [0, 0.1, 5, 5, 6, 6]]], "float32"
)


def scattered(x: Array, indices: Array, updates: Array) -> Array:
    result = x.copy()
    result[tuple(indices)] = updates
    return result


def reversed_sequences(x: Array, lengths: Array) -> Array:
    result = x.copy()
    for row, length in enumerate(lengths):
        result[row, :length] = x[row, :length][::-1]
    return result


def masked(x: Array, lengths: Array) -> Array:
    return np.where(np.arange(len(x))[:, None] < lengths[None, :], x, -1)


CASES: dict[str, Case] = {
    "take": Case("take(%a, %b, axis=1)", (f32(2, 4), INDICES), lambda a, b: a[:, [2, 0, 3, 0]]),
    "take_wrap": Case('take(%a, %b, axis=1, mode="wrap")', (f32(2, 4), INDICES), lambda a, b: a[:, b % 4]),
    "take_known": Case("take(%a, 9, axis=0)", (f32(3, 4),), lambda a: a[2]),
    "gather": Case(
        "gather(%a, %b, axis=1)",
        (f32(2, 4), i32(2, 2, low=0, high=4, dtype="int64")),
        lambda a, b: np.take_along_axis(a, b, 1),
    ),
    "gather_nd": Case("gather_nd(%a, %b)", (X, np.array([[0, 1], [2, 0]], "int64")), lambda a, b: a[tuple(b)]),
    "scatter": Case(
        "scatter(%a, %b, %c)",
        (f32(3, 2), np.array([[2, 0]], "int64"), f32(1, 2)),
        by_torch(lambda a, b, c: a.scatter(0, b, c)),
    ),
    "scatter_add": Case(
        "scatter_add(%a, %b, %c)",
        (f32(3, 2), np.array([[2, 0]], "int64"), f32(1, 2)),
        by_torch(lambda a, b, c: a.scatter_add(0, b, c)),
    ),
    "scatter_part": Case(
        "scatter(%a, %b, %c)",
        (f32(4, 4, 4), np.array([[[3, 0], [1, 1]], [[0, 3], [2, 2]]], "int64"), f32(2, 2, 2)),
        by_torch(lambda a, b, c: a.scatter(0, b, c)),
    ),
    "scatter_elements": Case(
        'scatter_elements(%a, %b, %c, axis=1, reduction="update")',
        (f32(2, 3), np.array([[2], [0]], "int64"), f32(2, 1)),
        by_torch(lambda a, b, c: a.scatter(1, b, c)),
    ),
    "scatter_nd": Case("scatter_nd(%a, %b, %c)", (f32(3, 4), np.array([[0, 2], [1, 3]], "int64"), f32(2)), scattered),
    "one_hot": Case('one_hot(%a, 1f, 0f, depth=4, dtype="float32")', (i32(3, low=0, high=4),), lambda a: np.eye(4)[a]),
    "sequence_mask": Case("sequence_mask(%a, %b, mask_value=-1f)", (f32(4, 3), i32(3, low=0, high=4)), masked),
    "reverse_sequence": Case(
        "reverse_sequence(%a, %b, seq_axis=1, batch_axis=0)", (f32(3, 4), i32(3, low=1, high=4)), reversed_sequences
    ),
    "take_batches": Case(
        "take(%a, %b, axis=1, batch_dims=1)",
        (X, np.array([[2, 0], [1, 9]], "int64")),
        lambda a, b: np.stack([a[0, [2, 0]], a[1, [1, 2]]]),
    ),
    "take_batches_wrap": Case(
        'take(%a, %b, axis=1, batch_dims=1, mode="wrap")',
        (X, np.array([[2, -1], [1, 9]], "int64")),
        lambda a, b: np.stack([a[0, [2, 2]], a[1, [1, 0]]]),
    ),
    "take_batches_of_one": Case(
        "take(%a, %b, axis=2, batch_dims=2)",
        (X, POSITIONS),
        lambda a, b: np.take_along_axis(a, b[..., None], 2)[..., 0],
    ),
    "take_batches_int8": Case(
        "take(%a, %b, axis=1, batch_dims=-1)",
        (f32(2, 100), np.array([[99, 1], [3, 99]], "int8")),
        lambda a, b: np.take_along_axis(a, b.astype("int64"), 1),
    ),
    "take_known_int8": Case('take(%a, cast(99, dtype="int8"), axis=0)', (f32(300, 2),), lambda a: a[99]),
    "take_int8": Case("take(%a, %b, axis=0)", (f32(300, 2), np.array([99, -1], "int8")), lambda a, b: a[[99, 0]]),
    "take_known_int8_wrap": Case(
        'take(%a, cast(-1, dtype="int8"), axis=0, mode="wrap")',
        (np.arange(200, dtype="float32"),),
        lambda a: a[-1],
    ),
    "take_flat": Case("take(%a, %b)", (X, i32(2, 2, low=0, high=24)), np.take),
    "take_flat_known": Case("take(%a, 23)", (X,), lambda a: a[1, 2, 3]),
    "one_hot_int8": Case(
        'one_hot(%a, 1f, 0f, depth=300, dtype="float32")', (np.array([44, -1], "int8"),), lambda a: HOT_AT_44
    ),
    "sequence_mask_int8": Case(
        "sequence_mask(%a, %b, mask_value=-1f)", (f32(200, 2), np.array([3, 127], "int8")), masked
    ),
    "unravel_index_int8": Case(
        "unravel_index(%a, shape_of(%b))",
        (i32(5, low=0, high=100, dtype="int8"), f32(2, 300)),
        lambda a, b: np.stack(np.unravel_index(a, b.shape)),
    ),
    "dyn.one_hot": Case(
        'dyn.one_hot(%a, 1f, 0f, 4, dtype="float32")', (i32(3, low=0, high=4),), lambda a: np.eye(4)[a]
    ),
    "searchsorted_left": Case(
        "searchsorted(%a, %b)",
        (np.array([1, 2, 3], "float32"), np.array([0, 2, 2.5, 9], "float32")),
        lambda a, b: np.searchsorted(a, b),
    ),
    "adv_index": Case(
        "adv_index((%a, %b, %c))",
        (X, np.array([1, 0], "int64"), np.array([[2], [0]], "int64")),
        lambda a, b, c: a[b, c],
    ),
    "unravel_index": Case(
        "unravel_index(%a, shape_of(%b))",
        (i32(5, low=0, high=24), X),
        lambda a, b: np.stack(np.unravel_index(a, b.shape)),
    ),
    "invert_permutation": Case("invert_permutation(%a)", (np.array([2, 0, 1], "int32"),), np.argsort),
    "searchsorted": Case(
        'searchsorted(%a, %b, right=True, dtype="int64")',
        (np.array([1, 2, 3], "float32"), np.array([[0, 2], [2.5, 9]], "float32")),
        lambda a, b: np.searchsorted(a, b, side="right"),
    ),
    "matrix_set_diag": Case(
        "matrix_set_diag(%a, %b, k1=1, k2=1)",
        (f32(2, 3, 4), f32(2, 3)),
        by_torch(lambda a, b: a.diagonal_scatter(b, 1, 1, 2)),
    ),
    "matrix_set_diag_below": Case(
        "matrix_set_diag(%a, %b, k1=-1, k2=-1)", (f32(4, 3), f32(3)), by_torch(lambda a, b: a.diagonal_scatter(b, -1))
    ),
    "sparse_to_dense": Case(
        "sparse_to_dense(%a, %b, -1f, output_shape=[3, 4])",
        (np.array([[0, 1], [2, 3]], "int32"), f32(2)),
        lambda a, b: scattered(np.full((3, 4), -1, "float32"), a.T, b),
    ),
    "vision.get_valid_counts": Case(
        "%0 = vision.get_valid_counts(%a, 0.5f, id_index=0, score_index=1); %0.1",
        (BOXES,),
        lambda a: np.concatenate([a[:, :3], np.full((1, 1, 6), -1)], 1),
    ),
    "vision.non_max_suppression": Case(
        "vision.non_max_suppression(%a, %b, %c, -1, 0.5f, return_indices=False, invalid_to_bottom=True)",
        (BOXES, np.array([3], "int32"), np.arange(4, dtype="int32")[None]),
        lambda a, b, c: np.concatenate([a[:, [0, 2]], np.full((1, 2, 6), -1)], 1),
    ),
    "vision.roi_align": Case(
        "vision.roi_align(%a, %b, pooled_size=[1, 1], spatial_scale=1f, sample_ratio=1)",
        (IMAGE, np.array([[0, 1, 1, 3, 3]], "float32")),
        lambda a, b: a[:, :, 2:3, 2:3],
    ),
    "vision.roi_pool": Case(
        "vision.roi_pool(%a, %b, pooled_size=[1, 1], spatial_scale=1f)",
        (IMAGE, np.array([[0, 1, 1, 3, 3]], "float32")),
        lambda a, b: a[:, :, 1:4, 1:4].max((2, 3), keepdims=True),
    ),
}


@pytest.fixture(scope="module")
def functions(compile_cases: Callable[..., dict[str, Callable[..., Array]]]) -> dict[str, Callable[..., Array]]:
    return compile_cases(CASES)


@pytest.mark.parametrize("name", CASES)
def test_operator_computes_what_its_reference_computes(name: str, functions: dict[str, Callable[..., Array]]) -> None:
    assert_computes(CASES[name], functions[name])


def test_every_operator_of_these_tables_has_a_case() -> None:
    assert {row.name for row in [*INDEXING, *DETECTION]} - set(CASES) == set()


def test_printed_operators_are_read_back_as_the_same(convert_cases: Callable[..., tvm.IRModule]) -> None:
    # The coordinates of a part are stacked last, where Relay has them first: two more permutes.
    assert not_read_back(convert_cases(CASES), CASES) == ["scatter_part"]
