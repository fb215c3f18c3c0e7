"""From a Relay program to a Relax module: functions are inlined, types inferred, operators converted by the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from numpy.typing import NDArray
from tvm import relax

from . import program as ir
from .attributes import check_attributes
from .builder import Builder
from .errors import RelayError
from .operators import OPERATORS
from .program import MAX_DEPTH, Program
from .survey import Survey, refuse_unknown_operators, survey
from .type_check import fits, is_static, relax_type, relay_type

__all__ = ["convert"]

_MAX_CALLS = 20_000
_MAX_LEAVES = 4096
"""Small texts can ask for exponentially many calls and fields."""

# What TVM and the converters raise for arguments that do not fit each other.
_REFUSALS = (ValueError, TypeError, IndexError, KeyError, OverflowError, ZeroDivisionError, RuntimeError)


def convert(
    program: Program, params: Mapping[str, Any] | None = None, shapes: Mapping[str, Sequence[int]] | None = None
) -> tvm.IRModule:
    """Convert "main" and every function that no other function calls.

    Parameters
    ----------
    program
        What was read.
    params
        Arrays by the name of a parameter of "main"; they become constants.
    shapes
        Extents for parameters of "main" that have `?` in their types.

    Raises
    ------
    RelayError
        It does not type-check, or `params` or `shapes` do not fit it.
    UnsupportedRelayError
        Operators without a counterpart (all are listed), recursion, dynamic shapes.
    """
    for what, argument in (("params", params), ("shapes", shapes)):
        if argument is not None and not hasattr(argument, "keys"):
            raise RelayError(f"{what} must be a dict by the names of parameters, not {type(argument).__name__}")
    surveys = {name: survey(function) for name, function in program.functions.items()}
    reached = _check_calls(program, surveys)
    called = set().union(*(found.calls for found in surveys.values()))
    roots = [name for name in program.functions if name == "main" or name not in called]
    used = set().union(*(reached[name] for name in roots))
    refuse_unknown_operators(program, [surveys[name] for name in used], OPERATORS)
    functions = {}
    for name in roots:
        branches = any(surveys[part].branches for part in reached[name])
        given = (dict(params or {}), dict(shapes or {})) if name == "main" else ({}, {})
        functions[name] = _Converter(program, dataflow=not branches).function(name, *given)
    return tvm.IRModule(functions)


def _check_calls(program: Program, surveys: Mapping[str, Survey]) -> dict[str, set[str]]:
    """The functions that each function reaches, itself included; refuses recursion and unknown names."""
    reached: dict[str, set[str]] = {}
    for root in surveys:
        stack: list[tuple[str, bool]] = [(root, False)]
        active: set[str] = set()
        while stack:
            name, done = stack.pop()
            calls = surveys[name].calls
            if done:
                active.discard(name)
                reached[name] = {name}.union(*(reached[callee] for callee in calls))
                continue
            if name in reached:
                continue
            position = program.functions[name].position
            missing = sorted(callee for callee in calls if callee not in surveys)
            if missing:
                raise program.error(position, f"@{name} calls @{missing[0]}, which is not defined")
            active.add(name)
            if calls & active:
                raise program.unsupported(position, f"@{name} calls itself; recursion (a loop) cannot be converted")
            stack.append((name, True))
            stack.extend((callee, False) for callee in calls)
    return reached


class _Frame:
    """Values of the expressions of one function call or branch; what is not here is looked up outside."""

    def __init__(self, outer: _Frame | None) -> None:
        self.outer = outer
        self.depth: int = 0 if outer is None else outer.depth + 1
        self._values: dict[int, Any] = {}

    def find(self, node: ir.Expr) -> Any:
        """The value; None when there is none yet."""
        frame: _Frame | None = self
        while frame is not None:
            value = frame._values.get(id(node))
            if value is not None:
                return value
            frame = frame.outer
        return None

    def set(self, node: ir.Expr, value: Any) -> None:
        self._values[id(node)] = value


@dataclass(frozen=True, eq=False)
class _Closure:
    """A function as a value, with the frame that its free variables are in."""

    function: ir.Function
    frame: _Frame


class _Converter:
    """Converts one function of the program."""

    def __init__(self, program: Program, dataflow: bool) -> None:
        self._program = program
        self._builder = Builder(dataflow)
        self._globals = _Frame(None)
        self._calls = 0
        self._depth = 0

    def function(self, name: str, params: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> relax.Function:
        """The Relax function, whose parameters are those that `params` does not give."""
        function = self._program.functions[name]
        _check_names(function, params, shapes)
        frame = _Frame(self._globals)
        inputs: list[relax.Var] = []
        names: set[str] = set()
        for param in function.params:
            if param.name in names:
                raise self._program.error(param.position, f"%{param.name} is a parameter twice")
            names.add(param.name)
            annotation = self._annotation(param, shapes.get(param.name))
            if param.name in params:
                value = self._builder.constant(_array(params[param.name]))
                self._check_type(value, annotation, param.position, f"params has for %{param.name}")
                frame.set(param, value)
            else:
                inputs.append(relax.Var(param.name, relax_type(annotation)))
                frame.set(param, inputs[-1])
        result = self._value(function.body, frame)
        self._refuse_closure(result, function.body.position)
        self._check_type(result, function.result, function.position, f"@{name} returns")
        body = self._builder.body(result)
        converted = relax.Function(inputs, body, ret_ty=body.ty)
        return converted.with_attr("global_symbol", name).with_attr("num_input", len(inputs))

    def _annotation(self, param: ir.Var, extents: Sequence[int] | None) -> ir.Type:
        """The full type of a parameter of the module's function."""
        annotation = param.type
        if annotation is None:
            raise self._program.error(param.position, f"the parameter %{param.name} needs a type, as in %x: float32")
        if isinstance(annotation, ir.TensorType) and extents is not None:
            suits = len(extents) == len(annotation.shape) and all(
                own in (None, given) for own, given in zip(annotation.shape, extents, strict=True)
            )
            if not suits:
                raise self._program.error(
                    param.position, f"%{param.name} is {annotation}, which the shape {tuple(extents)} does not fit"
                )
            return ir.TensorType(tuple(int(extent) for extent in extents), annotation.dtype)
        if isinstance(annotation, ir.TensorType) and None in annotation.shape:
            raise self._program.unsupported(
                param.position,
                f"%{param.name} is {annotation}, of dynamic shape; give the extents: "
                f'shapes={{"{param.name}": (1, ...)}}, or --shape {param.name}=1,...',
            )
        if not is_static(annotation):
            raise self._program.unsupported(
                param.position, f"the parameter %{param.name} must be a tensor, or a tuple of tensors, of static shape"
            )
        return annotation

    # Expressions

    def _value(self, root: ir.Expr, frame: _Frame) -> Any:
        """Convert what `root` consists of, in the order of the text and without recursion."""
        for node, let in sorted(_unconverted(root, frame), key=lambda entry: entry[0].serial):
            frame.set(node, self._compute(node, frame) if let is None else self._bound(let, frame))
        return frame.find(root)

    def _bound(self, let: ir.Let, frame: _Frame) -> Any:
        """The value of a variable of `let`."""
        value = frame.find(let.value)
        if not isinstance(value, _Closure):
            self._check_type(value, let.var.type, let.position, f"%{let.var.name} is bound to")
        return value

    def _compute(self, node: ir.Expr, frame: _Frame) -> Any:
        """Convert `node`, whose parts are converted."""
        if isinstance(node, ir.Call):
            return self._call(node, frame)
        if isinstance(node, ir.Constant):
            return self._builder.constant(node.value)
        if isinstance(node, ir.Tuple):
            fields = [frame.find(field) for field in node.fields]
            if _leaf_count(fields) > _MAX_LEAVES:
                raise self._program.error(node.position, f"a tuple of more than {_MAX_LEAVES} values")
            return fields
        if isinstance(node, ir.TupleItem):
            return self._item(node, frame.find(node.value))
        if isinstance(node, ir.Let):
            return frame.find(node.body)
        if isinstance(node, ir.If):
            return self._if(node, frame)
        if isinstance(node, ir.Function):
            return _Closure(node, frame)
        if isinstance(node, ir.GlobalRef):
            return _Closure(self._program.functions[node.name], self._globals)
        raise self._program.error(node.position, f"the variable %{node.name} is not bound here")

    def _item(self, node: ir.TupleItem, value: Any) -> Any:
        count = len(value) if isinstance(value, list) else _field_count(value)
        if count is None:
            raise self._program.error(node.position, f".{node.index} of something that is no tuple")
        if not 0 <= node.index < count:
            raise self._program.error(node.position, f".{node.index} of a tuple with {count} fields")
        return value[node.index] if isinstance(value, list) else self._builder.emit(value[node.index])

    def _call(self, node: ir.Call, frame: _Frame) -> Any:
        args = [frame.find(arg) for arg in node.args]
        if not isinstance(node.callee, str):
            return self._inline(node, frame.find(node.callee), args)
        for arg in args:
            self._refuse_closure(arg, node.position)
        operator = OPERATORS[node.callee]
        if not operator.min_args <= len(args) <= operator.max_args:
            least, most = operator.min_args, operator.max_args
            expected = str(least) if least == most else f"{least} to {most}"
            raise self._program.error(
                node.position, f"{operator.name} takes {expected} arguments, {len(args)} are given"
            )
        try:
            attrs = check_attributes(operator.name, operator.attrs, node.attrs)
            return self._builder.emit(operator.convert(self._builder, args, attrs))
        except RelayError:
            raise
        except _REFUSALS as error:
            raise self._program.error(node.position, f"{operator.name}: {_reason(error)}") from error

    def _inline(self, node: ir.Call, callee: Any, args: list[Any]) -> Any:
        if not isinstance(callee, _Closure):
            raise self._program.error(node.position, "what is called is no function")
        function = callee.function
        if len(args) != len(function.params):
            raise self._program.error(
                node.position, f"the function takes {len(function.params)} arguments, {len(args)} are given"
            )
        inner = _Frame(callee.frame)
        for param, arg in zip(function.params, args, strict=True):
            if not isinstance(arg, _Closure):
                self._check_type(arg, param.type, node.position, f"the argument %{param.name} is")
            inner.set(param, arg)
        result = self._nested(function.body, inner, node.position)
        if not isinstance(result, _Closure):
            self._check_type(result, function.result, node.position, "the function returns")
        return result

    def _if(self, node: ir.If, frame: _Frame) -> Any:
        condition = frame.find(node.condition)
        self._refuse_closure(condition, node.position)
        if relay_type(condition) != ir.TensorType((), "bool"):
            raise self._program.error(node.position, "the condition of if must be one bool")
        known = self._builder.known(condition)
        if known is not None:
            return self._nested(node.then if known.item() else node.otherwise, _Frame(frame), node.position)
        bodies = []
        for branch in (node.then, node.otherwise):
            with self._builder.branch():
                value = self._nested(branch, _Frame(frame), node.position)
                self._refuse_closure(value, node.position)
                bodies.append(self._builder.body(value))
        if not tvm_ffi.structural_equal(bodies[0].ty, bodies[1].ty):
            raise self._program.error(
                node.position, f"the branches of if have different types: {bodies[0].ty} and {bodies[1].ty}"
            )
        return self._builder.branch_on(condition, *bodies)

    def _nested(self, body: ir.Expr, frame: _Frame, position: int) -> Any:
        """Convert a body in a frame of its own."""
        self._calls += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._program.error(position, f"functions and branches are nested more than {MAX_DEPTH} levels deep")
        if self._calls > _MAX_CALLS:
            raise self._program.error(position, f"more than {_MAX_CALLS:,} calls of functions, all of them inlined")
        value = self._value(body, frame)
        self._depth -= 1
        return value

    # Types

    def _refuse_closure(self, value: Any, position: int) -> None:
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            if isinstance(part, list):
                self._refuse_closure(part, position)
            elif isinstance(part, _Closure):
                raise self._program.unsupported(position, "a function as a value; functions can only be called")

    def _check_type(self, value: Any, annotation: ir.Type | None, position: int, what: str) -> None:
        if annotation is not None:
            self._refuse_closure(value, position)
            found = relay_type(value)
            if not fits(found, annotation):
                raise self._program.error(position, f"{what} {found}, expected {annotation}")


def _unconverted(root: ir.Expr, frame: _Frame) -> Iterator[tuple[ir.Expr, ir.Let | None]]:
    """The expressions that `root` consists of and that have no value yet; variables with the `let` that binds them.

    Bodies of functions and branches are not among them: they are converted when they are called or taken.
    """
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if id(node) in seen or frame.find(node) is not None:
            continue
        seen.add(id(node))
        if isinstance(node, ir.Let):
            seen.add(id(node.var))
            yield node.var, node
            stack += [node.value, node.body]
        elif isinstance(node, ir.Call):
            stack += node.args if isinstance(node.callee, str) else [*node.args, node.callee]
        elif isinstance(node, ir.Tuple):
            stack += node.fields
        elif isinstance(node, ir.TupleItem):
            stack.append(node.value)
        elif isinstance(node, ir.If):
            stack.append(node.condition)
        yield node, None


def _check_names(function: ir.Function, params: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse names that are misspelt. Arrays that the program does not use are let be, as Relay does."""
    by_name = {param.name: param for param in function.params}
    known = ", ".join(by_name) or "none"
    for name in shapes:
        if name not in by_name:
            raise RelayError(f"no parameter {name!r} to give a shape to; main has: {known}")
    if params and not by_name.keys() & params.keys():
        raise RelayError(f"params has none of main's parameters, which are: {known}; it has: {', '.join(params)}")
    open_types = {str(param.type): name for name, param in by_name.items() if name not in params}
    for name in params.keys() - by_name.keys():
        array = _array(params[name])
        twin = open_types.get(str(ir.TensorType(array.shape, str(array.dtype))))
        if twin is not None:
            raise RelayError(
                f"params has {name!r}, which main does not take; did you mean {twin!r}, which has the same type?"
            )


def _array(value: Any) -> NDArray[Any]:
    return value.numpy() if isinstance(value, tvm.runtime.Tensor) else np.asarray(value)


def _leaf_count(value: Any) -> int:
    return sum(_leaf_count(part) for part in value) if isinstance(value, list) else 1


def _field_count(value: Any) -> int | None:
    if isinstance(value, _Closure) or not isinstance(value.ty, relax.TupleType):
        return None
    return len(value.ty.fields)


def _reason(error: BaseException) -> str:
    """The sentence of an error of TVM's, without the dump of its operator."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    if text.startswith("In ir.Op("):
        text = text.partition("), ")[2] or text
    return text if len(text) <= 400 else "..." + text[-400:]
