"""Relax to terms: a dataflow block becomes a `TermGraph`.

What the vocabulary cannot express keeps its place as an `opaque` term over its tensor operands: an operator without a
row, call_tir, call_dps_packed, calls with symbolic shapes. No rule looks inside, and two are equal only where Relax
says that they are the same function of the same operands. A result of several tensors is one term each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, relax

from .attributes import Full, Leaf, Opaque, Slice, TensorType
from .relax_ops import FLOATS, MOVES, ROWS, read_call, static_type
from .terms import Term, TermGraph

__all__ = ["Encoded", "NotEncodable", "Tree", "encode_block", "exact_variables"]

Tree = int | tuple["Tree", ...]
"""A value of a Relax program: the index of a term, or a tuple."""

Place = int | None | tuple["Place", ...]
"""Where an argument of a call stands among a term's arguments: a position, a tuple, or None for what is no value."""


IN_PLACE = ("relax.call_tir_inplace", "relax.call_inplace_packed")
"""Calls that write into their arguments."""


ROUNDING = ("ceil", "floor", "floor_divide", "floor_mod", "mod", "round", "trunc")
"""Operators to which a last bit makes a difference of 1; so does a cast to integers."""

COMPARING = ("bucketize", "equal", "greater", "greater_equal", "less", "less_equal", "not_equal", "sign")
"""Those whose truth, or place among boundaries, can depend on it; so does a cast to truth values."""

PASSING = (
    *("astype", "clip", "dynamic_strided_slice", "flip", "gather_elements", "gather_nd", "index_put", "index_tensor"),
    *("max", "meshgrid", "min", "nn.pad", "repeat", "reverse_sequence", "scatter_elements", "scatter_nd"),
    *("slice_scatter", "sort", "split", "stack", "take", "tile", "tril", "triu", "where"),
)
"""Other operators whose results are numbers that they were given."""


class NotEncodable(Exception):
    """A block holds what this encoding does not cover (symbolic shapes bound, writing in place); it stays as it is."""


@dataclass
class Encoded:
    """A dataflow block as a graph.

    Attributes
    ----------
    graph : TermGraph
        Its outputs are the leaves of `outputs`, in order.
    leaves : list of relax.Expr
        What each leaf stands for: a variable from outside the block, or a constant.
    outputs : list of (relax.Var, Tree)
        The block's output variables, and their values.
    """

    graph: TermGraph
    leaves: list[Any] = field(default_factory=list)
    outputs: list[tuple[Any, Tree]] = field(default_factory=list)


@dataclass(frozen=True)
class Template:
    """How to write an opaque term: the Relax expression, and where its operands go.

    `arguments` has one entry for each argument of the call; what has no place in the term's arguments is written as it
    was. `path` leads to one tensor of a result that is a tuple.
    """

    expr: Any
    arguments: tuple[Place, ...]
    path: tuple[int, ...] = ()


def encode_block(block: relax.DataflowBlock, exact: Collection[Any] | None = None) -> Encoded:
    """Encode one dataflow block. Raises NotEncodable.

    `exact`: the variables whose arithmetic must stay as it is (`exact_variables`), by all blocks of the function; None:
    by this one alone.
    """
    return _Encoder().run(block, exact_variables([block]) if exact is None else exact)


class _Encoder:
    def __init__(self) -> None:
        self.result = Encoded(TermGraph())
        self.graph = self.result.graph
        self.values: dict[Any, Tree] = {}
        self.calls: dict[int, list[tuple[Any, int]]] = {}
        self.outside = 0

    def run(self, block: relax.DataflowBlock, exact: Collection[Any]) -> Encoded:
        for binding in block.bindings:
            if not isinstance(binding, relax.VarBinding):
                raise NotEncodable(f"{type(binding).__name__} of {binding.var.name}")
            value = self.call(binding.value, opaque=True) if binding.var in exact else self.value(binding.value)
            self.values[binding.var] = value
            if not isinstance(binding.var, relax.DataflowVar):
                self.result.outputs.append((binding.var, value))
        self.graph.outputs = [index for _, tree in self.result.outputs for index in flatten(tree)]
        return self.result

    def value(self, expr: Any) -> Tree:
        """The value of a binding."""
        if isinstance(expr, relax.Var | ir.GenericConst | relax.Tuple):
            return self.operand(expr)
        if isinstance(expr, relax.TupleGetItem):
            whole = self.operand(expr.tuple_value)
            if isinstance(whole, int):
                raise NotEncodable("an element of a tuple that is not known")
            return whole[expr.index]
        if isinstance(expr, relax.Call):
            return self.call(expr)
        if not relax.analysis.free_vars(expr) and not isinstance(expr, relax.Function):
            return self.opaque(expr, (), [])
        raise NotEncodable(type(expr).__name__)

    def operand(self, expr: Any) -> Tree:
        """A value where it is read."""
        found = self.values.get(expr)
        if found is None:
            found = self.values[expr] = self.new_operand(expr)
        return found

    def new_operand(self, expr: Any) -> Tree:
        if isinstance(expr, relax.Tuple):
            return tuple(self.operand(item) for item in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self.value(expr)
        if not isinstance(expr, relax.Var | ir.GenericConst):
            raise NotEncodable(f"{type(expr).__name__} as an operand")
        if isinstance(expr.ty, relax.TupleType):
            raise NotEncodable(f"{expr} is a tuple from outside")
        scalar = _scalar(expr)
        if scalar is not None:
            return self.graph.add("full", scalar, ())
        leaf = Term("leaf", Leaf(len(self.result.leaves)), ())
        self.result.leaves.append(expr)
        constant = isinstance(expr, ir.GenericConst)
        return self.graph.add_typed(leaf, static_type(expr.ty) or _unknown(expr.ty), constant)

    def call(self, call: relax.Call, *, opaque: bool = False) -> Tree:
        name = _name(call)
        operands: list[int] = []
        arguments = tuple(self.argument(argument, operands) for argument in call.args)
        types = [self.graph.types[index] for index in operands]
        if not opaque and all(not is_unknown(ty) for ty in types):
            if name == "relax.split" and isinstance(call.ty, relax.TupleType):
                parts = self.split(call, operands[0])
                if parts is not None:
                    return parts
            result = static_type(call.ty)
            known = read_call(call, types, result) if result is not None else None
            if known is not None:
                return self.graph.add(*known, operands)
        if isinstance(call.op, relax.Var | relax.Function):
            raise NotEncodable("a call of a local function")
        if name in IN_PLACE:
            raise NotEncodable(f"{name} overwrites what others may read, and terms have no order")
        return self.opaque(call, arguments, operands)

    def argument(self, expr: Any, operands: list[int]) -> Place:
        """The place of a call's argument; its terms are appended to `operands`."""
        if isinstance(expr, relax.Tuple):
            return tuple(self.argument(item, operands) for item in expr.fields)
        return _relabel(self.operand(expr), operands) if _is_value(expr) else None

    def split(self, call: relax.Call, operand: int) -> Tree | None:
        """The parts of a split, as slices."""
        shape = self.graph.types[operand].shape
        parts = [static_type(ty) for ty in call.ty.fields]
        axis = int(call.attrs.axis) % len(shape)
        begin, slices = 0, []
        for part in parts:
            if part is None:
                return None
            first, last = [0] * len(shape), list(shape)
            first[axis], last[axis] = begin, begin + part.shape[axis]
            begin = last[axis]
            slices.append(self.graph.add("slice", Slice(tuple(first), tuple(last)), (operand,)))
        return tuple(slices)

    def opaque(self, expr: Any, arguments: tuple[Place, ...], operands: list[int]) -> Tree:
        """An opaque term for each tensor of the result."""
        key = self.identity(expr, arguments)
        name = getattr(getattr(expr, "op", None), "name", type(expr).__name__)

        def build(ty: Any, path: tuple[int, ...]) -> Tree:
            if isinstance(ty, relax.TupleType):
                return tuple(build(item, (*path, i)) for i, item in enumerate(ty.fields))
            result = static_type(ty)
            attrs = Opaque(name, (key, *path), result or _unknown(ty), Template(expr, arguments, path))
            return self.graph.add_typed(Term("opaque", attrs, tuple(operands)), attrs.type, False)

        return build(expr.ty, ())

    def identity(self, expr: Any, arguments: tuple[Place, ...]) -> int:
        """The same number for calls of the same operator that differ in their operands only."""
        self.outside += 1
        if not isinstance(expr, relax.Call) or not isinstance(expr.op, ir.Op) or not expr.op.name.startswith("relax."):
            return self.outside
        if expr.op.name.startswith("relax.call_"):
            return self.outside
        rest = [expr.op, *expr.ty_args]
        rest += [part for argument, place in zip(expr.args, arguments, strict=True) for part in _fixed(argument, place)]
        rest += [expr.attrs] if expr.attrs is not None else []
        bucket = self.calls.setdefault(hash((arguments, *(tvm_ffi.structural_hash(part) for part in rest))), [])
        for other, number in bucket:
            if len(other) == len(rest) and all(map(tvm_ffi.structural_equal, other, rest)):
                return number
        bucket.append((rest, self.outside))
        return self.outside


def exact_variables(blocks: Sequence[relax.BindingBlock]) -> set[Any]:
    """The variables of a function's blocks, and of their branches, whose arithmetic must stay as it is.

    Those that are rounded after nothing but element-wise functions, choices and moves: floor of (i + 0.5) * s - 0.5 and
    of i * s + (0.5 * s - 0.5) differ. Of those that are compared, quotients: 41 * 2 / 82 is 1, and 41 * (2 * (1 / 82))
    is less.
    """
    rounded: set[Any] = set()
    compared: set[Any] = set()
    exact: set[Any] = set()

    def look_at(binding: Any) -> None:
        value, name = binding.value, _name(binding.value)
        short = name.removeprefix("relax.")
        cast = str(value.attrs.dtype) if name == "relax.astype" else "float32"
        operation = ROWS[name].op if name in ROWS else ""
        if operation == "binary" and (binding.var in rounded or (binding.var in compared and short == "divide")):
            exact.add(binding.var)
        passes = short in PASSING or operation in ("unary", "binary", *MOVES) or not isinstance(value, relax.Call)
        if short in ROUNDING or cast not in (*FLOATS, "bool") or (binding.var in rounded and passes):
            rounded.update(_variables(value))
        if short in COMPARING or cast == "bool" or (binding.var in compared and passes):
            compared.update(_variables(value))
        for branch in (value.true_branch, value.false_branch) if isinstance(value, relax.If) else ():
            look_at_all(branch.blocks)

    def look_at_all(blocks: Sequence[relax.BindingBlock]) -> None:
        """From the last binding to the first: uses come before what they use."""
        for block in reversed(list(blocks)):
            for binding in reversed(list(block.bindings)):
                look_at(binding)

    look_at_all(blocks)
    return exact


def _variables(expr: Any) -> Iterator[Any]:
    """What a value is computed from, or made of: a concatenation is one of a tuple, a choice one of two branches."""
    if isinstance(expr, relax.Var):
        yield expr
    elif isinstance(expr, relax.TupleGetItem):
        yield from _variables(expr.tuple_value)
    elif isinstance(expr, relax.If):
        yield from _variables(expr.true_branch.body)
        yield from _variables(expr.false_branch.body)
    elif isinstance(expr, relax.Call | relax.Tuple):
        for item in expr.args if isinstance(expr, relax.Call) else expr.fields:
            yield from _variables(item)


def _name(expr: Any) -> str:
    """Of the operator that is called, or nothing."""
    return getattr(getattr(expr, "op", None), "name", "")


def flatten(tree: Tree) -> Iterator[int]:
    """The terms of a tree, in order."""
    if isinstance(tree, int):
        yield tree
    else:
        for item in tree:
            yield from flatten(item)


def is_unknown(ty: TensorType) -> bool:
    """Whether a term's value is something that types do not describe: a symbolic shape, a scalar, an object."""
    return ty.dtype.startswith("unknown ")


def _unknown(ty: Any) -> TensorType:
    return TensorType((), f"unknown {ty}")


def _is_value(argument: Any) -> bool:
    return isinstance(argument, relax.Var | ir.GenericConst | relax.TupleGetItem | relax.Call)


def _relabel(tree: Tree, operands: list[int]) -> Place:
    if isinstance(tree, int):
        operands.append(tree)
        return len(operands) - 1
    return tuple(_relabel(item, operands) for item in tree)


def _fixed(argument: Any, place: Place) -> Iterator[Any]:
    """What an argument of a call holds that is no value."""
    if place is None:
        yield argument
    elif isinstance(place, tuple) and isinstance(argument, relax.Tuple):
        for item, inner in zip(argument.fields, place, strict=True):
            yield from _fixed(item, inner)


def _scalar(expr: Any) -> Full | None:
    """A constant without dimensions as the value that it holds."""
    if not isinstance(expr, ir.GenericConst):
        return None
    ty = static_type(expr.ty)
    if ty is None or ty.shape:
        return None
    value: Any = expr.value.numpy().item()
    # NaN equals nothing, and minus zero equals zero: neither may be an attribute.
    return None if value != value or (value == 0 and np.signbit(value)) else Full((), value, ty.dtype)
