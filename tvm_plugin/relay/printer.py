"""Relax as Relay's text."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import tvm
from numpy.typing import NDArray
from tvm import relax

from ..relax_ir.constants import array_of
from ..relax_ir.functions import operator, top_level_bindings, use_counts
from ..relax_ir.tensors import extents
from .arrays import array_to_bytes
from .attributes import REQUIRED, attribute_class
from .errors import RelayError, UnsupportedRelayError
from .operators import OPERATORS
from .printing_rows import ROWS, coordinates_last

__all__ = ["astext", "astext_and_params"]

_HEADER = '#[version = "0.0.5"]\n'
_SUFFIXES = {"float16": "f16", "float32": "f", "float64": "f64", "int16": "i16", "int32": "", "int64": "i64"}
_NAME = re.compile(r"[A-Za-z_][\w/]*(?:(?:\.|::)[\w/]+)*")


def astext(mod: tvm.IRModule) -> str:
    """Print a Relax module in Relay's text format 0.0.5; weights go into its metadata section.

    `from_text` reads it back: operator for operator, but for those that Relay has not (gelu, silu, attention over more
    than three axes), which are written with the ones that it has.

    Raises
    ------
    UnsupportedRelayError
        Operators that Relay has no counterpart for; all are listed, with how often they occur.
    RelayError
        The module has no Relax function, or one that takes or computes something else than tensors of static shape.
    """
    constants = _Constants(as_params=False)
    return _print(mod, constants) + constants.metadata()


def astext_and_params(mod: tvm.IRModule) -> tuple[str, dict[str, NDArray[Any]]]:
    """As `astext`, with the weights as parameters `%p0`, `%p1`, ... of "main", and their arrays by name.

    `tvm.runtime.save_param_dict` writes such arrays to a .params file.
    """
    constants = _Constants(as_params=True)
    return _print(mod, constants), constants.params


def _print(mod: tvm.IRModule, constants: _Constants) -> str:
    if not isinstance(mod, tvm.IRModule):
        raise RelayError(f"astext prints an IRModule, not {type(mod).__name__}")
    functions = {
        var.name_hint: function for var, function in mod.functions_items() if isinstance(function, relax.Function)
    }
    if not functions:
        raise RelayError("the module has no Relax functions to print")
    if constants.as_params and list(functions) != ["main"]:
        raise RelayError(f'only "main" can take weights as parameters, the module has: {", ".join(functions)}')
    _refuse_unknown(functions)
    return _HEADER + "\n".join(_Function(function, constants).text(name) for name, function in functions.items())


def _refuse_unknown(functions: dict[str, relax.Function]) -> None:
    names = Counter(name for function in functions.values() for name in _unprintable(function))
    if names:
        listed = ", ".join(f"{name} ({count} time{'s' if count > 1 else ''})" for name, count in names.most_common())
        raise UnsupportedRelayError(f"{len(names)} operator(s) have no counterpart in Relay: {listed}")


def _unprintable(function: relax.Function) -> Iterator[str]:
    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call):
            name = getattr(expr.op, "name", type(expr.op).__name__)
            if name.removeprefix("relax.") not in ROWS:
                found.append(name)

    found: list[str] = []
    relax.analysis.post_order_visit(function, visit)
    return iter(found)


class _Constants:
    """Weights that the text refers to, each once."""

    def __init__(self, as_params: bool) -> None:
        self.as_params = as_params
        self.params: dict[str, NDArray[Any]] = {}
        self._names: dict[Any, str] = {}
        self._arrays: list[NDArray[Any]] = []

    def reference(self, constant: Any) -> str:
        """A literal for a plain scalar, else a reference."""
        array = array_of(constant)
        if array.ndim == 0 and (array.dtype.name in _SUFFIXES or array.dtype.kind == "b"):
            return _scalar(array)
        if constant not in self._names:
            if self.as_params:
                name = f"p{len(self.params)}"
                self.params[name] = array
                self._names[constant] = f"%{name}"
            else:
                self._names[constant] = f"meta[relay.Constant][{len(self._arrays)}]"
                self._arrays.append(array)
        return self._names[constant]

    def metadata(self) -> str:
        """The metadata section; "" without constants."""
        if not self._arrays:
            return ""
        first = 3
        nodes: list[dict[str, Any]] = [
            {"type_key": ""},
            {"type_key": "Map", "keys": ["relay.Constant"], "data": [2]},
            {"type_key": "Array", "data": list(range(first, first + len(self._arrays)))},
        ]
        for index in range(len(self._arrays)):
            fields = {"_checked_type_": "0", "data": str(index), "span": "0", "virtual_device_": "0"}
            nodes.append({"type_key": "relay.Constant", "attrs": fields})
        blobs = [base64.b64encode(array_to_bytes(array)).decode("ascii") for array in self._arrays]
        return "\n#[metadata]\n" + json.dumps({"root": 1, "nodes": nodes, "b64ndarrays": blobs}, indent=1) + "\n"


class _Function:
    """Prints one function."""

    def __init__(self, function: relax.Function, constants: _Constants) -> None:
        self._function = function
        self._constants = constants
        self._names: dict[Any, str] = {}
        self._taken: set[str] = set()
        self._next = 0
        self._values = {binding.var: binding.value for binding in top_level_bindings(function)}
        self._uses = use_counts(function)
        self._inlined = set(self._find_inlined())

    def text(self, name: str) -> str:
        params = [f"%{self._declare(param)}: {_type(param.ty)}" for param in self._function.params]
        known = list(self._constants.params)
        body = self._body(self._function.body, "  ")
        params += [
            f"%{weight}: {_type(relax.TensorType(array.shape, str(array.dtype)))}"
            for weight, array in self._constants.params.items()
            if weight not in known
        ]
        return f"def @{name}({', '.join(params)}) -> {_type(self._function.ret_ty)} {{\n{body}}}\n"

    def _declare(self, var: Any) -> str:
        """A unique name for a parameter, its own where Relay can spell it."""
        name = str(var.name)
        if not _NAME.fullmatch(name):
            name = re.sub(r"\W", "_", name)
            name = name if name[:1].isalpha() or name[:1] == "_" else f"v{name}"
        if self._constants.as_params and re.fullmatch(r"p\d+", name):
            name += "_"
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        self._names[var] = f"%{name}"
        return name

    def _body(self, body: Any, indent: str) -> str:
        """The bindings, one a line, and the result."""
        blocks, result = (body.blocks, body.body) if isinstance(body, relax.SeqExpr) else ([], body)
        lines = []
        for block in blocks:
            for binding in block.bindings:
                if binding.var in self._inlined:
                    continue
                if not isinstance(binding, relax.VarBinding):
                    raise RelayError(f"{binding.var.name} is bound by match_cast; shapes must be static")
                if isinstance(binding.value, relax.Var):
                    self._names[binding.var] = self.value(binding.value)
                    continue
                right = self._right(binding.value, indent)
                self._names[binding.var] = f"%{self._next}"
                self._next += 1
                lines.append(f"{indent}{self._names[binding.var]} = {right};\n")
        return "".join(lines) + f"{indent}{self.value(result)}\n"

    def _right(self, value: Any, indent: str) -> str:
        if isinstance(value, relax.If):
            then, otherwise = (self._body(branch, indent + "  ") for branch in (value.true_branch, value.false_branch))
            return f"if ({self.value(value.cond)}) {{\n{then}{indent}}} else {{\n{otherwise}{indent}}}"
        if not isinstance(value, relax.Call):
            return self.value(value)
        name = operator(value).removeprefix("relax.")
        peephole = self._peephole(value)
        if peephole is not None:
            return peephole
        try:
            return ROWS[name](self, value)
        except ValueError as error:
            raise UnsupportedRelayError(f"{name}: {error}") from error

    # What one operator of Relay stands for in two of Relax

    def _find_inlined(self) -> Iterator[Any]:
        """Variables that are part of their only use: W^T of nn.dense, argmax before its cast, moved indices."""
        for value in self._values.values():
            if operator(value) == "relax.matmul" and self._transposed_weight(value) is not None:
                yield value.args[1]
            elif operator(value) == "relax.astype" and self._position(value) is not None:
                yield value.args[0]
            elif operator(value) in ("relax.gather_nd", "relax.scatter_nd") and coordinates_last(
                self._once(value.args[1])
            ):
                yield value.args[1]

    def _once(self, expr: Any) -> Any:
        return self._values.get(expr) if isinstance(expr, relax.Var) and self._uses.get(expr) == 1 else None

    def _transposed_weight(self, call: Any) -> Any:
        """W of matmul(x, W^T), or None."""
        inner = self._once(call.args[1])
        if operator(inner) != "relax.permute_dims" or inner.ty.ndim != 2 or call.args[0].ty.ndim < 2:
            return None
        axes = inner.attrs.axes
        return inner.args[0] if axes is None or [int(axis) for axis in axes] == [1, 0] else None

    def _position(self, call: Any) -> Any:
        """The argmax or argmin whose positions are cast to int32, or None."""
        inner = self._once(call.args[0])
        is_position = operator(inner) in ("relax.argmax", "relax.argmin") and str(call.ty.dtype) == "int32"
        return inner if is_position else None

    def _peephole(self, call: Any) -> str | None:
        if operator(call) == "relax.matmul":
            weight = self._transposed_weight(call)
            if weight is not None:
                same = str(call.ty.dtype) == str(call.args[0].ty.dtype)
                dtype = None if same else str(call.ty.dtype)
                return self.call("nn.dense", [call.args[0], weight], units=extents(weight.ty)[0], out_dtype=dtype)
        if operator(call) == "relax.astype":
            position = self._position(call)
            if position is not None:
                axis = None if position.attrs.axis is None else [int(position.attrs.axis)]
                name = operator(position).removeprefix("relax.")
                return self.call(name, position.args, axis=axis, keepdims=bool(position.attrs.keepdims))
        return None

    # Used by the rows

    def value(self, expr: Any) -> str:
        """An argument."""
        if isinstance(expr, str):
            return expr
        if isinstance(expr, relax.Var):
            return self._names[expr]
        if isinstance(expr, tvm.ir.GenericConst):
            return self._constants.reference(expr)
        if isinstance(expr, relax.Tuple):
            fields = ", ".join(self.value(field) for field in expr.fields)
            return f"({fields},)" if len(expr.fields) == 1 else f"({fields})"
        if isinstance(expr, relax.TupleGetItem):
            whole = self.value(expr.tuple_value)
            named = f"{whole}.{expr.index}"[1:] in self._taken
            return f"({whole}).{expr.index}" if named else f"{whole}.{expr.index}"
        raise RelayError(f"{type(expr).__name__} cannot be printed as Relay")

    def definition(self, expr: Any) -> Any:
        """What a variable is bound to; None for anything else."""
        return self._values.get(expr) if isinstance(expr, relax.Var) else None

    def call(self, name: str, args: Sequence[Any], **attrs: Any) -> str:
        """A call, without the attributes that have their defaults."""
        fields = attribute_class(OPERATORS[name].attrs) or {}
        parts = [self.value(arg) for arg in args]
        for key, value in attrs.items():
            default = fields[key].default
            # Relax spells paddings out.
            short = value[: len(value) // 2] if key == "padding" and isinstance(value, list) else value
            if default is REQUIRED or (value != default and not (short == default and value == short * 2)):
                parts.append(f"{key}={_attribute(value)}")
        return f"{name}({', '.join(parts)})"


def _type(ty: Any) -> str:
    if isinstance(ty, relax.TupleType):
        fields = ", ".join(_type(field) for field in ty.fields)
        return f"({fields},)" if len(ty.fields) == 1 else f"({fields})"
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        raise RelayError(f"a value of type {ty}; only tensors of static shape can be printed as Relay")
    if not all(isinstance(extent, tvm.tirx.IntImm) for extent in ty.shape.values):
        raise RelayError(f"a value of type {ty}; only tensors of static shape can be printed as Relay")
    shape = ", ".join(str(extent) for extent in extents(ty))
    return f"Tensor[({shape}), {ty.dtype}]" if shape else str(ty.dtype)


def _scalar(array: NDArray[Any]) -> str:
    if array.dtype.kind == "b":
        return str(bool(array))
    return f"{array.item() if array.dtype.kind == 'i' else str(array)}{_SUFFIXES[array.dtype.name]}"


def _attribute(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value!r}f"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(_attribute(element) for element in value)}]"
    return str(value)
