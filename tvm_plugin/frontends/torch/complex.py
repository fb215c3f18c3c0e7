"""Complex numbers of PyTorch as pairs of real tensors, and Fourier transforms as products: TVM has neither.

The program runs once more, on pairs, while torch.export listens: what it records is real. Rotary embeddings that are
written as complex products, spectrograms (`stft`), `fft` layers and spectral convolutions come in this way.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.export
import torch.fx
from torch import Tensor
from torch.export.graph_signature import InputKind

from ...errors import UnsupportedModelError
from ..fourier import factors, waves

__all__ = ["has_complex_numbers", "with_real_numbers"]

LANES = 8
"""Of a vector, at least..."""

MOST_EMPTY = 1.15
"""... and how many of them rows may need, relative to their length, to be worth vectors of their own."""

aten = torch.ops.aten


class Complex(NamedTuple):
    """Two tensors of one shape."""

    real: Any
    imag: Any


def has_complex_numbers(program: torch.export.ExportedProgram) -> bool:
    """Whether any value of the program is a complex tensor."""
    return any(_is_complex(node) for node in program.graph.nodes)


def with_real_numbers(program: torch.export.ExportedProgram, name: str) -> torch.export.ExportedProgram:
    """The same program without complex tensors, its inputs called as they were.

    Raises
    ------
    UnsupportedModelError
        An input or output is complex, a transform is too long (`fourier.factors`), or an operator is not known of
        complex numbers.
    """
    plain = _decomposed(program)
    inputs = {
        node.name: node.meta["val"] for node in plain.graph.nodes if node.name in plain.graph_signature.user_inputs
    }
    output = next(node for node in plain.graph.nodes if node.op == "output")
    if any(value.is_complex() for value in inputs.values()) or any(map(_is_complex, output.all_input_nodes)):
        raise UnsupportedModelError(
            f"{name} takes or returns complex tensors; let it take or return torch.view_as_real of them"
        )
    unknown = sorted(
        {str(node.target) for node in plain.graph.nodes if _computes_complex(node) and not _is_known(node)}
    )
    if unknown:
        raise UnsupportedModelError(f"{', '.join(unknown)} of complex numbers cannot be imported")
    examples = {key: torch.zeros(tuple(value.shape), dtype=value.dtype) for key, value in inputs.items()}
    with torch.no_grad():
        return torch.export.export(_OnPairs(plain), (), examples, strict=False)


def _decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program in operators that are known of complex numbers, as far as PyTorch itself can say so."""
    decompositions = torch.export.default_decompositions()
    table: dict[Any, Callable[..., Any]] = {}
    while True:
        plain = program.run_decompositions(table)
        unknown = {node.target for node in plain.graph.nodes if _computes_complex(node) and not _is_known(node)}
        helpful = [target for target in unknown if target in decompositions and target not in table]
        if not helpful:
            return plain
        table |= {target: decompositions[target] for target in helpful}


def _computes_complex(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and any(map(_is_complex, (node, *node.all_input_nodes)))


def _is_known(node: torch.fx.Node) -> bool:
    return any(_packet(node) in known for known in (_BY_PART, _OF_VALUES, _OPERATORS))


def _packet(node: torch.fx.Node) -> Any:
    """The operator that a node calls an overload of."""
    return getattr(node.target, "overloadpacket", node.target)


def _is_complex(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


class _OnPairs(torch.nn.Module):
    """Runs a program on real inputs by their names; returns its outputs, flat."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        super().__init__()
        self._program = program
        self._specs = program.graph_signature.input_specs
        for number, spec in enumerate(self._specs):
            if spec.kind != InputKind.USER_INPUT:
                kept = program.state_dict if spec.target in program.state_dict else program.constants
                value = kept[str(spec.target)].detach()
                parts = {"real": value.real.clone(), "imag": value.imag.clone()} if value.is_complex() else {"": value}
                for part, tensor in parts.items():
                    self.register_buffer(f"value{number}{part}", tensor)

    def forward(self, **inputs: Tensor) -> Any:
        values = [
            inputs[spec.arg.name] if spec.kind == InputKind.USER_INPUT else self._kept(number)
            for number, spec in enumerate(self._specs)
        ]
        return tuple(_Interpreter(self._program.graph_module).run(*values))

    def _kept(self, number: int) -> Any:
        if hasattr(self, f"value{number}"):
            return getattr(self, f"value{number}")
        return Complex(getattr(self, f"value{number}real"), getattr(self, f"value{number}imag"))


class _Interpreter(torch.fx.Interpreter):
    def run_node(self, node: torch.fx.Node) -> Any:
        if node.op != "call_function":
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if node.target is aten.view.default:  # what it views may lie in another order here
            return _by_part(aten.reshape, args, kwargs)
        if node.target is aten._neg_view.default:
            return -args[0]
        if not _computes_complex(node):
            return super().run_node(node)
        if _packet(node) in _BY_PART:
            return _by_part(node.target, args, kwargs)
        if _packet(node) in _OF_VALUES:
            places = _OF_VALUES[_packet(node)]
            return _by_part(node.target, [_values(a) if i in places else a for i, a in enumerate(args)], kwargs)
        return _OPERATORS[_packet(node)](*args, **kwargs)


def _of(value: Any) -> Complex:
    """A real tensor or a number as a complex one."""
    if isinstance(value, Complex):
        return value
    if isinstance(value, complex):
        return Complex(value.real, value.imag)
    return Complex(value, 0.0)


def _values(value: Any) -> Any:
    """Each value of an argument as a complex one, of which both parts are as the real part is: a tensor or a number."""
    if isinstance(value, list | tuple) and not isinstance(value, Complex):
        return [_values(item) for item in value]
    real, imag = _of(value)
    return Complex(real, torch.zeros_like(real) if isinstance(real, Tensor) and not isinstance(imag, Tensor) else imag)


def _by_part(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a function makes of the real parts, and of the imaginary ones; real values stay real."""

    def of(value: Any, part: int) -> Any:
        if isinstance(value, Complex):
            return value[part]
        return [of(item, part) for item in value] if isinstance(value, list | tuple) else value

    def is_complex(value: Any) -> bool:
        inside = isinstance(value, list | tuple) and any(map(is_complex, value))
        return isinstance(value, Complex) or inside

    if not is_complex(args):
        return function(*args, **kwargs)
    real, imag = (function(*of(args, part), **kwargs) for part in (0, 1))
    if isinstance(real, list | tuple):
        return [Complex(*parts) for parts in zip(real, imag, strict=True)]
    return Complex(real, imag)


def _add(left: Any, right: Any, alpha: Any = 1) -> Complex:
    left, right = _of(left), _of(right)
    return _full(Complex(left.real + alpha * right.real, left.imag + alpha * right.imag))


def _subtract(left: Any, right: Any, alpha: Any = 1) -> Complex:
    return _add(left, right, -alpha)


def _full(value: Complex) -> Complex:
    """With both parts of one shape: the part of a real operand is a number."""
    real, imag = (part if isinstance(part, Tensor) else torch.tensor(part) for part in value)
    shape = torch.broadcast_shapes(real.shape, imag.shape)
    dtype = torch.promote_types(real.dtype, imag.dtype)
    return Complex(real.to(dtype).expand(shape), imag.to(dtype).expand(shape))


def _multiply(left: Any, right: Any) -> Complex:
    return _product(operator.mul, left, right)


def _product(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Complex:
    """By any function that is linear in both."""
    for real, other, swapped in ((left, right, False), (right, left, True)):
        if not isinstance(real, Complex | complex):
            parts = _of(other)
            return Complex(*(function(part, real) if swapped else function(real, part) for part in parts))
    (a, b), (c, d) = _of(left), _of(right)
    return Complex(function(a, c) - function(b, d), function(a, d) + function(b, c))


def _divide(left: Any, right: Any) -> Complex:
    if not isinstance(right, Complex | complex):
        return Complex(*(part / right for part in _of(left)))
    c, d = _of(right)
    size = c * c + d * d
    return _multiply(left, Complex(c / size, -d / size))


def _conjugate(value: Complex) -> Complex:
    return Complex(value.real, -value.imag)


def _exp(value: Complex) -> Complex:
    return _polar(torch.exp(value.real), value.imag)


def _of_parts(real: Any, imag: Any) -> Complex:
    """Of parts that broadcast: a tensor and one of zeros, say."""
    return Complex(real, imag) if real.shape == imag.shape else _full(Complex(real, imag))


def _polar(size: Any, angle: Any) -> Complex:
    return Complex(size * torch.cos(angle), size * torch.sin(angle))


def _abs(value: Complex) -> Any:
    return torch.sqrt(value.real * value.real + value.imag * value.imag)


def _power(value: Complex, exponent: Any) -> Any:
    if exponent != 2:
        raise UnsupportedModelError(f"the power {exponent} of complex numbers cannot be imported; 2 can")
    return _multiply(value, value)


def _to(value: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """To another dtype: from or to complex numbers, or between them."""
    parts = _of(value)
    if dtype is None:
        return parts
    if not dtype.is_complex:
        return parts.real.to(dtype)
    part = dtype.to_real()
    if not isinstance(parts.imag, Tensor):
        parts = Complex(parts.real, torch.zeros_like(parts.real))
    return Complex(parts.real.to(part), parts.imag.to(part))


def _filled(size: Sequence[int], value: complex, dtype: torch.dtype | None = None, **_: Any) -> Complex:
    parts, part_dtype = _of(value), torch.get_default_dtype() if dtype is None else dtype.to_real()
    return Complex(*(torch.full(size, part, dtype=part_dtype) for part in parts))


def _real_transform(x: Any, dims: Sequence[int], normalization: int, onesided: bool) -> Complex:
    *others, last = dims
    length = x.shape[last]
    value = _transformed(Complex(x, None), last, -1, length // 2 + 1 if onesided else length)
    for dim in others:
        value = _transformed(value, dim, -1, x.shape[dim])
    return _scaled(value, [x.shape[dim] for dim in dims], normalization)


def _complex_transform(x: Complex, dims: Sequence[int], normalization: int, forward: bool) -> Complex:
    value = x
    for dim in dims:
        value = _transformed(value, dim, -1 if forward else 1, x.real.shape[dim])
    return _scaled(value, [x.real.shape[dim] for dim in dims], normalization)


def _transform_to_real(x: Complex, dims: Sequence[int], normalization: int, length: int) -> Any:
    """Inverse, of the first half of a spectrum whose second half mirrors it."""
    *others, last = dims
    for dim in others:
        x = _transformed(x, dim, 1, x.real.shape[dim])
    extents = [x.real.shape[dim] for dim in others]
    half = _each(x, lambda part: part.narrow(last, 0, length // 2 + 1))
    if factors(length) is None:
        real = _real_by_matrix(half, last, length)
    else:
        mirrored = [part.narrow(last, 1, (length - 1) // 2).flip(last) for part in half]
        whole = Complex(torch.cat([half.real, mirrored[0]], last), torch.cat([half.imag, -mirrored[1]], last))
        real = _transformed(whole, last, 1, length).real
    return _scaled(Complex(real, None), [*extents, length], normalization).real


def _transformed(x: Complex, dim: int, sign: int, count: int) -> Complex:
    """The first results of a transform along one axis; the imaginary part may be None.

    Of a length a * b, as transforms of lengths a and b (Cooley and Tukey): the second along the rows of a matrix, so
    that no result has to be moved.
    """
    length = x.real.shape[dim]
    pair = factors(length)
    if pair is None:
        return _by_matrix(x, dim, sign, count)
    if dim % x.real.dim() != x.real.dim() - 1:
        return _moved(_transformed, x, dim, -1, sign, count)
    inner = _by_matrix(_each(x, lambda part: part.unflatten(-1, pair).mT), -1, sign, pair[0])
    cosines, sines = _waves(length, pair[1], pair[0], x.real.dtype)
    turned = _multiply(inner, Complex(cosines, sign * sines))
    outer = _transformed(turned, -2, sign, -(-count // pair[0]))
    return _each(outer, lambda part: part.flatten(-2)[..., :count])


def _by_matrix(x: Complex, dim: int, sign: int, count: int) -> Complex:
    """As a product from the right of the last axis, from the left of the one before; others are moved there."""
    rank, length = x.real.dim(), x.real.shape[dim]
    is_last, width = dim % rank == rank - 1, x.real.shape[-1]
    fills_vectors = -(-width // LANES) * LANES <= MOST_EMPTY * width
    if not is_last and (dim % rank != rank - 2 or not fills_vectors):
        return _moved(_by_matrix, x, dim, -2 if fills_vectors else -1, sign, count)
    cosines, sines = _waves(length, length, count, x.real.dtype)

    def product(part: Any, waves: Any) -> Any:
        return part @ waves if is_last else waves.mT.contiguous() @ part

    real, imag = product(x.real, cosines), sign * product(x.real, sines)
    if x.imag is None:
        return Complex(real, imag)
    return Complex(real - sign * product(x.imag, sines), imag + product(x.imag, cosines))


def _real_by_matrix(half: Complex, dim: int, length: int) -> Any:
    """The inverse transform of a spectrum whose second half mirrors the first: it only doubles what is real."""
    half = _each(half, lambda part: part.movedim(dim, -1))
    bins = half.real.shape[-1]
    twice = torch.from_numpy(np.where(np.isin(np.arange(bins), (0, length / 2)), 1.0, 2.0)).to(half.real.dtype)[:, None]
    cosines, sines = _waves(length, bins, length, half.real.dtype)
    real = half.real @ (twice * cosines) - half.imag @ (twice * sines)
    return real.movedim(-1, dim).contiguous()


def _moved(transform: Callable[..., Complex], x: Complex, dim: int, to: int, sign: int, count: int) -> Complex:
    """A transform along an axis that is moved there and back."""
    result = transform(_each(x, lambda part: part.movedim(dim, to)), to, sign, count)
    return _each(result, lambda part: part.movedim(to, dim).contiguous())


def _each(x: Complex, function: Callable[[Any], Any]) -> Complex:
    """Of both parts, if there are two."""
    return Complex(*(part if part is None else function(part) for part in x))


def _waves(length: int, rows: int, columns: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Numpy's, which are constants while torch.export listens."""
    cosines, sines = waves(length, rows, columns)
    return torch.from_numpy(cosines).to(dtype), torch.from_numpy(sines).to(dtype)


def _scaled(value: Complex, lengths: Sequence[int], normalization: int) -> Complex:
    """By PyTorch's numbers: 0 as it is, 1 by the root of the length, 2 by the length."""
    factor = math.prod(lengths) ** (-0.5 * normalization)
    return value if normalization == 0 else _each(value, lambda part: part * factor)


_BY_PART = frozenset(
    getattr(aten, name)
    for name in (
        *("view", "reshape", "_unsafe_view", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "alias"),
        *("slice", "select", "clone", "contiguous", "detach", "flip", "roll", "movedim", "narrow", "gather"),
        *("sum", "mean", "neg", "index_select", "index", "split_with_sizes", "split", "unbind", "unfold", "repeat"),
        "lift_fresh_copy",
    )
)
"""What moves or adds up elements of one tensor; all other arguments are axes, sizes or indices."""

_OF_VALUES: dict[Any, tuple[int, ...]] = {
    aten.cat: (0,),
    aten.stack: (0,),
    aten.where: (1, 2),
    aten.copy: (0, 1),
    aten.slice_scatter: (0, 1),
    aten.select_scatter: (0, 1),
    aten.constant_pad_nd: (0, 2),
}
"""What takes elements of several values -> which of its arguments they are: real ones among them have no imaginary
part."""

_OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.add: _add,
    aten.sub: _subtract,
    aten.mul: _multiply,
    aten.div: _divide,
    aten.mm: lambda left, right: _product(torch.mm, left, right),
    aten.bmm: lambda left, right: _product(torch.bmm, left, right),
    aten.matmul: lambda left, right: _product(torch.matmul, left, right),
    aten.reciprocal: lambda value: _divide(1.0, value),
    aten.pow: _power,
    aten.exp: _exp,
    aten.abs: _abs,
    aten.angle: lambda value: torch.atan2(value.imag, value.real),
    aten.real: lambda value: value.real,
    aten.imag: lambda value: value.imag,
    aten.complex: _of_parts,
    aten.polar: _polar,
    aten._conj: _conjugate,
    aten._conj_physical: _conjugate,
    aten.conj_physical: _conjugate,
    aten.resolve_conj: lambda value: value,
    aten.resolve_neg: lambda value: value,
    aten.view_as_real: lambda value: torch.stack(list(value), -1),
    aten.view_as_complex: lambda value: Complex(value[..., 0], value[..., 1]),
    aten._to_copy: _to,
    aten.full: _filled,
    aten._fft_r2c: _real_transform,
    aten._fft_c2c: _complex_transform,
    aten._fft_c2r: _transform_to_real,
}
