"""What the sketches of memory-bound kernels know about a kernel: its stages after inlining, as plain numbers.

Unlike `..analysis`, nothing here may fail on an odd kernel: an index that is not affine is `None`, never an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.ir.expr import TensorLoad

from ..analysis import accumulates
from ..byte_tables import TableInstructions, is_looked_up, table_instructions_of
from ..expressions import COMPARISONS, nodes_of
from .math_forms import math_form

__all__ = ["Access", "Kernel", "Stage", "block_names", "is_library_call", "read_kernel"]

_OPERATORS = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Max, tirx.Min, tirx.Select, tirx.Cast, *COMPARISONS)
_DIVISION_COST = 4

_ROOT_COST = 4
_CHEAP_CALLS = ("if_then_else", "likely", "reinterpret", "nearbyint", "round", "floor", "ceil", "trunc", "fabs", "fma")


@dataclass(frozen=True)
class Access:
    """One element that a stage reads or writes, as a function of the stage's axes.

    Attributes
    ----------
    buffer : str
    buffer_bytes : int
        Size of the whole buffer.
    item_bytes : int
    strides : tuple of int or None
        Elements between neighbours along each axis of the stage; None where the index is not affine in that axis.
    looked_up : bool
        Whether it is of a table of bytes, at the place that a byte says.
    """

    buffer: str
    buffer_bytes: int
    item_bytes: int
    strides: tuple[int | None, ...]
    looked_up: bool = False


@dataclass(frozen=True)
class Stage:
    """One statement that is left after inlining.

    Attributes
    ----------
    name : str
        Name of its block in the schedule.
    extents : tuple of int
        Of its axes, in loop order.
    reduced : tuple of bool
        Which axes are reduced over.
    reads, writes : tuple of Access
    operations : float
        Vector instructions of one iteration without loads, stores and calls; a division counts four.
    calls : int
        Calls of libm in one iteration, which do not vectorise.
    forms : int
        Calls in one iteration that have a vectorising form (math_forms.py).
    guards : dict of axis to constants
        Axes that a condition depends on, as in padding and concatenation, with the constants they are compared with.
    combiners : int
        Buffers written; above one for argmax-like reductions.
    widest_bytes : int
        Of the values of one iteration, those on the way from what is read to what is written included. TVM counts what
        is computed in bfloat16 as float32.
    regular : bool
        Whether every axis has a constant extent from 0 and is spatial or reduced, so that sketches may reorder them.
    picks : TableInstructions or None
        What picks bytes of tables, where something does.
    """

    name: str
    extents: tuple[int, ...]
    reduced: tuple[bool, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    operations: float
    calls: int
    forms: int
    guards: dict[int, tuple[int, ...]]
    combiners: int
    widest_bytes: int
    regular: bool
    picks: TableInstructions | None = None

    @property
    def is_reduction(self) -> bool:
        """Whether any axis is reduced over."""
        return any(self.reduced)

    @property
    def iterations(self) -> int:
        """How often the statement runs."""
        return math.prod(self.extents)

    @property
    def spatial(self) -> tuple[int, ...]:
        """Positions of the axes that are not reduced over."""
        return tuple(i for i, reduced in enumerate(self.reduced) if not reduced)

    @property
    def reduction(self) -> tuple[int, ...]:
        """Positions of the axes that are reduced over."""
        return tuple(i for i, reduced in enumerate(self.reduced) if reduced)

    @property
    def rows(self) -> int:
        """Number of separate results: the product of the spatial extents."""
        return math.prod(self.extents[i] for i in self.spatial)

    def run(self, axes: tuple[int, ...]) -> int:
        """How many of the last of `axes` fuse into one loop along which every access but those of tables stays
        affine and unguarded."""
        count = 1
        accesses = [access for access in self.reads + self.writes if not access.looked_up]
        for outer, inner in zip(reversed(axes[:-1]), reversed(axes[1:]), strict=True):
            if outer + 1 != inner or {outer, inner} & self.guards.keys():
                break
            step = self.extents[inner]
            if not all(_continues(access.strides[outer], access.strides[inner], step) for access in accesses):
                break
            count += 1
        return count


def _continues(outer: int | None, inner: int | None, extent: int) -> bool:
    return outer is not None and inner is not None and (outer == inner * extent or extent == 1)


@dataclass(frozen=True)
class Kernel:
    """A kernel after inlining: the stages in program order, the bytes of its arguments, each counted once, and whether
    it adds to what its result is already."""

    stages: tuple[Stage, ...]
    argument_bytes: int
    outputs: frozenset[str]
    accumulates: bool

    @property
    def operations(self) -> float:
        """Arithmetic of one call."""
        return sum(stage.iterations * stage.operations for stage in self.stages)


def block_names(mod: Any) -> list[str]:
    """Names of the kernel's blocks, in order; none where it has no blocks."""
    names = [str(block.name_hint) for block in nodes_of(mod["main"].body, s_tir.SBlock)]
    return [name for name in names if name != "root"]


def read_kernel(schedule: Any) -> Kernel:
    """The stages of a schedule that has no transformed loops yet.

    Raises
    ------
    ValueError
        When a shape is symbolic.
    """
    func = schedule.mod["main"]
    root = schedule.get_sblock("root")
    blocks = [schedule.get(block) for block in schedule.get_child_blocks(root)]
    arguments = [parameter for parameter in func.params if hasattr(parameter.ty, "shape")]
    return Kernel(
        tuple(_read_stage(block, _plain_loops(schedule, block), table_instructions_of(func)) for block in blocks),
        sum(_buffer_bytes(buffer) for buffer in arguments),
        frozenset(str(schedule.get(block).name_hint) for block in schedule.get_output_blocks(root)),
        accumulates(func),
    )


def _plain_loops(schedule: Any, block: Any) -> bool:
    """Whether each axis of the block is one loop."""
    try:
        return len(schedule.get_loops(schedule.get_sblock(block.name_hint))) == len(block.iter_vars)
    except s_tir.ScheduleError:
        return False


def _read_stage(block: Any, plain: bool, picks: TableInstructions | None) -> Stage:
    variables = [v.var for v in block.iter_vars]
    analyzer = sym.Analyzer()
    constant = all(isinstance(v.dom.extent, tirx.IntImm) for v in block.iter_vars)
    for v in block.iter_vars:
        analyzer.bind(v.var, v.dom)
    stores: list[Any] = []
    loads: list[Any] = []
    operators: list[Any] = []
    tvm_ffi.structural_walk(
        block.body,
        [
            (tirx.BufferStore, stores.append),
            (TensorLoad, loads.append),
            ((*_OPERATORS, tirx.Div, ir.Call), operators.append),
        ],
    )
    written = [store.buffer for store in stores]
    loads = [load for load in loads if not any(load.source.same_as(buffer) for buffer in written)]
    guards: dict[int, tuple[int, ...]] = {}
    for condition in (node for node in operators if isinstance(node, COMPARISONS) and not nodes_of(node, TensorLoad)):
        for axis in _axes_of(condition, variables):
            guards[axis] = (*guards.get(axis, ()), *_constants_of(condition))
    kinds = [int(v.iter_type) for v in block.iter_vars]
    functions = [node for node in operators if isinstance(node, ir.Call) and is_library_call(node)]
    forms = sum(math_form(call) is not None for call in functions)
    return Stage(
        name=str(block.name_hint),
        extents=tuple(int(v.dom.extent) if constant else 1 for v in block.iter_vars),
        reduced=tuple(kind == tirx.IterVar.CommReduce for kind in kinds),
        reads=tuple(_access(load.source, load.indices, variables, analyzer, is_looked_up(load)) for load in loads),
        writes=tuple(_access(store.buffer, store.indices, variables, analyzer) for store in stores),
        operations=sum(_cost(node) for node in operators if not _is_index(node)),
        calls=len(functions) - forms,
        forms=forms,
        guards=guards,
        combiners=len({str(buffer.name) for buffer in written}),
        widest_bytes=max((_value_bytes(node) for node in (*loads, *stores, *operators)), default=1),
        regular=plain and constant and bool(stores) and set(kinds) <= {tirx.IterVar.DataPar, tirx.IterVar.CommReduce},
        picks=picks,
    )


def _access(buffer: Any, indices: Any, variables: list[Any], analyzer: Any, looked_up: bool = False) -> Access:
    flat: Any = tirx.const(0, "int64")
    for index, extent in zip(indices, buffer.shape, strict=True):
        flat = flat * tirx.Cast("int64", extent) + tirx.Cast("int64", index)
    flat = analyzer.simplify(flat)
    linear = sym.detect_linear_equation(flat, variables)
    if linear and all(isinstance(c, tirx.IntImm) for c in linear[:-1]):
        strides: tuple[int | None, ...] = tuple(int(c) for c in linear[:-1])
    else:
        used = _axes_of(flat, variables)
        strides = tuple(_stride(flat, v) if i in used else 0 for i, v in enumerate(variables))
    return Access(str(buffer.name), _buffer_bytes(buffer), _item_bytes(buffer), strides, looked_up)


def _stride(flat: Any, variable: Any) -> int | None:
    linear = sym.detect_linear_equation(flat, [variable])
    return int(linear[0]) if linear and isinstance(linear[0], tirx.IntImm) else None


def _axes_of(expression: Any, variables: list[Any]) -> set[int]:
    used = nodes_of(expression, ir.Var)
    return {i for var in used for i, variable in enumerate(variables) if variable.same_as(var)}


def _constants_of(expression: Any) -> list[int]:
    return [int(node.value) for node in nodes_of(expression, tirx.IntImm)]


def _buffer_bytes(buffer: Any) -> int:
    elements = 1
    for extent in buffer.shape:
        if not isinstance(extent, tirx.IntImm):
            raise ValueError(f"buffer {buffer.name} has the symbolic extent {extent}; only static shapes are scheduled")
        elements *= int(extent)
    return elements * _item_bytes(buffer)


def _item_bytes(buffer: Any) -> int:
    return max(1, int(tvm_ffi.dtype(str(buffer.dtype)).itemsize))


def _value_bytes(node: Any) -> int:
    """Of what is loaded, stored or computed; 1 of an index."""
    if isinstance(node, TensorLoad | tirx.BufferStore):
        return _item_bytes(node.source if isinstance(node, TensorLoad) else node.buffer)
    if not _dtype(node) or (_is_index(node) and not nodes_of(node, TensorLoad)):
        return 1
    dtypes = {_dtype(node), _dtype(node.value) if isinstance(node, tirx.Cast) else ""}
    return 4 if "bfloat16" in dtypes else max(1, int(tvm_ffi.dtype(_dtype(node)).itemsize))


def _is_index(node: Any) -> bool:
    """Whether it is computed from loop variables alone, so that the compiler hoists or folds it."""
    return _dtype(node).startswith("int64") or (isinstance(node, COMPARISONS) and not nodes_of(node, TensorLoad))


def _cost(node: Any) -> float:
    if isinstance(node, tirx.Div):
        return _DIVISION_COST
    if isinstance(node, ir.Call):
        return {"sqrt": _ROOT_COST, "rsqrt": _ROOT_COST + _DIVISION_COST}.get(_call_name(node), 0.0)
    return 1.0


def _call_name(call: Any) -> str:
    return str(getattr(call.op, "name", "")).rpartition(".")[2]


def is_library_call(call: Any) -> bool:
    """Whether a call is of a function of floats that takes many instructions."""
    name = _call_name(call)
    cheap = name in _CHEAP_CALLS or name.endswith("sqrt") or "shift" in name or "bitwise" in name
    return not cheap and _dtype(call).startswith(("float", "bfloat"))


def _dtype(node: Any) -> str:
    """Of a value; "" of an address."""
    return str(getattr(node.ty, "dtype", ""))
