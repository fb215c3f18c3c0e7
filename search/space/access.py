"""Statements of a kernel as plain data: axes, and what is read and written at which indices. Knows nothing of TVM."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field

__all__ = ["Access", "Axis", "Block", "Linear", "dtype_bytes"]


@dataclass(frozen=True)
class Linear:
    """One index of an access: `offset + sum(coefficient * axis) + sum(coefficient * (axis // divisor))`.

    Attributes
    ----------
    coefficients : dict of axis position to int
        Zeros are left out.
    offset : int
    quotients : dict of axis position to (divisor, coefficient)
        Grouped convolutions read their input channels by `column // columns_of_a_group`; empty elsewhere.
    """

    coefficients: dict[int, int]
    offset: int
    quotients: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Axis:
    """One iteration variable of a block. `position` is its place among the block's variables."""

    position: int
    name: str
    extent: int
    reduction: bool


@dataclass(frozen=True)
class Access:
    """One buffer element that a block reads or writes.

    Attributes
    ----------
    buffer : int
        Which buffer: an index into `Kernel.buffers`. Arguments of the function come first, in their order.
    shape : tuple of int
    dtype : str
    indices : tuple of Linear or None
        One for each dimension; None where an index is not linear in the block's axes.
    """

    buffer: int
    shape: tuple[int, ...]
    dtype: str
    indices: tuple[Linear | None, ...]

    @property
    def linear(self) -> bool:
        """Whether every index is linear, without quotients."""
        return all(index is not None and not index.quotients for index in self.indices)

    def axes(self) -> frozenset[int]:
        """Positions of the axes that appear in any linear index."""
        return frozenset(a for index in self.indices if index is not None for a in index.coefficients)

    def stride(self, axis: int) -> int | None:
        """Elements between neighbours along `axis` in a dense row-major buffer; None when not linear."""
        total, step = 0, 1
        for extent, index in zip(reversed(self.shape), reversed(self.indices), strict=True):
            if index is None or axis in index.quotients:
                return None
            total += step * index.coefficients.get(axis, 0)
            step *= extent
        return total

    @property
    def elements(self) -> int:
        """Number of elements of the whole buffer."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the whole buffer in bytes."""
        return self.elements * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class Block:
    """One statement of the kernel with its iteration space.

    Attributes
    ----------
    name : str
        Its name in the schedule (`Schedule.get_sblock`).
    axes : tuple of Axis
    reads : tuple of Access
        Every load in the body, without the load of the accumulator.
    write : Access
        The one store.
    operations : int
        Arithmetic operations of one iteration (an estimate: every operator and call counts one).
    conditional : bool
        Whether the value is chosen by a condition, as padding does.
    multiplies : tuple of int or None
        The two reads that a reduction multiplies before it sums, as indices into `reads`; None for anything else.
    """

    name: str
    axes: tuple[Axis, ...]
    reads: tuple[Access, ...]
    write: Access
    operations: int
    conditional: bool
    multiplies: tuple[int, int] | None

    @property
    def is_reduction(self) -> bool:
        """Whether any axis is reduced over."""
        return any(axis.reduction for axis in self.axes)

    @property
    def is_elementwise(self) -> bool:
        """Whether it has no reduction and writes each element at its own axes, in order, perhaps into a larger buffer.

        A part of a concatenation is written at its axes plus where the part begins.
        """
        return not self.is_reduction and all(
            index is not None and (index.coefficients == {position: 1} or (not index.coefficients and extent == 1))
            for position, (index, extent) in enumerate(
                zip(self.write.indices, (axis.extent for axis in self.axes), strict=False)
            )
        )

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the axes, in order."""
        return tuple(axis.extent for axis in self.axes)

    @property
    def spatial(self) -> tuple[Axis, ...]:
        """The axes that are not reduced over."""
        return tuple(axis for axis in self.axes if not axis.reduction)

    @property
    def reduced(self) -> tuple[Axis, ...]:
        """The axes that are reduced over."""
        return tuple(axis for axis in self.axes if axis.reduction)

    @property
    def iterations(self) -> int:
        """How often the statement runs."""
        return math.prod(self.extents)


@functools.cache
def dtype_bytes(dtype: str) -> int:
    """Bytes of one element: of "float8_e4m3fn" the 8 are its bits."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1
