"""The door that every extraction goes through before its cost is believed."""

from __future__ import annotations

from eqtune.errors import MismatchError

from ..egraph_view import EGraphView
from ..operators import infer
from ..terms import TermGraph
from .problem import Choice, Problem

__all__ = ["checked_graph"]


def checked_graph(view: EGraphView, problem: Problem, choice: Choice) -> TermGraph:
    """The graph that a choice stands for.

    Raises
    ------
    MismatchError
        When a class that is needed has no chosen node, or one of another class; when the chosen nodes form a cycle;
        when a term's inferred type is not that of its class.
    """
    complete = problem.weights | choice
    for c, node in complete.items():
        if view.node_class[node] != c:
            raise MismatchError(f"node {node} was chosen for class {c}, and belongs to class {view.node_class[node]}")
    graph = view.graph(complete)
    for index, term in enumerate(graph.terms):
        if term.op not in ("leaf", "opaque"):
            inferred = infer(term.op, term.attrs, *(graph.types[argument] for argument in term.args))
            if inferred != graph.types[index]:
                raise MismatchError(f"{term.op} {term.attrs} has type {inferred} in a class of {graph.types[index]}")
    return graph
