"""Any contraction as a batch of matrix products: `C[b, i, j] += A[b, i, k] * B[b, j, k]`.

Convolutions become implicit matrix products (Chetlur et al., "cuDNN", 2014): rows are the pixels of the output, the
reduction runs over the window and the channels, and nothing is copied but the tiles in shared memory.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.s_tir import ScheduleError

from ..access import Access, Axis, dtype_bytes
from ..analysis import Contraction, Kernel
from ..expressions import nodes_of
from ..schedule import schedule_of

__all__ = ["WIDEST_ACCESS_BYTES", "MatrixForm", "Normalized", "Operand", "inline_producers", "matrix_form"]

WIDEST_ACCESS_BYTES = 16
"""Of a load or store of one thread."""

FARTHEST_COPY_BYTES = 2**31
"""Of an argument, what TVM can copy asynchronously: it counts the bytes to where a copy begins in 32 bits."""


@dataclass(frozen=True)
class Operand:
    """One factor as a matrix.

    Attributes
    ----------
    access : Access
    along_reduction : bool
        Whether neighbours in memory follow the reduction (else the rows or columns).
    run : int
        Elements that lie one after another there, at aligned addresses and under one condition.
    stride : int
        Elements between neighbours along the faster axis; 1 when loads coalesce.
    row : int
        Extent of the faster axis, which a run may go beyond.
    """

    access: Access
    along_reduction: bool
    run: int
    stride: int
    row: int

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return dtype_bytes(self.access.dtype)

    def vector(self, elements: int, threads: int) -> int:
        """Elements of one load when `threads` threads fetch a tile of `elements`: the widest that is legal."""
        # TVM writes vectors of more than four bytes, where zeros are padded in, as CUDA that does not compile.
        # It pads bfloat16 as float32.
        # Of eight indices that it does not see to be neighbours, because the run goes over several axes, as well.
        narrow = self.item_bytes == 1 or self.access.dtype == "bfloat16" or self.run > self.row
        widest = 4 if narrow else max(1, WIDEST_ACCESS_BYTES // self.item_bytes)
        while widest > 1 and (self.run % widest or elements % (widest * threads)):
            widest //= 2
        return widest


@dataclass(frozen=True)
class MatrixForm:
    """The roles of a contraction's axes on a GPU; `columns` hold the output's contiguous axis.

    Attributes
    ----------
    kernel : Kernel
    contraction : Contraction
    rows, columns : tuple of Axis
        Of the operands A and B.
    a, b : Operand
    """

    kernel: Kernel
    contraction: Contraction
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    a: Operand
    b: Operand

    @property
    def groups(self) -> int:
        """Runs of a grouped convolution's channels; they count as a batch axis."""
        return self.contraction.groups

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """Extents of batch, rows, columns and reduction."""
        batch = math.prod(axis.extent for axis in self.contraction.batch) * self.groups
        rows, columns = (math.prod(axis.extent for axis in axes) for axes in (self.rows, self.columns))
        if self._grouped_rows:
            rows //= self.groups
        else:
            columns //= self.groups
        return batch, rows, columns, math.prod(axis.extent for axis in self.contraction.reduction)

    @property
    def _grouped_rows(self) -> bool:
        return self.groups > 1 and self.contraction.columns[0] in self.rows

    @property
    def accumulator(self) -> str:
        """Dtype of the sums."""
        return self.contraction.block.write.dtype

    @cached_property
    def copies_reach(self) -> bool:
        """Whether asynchronous copies reach all that is read: where not, they would take bytes from somewhere else."""
        inputs = [given for place, given in enumerate(self.kernel.arguments) if place not in self.kernel.outputs]
        return all(math.prod(shape) * dtype_bytes(dtype) <= FARTHEST_COPY_BYTES for shape, dtype in inputs)

    @cached_property
    def written_run(self) -> int:
        """Columns of the result that lie side by side where the kernel writes them, at aligned addresses.

        TVM writes vectors at any address, also where a part of a concatenation begins at an odd one.
        """
        last = [axis for axis in self.columns if axis.extent > 1][-1]
        run = math.gcd(self.shape[2], last.extent)
        for block in self.kernel.blocks:
            write = block.write
            results = math.prod(axis.extent for axis in block.spatial)
            if write.buffer in self.kernel.outputs and results < write.elements:
                steps = [write.stride(axis.position) for axis in block.spatial if axis.extent > 1]
                run = math.gcd(run, _offset(write), *(1 if step is None else step for step in steps if step != 1))
        return run

    def normalize(self, mod: Any, padding: Sequence[int]) -> Normalized:
        """Start a schedule in which the contraction's loops are batch, row, column and reduction.

        Parameters
        ----------
        mod : tvm.ir.IRModule
        padding : sequence of int
            What rows, columns and reduction are padded to multiples of.

        Raises
        ------
        tvm.s_tir.ScheduleError
            When TVM cannot bring the kernel into this form.
        """
        sch = schedule_of(mod)
        block = sch.get_sblock(self.contraction.block.name)
        for stage in self.kernel.epilogue[:-1]:
            with contextlib.suppress(ScheduleError):
                sch.compute_inline(sch.get_sblock(stage.name))
        index_dtype = str(sch.get(block).iter_vars[0].var.ty.dtype)
        maps = _Maps(self, index_dtype)
        if self.groups > 1:
            # First, so that the data's indices follow the run of channels and not each of them.
            sch.transform_block_layout(block, maps.split_groups())
        places = self._places(sch.get(block))
        copies = [sch.reindex(block, ("read", place)) for place in places]
        result = sch.reindex(block, ("write", 0))
        sblock = sch.get(block)
        maps.variables = [v.var for v in sblock.iter_vars]
        sch.transform_layout(copies[0], ("write", 0), maps.of_region(sblock.reads[places[0]], "bik"))
        sch.transform_layout(copies[1], ("write", 0), maps.of_region(sblock.reads[places[1]], "bjk"))
        sch.transform_layout(result, ("read", 0), maps.of_region(sblock.writes[0], "bij"))
        sch.transform_block_layout(block, maps.of_positions(list(range(len(sblock.iter_vars))), "bijk"))
        sch.pad_einsum(block, [1, *padding])
        return Normalized(sch, block, places, index_dtype)

    def _places(self, block: Any) -> list[int]:
        """Those of A and B among what the contraction's block reads; not by name, which two arguments may share."""
        written = block.writes[0].source
        loads = [load for load in nodes_of(block.body, TensorLoad) if not load.source.same_as(written)]
        reads = self.contraction.block.reads
        factors = [loads[reads.index(operand.access)].source for operand in (self.a, self.b)]
        regions = list(enumerate(block.reads))
        return [next(place for place, region in regions if region.source.same_as(factor)) for factor in factors]


@dataclass
class Normalized:
    """A schedule whose contraction is in matrix form; `places` are those of A and B among what the block reads."""

    schedule: Any
    block: Any
    places: list[int]
    index_dtype: str

    def take_epilogue(self) -> Any:
        """Fold what follows into the block that writes the sums back, as far as possible; that block."""
        sch = self.schedule
        (writer,) = sch.get_consumers(self.block)
        while True:
            consumers = sch.get_consumers(writer)
            if len(consumers) != 1:
                return writer
            try:
                sch.reverse_compute_inline(consumers[0])
            except ScheduleError:  # it reads the sums twice, or in another order: a kernel of its own
                return writer


class _Maps:
    """Index maps from the axes of a contraction to those of its matrix form. `variables` are the block's, in order."""

    def __init__(self, form: MatrixForm, index_dtype: str) -> None:
        self.variables: list[Any] = []
        self._dtype = index_dtype
        self._form = form
        roles: dict[int, str] = {}
        for role, axes in (
            ("b", form.contraction.batch),
            ("i", form.rows),
            ("j", form.columns),
            ("k", form.contraction.reduction),
        ):
            roles.update({axis.position: role for axis in axes})
        self._grouped = form.contraction.columns[0].position if form.groups > 1 else -1
        self._axes: list[tuple[str, int]] = []
        for axis in form.contraction.block.axes:
            if axis.position == self._grouped:
                self._axes += [("b", form.groups), (roles[axis.position], axis.extent // form.groups)]
            else:
                self._axes.append((roles[axis.position], axis.extent))

    def split_groups(self) -> Any:
        """The axis of a grouped convolution's output channels as two: which group, and which channel of it."""
        within = self._axes[self._grouped + 1][1]

        def result(*index: Any) -> list[Any]:
            channel = index[self._grouped]
            return [*index[: self._grouped], channel // within, channel % within, *index[self._grouped + 1 :]]

        count = len(self._form.contraction.block.axes)
        return tirx.IndexMap.from_func(result, ndim=count, index_dtype=self._dtype)

    def of_region(self, region: Any, roles: str) -> Any:
        """For a reindexed buffer, whose every index is one of the block's variables or zero."""
        positions = [
            next((p for p, variable in enumerate(self.variables) if variable.same_as(r.min)), None)
            for r in region.region
        ]
        return self.of_positions(positions, roles)

    def of_positions(self, positions: Sequence[int | None], roles: str) -> Any:
        """For indices that stand for the axes at `positions`; one result index for each of `roles`."""

        def result(*index: Any) -> list[Any]:
            flat = dict.fromkeys(roles, tirx.const(0, self._dtype))
            for value, position in zip(index, positions, strict=True):
                if position is not None:
                    role, extent = self._axes[position]
                    flat[role] = flat[role] * extent + value
            return list(flat.values())

        return tirx.IndexMap.from_func(result, ndim=len(positions), index_dtype=self._dtype)


def matrix_form(kernel: Kernel) -> MatrixForm | None:
    """The kernel's contraction as a matrix product; None where there is none, or it has no rows or no columns."""
    contraction = kernel.contraction
    if contraction is None or len(kernel.outputs) != 1:
        return None
    rows, columns = contraction.rows, contraction.columns
    left, right = contraction.left.access, contraction.right.access
    if any(axis.position not in left.axes() | _quotient_axes(left) for axis in rows if axis.extent > 1):
        return None
    if contraction.contiguous in rows:
        rows, columns, left, right = columns, rows, right, left
    if any(math.prod(axis.extent for axis in axes) == 1 for axes in (rows, columns)):
        return None
    # Behind the end of an axis that one factor lacks, zeros would be multiplied by what the other one is: infinity.
    if any(axis.position not in left.axes() & right.axes() for axis in contraction.reduction if axis.extent > 1):
        return None
    return MatrixForm(
        kernel,
        contraction,
        rows,
        columns,
        _operand(left, rows, contraction, kernel),
        _operand(right, columns, contraction, kernel),
    )


def _quotient_axes(access: Access) -> frozenset[int]:
    return frozenset(axis for index in access.indices if index is not None for axis in index.quotients)


def _operand(access: Access, outer: tuple[Axis, ...], contraction: Contraction, kernel: Kernel) -> Operand:
    """How the operand lies in memory, seen through the padding that is computed on the way."""
    reduction = contraction.reduction
    every = [axis for axis in (*outer, *reduction, *contraction.batch) if axis.extent > 1]
    writer = kernel.writer(access.buffer)
    sources = _sources(access.buffer, kernel)
    padded = any(source.shape != access.shape or _offset(source) for source in sources or ())
    # Lines of another length than the argument's, or that begin elsewhere.
    moved = any(source.shape[-1:] != access.shape[-1:] or _begins_within(source) for source in sources or ())
    strides = {axis.position: access.stride(axis.position) for axis in every}

    def run_of(axes: tuple[Axis, ...]) -> int:
        """Elements one after another along the last of `axes`, and the one before where it goes on."""
        run = 1
        others = dict(strides)
        for axis in reversed(axes):
            if axis.extent == 1:
                continue
            if strides[axis.position] != run or (run > 1 and padded):
                break
            run *= axis.extent
            del others[axis.position]
        if run == 1 or moved:
            return 1
        last = access.shape[-1]
        # Where a run begins: a window moves along it by single elements.
        steps = (step for step in others.values() if step is not None)
        return math.gcd(run, last if padded else run, _offset(access), *steps)

    along = {True: run_of(reduction), False: run_of(outer)}
    steps = {True: _last_stride(reduction, strides), False: _last_stride(outer, strides)}
    along_reduction = min((False, True), key=lambda side: (steps[side], -along[side]))
    usable = sources is not None and (writer is None or len(writer.reads) == 1)
    row = _last_extent(reduction if along_reduction else outer)
    return Operand(access, along_reduction, along[along_reduction] if usable else 1, steps[along_reduction], row)


def _sources(buffer: int, kernel: Kernel) -> list[Access] | None:
    """What is copied to a buffer, and to that, back to an argument; None where an axis is moved, turned or added.

    Neighbours in the buffer are then none in the argument, as those of the weights of transposed convolutions. TVM
    takes an asynchronous copy of such a vector for one of a run.
    """
    writer = kernel.writer(buffer)
    if buffer < len(kernel.arguments) or writer is None or len(writer.reads) != 1:
        return []
    (source,) = writer.reads
    straight = writer.is_elementwise and len(source.indices) == len(writer.write.indices)
    straight &= all(
        index is not None and not index.quotients and all(step == (axis, 1) for step in index.coefficients.items())
        for axis, index in enumerate(source.indices)
    )
    before = _sources(source.buffer, kernel) if straight and source.buffer != buffer else None
    return None if before is None else [source, *before]


def _offset(access: Access) -> int:
    """Elements from where the buffer begins to where all axes are zero; 1, which nothing divides, when unknown."""
    total, step = 0, 1
    for extent, index in zip(reversed(access.shape), reversed(access.indices), strict=True):
        if index is None:
            return 1
        total += step * index.offset
        step *= extent
    return total


def _begins_within(access: Access) -> bool:
    """Whether the first element along the last axis is another than the buffer's."""
    return any(index is None or index.offset != 0 for index in access.indices[-1:])


def _last_extent(axes: tuple[Axis, ...]) -> int:
    moving = [axis for axis in axes if axis.extent > 1]
    return moving[-1].extent if moving else 1


def _last_stride(axes: tuple[Axis, ...], strides: dict[int, int | None]) -> int:
    """Elements between neighbours along the fastest axis; a large number when unknown."""
    moving = [axis for axis in axes if axis.extent > 1]
    if not moving:
        return 1 << 30
    return strides[moving[-1].position] or (1 << 20)


def inline_producers(schedule: Any, block: Any) -> None:
    """Compute everything that `block` reads where it is read, as far as TVM can."""
    progress = True
    while progress:
        progress = False
        for producer in schedule.get_producers(block):
            try:
                schedule.compute_inline(producer)
                progress = True
            except ScheduleError:
                continue
