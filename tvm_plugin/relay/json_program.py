"""From TVM's JSON to a `Program`."""

from __future__ import annotations

from . import program as ir
from .attributes import decode_attributes
from .errors import RelayError, UnsupportedRelayError
from .json_graph import JsonGraph, number
from .program import Program

__all__ = ["program_from_json"]

_MAX_TYPE_DEPTH = 16

# Fields of each class of expression that hold expressions; "*" for arrays of them.
_PARTS = {
    "relay.Var": (),
    "relay.Constant": (),
    "GlobalVar": (),
    "relay.GlobalVar": (),
    "relay.Tuple": ("*fields",),
    "relay.TupleGetItem": ("tuple_value",),
    "relay.Call": ("op", "*args"),
    "relay.If": ("cond", "true_branch", "false_branch"),
    "relay.Let": ("value", "var", "body"),
    "relay.Function": ("*params", "body"),
}


def program_from_json(text: str) -> Program:
    """Read a saved module, or a saved function, which becomes "main".

    Raises
    ------
    RelayError
        It is not what `tvm.ir.save_json` of TVM 0.8 to 0.19 writes for Relay; the message has the node's number.
    UnsupportedRelayError
        It has pattern matching, references, or functions of TIR.
    """
    return _Reader(JsonGraph(text, "the JSON")).program()


class _Reader:
    def __init__(self, graph: JsonGraph) -> None:
        self._graph = graph
        self._expressions: dict[int, ir.Expr] = {}

    def program(self) -> Program:
        graph, root = self._graph, self._graph.root
        key = graph.type_key(root)
        if key == "relay.Function":
            return Program({"main": self._function(root)})
        if key != "IRModule":
            raise graph.error(root, f"{key or 'None'} is saved here; a Relay module or function is expected")
        pairs = graph.children(graph.child(root, "functions"))
        if len(pairs) % 2:
            raise graph.error(root, "as many names as functions are expected")
        functions = {
            self._name(name): self._function(function) for name, function in zip(pairs[::2], pairs[1::2], strict=True)
        }
        if not functions:
            raise graph.error(root, "the module has no functions")
        return Program(functions)

    def _name(self, index: int) -> str:
        return self._graph.text(self._graph.child(index, "name_hint"))

    def _function(self, index: int) -> ir.Function:
        value = self._expression(index)
        if not isinstance(value, ir.Function):
            raise self._graph.error(index, f"{self._graph.type_key(index)} where a function is expected")
        return value

    def _expression(self, root: int) -> ir.Expr:
        """Build what `root` refers to, then `root`; chains of any length, without recursion."""
        built = self._expressions
        active: set[int] = set()
        stack = [root]
        while stack:
            index = stack[-1]
            if index in built:
                stack.pop()
                continue
            missing = [part for part in self._parts(index) if part not in built]
            if not missing:
                built[index] = self._build(index)
                active.discard(index)
                stack.pop()
                continue
            if index in active:
                raise self._graph.error(index, "the expression contains itself")
            active.add(index)
            stack.extend(reversed(missing))
        return built[root]

    def _parts(self, index: int) -> list[int]:
        key = self._graph.type_key(index)
        if key not in _PARTS:
            if key in ("relay.Match", "relay.RefCreate", "relay.RefRead", "relay.RefWrite", "tir.PrimFunc"):
                raise UnsupportedRelayError(f"the JSON, node {index}: {key} has no counterpart in Relax")
            raise self._graph.error(index, f"{key or 'None'} where an expression is expected")
        parts: list[int] = []
        for name in _PARTS[key]:
            child = self._graph.child(index, name.lstrip("*"))
            if name.startswith("*"):
                parts.extend(self._graph.children(child))
            elif not (name == "op" and self._graph.type_key(child) in ("Op", "relay.Op")):
                parts.append(child)
        return parts

    def _build(self, index: int) -> ir.Expr:
        graph = self._graph
        key = graph.type_key(index)
        parts = [self._expressions[part] for part in self._parts(index)]
        if key == "relay.Var":
            return ir.Var(self._name(graph.child(index, "vid")), self._type(graph.child(index, "type_annotation")))
        if key == "relay.Constant":
            return ir.Constant(graph.array(graph.field(index, "data") or ""))
        if key in ("GlobalVar", "relay.GlobalVar"):
            return ir.GlobalRef(self._name(index))
        if key == "relay.Tuple":
            return ir.Tuple(parts)
        if key == "relay.TupleGetItem":
            return ir.TupleItem(parts[0], self._natural(index, "index"))
        if key == "relay.If":
            condition, then, otherwise = parts
            return ir.If(condition, then, otherwise)
        if key == "relay.Let":
            value, var, body = parts
            if not isinstance(var, ir.Var):
                raise graph.error(index, "let binds something that is no variable")
            return ir.Let(var, value, body)
        if key == "relay.Function":
            params = [part for part in parts[:-1] if isinstance(part, ir.Var)]
            if len(params) != len(parts) - 1:
                raise graph.error(index, "a parameter is no variable")
            return ir.Function(params, parts[-1], self._type(graph.child(index, "ret_type", optional=True)))
        return self._call(index, parts)

    def _call(self, index: int, parts: list[ir.Expr]) -> ir.Call:
        graph = self._graph
        callee, attrs = graph.child(index, "op"), graph.child(index, "attrs", optional=True)
        values = decode_attributes(graph, attrs) if graph.type_key(attrs) else {}
        if graph.type_key(callee) in ("Op", "relay.Op"):
            return ir.Call(graph.text(callee), parts, values)
        return ir.Call(parts[0], parts[1:], {})

    def _natural(self, index: int, name: str) -> int:
        value = number(self._graph.field(index, name))
        if not isinstance(value, int) or value < 0:
            raise self._graph.error(index, f"{name!r} is {self._graph.field(index, name)!r}, expected a number")
        return value

    def _type(self, index: int, depth: int = 0) -> ir.Type | None:
        graph, key = self._graph, self._graph.type_key(index)
        if key in ("", "IncompleteType"):
            return None
        if depth > _MAX_TYPE_DEPTH:
            raise graph.error(index, "the type is nested too deeply")
        if key == "relay.TensorType":
            shape = tuple(self._extent(extent) for extent in graph.children(graph.child(index, "shape")))
            return ir.TensorType(shape, graph.field(index, "dtype") or "")
        if key == "TupleType":
            fields = graph.children(graph.child(index, "fields"))
            return ir.TupleType(tuple(self._type(field, depth + 1) for field in fields))
        if key == "FuncType":
            params = graph.children(graph.child(index, "arg_types"))
            result = self._type(graph.child(index, "ret_type"), depth + 1)
            return ir.FunctionType(tuple(self._type(param, depth + 1) for param in params), result)
        raise RelayError(f"the JSON, node {index}: the type {key} has no counterpart in Relax")

    def _extent(self, index: int) -> int | None:
        if self._graph.type_key(index) in ("tir.Any", "tir.Var", "tir.SizeVar"):
            return None
        value = self._graph.value(index)
        if not isinstance(value, int) or value < 0:
            raise self._graph.error(index, f"{value!r} where an extent is expected")
        return value
