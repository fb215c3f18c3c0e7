"""What a kernel computes, read from its TensorIR without scheduling it.

`analyze` turns the one function of a fused module into plain data: its blocks with their axes and the linear index
expressions of everything they read and write, which arguments are weights, and, where there is one, the contraction
(matrix product or convolution) that the kernel is built around. The classification looks at index expressions only, so
it is the same for every layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import ir, tirx
from tvm.ir.expr import TensorLoad
from tvm.s_tir.stmt import SBlockRealize

from .access import Access, Axis, Block, Linear, dtype_bytes
from .expressions import is_conditional, is_reduced, nodes_of

__all__ = [
    "ACCUMULATES",
    "Contraction",
    "Kernel",
    "Operand",
    "accumulates",
    "analyze",
]

ACCUMULATES = "eqtune.accumulates"
"""Attribute of kernels that add to what their result is, which is a parameter as well, in the same memory: nothing may
be computed twice."""


@dataclass(frozen=True)
class Operand:
    """One factor of a contraction; `weight` when it is an argument whose layout a schedule may choose."""

    access: Access
    weight: bool


@dataclass(frozen=True)
class Contraction:
    """`output[batch, row, column] += left[batch, row, reduction] * right[batch, column, reduction]`.

    The right operand is the weight where there is one, otherwise the one written second. Windows are reduction axes.
    Axes of extent one that no index distinguishes are counted as rows, if the left operand has them, else as columns.

    Attributes
    ----------
    block : Block
    left, right : Operand
    batch, rows, columns, reduction : tuple of Axis
        The roles of all axes, in the order of the block's axes.
    groups : int
        Above one for a grouped convolution: its one column axis falls into this many runs with separate reductions.
    """

    block: Block
    left: Operand
    right: Operand
    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    reduction: tuple[Axis, ...]
    groups: int = 1

    @property
    def contiguous(self) -> Axis | None:
        """The output axis with stride one (of extent above one, where there is any)."""
        output = self.block.write
        found = [axis for axis in self.block.spatial if output.stride(axis.position) == 1]
        return max(found, key=lambda axis: axis.extent, default=None)

    @property
    def window(self) -> bool:
        """Whether an index of the left operand adds an output axis and a reduction axis, as convolutions do."""
        reduced = {axis.position for axis in self.reduction}
        return any(
            index is not None and len(index.coefficients) > 1 and reduced & set(index.coefficients)
            for index in self.left.access.indices
        )

    @property
    def flops(self) -> float:
        """Floating-point operations; a multiply-add counts two."""
        return 2.0 * self.block.iterations


@dataclass(frozen=True)
class Kernel:
    """One fused function as data.

    Attributes
    ----------
    blocks : tuple of Block
        In program order.
    arguments : tuple of (shape, dtype)
        Parameters of the function, inputs first, outputs last.
    outputs : tuple of int
        Indices of the arguments that are written.
    weights : frozenset of int
        Indices of the arguments whose layout a schedule may choose (`layout_free_buffers`).
    buffers : tuple of str
        Names of all buffers; arguments first.
    accumulates : bool
        Whether it adds to what its result is already (`ACCUMULATES`).
    """

    blocks: tuple[Block, ...]
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    outputs: tuple[int, ...]
    weights: frozenset[int]
    buffers: tuple[str, ...]
    accumulates: bool = False

    @property
    def flops(self) -> float:
        """Arithmetic operations of one call."""
        return float(sum(block.iterations * block.operations for block in self.blocks))

    @property
    def bytes_moved(self) -> float:
        """Bytes of all arguments, each counted once."""
        return float(sum(math.prod(shape) * dtype_bytes(dtype) for shape, dtype in self.arguments))

    def block(self, name: str) -> Block:
        """The block of that name; raises KeyError."""
        for block in self.blocks:
            if block.name == name:
                return block
        raise KeyError(f"no block {name!r}; this kernel has {[b.name for b in self.blocks]}")

    def writer(self, buffer: int) -> Block | None:
        """The block that writes a buffer; None for an input."""
        return next((block for block in self.blocks if block.write.buffer == buffer), None)

    @property
    def producers(self) -> tuple[Block, ...]:
        """Blocks that the contraction needs, directly or not; empty without a contraction."""
        if self.contraction is None:
            return ()
        needed = {read.buffer for read in self.contraction.block.reads}
        found = []
        for block in reversed(self.blocks):
            if block is not self.contraction.block and block.write.buffer in needed:
                found.append(block)
                needed |= {read.buffer for read in block.reads}
        return tuple(reversed(found))

    @property
    def epilogue(self) -> tuple[Block, ...]:
        """Blocks that follow the contraction (all that are neither it nor its producers)."""
        if self.contraction is None:
            return ()
        producers = {block.name for block in self.producers}
        return tuple(b for b in self.blocks if b.name not in producers and b is not self.contraction.block)

    @cached_property
    def contraction(self) -> Contraction | None:
        """The contraction that the kernel is built around: the only reduction there is, and a sum of products.

        None where its results are spread over something larger: a tile would have to write all of that.
        """
        reductions = [block for block in self.blocks if block.is_reduction]
        if len(reductions) != 1 or self._spreads(reductions[0]):
            return None
        return _contraction(reductions[0], self)

    def _spreads(self, reduction: Block) -> bool:
        """Whether a block that follows computes more places than the reduction has results."""
        results = math.prod(axis.extent for axis in reduction.spatial)
        following = {reduction.write.buffer}
        for block in self.blocks:
            if block is not reduction and any(read.buffer in following for read in block.reads):
                if block.iterations > results:
                    return True
                following.add(block.write.buffer)
        return False


def analyze(mod: Any) -> Kernel:
    """The kernel in `mod["main"]` as data.

    Raises
    ------
    ValueError
        When a shape is symbolic, an extent varies, or a block is not one store (opaque or nested blocks).
    """
    func = mod["main"]
    buffers: list[Any] = [p for p in func.params if hasattr(p.ty, "shape")]
    arguments = tuple((_shape(buffer), str(buffer.dtype)) for buffer in buffers)
    realized = nodes_of(func.body, SBlockRealize)
    blocks = tuple(_read_block(node.block, buffers) for node in realized if len(node.block.iter_vars))
    written = {block.write.buffer for block in blocks}
    attributes = func.attrs
    free = attributes.get("layout_free_buffers", ())
    return Kernel(
        blocks=blocks,
        arguments=arguments,
        outputs=tuple(i for i in range(len(arguments)) if i in written),
        weights=frozenset(int(i) for i in free),
        buffers=tuple(str(buffer.name) for buffer in buffers),
        accumulates=accumulates(func),
    )


def accumulates(function: Any) -> bool:
    """Whether a kernel has the attribute `ACCUMULATES`."""
    return function.attrs is not None and ACCUMULATES in function.attrs


def _shape(buffer: Any) -> tuple[int, ...]:
    if not all(isinstance(extent, tirx.IntImm) for extent in buffer.shape):
        raise ValueError(
            f"buffer {buffer.name} has a symbolic shape {list(buffer.shape)}; only static shapes are scheduled"
        )
    return tuple(int(extent) for extent in buffer.shape)


def _read_block(block: Any, buffers: list[Any]) -> Block:
    """The block as data; appends the buffers it is first to touch to `buffers`."""
    stores = nodes_of(block.body, tirx.BufferStore)
    if len(stores) != 1:
        raise ValueError(f"block {block.name_hint!r} has {len(stores)} stores; only single statements are scheduled")
    store = stores[0]
    loads, operators = nodes_of(store.value, TensorLoad), nodes_of(store.value, (*_ARITHMETIC, ir.Call))
    conditional = any(map(is_conditional, operators))
    conditional |= any(isinstance(node, tirx.Select) for node in operators)
    # An address has no dtype.
    operators = [node for node in operators if not str(getattr(node.ty, "dtype", "")).startswith(("int64", "bool"))]
    if not all(isinstance(variable.dom.extent, tirx.IntImm) for variable in block.iter_vars):
        raise ValueError(f"block {block.name_hint!r} has an axis whose extent varies, as ragged adaptive pooling has")
    axes = tuple(
        Axis(position, str(variable.var.name), int(variable.dom.extent), is_reduced(variable))
        for position, variable in enumerate(block.iter_vars)
    )
    variables = [variable.var for variable in block.iter_vars]
    reduction = any(axis.reduction for axis in axes)
    loads = [load for load in loads if not (reduction and load.source.same_as(store.buffer))]
    reads = tuple(_access(load.source, load.indices, variables, buffers) for load in loads)
    write = _access(store.buffer, store.indices, variables, buffers)
    multiplies = _multiplies(store, loads) if reduction else None
    return Block(str(block.name_hint), axes, reads, write, len(operators), conditional, multiplies)


_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min, tirx.Select)


def _multiplies(store: Any, loads: list[Any]) -> tuple[int, int] | None:
    """Which loads a statement `C = C + A * B` multiplies; operands may be cast."""
    value = store.value
    if not isinstance(value, tirx.Add):
        return None
    terms = [term for term in (value.a, value.b) if not _loads_from(term, store.buffer)]
    if len(terms) != 1:
        return None
    product = terms[0].value if isinstance(terms[0], tirx.Cast) else terms[0]
    if not isinstance(product, tirx.Mul):
        return None
    factors = []
    for factor in (product.a, product.b):
        while isinstance(factor, tirx.Cast):
            factor = factor.value
        if not isinstance(factor, TensorLoad):
            return None
        factors.append(next(i for i, load in enumerate(loads) if load.same_as(factor)))
    return (factors[0], factors[1])


def _loads_from(expression: Any, buffer: Any) -> bool:
    return isinstance(expression, TensorLoad) and bool(expression.source.same_as(buffer))


def _access(buffer: Any, indices: Any, variables: list[Any], buffers: list[Any]) -> Access:
    number = next((i for i, known in enumerate(buffers) if known.same_as(buffer)), len(buffers))
    if number == len(buffers):
        buffers.append(buffer)
    return Access(number, _shape(buffer), str(buffer.dtype), tuple(_linear(index, variables) for index in indices))


def _linear(index: Any, variables: list[Any]) -> Linear | None:
    """The index as a linear form of the block's axes; None when it is not one."""
    if isinstance(index, tirx.IntImm):
        return Linear({}, int(index))
    if isinstance(index, ir.Var):
        position = next((i for i, variable in enumerate(variables) if variable.same_as(index)), None)
        return None if position is None else Linear({position: 1}, 0)
    if isinstance(index, tirx.Cast):
        return _linear(index.value, variables)
    if isinstance(index, tirx.FloorDiv):
        inner = _linear(index.a, variables)
        if (
            inner is None
            or not isinstance(index.b, tirx.IntImm)
            or inner.offset
            or list(inner.coefficients.values()) != [1]
        ):
            return None
        return Linear({}, 0, {next(iter(inner.coefficients)): (int(index.b), 1)}) if not inner.quotients else None
    if isinstance(index, (tirx.Add, tirx.Sub, tirx.Mul)):
        left, right = _linear(index.a, variables), _linear(index.b, variables)
        if left is None or right is None:
            return None
        if isinstance(index, tirx.Mul):
            constant, other = (left, right) if not (left.coefficients or left.quotients) else (right, left)
            if constant.coefficients or constant.quotients:
                return None
            return _combine(other, Linear({}, 0), constant.offset)
        return _combine(right, left, -1 if isinstance(index, tirx.Sub) else 1)
    return None


def _combine(scaled: Linear, added: Linear, factor: int) -> Linear | None:
    """`added + factor * scaled`; None when both divide the same axis."""
    coefficients = dict(added.coefficients)
    for axis, coefficient in scaled.coefficients.items():
        coefficients[axis] = coefficients.get(axis, 0) + factor * coefficient
    if scaled.quotients.keys() & added.quotients.keys():
        return None
    quotients = dict(added.quotients)
    quotients.update({axis: (divisor, factor * c) for axis, (divisor, c) in scaled.quotients.items()})
    return Linear({a: c for a, c in coefficients.items() if c}, added.offset + factor * scaled.offset, quotients)


def _contraction(block: Block, kernel: Kernel) -> Contraction | None:
    """The roles of a sum of products; None when it is not one that the sketches understand."""
    if block.multiplies is None or not block.write.linear:
        return None
    first, second = (block.reads[i] for i in block.multiplies)
    if first == second or any(None in operand.indices for operand in (first, second)):
        return None
    reduced = {axis.position for axis in block.reduced}

    def windowed(access: Access) -> bool:
        return any(index is not None and len(index.coefficients) > 1 for index in access.indices)

    def weight(access: Access) -> bool:
        return access.buffer in kernel.weights

    swap = windowed(second) and not windowed(first)
    if windowed(first) == windowed(second):
        swap = weight(first) and not weight(second)
    left, right = (second, first) if swap else (first, second)
    if not right.linear:
        return None
    quotients = {axis: q for index in left.indices if index is not None for axis, q in index.quotients.items()}
    in_left, in_right = left.axes() - quotients.keys(), right.axes()
    if left.axes() & quotients.keys() or not reduced <= in_left | in_right or len(quotients) > 1:
        return None
    batch, rows, columns = [], [], []
    for axis in block.spatial:
        if axis.position in in_left and axis.position in in_right:
            batch.append(axis)
        elif axis.position in in_right:
            columns.append(axis)
        else:
            rows.append(axis)
    groups = 1
    for position, (divisor, _) in quotients.items():
        extent = block.axes[position].extent
        if block.axes[position] not in columns or extent % divisor:
            return None
        groups = extent // divisor
    return Contraction(
        block=block,
        left=Operand(left, weight(left)),
        right=Operand(right, weight(right)),
        batch=tuple(batch),
        rows=tuple(rows),
        columns=tuple(columns),
        reduction=tuple(block.reduced),
        groups=groups,
    )
