"""Shapes, reductions, indices and images, compiled by TVM and compared with numpy or PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm

from eqtune import relay
from eqtune.relay.operators import OPERATORS
from eqtune.relay.operators.image import IMAGE as IMAGE_ROWS
from eqtune.relay.operators.reduce import REDUCE
from eqtune.relay.operators.shape import SHAPE

from .cases import Array, Case, Random, assert_computes, by_torch, not_read_back

RANDOM = Random()
f32, flags = RANDOM.f32, RANDOM.flags

X = f32(2, 3, 4)
IMAGE = f32(1, 4, 6, 6)
POSITIVE = f32(2, 3, low=0.5, high=2.0)
VOLUME = f32(1, 1, 2, 2, 2)
VECTOR4 = f32(4)


def blocks_to_batch(x: Array) -> Array:
    padded = np.pad(x, [(0, 0), (1, 1), (0, 0), (0, 0)])
    return np.concatenate([padded[:, i::2, j::2] for i in range(2) for j in range(2)])


def batch_to_blocks(x: Array) -> Array:
    result = np.zeros((1, x.shape[1] * 2, x.shape[2] * 2, x.shape[3]), x.dtype)
    for i in range(2):
        for j in range(2):
            result[:, i::2, j::2] = x[2 * i + j]
    return result[:, 1:-1]


def halfway_rows(x: Array) -> Array:
    """Twice as many rows, the new ones between those above and below; the last is repeated."""
    below = np.concatenate([x[:, :, 1:], x[:, :, -1:]], 2)
    return np.stack([x, (x + below) / 2], 3).reshape(1, 4, 12, 6)


def affine(x: Array) -> Array:
    return F.affine_grid(torch.from_numpy(x), [1, 1, 3, 4], align_corners=True).permute(0, 3, 1, 2).numpy()


def sampled(x: Array, grid: Array) -> Array:
    data, where = torch.from_numpy(x), torch.from_numpy(grid).permute(0, 2, 3, 1)
    return F.grid_sample(data, where, align_corners=True).numpy()


CROP = 'coordinate_transformation_mode="tf_crop_and_resize"'
ROI = "arange(0.2f, 1f, 0.2f)"

CASES: dict[str, Case] = {
    "shape_of": Case("shape_of(%a)", (X,), lambda x: np.array(x.shape)),
    "vm.shape_of": Case('vm.shape_of(%a, dtype="int64")', (X,), lambda x: np.array(x.shape)),
    "ndarray_size": Case("ndarray_size(%a)", (X,), lambda x: x.size),
    # shape
    "reshape": Case("reshape(%a, newshape=[0, -1])", (X,), lambda a: a.reshape(2, 12)),
    "reshape_codes": Case("reshape(%a, newshape=[-4, 1, -1, -3])", (X,), lambda a: a.reshape(1, 2, 12)),
    "reshape_rest": Case("reshape(%a, newshape=[1, -2])", (f32(1, 3, 4),), lambda a: a.reshape(1, 3, 4)),
    "dyn.reshape": Case("dyn.reshape(%a, shape_of(%b))", (X, f32(6, 4)), lambda a, b: a.reshape(6, 4)),
    "vm.reshape_tensor": Case("vm.reshape_tensor(%a, shape_of(%b))", (X, f32(6, 4)), lambda a, b: a.reshape(6, 4)),
    "contrib_reverse_reshape": Case("contrib_reverse_reshape(%a, newshape=[-1, 0])", (X,), lambda a: a.reshape(6, 4)),
    "reshape_like": Case("reshape_like(%a, %b)", (X, f32(6, 4)), lambda a, b: a.reshape(6, 4)),
    "transpose": Case("transpose(%a, axes=[0, 2, 1])", (X,), lambda a: a.transpose(0, 2, 1)),
    "transpose_all": Case("transpose(%a)", (X,), lambda a: a.T),
    "squeeze": Case("squeeze(%a, axis=[0])", (f32(1, 1, 3),), lambda a: a[0]),
    "dyn.squeeze": Case("dyn.squeeze(%a, 0)", (f32(1, 1, 3),), lambda a: a[0]),
    "expand_dims": Case("expand_dims(%a, axis=-1, num_newaxis=2)", (f32(3),), lambda a: a[:, None, None]),
    "dyn.expand_dims": Case("dyn.expand_dims(%a, 1)", (f32(3),), lambda a: a[:, None]),
    "dyn.expand_dims_with_attributes": Case(
        "dyn.expand_dims(%a, 1, num_newaxis=2)", (f32(3),), lambda a: a[:, None, None]
    ),
    "concatenate": Case(
        "%0 = (%a, %b); concatenate(%0, axis=1)", (X, f32(2, 1, 4)), lambda a, b: np.concatenate([a, b], 1)
    ),
    "stack": Case("stack((%a, %b), axis=-1)", (X, -X), lambda a, b: np.stack([a, b], -1)),
    "split": Case("%0 = split(%a, indices_or_sections=2, axis=2); %0.1", (X,), lambda a: a[..., 2:]),
    "split_indices": Case("%0 = split(%a, indices_or_sections=[1], axis=2); %0.1", (X,), lambda a: a[..., 1:]),
    "strided_slice": Case(
        "strided_slice(%a, begin=[0, -2, 0], end=[1, 100, 4], strides=[1, 1, 2])", (X,), lambda a: a[:1, -2:, ::2]
    ),
    "strided_slice_first_stride": Case(
        "strided_slice(%a, begin=[0, 0], end=[2, 3], strides=[2])", (X,), lambda a: a[::2, :3]
    ),
    "strided_slice_backward": Case(
        "strided_slice(%a, begin=[-1], end=[-100], strides=[-1], axes=[2])", (X,), lambda a: a[..., ::-1]
    ),
    "strided_slice_size": Case(
        'strided_slice(%a, begin=[1, 0], end=[-1, 2], strides=[1], slice_mode="size", axes=[1, 2])',
        (X,),
        lambda a: a[:, 1:, :2],
    ),
    "dyn.strided_slice": Case(
        'dyn.strided_slice(%a, zeros(shape=[1], dtype="int64"), ones(shape=[1], dtype="int64"))',
        (X,),
        lambda a: a[:1],
    ),
    "slice_like": Case("slice_like(%a, %b, axes=[2])", (X, f32(9, 9, 2)), lambda a, b: a[..., :2]),
    "broadcast_to": Case("broadcast_to(%a, shape=[2, 4])", (VECTOR4,), lambda a: np.stack([a, a])),
    "dyn.broadcast_to": Case("dyn.broadcast_to(%a, shape_of(%b))", (VECTOR4, X), lambda a, b: a + b * 0),
    "broadcast_to_like": Case("broadcast_to_like(%a, %b)", (VECTOR4, X), lambda a, b: a + b * 0),
    "collapse_sum_like": Case("collapse_sum_like(%a, %b)", (X, f32(3, 1)), lambda a, b: a.sum((0, 2))[:, None]),
    "collapse_sum_to": Case("collapse_sum_to(%a, shape_of(%b))", (X, f32(3, 1)), lambda a, b: a.sum((0, 2))[:, None]),
    "full": Case("full(%a, shape=[2, 3])", (np.float32(3).reshape(()),), lambda a: np.full((2, 3), a)),
    "dyn.full": Case("dyn.full(2f, shape_of(%a))", (X,), lambda a: np.full(a.shape, 2)),
    "full_like": Case("full_like(%a, 2f)", (X,), lambda a: np.full_like(a, 2)),
    "zeros": Case('zeros(shape=[3], dtype="float32") + %a', (f32(3),), lambda a: a),
    "ones": Case('ones(shape=[3], dtype="float32") + %a', (f32(3),), lambda a: a + 1),
    "dyn.zeros": Case('dyn.zeros(shape_of(%a), dtype="float32")', (X,), lambda a: a * 0),
    "dyn.ones": Case('dyn.ones(shape_of(%a), dtype="float32")', (X,), lambda a: a * 0 + 1),
    "arange": Case('arange(1f, 4f, 0.5f, dtype="float32") + %a', (f32(6),), lambda a: np.arange(1, 4, 0.5) + a),
    "meshgrid": Case(
        "%0 = meshgrid((%a, %b)); %0.0 + %0.1", (f32(2), f32(3)), lambda a, b: sum(np.meshgrid(a, b, indexing="ij"))
    ),
    "tile": Case("tile(%a, reps=[2, 1])", (f32(2, 3),), lambda a: np.tile(a, (2, 1))),
    "dyn.tile": Case("dyn.tile(%a, shape_of(%b))", (f32(2, 3), f32(2, 1)), lambda a, b: np.tile(a, (2, 1))),
    "repeat": Case("repeat(%a, repeats=2, axis=1)", (X,), lambda a: np.repeat(a, 2, 1)),
    "reverse": Case("reverse(%a, axis=1)", (X,), lambda a: a[:, ::-1]),
    "layout_transform": Case(
        'layout_transform(%a, src_layout="NCHW", dst_layout="NHWC")', (IMAGE,), lambda a: a.transpose(0, 2, 3, 1)
    ),
    "layout_transform_to_blocks": Case(
        'layout_transform(%a, src_layout="NHWC", dst_layout="NCHW2c")',
        (f32(1, 2, 3, 4),),
        lambda a: a.reshape(1, 2, 3, 2, 2).transpose(0, 3, 1, 2, 4),
    ),
    "layout_transform_weights": Case(
        'layout_transform(%a, src_layout="OIHW2i2o", dst_layout="OIHW4i4o")',
        (f32(2, 2, 1, 1, 2, 2),),
        lambda a: a.transpose(2, 3, 1, 4, 0, 5).reshape(1, 1, 1, 1, 4, 4),
    ),
    "nn.depth_to_space": Case(
        'nn.depth_to_space(%a, block_size=2, mode="CRD")', (IMAGE,), by_torch(lambda a: F.pixel_shuffle(a, 2))
    ),
    "nn.depth_to_space_dcr": Case(
        "nn.depth_to_space(%a, block_size=2)",
        (f32(1, 8, 2, 2),),
        lambda a: a.reshape(1, 2, 2, 2, 2, 2).transpose(0, 3, 4, 1, 5, 2).reshape(1, 2, 4, 4),
    ),
    "nn.space_to_depth": Case(
        "nn.space_to_depth(%a, block_size=2)",
        (IMAGE,),
        lambda a: a.reshape(1, 4, 3, 2, 3, 2).transpose(0, 3, 5, 1, 2, 4).reshape(1, 16, 3, 3),
    ),
    "nn.space_to_batch_nd": Case(
        "nn.space_to_batch_nd(%a, block_shape=[2, 2], paddings=[[1, 1], [0, 0]])", (f32(1, 4, 6, 3),), blocks_to_batch
    ),
    "nn.batch_to_space_nd": Case(
        "nn.batch_to_space_nd(%a, block_shape=[2, 2], crops=[[1, 1], [0, 0]])", (f32(4, 2, 3, 3),), batch_to_blocks
    ),
    # reductions and indices
    **{
        name: Case(f"{name}(%a, axis=[1], keepdims=True)", (X,), partial(function, axis=1, keepdims=True))
        for name, function in {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}.items()
    },
    "sum_exclude": Case("sum(%a, axis=[1], exclude=True)", (X,), lambda a: a.sum((0, 2))),
    "all": Case("all(%a, axis=[0])", (flags(4, 3),), lambda a: a.all(0)),
    "any": Case("any(%a)", (flags(4, 3),), lambda a: a.any()),
    "argmax": Case("argmax(%a, axis=[2])", (X,), lambda a: a.argmax(2).astype("int32")),
    "argmin": Case("argmin(%a)", (X,), lambda a: a.argmin().astype("int32")),
    "variance": Case(
        "variance(%a, mean(%a, axis=[2], keepdims=True), axis=[2], unbiased=True)", (X,), lambda a: a.var(2, ddof=1)
    ),
    "cumsum": Case("cumsum(%a, meta[relay.attrs.ScanopAttrs][0])", (X,), lambda a: a.cumsum(1)),
    "cumprod": Case("cumprod(%a, axis=1)", (X,), lambda a: a.cumprod(1)),
    "argsort": Case("argsort(%a, axis=-1, is_ascend=False)", (X,), lambda a: np.argsort(-a, -1).astype("int32")),
    "sort": Case("sort(%a)", (X,), lambda a: np.sort(a, -1)),
    "topk": Case("%0 = topk(%a, k=2); %0.0", (X,), lambda a: -np.sort(-a, -1)[..., :2]),
    "dyn.topk": Case("%0 = dyn.topk(%a, 2); %0.1", (X,), lambda a: np.argsort(-a, -1)[..., :2]),
    "trilu": Case("trilu(%a, 1, upper=False)", (f32(4, 4),), lambda a: np.tril(a, 1)),
    "einsum": Case('einsum((%a, %b), equation="ij,jk->ik")', (f32(2, 3), f32(3, 4)), np.matmul),
    # images
    "image.resize1d": Case(
        "image.resize1d(%a, size=[8])", (X,), by_torch(lambda a: F.interpolate(a, 8, mode="linear"))
    ),
    "image.resize2d_crop": Case(
        f"image.resize2d(%a, size=[2, 3], roi=[0.2f, 0.4f, 0.4f, 0.8f], {CROP})", (IMAGE,), lambda a: a[:, :, 1:3, 2:5]
    ),
    "dyn.image.resize2d_crop": Case(
        f"dyn.image.resize2d(%a, shape_of(%b), {ROI}, {CROP})", (IMAGE, f32(3, 3)), lambda a, b: a[:, :, 1:4, 2:5]
    ),
    "image.resize2d": Case(
        "image.resize2d(%a, size=[9, 4])", (IMAGE,), by_torch(lambda a: F.interpolate(a, (9, 4), mode="bilinear"))
    ),
    "dyn.image.resize2d": Case(
        'dyn.image.resize2d(%a, shape_of(%b), method="nearest_neighbor", '
        'coordinate_transformation_mode="asymmetric", rounding_method="floor")',
        (IMAGE, f32(12, 3)),
        lambda a, b: a.repeat(2, 2)[..., ::2],
    ),
    "image.resize3d": Case(
        "image.resize3d(%a, size=[4, 4, 4])",
        (f32(1, 1, 2, 2, 2),),
        by_torch(lambda a: F.interpolate(a, (4, 4, 4), mode="trilinear")),
    ),
    "image.grid_sample": Case("image.grid_sample(%a, %b)", (IMAGE, f32(1, 2, 3, 3, low=-0.9, high=0.9)), sampled),
    "image.affine_grid": Case("image.affine_grid(%a, target_shape=[3, 4])", (f32(1, 2, 3),), affine),
    "nn.upsampling": Case("nn.upsampling(%a, scale_h=2f, scale_w=2f)", (IMAGE,), lambda a: a.repeat(2, 2).repeat(2, 3)),
    "nn.upsampling_asymmetric": Case(
        'nn.upsampling(%a, scale_h=2f, scale_w=1f, method="bilinear")', (IMAGE,), halfway_rows
    ),
    "nn.upsampling_aligned": Case(
        'nn.upsampling(%a, scale_h=2f, scale_w=2f, method="bilinear", align_corners=True)',
        (IMAGE,),
        by_torch(lambda a: F.interpolate(a, scale_factor=2, mode="bilinear", align_corners=True)),
    ),
    "dyn.nn.upsampling": Case("dyn.nn.upsampling(%a, 2f, 2f)", (IMAGE,), lambda a: a.repeat(2, 2).repeat(2, 3)),
    "nn.upsampling3d": Case(
        'nn.upsampling3d(%a, scale_d=2f, scale_h=2f, scale_w=2f, method="trilinear")',
        (VOLUME,),
        by_torch(lambda a: F.interpolate(a, scale_factor=2, mode="trilinear")),
    ),
    "dyn.nn.upsampling3d": Case(
        'dyn.nn.upsampling3d(%a, 1f, 2f, 1f, coordinate_transformation_mode="asymmetric")',
        (VOLUME,),
        lambda a: a.repeat(2, 3),
    ),
    # sums of 5000 numbers, which float16 does not hold
    "mean_float16": Case("mean(%a, axis=[0])", (np.full((5000, 2), 3, "float16"),), lambda a: np.array([3, 3])),
    **{
        f"variance_float16{unbiased}": Case(
            f"variance(%a, mean(%a, axis=[0], keepdims=True), axis=[0]{unbiased})",
            (np.tile(np.array([0, 6], "float16"), 2500),),
            lambda a: np.float64(9),
        )
        for unbiased in ("", ", unbiased=True")
    },
}

METADATA = """
#[metadata]
{"root": 1, "nodes": [{"type_key": ""},
 {"type_key": "Map", "keys": ["relay.attrs.ScanopAttrs"], "data": [2]}, {"type_key": "Array", "data": [3]},
 {"type_key": "relay.attrs.ScanopAttrs", "attrs": {"axis": "4", "dtype": "float32", "exclusive": "0"}},
 {"type_key": "IntImm", "attrs": {"dtype": "int32", "span": "0", "value": "1"}}], "b64ndarrays": []}
"""


@pytest.fixture(scope="module")
def functions(compile_cases: Callable[..., dict[str, Callable[..., Array]]]) -> dict[str, Callable[..., Array]]:
    return compile_cases(CASES, METADATA)


@pytest.mark.parametrize("name", CASES)
def test_operator_computes_what_its_reference_computes(name: str, functions: dict[str, Callable[..., Array]]) -> None:
    assert_computes(CASES[name], functions[name])


def test_every_operator_of_these_tables_has_a_case() -> None:
    assert {row.name for row in [*SHAPE, *REDUCE, *IMAGE_ROWS]} - set(CASES) == set()


def test_extents_of_no_elements_are_inferred_from_those_that_are_not_copied() -> None:
    text = """def @main(%x: Tensor[(0, 2, 3), float32]) -> Tensor[(0, 6), float32] {
      reshape(%x, newshape=[0, -1])
    }"""
    assert [int(extent) for extent in relay.from_text(text)["main"].ret_ty.shape] == [0, 6]


def test_there_are_enough_operators() -> None:
    assert len(OPERATORS) >= 120


def test_printed_operators_are_read_back_as_the_same(convert_cases: Callable[..., tvm.IRModule]) -> None:
    assert not_read_back(convert_cases(CASES, METADATA), CASES) == []
