"""An e-graph read out of egglog as plain lists, for extraction and reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eqtune.errors import MismatchError

from .attributes import TensorType
from .compile_rule import Form, constructor
from .database import Database
from .terms import Term, TermGraph

__all__ = ["EGraphView", "read_view"]


@dataclass
class EGraphView:
    """E-nodes and e-classes by index. Lists of nodes have one entry a node, lists of classes one a class.

    Attributes
    ----------
    ops : list of str
        Each node's operator.
    attrs : list
        Each node's attributes.
    forms : list of int
        The number of each node's form: equal numbers mean equal attributes, and operands of equal types.
    children : list of tuple of int
        Each node's argument classes.
    made_by : list of str
        The rule that made each node first; "" for nodes of the original graph.
    node_class : list of int
        The class of each node.
    classes : list of list of int
        The nodes of each class.
    types : list of TensorType
        Of each class.
    constant : list of bool
        Whether each class depends on weights alone.
    numbers : dict of int to int
        Number of each class that has one; a class of the original graph has the least index of its terms.
    roots : list of int
        The classes of the outputs, in order.
    """

    ops: list[str]
    attrs: list[Any]
    forms: list[int]
    children: list[tuple[int, ...]]
    made_by: list[str]
    node_class: list[int]
    classes: list[list[int]]
    types: list[TensorType]
    constant: list[bool]
    numbers: dict[int, int]
    roots: list[int]

    def graph(self, choice: Mapping[int, int]) -> TermGraph:
        """The graph of the chosen nodes.

        Parameters
        ----------
        choice : mapping of int to int
            The node chosen for each class that is needed; what other classes hold is not looked at.

        Raises
        ------
        MismatchError
            When a class that is needed has no chosen node, or the choice has a cycle.
        """
        graph = TermGraph()
        index: dict[int, int] = {}
        open_classes: set[int] = set()
        stack = [(root, False) for root in reversed(self.roots)]
        while stack:
            c, done = stack.pop()
            if c in index:
                continue
            node = choice.get(c, -1)
            if node < 0:
                raise MismatchError(f"no node was chosen for class {c} of type {self.types[c]}, which is needed")
            if done:
                args = tuple(index[child] for child in self.children[node])
                index[c] = graph.add_typed(
                    Term(self.ops[node], self.attrs[node], args), self.types[c], self.constant[c]
                )
                continue
            if c in open_classes:
                raise MismatchError(f"the extracted graph has a cycle through {self.ops[node]}")
            open_classes.add(c)
            stack.append((c, True))
            stack += [(child, False) for child in reversed(self.children[node]) if child not in index]
        graph.outputs = [index[root] for root in self.roots]
        return graph


def read_view(
    database: Database,
    constructors: Iterable[tuple[str, int]],
    forms: Sequence[Form],
    tags: Sequence[str],
    roots: Sequence[int],
) -> EGraphView:
    """Read an e-graph. The order of nodes and classes depends on nothing but the e-graph.

    Raises
    ------
    MismatchError
        When terms of different types are in one class: some rule is wrong.
    """
    functions, integer = database.tables(), database.integer
    view = EGraphView([], [], [], [], [], [], [], [], [], {}, [])
    class_of: dict[Any, int] = {}
    operands: list[list[Any]] = []
    for op, count in sorted(constructors):
        name = constructor(op, count)
        made = {tuple(row.inputs): integer(row.output) for row in functions[f"made-{name}"].rows}
        for row in functions[name].rows:
            inputs = row.inputs
            number = integer(inputs[0])
            form = forms[number]
            c = class_of.setdefault(row.output, len(view.classes))
            if c == len(view.classes):
                view.classes.append([])
                view.types.append(form.result)
                view.constant.append(False)
            if view.types[c] != form.result:
                raise MismatchError(f"one class holds {view.types[c]} and {form.result} ({op} {form.attrs})")
            view.constant[c] |= form.constant
            view.classes[c].append(len(view.ops))
            view.node_class.append(c)
            view.ops.append(op)
            view.attrs.append(form.attrs)
            view.forms.append(number)
            view.made_by.append(tags[made.get(tuple(inputs), 0)])
            operands.append(inputs[1:])
    view.children = [tuple([class_of[value] for value in values]) for values in operands]
    view.numbers = {class_of[row.inputs[0]]: integer(row.output) for row in functions["number"].rows}
    by_number = {integer(row.inputs[0]): class_of[row.output] for row in functions["numbered"].rows}
    view.roots = [by_number[root] for root in roots]
    return view
