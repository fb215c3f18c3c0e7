"""Fourier transforms of ONNX, DFT and STFT, as products of real tensors: TVM's importer does not know them.

Complex numbers are pairs along the last axis there; in between they are two tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from tvm import relax
from tvm.relax import op

from ...relax_ir.constants import array_of, constant_of
from ...relax_ir.tensors import extents
from ..fourier import factors, waves
from .nodes import numbers_of, padded

__all__ = ["FOURIER", "convert_fourier", "with_precise_transforms"]


def convert_fourier(bb: Any, name: str, inputs: Sequence[Any], attrs: dict[str, Any], opset: int) -> Any:
    """The result of an operator of `FOURIER`, in ONNX's form.

    Raises
    ------
    UnsupportedModelError
        A length, step or axis is computed by the model, or a transform is too long (`fourier.factors`).
    """
    if name == "DFT":
        signal, length, axis, *_ = padded(inputs, 3)
        place = attrs.get("axis", 1) if opset < 20 else _number(name, "axis", axis, -2)
        return _dft(bb, signal, _number(name, "dft_length", length, None), int(place), attrs)
    signal, step, window, length, *_ = padded(inputs, 4)
    is_whole = length is None and window is not None
    (size,) = extents(window.ty) if is_whole else numbers_of(name, "frame_length", length)
    (step,) = numbers_of(name, "frame_step", step)
    return _stft(bb, signal, step, window, size, bool(attrs.get("onesided", 1)))


FOURIER = frozenset({"DFT", "STFT"})
"""The operators that `convert_fourier` converts."""


def with_precise_transforms(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with transforms in float64: ONNX Runtime's of other lengths than powers of two are off by up to 1e-3.

    `model` itself where it has none.
    """
    if not any(node.op_type in FOURIER for node in model.graph.node):
        return model
    nodes = []
    for number, node in enumerate(model.graph.node):
        if node.op_type not in FOURIER:
            nodes.append(node)
            continue
        wide = onnx.NodeProto()
        wide.CopyFrom(node)
        for place in (0, 2) if node.op_type == "STFT" else (0,):  # the signal, and its window
            if place < len(node.input) and node.input[place]:
                wide.input[place] = f"eqtune.wide.{number}.{place}"
                cast = {"inputs": [node.input[place]], "outputs": [wide.input[place]], "to": onnx.TensorProto.DOUBLE}
                nodes.append(onnx.helper.make_node("Cast", **cast))
        wide.output[0] = f"eqtune.wide.{number}"
        nodes += [wide, onnx.helper.make_node("CastLike", [wide.output[0], node.input[0]], [node.output[0]])]
    precise = onnx.ModelProto()
    precise.CopyFrom(model)
    del precise.graph.node[:]
    precise.graph.node.extend(nodes)
    return precise


class _Complex(NamedTuple):
    """Two tensors of one shape; a real number has no imaginary part."""

    real: Any
    imag: Any


def _dft(bb: Any, signal: Any, length: int | None, axis: int, attrs: dict[str, Any]) -> Any:
    inverse, onesided = bool(attrs.get("inverse", 0)), bool(attrs.get("onesided", 0))
    shape = extents(signal.ty)
    axis %= len(shape)
    half = inverse and onesided  # of a spectrum, whose other half mirrors it
    length = length or (2 * (shape[axis] - 1) if half else shape[axis])
    given = length // 2 + 1 if half else length
    x = _each(_parts(bb, signal), lambda part: _resized(bb, part, axis, given))
    x = _mirrored(bb, x, axis, length) if half else x
    count = length // 2 + 1 if onesided and not inverse else length
    x = _transformed(bb, x, axis, 1 if inverse else -1, count)
    if inverse:
        x = _each(x, lambda part: bb.emit(op.multiply(part, relax.const(1 / length, str(part.ty.dtype)))))
    return op.expand_dims(x.real, -1) if half else op.stack(list(x), axis=-1)


def _mirrored(bb: Any, half: _Complex, axis: int, length: int) -> _Complex:
    """The whole spectrum of a real signal of that length."""
    places = np.arange(length)
    is_mirrored = places > length // 2
    places = constant_of(np.where(is_mirrored, length - places, places))
    whole = _each(half, lambda part: bb.emit(op.take(part, places, axis=axis)))
    rank = len(extents(half.real.ty))
    signs = np.where(is_mirrored, -1, 1).astype(str(half.real.ty.dtype)).reshape([-1] + [1] * (rank - 1 - axis))
    return _Complex(whole.real, bb.emit(op.multiply(whole.imag, constant_of(signs))))


def _stft(bb: Any, signal: Any, step: int, window: Any, size: int, onesided: bool) -> Any:
    emit = bb.emit
    x = _parts(bb, signal) if len(extents(signal.ty)) == 3 else _Complex(signal, None)
    starts = np.arange(0, extents(x.real.ty)[1] - size + 1, step)
    places = constant_of(starts[:, None] + np.arange(size))
    x = _each(x, lambda part: emit(op.take(part, places, axis=1)))
    if window is not None:
        x = _each(x, lambda part: emit(op.multiply(part, window)))
    return op.stack(list(_transformed(bb, x, 2, -1, size // 2 + 1 if onesided else size)), axis=-1)


def _number(name: str, what: str, value: Any, missing: int | None) -> Any:
    """Of an input that is one number; `missing` where it is not given."""
    return missing if value is None else int(numbers_of(name, what, value)[0])


def _parts(bb: Any, pairs: Any) -> _Complex:
    """[..., 2] or, of real numbers, [..., 1]."""
    last = len(extents(pairs.ty)) - 1
    both = [
        bb.emit(op.squeeze(bb.emit(op.strided_slice(pairs, [last], [part], [part + 1])), [last]))
        for part in range(extents(pairs.ty)[-1])
    ]
    return _Complex(*both, *[None] * (2 - len(both)))


def _resized(bb: Any, x: Any, axis: int, length: int) -> Any:
    """Cut, or filled up with zeros."""
    shape = extents(x.ty)
    if shape[axis] > length:
        return bb.emit(op.strided_slice(x, [axis], [0], [length]))
    if shape[axis] == length:
        return x
    behind = [0] * (2 * len(shape))
    behind[2 * axis + 1] = length - shape[axis]
    return bb.emit(op.nn.pad(x, behind))


def _transformed(bb: Any, x: _Complex, axis: int, sign: int, count: int) -> _Complex:
    """The first `count` results of a transform along one axis."""
    rank = len(extents(x.real.ty))
    order = [*(a for a in range(rank) if a != axis), axis]
    result = _along_last(bb, _permuted(bb, x, order), sign, count)
    return _permuted(bb, result, [order.index(a) for a in range(rank)])


def _along_last(bb: Any, x: _Complex, sign: int, count: int) -> _Complex:
    *rest, length = extents(x.real.ty)
    pair = factors(length)
    if pair is None:
        return _times(bb, x, op.matmul, waves(length, length, count), sign)
    first, second = pair
    rows, swapped = -(-count // first), [*range(len(rest)), len(rest) + 1, len(rest)]
    folded = _each(x, lambda part: bb.emit(op.reshape(part, [*rest, first, second])))
    inner = _times(bb, _permuted(bb, folded, swapped), op.matmul, waves(first, first, first), sign)
    turned = _times(bb, inner, op.multiply, waves(length, second, first), sign)
    if factors(second) is None:
        outer = _times(bb, turned, lambda part, wave: op.matmul(wave, part), waves(second, rows, second), sign)
    else:
        outer = _permuted(bb, _along_last(bb, _permuted(bb, turned, swapped), sign, rows), swapped)
    results = _each(outer, lambda part: bb.emit(op.reshape(part, [*rest, rows * first])))
    return _each(results, lambda part: bb.emit(op.strided_slice(part, [len(rest)], [0], [count])))


def _times(bb: Any, x: _Complex, multiply: Callable[..., Any], cosines_and_sines: Any, sign: int) -> _Complex:
    """With cosine + sign * i * sine, by an operator that is linear in both."""
    dtype = str(x.real.ty.dtype)
    cosine, sine = (constant_of(np.ascontiguousarray(wave, dtype)) for wave in cosines_and_sines)
    minus_sine = constant_of(-array_of(sine))
    upwards, downwards = (sine, minus_sine) if sign > 0 else (minus_sine, sine)
    real, imag = bb.emit(multiply(x.real, cosine)), bb.emit(multiply(x.real, upwards))
    if x.imag is None:
        return _Complex(real, imag)
    real = bb.emit(op.add(real, bb.emit(multiply(x.imag, downwards))))
    return _Complex(real, bb.emit(op.add(imag, bb.emit(multiply(x.imag, cosine)))))


def _permuted(bb: Any, x: _Complex, order: Sequence[int]) -> _Complex:
    if list(order) == sorted(order):
        return x
    return _each(x, lambda part: bb.emit(op.permute_dims(part, list(order))))


def _each(x: _Complex, function: Callable[[Any], Any]) -> _Complex:
    return _Complex(*(part if part is None else function(part) for part in x))
