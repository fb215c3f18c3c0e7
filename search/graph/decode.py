"""Terms to Relax: the inverse of `encode.py`."""

from __future__ import annotations

from typing import Any

from tvm import relax

from eqtune.errors import MismatchError

from .encode import Encoded, Place, Template, Tree, is_unknown
from .relax_ops import static_type, write_term
from .terms import TermGraph

__all__ = ["decode_block", "decode_function"]


def decode_block(encoded: Encoded, graph: TermGraph, params: list[Any] | None = None) -> relax.DataflowBlock:
    """A dataflow block that computes `graph`, with the output variables of the block that was encoded.

    A value read twice is computed once. Weights are written as operators on constants: `FoldWeights` computes them.

    Parameters
    ----------
    encoded : Encoded
        The block that `graph` was searched from; `graph.outputs` correspond to its outputs, leaf by leaf.
    graph : TermGraph
        What to compute.
    params : list of relax.Var
        The function's parameters, in scope of the block.

    Raises
    ------
    MismatchError
        When Relax infers another type for a term than the graph says.
    """
    return _Decoder(encoded, graph).block(params or [])


def decode_function(encoded: Encoded, graph: TermGraph) -> relax.Function:
    """A function of the variables among the leaves, in order, that returns the graph's outputs.

    Several outputs are a tuple. For tests and for timing: it has no name.
    """
    params = [leaf for leaf in encoded.leaves if isinstance(leaf, relax.Var)]
    block = decode_block(encoded, graph, params)
    results = [var for var, _ in encoded.outputs]
    body = relax.SeqExpr([block], results[0] if len(results) == 1 else relax.Tuple(results))
    builder = relax.BlockBuilder()
    return relax.Function(params, builder.normalize(body))


class _Decoder:
    def __init__(self, encoded: Encoded, graph: TermGraph) -> None:
        self.encoded = encoded
        self.graph = graph
        self.builder = relax.BlockBuilder()
        self.values: dict[int, Any] = {}
        self.calls: dict[Any, Any] = {}

    def block(self, params: list[Any]) -> relax.DataflowBlock:
        outputs = iter(self.graph.outputs)
        trees = [(var, _replace(tree, outputs)) for var, tree in self.encoded.outputs]
        # A term that is an output by itself is bound to the output's variable; a second name for it is an alias.
        names: dict[int, Any] = {}
        for var, tree in trees:
            if isinstance(tree, int) and self.graph.terms[tree].op not in ("leaf", "full"):
                names.setdefault(tree, var)
        self.builder.begin_scope(params)
        self.builder._begin_dataflow_block()
        for index in self.graph.live():
            self.values[index] = self.emit(index, names.get(index))
        for var, tree in trees:
            if not isinstance(tree, int) or names.get(tree) is not var:
                self.builder.emit_normalized(relax.VarBinding(var, self.builder.normalize(self.read(tree))))
        block = self.builder._end_block()
        self.builder.end_scope()
        return block

    def emit(self, index: int, name: Any) -> Any:
        """Bind one term; leaves and scalars are written where they are read."""
        term, result = self.graph.terms[index], self.graph.types[index]
        if term.op == "leaf":
            return self.encoded.leaves[term.attrs.index]
        arguments = [self.values[argument] for argument in term.args]
        if term.op == "opaque":
            expr = self.opaque(term.attrs.template, term.attrs.key, arguments, term.args)
        else:
            types = [self.graph.types[argument] for argument in term.args]
            expr = write_term(term.op, term.attrs, arguments, types, result)
            if term.op == "full":
                return expr
        expr = self.builder.normalize(expr)
        if not is_unknown(result) and static_type(expr.ty) != result:
            raise MismatchError(f"{term.op} {term.attrs} has type {expr.ty} in Relax, {result} in the graph search")
        if name is None:
            return self.builder.emit(expr)
        self.builder.emit_normalized(relax.VarBinding(name, expr))
        return name

    def opaque(self, template: Template, key: tuple[Any, ...], arguments: list[Any], places: tuple[int, ...]) -> Any:
        """The expression of an opaque term; the results of one call share it."""
        call = template.expr
        if isinstance(call, relax.Call):
            identity = (key[0], places)
            found = self.calls.get(identity) if template.path else None
            if found is None:
                operands = [
                    _build(place, arguments, old) for old, place in zip(call.args, template.arguments, strict=True)
                ]
                found = relax.Call(call.op, operands, call.attrs, list(call.ty_args))
                if template.path:
                    found = self.calls[identity] = self.builder.emit(found)
            call = found
        for item in template.path:
            call = relax.TupleGetItem(call, item)
        return call

    def read(self, tree: Tree) -> Any:
        """The expression of a tree of terms."""
        return self.values[tree] if isinstance(tree, int) else relax.Tuple([self.read(item) for item in tree])


def _replace(tree: Tree, leaves: Any) -> Tree:
    return next(leaves) if isinstance(tree, int) else tuple(_replace(item, leaves) for item in tree)


def _build(place: Place, arguments: list[Any], old: Any) -> Any:
    """An argument of a call: what is no value stays `old`."""
    if place is None:
        return old
    if isinstance(place, int):
        return arguments[place]
    fields = old.fields if isinstance(old, relax.Tuple) else [old] * len(place)  # a variable's tuple is values only
    return relax.Tuple([_build(inner, arguments, field) for inner, field in zip(place, fields, strict=True)])
