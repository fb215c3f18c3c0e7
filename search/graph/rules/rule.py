"""What a rewrite rule is, and how to write one.

A rule says that two terms are equal. It is data: the same value is compiled to egglog (`../compile_rule.py`),
evaluated on random tensors to verify it, and printed. To add one, put it into a table of this folder and its table
into `__init__.py`:

    x, y, z = tensors("x y z")
    matmul_associative = Rule(
        "matmul-associative",
        before=matmul(matmul(x, y), z),
        after=matmul(x, matmul(y, z)),
        reason="the other order may need fewer multiplications",
        source="TASO",
    )

*Tensors* are variables `Var("x")`; `weights("w")` match only what depends on weights alone. The same variable twice in
`before` must be the same tensor.

*Attributes* in `before` are a value (`Kind("add")`) that must be met exactly, or `Attr("a")`, which binds any. In
`after` they are a value, a bound `Attr`, or a function of the match:

    transposed_twice = Rule(
        "permute-permute",
        before=permute(permute(x, Attr("inner")), Attr("outer")),
        after=permute(x, lambda m: Permute(tuple(m.inner.axes[i] for i in m.outer.axes))),
        ...

*The match* `m` gives the type of a tensor variable (`m.x.shape`, `m.x.dtype`), the attributes bound to an `Attr`
(`m.inner.axes`), the type of any subterm of `before` (`m.type(subterm)`) and of its roots (`m.out[0]`). Conditions
(`when`) are named functions of the match that return a bool; they are looked up by types and attributes once for each
distinct combination, never once for each match, so that they may be written for clarity.

*Several roots* (`before=(..., ...)`, `after=(..., ...)`, one for one) make a multi-pattern rule: all roots are matched
together and each is made equal to its counterpart. Equal subterms of `after` are shared. Roots of one match are
distinct values; where exchanging two roots gives the same pattern again, only one of the two mirrored matches is seen.

*Groups* (`Group`) are multi-pattern rules over any number of roots: `make(n)` gives the rule for n; the search finds
the largest groups of matches of one `member` that agree on the variables and attributes in `shared`.

Types need no declaration: `after` is typed by `operators.infer`, and a match whose `after` cannot be typed, or whose
type is not that of `before`, is not applied; `instantiate(..., strict=True)`, which verification uses, raises instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from ..attributes import Leaf, TensorType
from ..operators import OPS, NotTypeable, infer
from ..terms import Term, TermGraph
from .pattern import Attr, Node, Pattern, Var, nodes_of, variables_of

__all__ = [
    "Group",
    "Instance",
    "Match",
    "Rule",
    "both_ways",
    "instantiate",
    "term_graphs",
]


class Match:
    """What a rule's functions see of one match: types of tensor variables and values of attributes, by name."""

    def __init__(
        self,
        rule: Rule,
        types: Mapping[str, TensorType],
        attrs: Mapping[str, Any],
        results: Sequence[TensorType] | None = None,
    ) -> None:
        self.__dict__.update(types)
        self.__dict__.update(attrs)
        self._types: dict[Pattern, TensorType] = {var: types[var.name] for var in rule.variables}
        self._attrs = attrs
        if results is not None:
            self._types.update(zip(rule.before_nodes, results, strict=True))
        else:
            for node in rule.before_nodes:
                self._types[node] = infer(node.op, self.attrs(node), *[self._types[arg] for arg in node.args])
        self.out = tuple(self._types[root] for root in rule.roots)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the match binds {sorted(k for k in self.__dict__ if k[0] != '_')}, not {name!r}")

    def type(self, pattern: Pattern) -> TensorType:
        """Type of a subterm of `before`."""
        return self._types[pattern]

    def attrs(self, node: Node) -> Any:
        """Attributes of a node of `before` or `after`, as values."""
        if isinstance(node.attrs, Attr):
            return self._attrs[node.attrs.name]
        return node.attrs(self) if callable(node.attrs) else node.attrs


Condition = Callable[[Match], bool]
Example = Callable[[Random], tuple[Mapping[str, TensorType], Mapping[str, Any]]]


@dataclass(frozen=True)
class Rule:
    """A verified equality, used from `before` to `after`.

    Attributes
    ----------
    name : str
        Unique, in words joined by hyphens.
    before, after : Pattern or tuple of Pattern
        The roots; `after` holds one for each of `before`.
    reason : str
        Why it may pay, in one line.
    source : str
        Where it is published, or "eqtune".
    when : tuple of functions of the match
        All must hold.
    fast_math : bool
        Equal over the reals but less accurate in floating point; used only where the configuration permits.
    worth : tuple of functions of the match
        Must hold as well, but are not needed for the sides to be equal: they keep the rule to where it may pay, or
        where no number leaves the range of float16.
    on_weights : bool
        Whether it also rewrites what depends on weights alone, which is free as it is: so that what other rules make
        of a weight has one form, and is recognised when they come by it again.
    example : callable or None
        random.Random -> (types, attributes) that fit the pattern and the conditions, for verification of rules whose
        pattern random choices seldom fit.
    """

    name: str
    before: Pattern | tuple[Pattern, ...]
    after: Pattern | tuple[Pattern, ...]
    reason: str
    source: str = "eqtune"
    when: tuple[Condition, ...] = ()
    fast_math: bool = False
    worth: tuple[Condition, ...] = ()
    on_weights: bool = False
    example: Example | None = None

    def __post_init__(self) -> None:
        if len(self.roots) != len(self.results):
            raise ValueError(f"rule {self.name}: {len(self.roots)} roots before, {len(self.results)} after")
        if not all(isinstance(root, Node) for root in self.roots):
            raise ValueError(f"rule {self.name}: a root of `before` must be an operator, not a variable")
        unbound = {v.name for v in variables_of(self.results)} - {v.name for v in self.variables}
        if unbound:
            raise ValueError(f"rule {self.name}: `after` uses {sorted(unbound)}, which `before` does not bind")
        for node in (*self.before_nodes, *self.after_nodes):
            arity = OPS[node.op].arity
            if arity is not None and arity != len(node.args):
                raise ValueError(f"rule {self.name}: {node.op} takes {arity} tensors, not {len(node.args)}")

    @cached_property
    def roots(self) -> tuple[Pattern, ...]:
        """The roots of `before`."""
        return self.before if isinstance(self.before, tuple) else (self.before,)

    @cached_property
    def results(self) -> tuple[Pattern, ...]:
        """The roots of `after`."""
        return self.after if isinstance(self.after, tuple) else (self.after,)

    @cached_property
    def multi(self) -> bool:
        """Whether several roots are matched at once."""
        return len(self.roots) > 1

    @cached_property
    def before_nodes(self) -> tuple[Node, ...]:
        """Distinct operators of `before`, arguments first."""
        return nodes_of(self.roots)

    @cached_property
    def after_nodes(self) -> tuple[Node, ...]:
        """Distinct operators of `after`, arguments first."""
        return nodes_of(self.results)

    @cached_property
    def variables(self) -> tuple[Var, ...]:
        """Tensor variables, in the order in which `before` mentions them."""
        return variables_of(self.roots)

    @cached_property
    def attributes(self) -> tuple[str, ...]:
        """Names of the attribute variables, in the order in which `before` mentions them."""
        return tuple(dict.fromkeys(n.attrs.name for n in self.before_nodes if isinstance(n.attrs, Attr)))


@dataclass(frozen=True)
class Group:
    """A family of multi-pattern rules, one for each number of roots.

    Attributes
    ----------
    name : str
        Unique among rules and groups.
    member : Node
        One root. The variables and attributes that are not in `shared` get the suffix 1 to n in `make(n)`.
    shared : tuple of str
        Names on which all members agree.
    make : callable
        n -> the rule for n members, whose roots are `member` renamed, in order.
    alike : callable or None
        Types of a member's tensor variables and values of its attribute variables, both by name -> what members that
        fit together agree on; None: nothing but `shared`. Large groups are merged as a whole, or not at all.
    order : callable or None
        Values of a member's attribute variables, by name -> what members are sorted by; None: as the graph has them.
    """

    name: str
    member: Node
    shared: tuple[str, ...]
    make: Callable[[int], Rule]
    reason: str = ""
    source: str = "eqtune"
    fast_math: bool = False
    alike: Callable[[Mapping[str, TensorType], Mapping[str, Any]], Any] | None = None
    order: Callable[[Mapping[str, Any]], Any] | None = None


@dataclass(frozen=True)
class Instance:
    """What a rule builds for one combination of types and attributes: one entry for each of `after_nodes`."""

    attrs: tuple[Any, ...]
    types: tuple[TensorType, ...]


def instantiate(
    rule: Rule,
    types: Mapping[str, TensorType],
    attrs: Mapping[str, Any],
    results: Sequence[TensorType] | None = None,
    *,
    strict: bool = False,
) -> Instance | None:
    """What the rule builds for tensor variables of these types and these attributes; None where it does not apply.

    `results` are the types of `rule.before_nodes`, where they are known. With `strict`, a result that meets the
    conditions but has no type, or another type than the original, raises NotTypeable.
    """
    try:
        match = Match(rule, types, attrs, results)
    except NotTypeable:
        return None
    if not all(condition(match) for condition in (*rule.when, *rule.worth)):
        return None
    result_types: dict[Pattern, TensorType] = {var: types[var.name] for var in rule.variables}
    result_attrs = []
    try:
        for node in rule.after_nodes:
            value = match.attrs(node)
            result_attrs.append(value)
            result_types[node] = infer(node.op, value, *[result_types[arg] for arg in node.args])
        for before, after in zip(match.out, rule.results, strict=True):
            if before != result_types[after]:
                raise NotTypeable(f"rule {rule.name} turns {before} into {result_types[after]}")
    except NotTypeable:
        if strict:
            raise
        return None
    return Instance(tuple(result_attrs), tuple(result_types[node] for node in rule.after_nodes))


def both_ways(
    forward: str,
    left: Pattern,
    backward: str,
    right: Pattern,
    *,
    reason: str,
    source: str = "eqtune",
    when: tuple[Condition, ...] = (),
    worth: tuple[Condition, ...] = (),
    example: Example | None = None,
) -> tuple[Rule, Rule]:
    """A rule and its inverse: `forward` names left -> right, `backward` right -> left."""
    return (
        Rule(forward, left, right, reason, source, when, worth=worth, example=example),
        Rule(backward, right, left, reason, source, when, worth=worth, example=example),
    )


def term_graphs(
    rule: Rule, types: Mapping[str, TensorType], attrs: Mapping[str, Any]
) -> tuple[TermGraph, TermGraph] | None:
    """Both sides of the rule as graphs with the same leaves, in order of `rule.variables`.

    None where the rule does not apply.
    Raises NotTypeable when the rule would change a type.
    """
    instance = instantiate(rule, types, attrs, strict=True)
    if instance is None:
        return None
    match = Match(rule, types, attrs)
    before = [match.attrs(node) for node in rule.before_nodes]
    return (
        _graph(rule, types, rule.before_nodes, before, rule.roots),
        _graph(rule, types, rule.after_nodes, instance.attrs, rule.results),
    )


def _graph(
    rule: Rule, types: Mapping[str, TensorType], nodes: Sequence[Node], attrs: Sequence[Any], roots: Sequence[Pattern]
) -> TermGraph:
    graph = TermGraph()
    index: dict[Pattern, int] = {}
    for i, var in enumerate(rule.variables):
        index[var] = graph.add_typed(Term("leaf", Leaf(i), ()), types[var.name], var.weight)
    for node, value in zip(nodes, attrs, strict=True):
        index[node] = graph.add(node.op, value, [index[arg] for arg in node.args])
    graph.outputs = [index[root] for root in roots]
    return graph
