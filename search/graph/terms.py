"""The term language of the graph search: graphs of operators, their attributes, and the types of their results.

A term is an operator (`operators.py`), its attributes (`attributes.py`: one hashable value, or None) and its tensor
arguments. Everything that a rule may want to look at is an attribute or a type, as plain Python data; nothing here
knows TVM or egglog. An operator that the vocabulary lacks is an `opaque` term: it keeps its place, and no rule looks
inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .attributes import TensorType
from .operators import OPS, infer

__all__ = [
    "Term",
    "TermGraph",
]


@dataclass(frozen=True)
class Term:
    """A node of a `TermGraph`: `args` are indices of earlier nodes."""

    op: str
    attrs: Any
    args: tuple[int, ...]


@dataclass
class TermGraph:
    """A dataflow graph in topological order: what is encoded, extracted, priced, evaluated and decoded.

    Attributes
    ----------
    terms : list of Term
    types : list of TensorType
        Of each term's value.
    constant : list of bool
        Whether a term depends on weights alone: it is computed once, ahead of time.
    outputs : list of int
        The terms whose values are wanted.
    """

    terms: list[Term] = field(default_factory=list)
    types: list[TensorType] = field(default_factory=list)
    constant: list[bool] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    _index: dict[Term, int] = field(default_factory=dict, repr=False)

    def add(self, op: str, attrs: Any, args: Sequence[int]) -> int:
        """The index of this term, which is added unless it is there.

        Raises NotTypeable when the arguments' types do not fit.
        """
        term = Term(op, attrs, tuple(args))
        found = self._index.get(term)
        if found is not None:
            return found
        result_type = infer(op, attrs, *(self.types[i] for i in args))
        return self.add_typed(term, result_type, OPS[op].folds and all(self.constant[i] for i in args))

    def add_typed(self, term: Term, result_type: TensorType, constant: bool) -> int:
        """The same for a term whose type is given, as that of a leaf is, and whether it depends on weights alone."""
        found = self._index.get(term)
        if found is not None:
            return found
        self.terms.append(term)
        self.types.append(result_type)
        self.constant.append(constant)
        self._index[term] = len(self.terms) - 1
        return len(self.terms) - 1

    def live(self) -> Iterator[int]:
        """Indices of the terms that outputs depend on, in order."""
        needed = set(self.outputs)
        for index in range(len(self.terms) - 1, -1, -1):
            if index in needed:
                needed.update(self.terms[index].args)
        return iter(sorted(needed))
