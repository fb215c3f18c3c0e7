"""The transforms of Winograd's minimal filtering as Relax operators, with channels last.

    eqtune.winograd_data(image (N, H, W, C), (m, r, padding)) -> (matrices, tiles, C)
    eqtune.winograd_result(products (matrices, tiles, C), (m, r, height, width)) -> image (N, height, width, C)
    eqtune.winograd_conv2d(image (N, H, W, C), weight (matrices, C, O), (m, r, padding)) -> image

m and r are two numbers each, down and across (attributes.WinogradData). Each is one kernel: tiles are cut, padded and
transformed in registers; what follows the last two, a bias or a relu, is fused into them. As matrix products, or as
padding, slices and concatenations, transforms take longer than the convolution. The last is a whole convolution: its
kernel takes some tiles at a time through all stages, so that what lies between the stages stays in the cache of one
core (winograd_kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax, te
from tvm.ir import Op, register_op_attr

from .attributes import TensorType, WinogradData, WinogradResult
from .operators import infer
from .winograd_kernels import conv2d_kernel, data_kernel, result_kernel

__all__ = ["winograd_conv2d", "winograd_data", "winograd_result"]

DATA, RESULT, CONV2D = "eqtune.winograd_data", "eqtune.winograd_result", "eqtune.winograd_conv2d"

FUSES_WITH_USERS, FUSES_WITH_NOTHING = 4, 8
"""TVM's kOutEWiseFusable and kOpaque."""


def winograd_data(x: Any, attrs: WinogradData) -> relax.Call:
    """B' d B of each tile d of an image (N, H, W, C)."""
    return relax.Call(Op.get(DATA), [x, relax.ShapeExpr([*attrs.outputs, *attrs.kernel, *attrs.padding])])


def winograd_result(x: Any, attrs: WinogradResult) -> relax.Call:
    """The image (N, height, width, C) of A' M A of all products M."""
    return relax.Call(Op.get(RESULT), [x, relax.ShapeExpr([*attrs.outputs, *attrs.kernel, attrs.height, attrs.width])])


def winograd_conv2d(x: Any, weight: Any, attrs: WinogradData) -> relax.Call:
    """The convolution of an image (N, H, W, C) with a transformed weight (matrices, C, O)."""
    return relax.Call(Op.get(CONV2D), [x, weight, relax.ShapeExpr([*attrs.outputs, *attrs.kernel, *attrs.padding])])


def _numbers(call: relax.Call) -> list[int]:
    return [int(value) for value in call.args[-1].values]


def _data_attrs(call: relax.Call) -> WinogradData:
    down, across, rows, columns, top, left, bottom, right = _numbers(call)
    return WinogradData((down, across), (rows, columns), (top, left, bottom, right))


def _result_attrs(call: relax.Call) -> WinogradResult:
    down, across, rows, columns, height, width = _numbers(call)
    return WinogradResult((down, across), (rows, columns), height, width)


def _static(ty: Any) -> TensorType:
    return TensorType(tuple(int(extent) for extent in ty.shape.values), str(ty.dtype))


def _data_type(call: relax.Call, _builder: Any) -> relax.TensorType:
    image = _static(call.args[0].ty)
    batch, height, width, channels = image.shape
    result = infer("winograd_data", _data_attrs(call), TensorType((batch, channels, height, width), image.dtype))
    return relax.TensorType(result.shape, result.dtype)


def _result_type(call: relax.Call, _builder: Any) -> relax.TensorType:
    result = infer("winograd_result", _result_attrs(call), _static(call.args[0].ty))
    batch, channels, height, width = result.shape
    return relax.TensorType((batch, height, width, channels), result.dtype)


def _conv2d_type(call: relax.Call, _builder: Any) -> relax.TensorType:
    image, weight = (_static(argument.ty) for argument in call.args[:2])
    batch, height, width, channels = image.shape
    image = TensorType((batch, channels, height, width), image.dtype)
    batch, channels, height, width = infer("winograd_conv2d", _data_attrs(call), image, weight).shape
    return relax.TensorType((batch, height, width, channels), image.dtype)


def _legalize(
    kernel: Callable[..., te.Tensor], attrs: Callable[[relax.Call], Any], pattern: int
) -> Callable[[relax.BlockBuilder, relax.Call], relax.Expr]:
    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        name = str(call.op.name).removeprefix("eqtune.")
        return builder.call_te(
            lambda *tensors: kernel(*tensors, attrs(call)),
            *call.args[:-1],
            primfunc_name_hint=name,
            primfunc_attrs={"op_pattern": pattern},
        )

    return legalize


def _register() -> None:
    for name, of_type, kernel, attrs, pattern in (
        (DATA, _data_type, data_kernel, _data_attrs, FUSES_WITH_NOTHING),
        (RESULT, _result_type, result_kernel, _result_attrs, FUSES_WITH_USERS),
        (CONV2D, _conv2d_type, conv2d_kernel, _data_attrs, FUSES_WITH_USERS),
    ):
        register_op_attr(name, "FInferType", of_type)
        register_op_attr(name, "FPurity", True)
        register_op_attr(name, "FLegalize", _legalize(kernel, attrs, pattern))


_register()
