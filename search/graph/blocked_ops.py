"""Convolution of channels in blocks (NCHWc) as a Relax operator; TVM types its own in this layout but cannot lower it.

    eqtune.blocked_conv2d(x (N, I/b, H, W, b), w (O/b, I/b, H, W, b in, b out), (strides, padding, dilation))
        -> (N, O/b, H, W, b)

It is one kernel, into which a bias or a relu that follows is fused.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, te, topi
from tvm.ir import Op, register_op_attr

from .attributes import Conv2d, TensorType
from .operators import infer

__all__ = ["blocked_conv2d"]

NAME = "eqtune.blocked_conv2d"


def blocked_conv2d(x: Any, w: Any, a: Conv2d) -> relax.Call:
    """The convolution that `a` says, of blocks by blocks."""
    return relax.Call(Op.get(NAME), [x, w, relax.ShapeExpr([*a.strides, *a.padding, *a.dilation])])


def _attrs(call: relax.Call) -> Conv2d:
    sh, sw, top, left, bottom, right, dh, dw = (int(value) for value in call.args[2].values)
    return Conv2d((sh, sw), (top, left, bottom, right), (dh, dw))


def _type(call: relax.Call, _builder: Any) -> relax.TensorType:
    x, w = (
        TensorType(tuple(int(extent) for extent in operand.ty.shape.values), str(operand.ty.dtype))
        for operand in call.args[:2]
    )
    result = infer("blocked_conv2d", _attrs(call), x, w)
    return relax.TensorType(result.shape, result.dtype)


def _kernel(x: te.Tensor, w: te.Tensor, a: Conv2d) -> te.Tensor:
    types = [TensorType(tuple(int(extent) for extent in operand.shape), str(operand.dtype)) for operand in (x, w)]
    shape = infer("blocked_conv2d", a, *types).shape
    (top, left, bottom, right), (sh, sw), (dh, dw) = a.padding, a.strides, a.dilation
    padded = topi.nn.pad(x, [0, 0, top, left, 0], [0, 0, bottom, right, 0], name="pad") if any(a.padding) else x
    block, row, column, lane = (
        te.reduce_axis((0, int(w.shape[i])), name) for i, name in ((1, "k"), (2, "r"), (3, "s"), (4, "l"))
    )
    return te.compute(
        shape,
        lambda n, o, y, z, c: te.sum(
            padded[n, block, y * sh + row * dh, z * sw + column * dw, lane] * w[o, block, row, column, lane, c],
            axis=[block, row, column, lane],
        ),
        name="blocked_conv2d",
    )


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return builder.call_te(
        lambda x, w: _kernel(x, w, _attrs(call)), *call.args[:2], primfunc_name_hint="blocked_conv2d"
    )


register_op_attr(NAME, "FInferType", _type)
register_op_attr(NAME, "FPurity", True)
register_op_attr(NAME, "FLegalize", _legalize)
