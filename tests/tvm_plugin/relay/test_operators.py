"""Arithmetic and layers, compiled by TVM and compared with numpy or PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm
from scipy import special

from eqtune.relay.operators.convolution import CONVOLUTION
from eqtune.relay.operators.elementwise import ELEMENTWISE
from eqtune.relay.operators.nn import NN

from .cases import Array, Case, Random, assert_computes, by_torch, not_read_back

RANDOM = Random()
f32, flags, i32 = RANDOM.f32, RANDOM.flags, RANDOM.i32


def packed(x: Array, block: int) -> Array:
    """NCHW to NCHW2c, for blocks of 2."""
    n, c, h, w = x.shape
    return x.reshape(n, c // block, block, h, w).transpose(0, 1, 3, 4, 2)


def unpacked(x: Array) -> Array:
    n, blocks, h, w, block = x.shape
    return np.ascontiguousarray(x.transpose(0, 1, 4, 2, 3).reshape(n, blocks * block, h, w))


def conv2d(x: Array, weight: Array, groups: int = 1) -> Array:
    return F.conv2d(torch.from_numpy(x), torch.from_numpy(weight), padding=1, groups=groups).numpy()


X = f32(2, 3, 4)
IMAGE = f32(1, 4, 6, 6)
TIES = np.array([-2.5, -1.5, -0.5, -0.25, 0.49999997, 0.5, 1.75, 2.5, 8388609], "float32")
POSITIVE = f32(2, 3, low=0.5, high=2.0)
UNIT = f32(2, 3, low=-0.9, high=0.9)

UNARY: dict[str, tuple[Array, Callable[[Array], Array]]] = {
    "abs": (X, np.abs),
    "acos": (UNIT, np.arccos),
    "acosh": (POSITIVE + 1, np.arccosh),
    "asin": (UNIT, np.arcsin),
    "asinh": (X, np.arcsinh),
    "atan": (X, np.arctan),
    "atanh": (UNIT, np.arctanh),
    "bitwise_not": (i32(3), np.invert),
    "ceil": (X, np.ceil),
    "copy": (X, lambda x: x),
    "cos": (X, np.cos),
    "cosh": (X, np.cosh),
    "erf": (X, special.erf),
    "exp": (X, np.exp),
    "fast_erf": (X, special.erf),
    "fast_exp": (X, np.exp),
    "fast_tanh": (X, np.tanh),
    "floor": (X, np.floor),
    "isfinite": (np.array([1, np.inf, np.nan], "float32"), np.isfinite),
    "isinf": (np.array([1, np.inf, np.nan], "float32"), np.isinf),
    "isnan": (np.array([1, np.inf, np.nan], "float32"), np.isnan),
    "log": (POSITIVE, np.log),
    "log10": (POSITIVE, np.log10),
    "log2": (POSITIVE, np.log2),
    "logical_not": (flags(4), np.logical_not),
    "negative": (X, np.negative),
    "nn.batch_flatten": (X, lambda x: x.reshape(2, 12)),
    "nn.relu": (X, lambda x: np.maximum(x, 0)),
    "ones_like": (X, np.ones_like),
    "round": (TIES, lambda x: np.trunc(x) + np.trunc(2 * (x - np.trunc(x)))),
    "rsqrt": (POSITIVE, lambda x: 1 / np.sqrt(x)),
    "sigmoid": (X, special.expit),
    "sign": (X, np.sign),
    "sin": (X, np.sin),
    "sinh": (X, np.sinh),
    "sqrt": (POSITIVE, np.sqrt),
    "tan": (UNIT, np.tan),
    "tanh": (X, np.tanh),
    "trunc": (X, np.trunc),
    "zeros_like": (X, np.zeros_like),
    "annotation.checkpoint": (X, lambda x: x),
    "annotation.compiler_begin": (X, lambda x: x),
    "annotation.compiler_end": (X, lambda x: x),
    "annotation.stop_fusion": (X, lambda x: x),
    "device_copy": (X, lambda x: x),
    "on_device": (X, lambda x: x),
}

BINARY: dict[str, tuple[Array, Array, Callable[[Array, Array], Array]]] = {
    "add": (X, f32(3, 1), np.add),
    "atan2": (X, f32(4), np.arctan2),
    "bitwise_and": (i32(3), i32(3), np.bitwise_and),
    "bitwise_or": (i32(3), i32(3), np.bitwise_or),
    "bitwise_xor": (i32(3), i32(3), np.bitwise_xor),
    "divide": (X, f32(4, low=1), np.divide),
    "equal": (i32(9), i32(9), np.equal),
    "floor_divide": (i32(9), i32(9, low=1), np.floor_divide),
    "floor_mod": (i32(9), i32(9, low=1), np.mod),
    "greater": (X, f32(4), np.greater),
    "greater_equal": (X, f32(4), np.greater_equal),
    "left_shift": (i32(3, low=0), i32(3, low=0, high=3), np.left_shift),
    "less": (X, f32(4), np.less),
    "less_equal": (X, f32(4), np.less_equal),
    "logical_and": (flags(9), flags(9), np.logical_and),
    "logical_or": (flags(9), flags(9), np.logical_or),
    "logical_xor": (flags(9), flags(9), np.logical_xor),
    "maximum": (X, f32(4), np.maximum),
    "minimum": (X, f32(4), np.minimum),
    "mod": (i32(9), i32(9, low=1), np.fmod),
    "multiply": (X, f32(4), np.multiply),
    "not_equal": (i32(9), i32(9), np.not_equal),
    "power": (POSITIVE, f32(3), np.power),
    "right_shift": (i32(3, low=0), i32(3, low=0, high=3), np.right_shift),
    "subtract": (X, f32(4), np.subtract),
    "trunc_divide": (i32(9), i32(9, low=1), lambda a, b: np.trunc(a / b)),
    "trunc_mod": (i32(9), i32(9, low=1), np.fmod),
}


def matmul_with(a: Array, b: Array) -> Array:
    return np.matmul(a, np.swapaxes(b, -1, -2))


def norm(kind: str, left_out: str, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    weight, bias = (gamma, None) if left_out == "center" else (None, beta)
    if kind == "layer":
        return F.layer_norm(x, (4,), weight, bias)
    return F.group_norm(x, 2 if kind == "group" else 4, weight, bias)


def truncated(a: Array, b: Array) -> Array:
    """The quotient, exact, in the dtype of its operands."""
    wide, divisor = a.astype("int64"), b.astype("int64")
    return (np.sign(wide) * np.sign(divisor) * (abs(wide) // abs(divisor))).astype(a.dtype)


def lrn(x: Array) -> Array:
    return F.local_response_norm(torch.from_numpy(x), 3, alpha=0.1, beta=0.5, k=2.0).numpy()


W22 = f32(5, 4, 3, 3)
SMALLEST = np.array([-128, -127, -1, 0, 127], "int8")
DIVISORS = np.array([[2], [-3], [-128], [127]], "int8")
BYTES = np.array([0, 6, 7, 128, 255], "uint8")
VECTOR4 = f32(4)

CASES: dict[str, Case] = {
    "add_infix": Case("%a + %b * 2f - %a / %b", (X, f32(4, low=1)), lambda a, b: a + b * 2 - a / b),
    "compare_infix": Case("%a + %b < %b", (X, f32(4)), lambda a, b: a + b < b),
    "divide_int": Case("divide(%a, %b)", (i32(9), i32(9, low=1)), lambda a, b: np.trunc(a / b)),
    **{
        f"{name}_{dtype}": Case(f"{name}(%a, %b)", operands, function)
        for name, function in {"divide": truncated, "trunc_mod": np.fmod}.items()
        for dtype, operands in {"int8": (SMALLEST, DIVISORS), "uint8": (BYTES, np.array([[1], [7]], "uint8"))}.items()
    },
    "trunc_mod_float": Case("trunc_mod(%a, %b)", (X, f32(4, low=1)), np.fmod),
    "cast": Case('cast(%a, dtype="int32")', (X,), lambda a: a.astype("int32")),
    "annotation.cast_hint": Case('annotation.cast_hint(%a, dtype="int8")', (X,), lambda a: a),
    "cast_like": Case("cast_like(%a, %b)", (X, i32(1)), lambda a, b: a.astype("int32")),
    "clip": Case("clip(%a, a_min=0f, a_max=1.5f)", (X,), lambda a: np.clip(a, 0, 1.5)),
    "clip_int": Case("clip(%a, a_min=-2f, a_max=3f)", (i32(9),), lambda a: np.clip(a, -2, 3)),
    "clip_int_between": Case("clip(%a, a_min=-2.5f, a_max=2.5f)", (i32(9),), lambda a: np.clip(a, -2, 2)),
    "clip_int_from": Case("clip(%a, a_min=0f, a_max=3.4028235e+38f)", (i32(9),), lambda a: np.maximum(a, 0)),
    "where": Case("where(%a, %b, %c)", (flags(3, 1), f32(3, 4), f32(4)), np.where),
    "fixed_point_multiply": Case(
        "fixed_point_multiply(%a, multiplier=1610612736, shift=2)", (i32(9),), lambda a: 3 * a
    ),
    # nn
    "nn.conv2d": Case(
        "nn.conv2d(%a, %b, strides=[2, 1], padding=[1, 1, 1, 1], channels=5, kernel_size=[3, 3])",
        (IMAGE, W22),
        by_torch(lambda a, b: F.conv2d(a, b, stride=(2, 1), padding=1)),
    ),
    "nn.conv2d_nhwc": Case(
        'nn.conv2d(%a, %b, padding=[1, 1], data_layout="NHWC", kernel_layout="HWIO")',
        (f32(1, 6, 6, 4), f32(3, 3, 4, 5)),
        by_torch(lambda a, b: F.conv2d(a.permute(0, 3, 1, 2), b.permute(3, 2, 0, 1), padding=1).permute(0, 2, 3, 1)),
    ),
    "nn.conv2d_depthwise_hwoi": Case(
        'nn.conv2d(%a, %b, groups=4, data_layout="NHWC", kernel_layout="HWOI")',
        (f32(1, 6, 6, 4), f32(3, 3, 4, 1)),
        by_torch(lambda a, b: F.conv2d(a.permute(0, 3, 1, 2), b.permute(2, 3, 0, 1), groups=4).permute(0, 2, 3, 1)),
    ),
    "nn.conv2d_depthwise_multiplier": Case(
        "nn.conv2d(%a, %b, groups=4, channels=8)",
        (IMAGE, f32(4, 2, 3, 3)),
        by_torch(lambda a, b: F.conv2d(a, b.reshape(8, 1, 3, 3), groups=4)),
    ),
    "nn.conv2d_grouped": Case(
        "nn.conv2d(%a, %b, groups=2, dilation=[2, 2])",
        (IMAGE, f32(6, 2, 2, 2)),
        by_torch(lambda a, b: F.conv2d(a, b, groups=2, dilation=2)),
    ),
    "nn.conv2d_as_many_groups_as_outputs": Case(
        "nn.conv2d(%a, %b, groups=2)", (IMAGE, f32(2, 2, 3, 3)), by_torch(lambda a, b: F.conv2d(a, b, groups=2))
    ),
    "nn.contrib_conv2d_NCHWc": Case(
        'nn.contrib_conv2d_NCHWc(%a, %b, padding=[1, 1], channels=6, kernel_size=[3, 3], data_layout="NCHW2c", '
        'kernel_layout="OIHW2i3o", out_layout="NCHW3c")',
        (f32(1, 2, 6, 6, 2), f32(2, 2, 3, 3, 2, 3)),
        lambda a, b: packed(conv2d(unpacked(a), b.transpose(0, 5, 1, 4, 2, 3).reshape(6, 4, 3, 3)), 3),
    ),
    "nn.contrib_depthwise_conv2d_NCHWc": Case(
        "nn.contrib_depthwise_conv2d_NCHWc(%a, %b, padding=[1, 1], groups=4, channels=4, kernel_size=[3, 3], "
        'data_layout="NCHW2c", kernel_layout="OIHW1i2o")',
        (f32(1, 2, 6, 6, 2), f32(2, 1, 3, 3, 1, 2)),
        lambda a, b: packed(conv2d(unpacked(a), b.transpose(0, 5, 1, 4, 2, 3).reshape(4, 1, 3, 3), 4), 2),
    ),
    "nn.conv1d": Case(
        "nn.conv1d(%a, %b, padding=[1])", (f32(1, 3, 8), f32(2, 3, 3)), by_torch(lambda a, b: F.conv1d(a, b, padding=1))
    ),
    "nn.conv3d": Case("nn.conv3d(%a, %b)", (f32(1, 2, 4, 4, 4), f32(3, 2, 2, 2, 2)), by_torch(F.conv3d)),
    "nn.conv1d_transpose": Case(
        "nn.conv1d_transpose(%a, %b, strides=[2])",
        (f32(1, 3, 5), f32(3, 2, 3)),
        by_torch(lambda a, b: F.conv_transpose1d(a, b, stride=2)),
    ),
    "nn.conv2d_transpose": Case(
        'nn.conv2d_transpose(%a, %b, strides=[2, 2], padding=[1, 1], output_padding=[1, 1], kernel_layout="OIHW")',
        (f32(1, 3, 5, 5), f32(3, 2, 3, 3)),
        by_torch(lambda a, b: F.conv_transpose2d(a, b, stride=2, padding=1, output_padding=1)),
    ),
    "nn.conv2d_transpose_oihw": Case(
        'nn.conv2d_transpose(%a, %b, kernel_layout="OIHW")',
        (IMAGE, np.linspace(-1, 1, 72, dtype="float32").reshape(2, 4, 3, 3)),
        by_torch(lambda a, b: F.conv_transpose2d(a, b.transpose(0, 1))),
    ),
    "nn.conv2d_transpose_nhwc": Case(
        'nn.conv2d_transpose(%a, %b, strides=[2, 2], data_layout="NHWC", kernel_layout="HWOI")',
        (f32(1, 5, 5, 3), f32(3, 3, 2, 3)),
        by_torch(
            lambda a, b: F.conv_transpose2d(a.permute(0, 3, 1, 2), b.permute(3, 2, 0, 1), stride=2).permute(0, 2, 3, 1)
        ),
    ),
    "nn.conv3d_transpose": Case(
        "nn.conv3d_transpose(%a, %b)", (f32(1, 2, 3, 3, 3), f32(2, 3, 2, 2, 2)), by_torch(F.conv_transpose3d)
    ),
    "nn.max_pool1d": Case(
        "nn.max_pool1d(%a, pool_size=[2], strides=[2])", (X,), by_torch(lambda a: F.max_pool1d(a, 2))
    ),
    "nn.max_pool2d": Case(
        "nn.max_pool2d(%a, pool_size=[3, 3], strides=[2, 2], padding=[1, 1, 1, 1])",
        (IMAGE,),
        by_torch(lambda a: F.max_pool2d(a, 3, 2, 1)),
    ),
    "nn.max_pool2d_packed": Case(
        'nn.max_pool2d(%a, pool_size=[2, 2], strides=[2, 2], layout="NCHW2c")',
        (f32(1, 2, 6, 6, 2),),
        lambda a: packed(F.max_pool2d(torch.from_numpy(unpacked(a)), 2).numpy(), 2),
    ),
    "nn.max_pool3d": Case(
        "nn.max_pool3d(%a, pool_size=[2, 2, 2])", (f32(1, 2, 3, 3, 3),), by_torch(lambda a: F.max_pool3d(a, 2, 1))
    ),
    "nn.avg_pool1d": Case(
        "nn.avg_pool1d(%a, pool_size=[2], strides=[2])", (X,), by_torch(lambda a: F.avg_pool1d(a, 2))
    ),
    "nn.avg_pool2d": Case(
        "nn.avg_pool2d(%a, pool_size=[3, 3], strides=[2, 2], padding=[1, 1, 1, 1])",
        (IMAGE,),
        by_torch(lambda a: F.avg_pool2d(a, 3, 2, 1, count_include_pad=False)),
    ),
    "nn.avg_pool3d": Case(
        "nn.avg_pool3d(%a, pool_size=[2, 2, 2])", (f32(1, 2, 3, 3, 3),), by_torch(lambda a: F.avg_pool3d(a, 2, 1))
    ),
    "nn.global_avg_pool2d": Case("nn.global_avg_pool2d(%a)", (IMAGE,), lambda a: a.mean((2, 3), keepdims=True)),
    "nn.global_max_pool2d": Case(
        'nn.global_max_pool2d(%a, layout="NHWC")', (IMAGE,), lambda a: a.max((1, 2), keepdims=True)
    ),
    "nn.adaptive_avg_pool1d": Case(
        "nn.adaptive_avg_pool1d(%a, output_size=[2])", (X,), by_torch(lambda a: F.adaptive_avg_pool1d(a, 2))
    ),
    "nn.adaptive_avg_pool2d": Case(
        "nn.adaptive_avg_pool2d(%a, output_size=[4, 3])", (IMAGE,), by_torch(lambda a: F.adaptive_avg_pool2d(a, (4, 3)))
    ),
    "nn.adaptive_avg_pool3d": Case(
        "nn.adaptive_avg_pool3d(%a, output_size=[1])",
        (f32(1, 2, 3, 3, 3),),
        by_torch(lambda a: F.adaptive_avg_pool3d(a, 1)),
    ),
    "nn.adaptive_max_pool1d": Case(
        "nn.adaptive_max_pool1d(%a, output_size=[2])", (X,), by_torch(lambda a: F.adaptive_max_pool1d(a, 2))
    ),
    "nn.adaptive_max_pool2d": Case(
        "nn.adaptive_max_pool2d(%a, output_size=[3, 2])", (IMAGE,), by_torch(lambda a: F.adaptive_max_pool2d(a, (3, 2)))
    ),
    "nn.adaptive_max_pool2d_uneven": Case(
        "nn.adaptive_max_pool2d(%a, output_size=[4, 5])", (IMAGE,), by_torch(lambda a: F.adaptive_max_pool2d(a, (4, 5)))
    ),
    "nn.adaptive_max_pool3d": Case(
        "nn.adaptive_max_pool3d(%a, output_size=[1])",
        (f32(1, 2, 3, 3, 3),),
        by_torch(lambda a: F.adaptive_max_pool3d(a, 1)),
    ),
    "nn.dense": Case("nn.dense(%a, %b, units=5)", (f32(2, 3), f32(5, 3)), matmul_with),
    "nn.contrib_dense_pack": Case(
        'nn.contrib_dense_pack(%a, %b, units=8, weight_layout="NC4n")',
        (f32(2, 3), f32(2, 3, 4)),
        lambda a, b: a @ b.transpose(1, 0, 2).reshape(3, 8),
    ),
    "nn.matmul": Case("nn.matmul(%a, %b, units=5, transpose_a=True)", (f32(3, 2), f32(3, 5)), lambda a, b: a.T @ b),
    "nn.batch_matmul": Case("nn.batch_matmul(%a, %b, transpose_b=True)", (X, f32(2, 5, 4)), matmul_with),
    "nn.bias_add": Case("nn.bias_add(%a, %b)", (IMAGE, VECTOR4), lambda a, b: a + b[:, None, None]),
    "nn.batch_norm": Case(
        "%0 = nn.batch_norm(%a, %b, %c, %d, %e, epsilon=0.001f); %0.0",
        (IMAGE, VECTOR4, f32(4), f32(4), f32(4, low=0.5)),
        by_torch(lambda a, b, c, d, e: F.batch_norm(a, d, e, b, c, eps=0.001)),
    ),
    "nn.layer_norm": Case(
        "nn.layer_norm(%a, %b, %c)", (X, VECTOR4, f32(4)), by_torch(lambda a, b, c: F.layer_norm(a, (4,), b, c))
    ),
    **{
        f"nn.{kind}_norm_without_{left_out}": Case(
            f"nn.{kind}_norm(%a, %b, %c, {'num_groups=2, ' if kind == 'group' else ''}{left_out}=False)",
            (X if kind == "layer" else IMAGE, VECTOR4, f32(4)),
            by_torch(partial(norm, kind, left_out)),
        )
        for kind in ("layer", "instance", "group")
        for left_out in ("center", "scale")
    },
    "nn.instance_norm": Case(
        "nn.instance_norm(%a, %b, %c)",
        (IMAGE, VECTOR4, f32(4)),
        by_torch(lambda a, b, c: F.instance_norm(a, weight=b, bias=c)),
    ),
    "nn.group_norm": Case(
        "nn.group_norm(%a, %b, %c, num_groups=2)",
        (IMAGE, VECTOR4, f32(4)),
        by_torch(lambda a, b, c: F.group_norm(a, 2, b, c)),
    ),
    "nn.l2_normalize": Case(
        "nn.l2_normalize(%a, eps=1e-10f, axis=[1])", (X,), by_torch(lambda a: F.normalize(a, dim=1))
    ),
    "nn.lrn": Case("nn.lrn(%a, size=3, bias=2f, alpha=0.1f, beta=0.5f)", (IMAGE,), lrn),
    "nn.softmax": Case("nn.softmax(%a, axis=1)", (X,), lambda a: special.softmax(a, 1)),
    "nn.fast_softmax": Case("nn.fast_softmax(%a)", (X,), lambda a: special.softmax(a, -1)),
    "nn.log_softmax": Case("nn.log_softmax(%a)", (X,), lambda a: special.log_softmax(a, -1)),
    "nn.leaky_relu": Case("nn.leaky_relu(%a, alpha=0.1f)", (X,), lambda a: np.where(a > 0, a, a * 0.1)),
    "nn.prelu": Case("nn.prelu(%a, %b)", (IMAGE, VECTOR4), by_torch(F.prelu)),
    "nn.dropout": Case("%0 = nn.dropout(%a); %0.0 + %0.1", (X,), lambda a: a + 1),
    "nn.pad": Case(
        "nn.pad(%a, 3f, pad_width=[[0, 0], [1, 2]])",
        (f32(2, 3),),
        lambda a: np.pad(a, [(0, 0), (1, 2)], constant_values=3),
    ),
    "nn.pad_edge": Case(
        'nn.pad(%a, 0f, pad_width=[[0, 0], [1, 2]], pad_mode="edge")',
        (f32(2, 3),),
        lambda a: np.pad(a, [(0, 0), (1, 2)], mode="edge"),
    ),
    "dyn.nn.pad": Case(
        "dyn.nn.pad(%a, reshape(tile(shape_of(%b), reps=[2]), newshape=[2, 2]), 1f)",
        (f32(2, 3), f32(1, 2)),
        lambda a, b: np.pad(a, [(1, 2), (1, 2)], constant_values=1),
    ),
    "nn.mirror_pad": Case(
        "nn.mirror_pad(%a, pad_width=[[0, 0], [1, 2]])",
        (f32(2, 3),),
        lambda a: np.pad(a, [(0, 0), (1, 2)], mode="symmetric"),
    ),
    "nn.mirror_pad_reflect": Case(
        'nn.mirror_pad(%a, mode="REFLECT", pad_width=[[1, 0], [1, 2]])',
        (f32(2, 3),),
        lambda a: np.pad(a, [(1, 0), (1, 2)], mode="reflect"),
    ),
    "nn.cross_entropy": Case(
        "nn.cross_entropy(%a, %b)", (POSITIVE, f32(2, 3)), lambda a, b: -(np.log(a) * b).sum() / 2
    ),
    "nn.cross_entropy_with_logits": Case(
        "nn.cross_entropy_with_logits(%a, %b)", (f32(2, 3), f32(2, 3)), lambda a, b: -(a * b).sum() / 2
    ),
    "nn.nll_loss": Case(
        "nn.nll_loss(%a, %b, %c, ignore_index=-100)",
        (f32(5, 3), i32(5, low=0, high=3, dtype="int64"), f32(3, low=0.5)),
        by_torch(F.nll_loss),
    ),
    **{
        f"where_{dtype}": Case(
            "where(%a, %b, 0f)",
            (np.array([0, 1, -2, 0.5]).astype(dtype), VECTOR4),
            lambda a, b: np.where(a != 0, b, 0),
        )
        for dtype in ("int32", "float32")
    },
}


ALL: dict[str, Case] = {
    **{name: Case(f"{name}(%a)", (x,), function) for name, (x, function) in UNARY.items()},
    **{name: Case(f"{name}(%a, %b)", (a, b), function) for name, (a, b, function) in BINARY.items()},
    **CASES,
}


@pytest.fixture(scope="module")
def functions(compile_cases: Callable[..., dict[str, Callable[..., Array]]]) -> dict[str, Callable[..., Array]]:
    return compile_cases(ALL)


@pytest.mark.parametrize("name", ALL)
def test_operator_computes_what_its_reference_computes(name: str, functions: dict[str, Callable[..., Array]]) -> None:
    assert_computes(ALL[name], functions[name])


def test_every_operator_of_these_tables_has_a_case() -> None:
    assert {row.name for row in [*ELEMENTWISE, *CONVOLUTION, *NN]} - set(ALL) == set()


def test_printed_operators_are_read_back_as_the_same(convert_cases: Callable[..., tvm.IRModule]) -> None:
    assert not_read_back(convert_cases(ALL), ALL) == []
