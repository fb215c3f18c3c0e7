"""The published rules of TASO and Tensat are theorems of the library: each is proved by saturation.

Tensat (MLSys 2021) publishes TASO's rules as 124 single-pattern rules (120 generated, 4 written by hand) and 15
multi-pattern ones (13 and 2). Their convolutions know an activation; here relu is an operator of its own, so that 2
single-pattern and 2 multi-pattern rules say nothing, and 6 single-pattern ones repeat others. The remaining 116 and 13
are restated below in our terms, and all of them are proved. "Same" padding is 1 on each side of a 3x3 kernel.

Published rules take it for granted that operands of an element-wise function have the same shape, and that groups are
equally large. Ours broadcast: without such a condition, four of them are wrong (`NEED_A_CONDITION`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from eqtune.search.graph.attributes import Axis, Conv2d, Pad, TensorType
from eqtune.search.graph.egraph import EGraph
from eqtune.search.graph.rules import EXTENDED_RULES, Group
from eqtune.search.graph.rules.pattern import Node, Pattern, add, concat, conv2d, matmul, multiply, pad, relu, tensors
from eqtune.search.graph.rules.rule import Rule, term_graphs
from eqtune.search.graph.rules.shapes import block
from eqtune.search.graph.terms import TermGraph
from eqtune.search.graph.verify import verify_rule

a, b, c, d = tensors("a b c d")
x, y, z, w = tensors("x y z w")
k, j, dot = tensors("k j dot")
p, q, r = tensors("p q r")
mm, mul = matmul, multiply

MATRIX, IMAGE, KERNEL = (4, 4), (4, 4, 6, 6), (4, 4, 3, 3)
SHAPES = dict.fromkeys("abcd", MATRIX) | dict.fromkeys("xyzw", IMAGE) | dict.fromkeys("kjpqr", KERNEL)
SHAPES["dot"] = (4, 4, 1, 1)


def conv(data: Pattern, kernel: Pattern, groups: int = 1) -> Node:
    return conv2d(data, kernel, Conv2d(padding=(1, 1, 1, 1), groups=groups))


def fused(data: Pattern, kernel: Pattern, groups: int = 1) -> Node:
    return relu(conv(data, kernel, groups))


def joined(axis: int, left: Pattern, right: Pattern) -> Node:
    return concat((left, right), Axis(axis))


def half(axis: int, whole: Pattern, index: int) -> Pattern:
    return block(whole, index, axis)


SINGLE = [
    (mm(mm(a, b), c), mm(a, mm(b, c))),
    (mm(mm(a, b), mm(c, d)), mm(mm(a, mm(b, c)), d)),
    (mm(joined(0, a, mm(b, a)), c), joined(0, mm(a, c), mm(b, mm(a, c)))),
    (mm(mm(mm(a, b), c), c), mm(a, mm(mm(b, c), c))),
    (mm(mm(a, b), mm(c, d)), mm(a, mm(mm(b, c), d))),
    (add(mm(a, b), mm(mm(a, b), c)), mm(a, add(b, mm(b, c)))),
    (mm(add(a, mm(a, b)), c), mm(a, add(c, mm(b, c)))),
    (joined(1, mm(a, b), mm(mm(a, b), c)), mm(a, joined(1, b, mm(b, c)))),
    (mm(mm(a, mm(b, c)), b), mm(a, mm(b, mm(c, b)))),
    (mm(mm(a, b), mm(mm(a, b), a)), mm(mm(a, mm(b, a)), mm(b, a))),
    (mm(mm(a, mm(b, c)), b), mm(mm(a, b), mm(c, b))),
    (mm(mm(a, mm(a, b)), c), mm(a, mm(a, mm(b, c)))),
    (mm(mm(a, mm(b, a)), c), mm(a, mm(b, mm(a, c)))),
    (mm(mm(a, mm(b, c)), a), mm(a, mm(b, mm(c, a)))),
    (mm(add(a, mm(b, a)), c), add(mm(a, c), mm(b, mm(a, c)))),
    (mm(mm(a, mm(b, a)), c), mm(mm(a, b), mm(a, c))),
    (mm(mm(a, mm(b, c)), a), mm(mm(a, b), mm(c, a))),
    (mm(a, mm(b, mm(b, c))), mm(mm(mm(a, b), b), c)),
    (mm(mm(a, b), mm(a, c)), mm(a, mm(mm(b, a), c))),
    (mm(mm(a, b), mm(c, a)), mm(a, mm(mm(b, c), a))),
    (mm(a, mm(b, mm(c, b))), mm(mm(mm(a, b), c), b)),
    (add(mm(a, b), mm(c, b)), mm(add(a, c), b)),
    (add(a, add(a, add(b, c))), add(add(b, a), add(c, a))),
    (add(a, add(b, c)), add(c, add(b, a))),
    (add(add(a, b), add(b, c)), add(b, add(b, add(a, c)))),
    (add(a, add(a, add(b, c))), add(c, add(a, add(b, a)))),
    (add(a, add(a, add(b, c))), add(add(c, a), add(b, a))),
    (add(a, add(b, c)), add(b, add(c, a))),
    (add(add(a, b), add(a, c)), add(a, add(a, add(b, c)))),
    (add(a, add(a, add(b, c))), add(b, add(a, add(c, a)))),
    (add(mm(a, b), mm(a, c)), mm(a, add(b, c))),
    (conv(add(p, add(q, r)), add(p, add(q, r))), conv(add(r, add(q, p)), add(r, add(q, p)))),
    (fused(add(p, add(q, r)), add(p, add(q, r))), fused(add(r, add(q, p)), add(r, add(q, p)))),
    (conv(add(p, add(q, r)), add(p, add(q, r))), conv(add(q, add(r, p)), add(q, add(r, p)))),
    (fused(add(p, add(q, r)), add(p, add(q, r))), fused(add(q, add(r, p)), add(q, add(r, p)))),
    (mul(a, add(b, c)), add(mul(a, b), mul(a, c))),
    (mul(a, add(b, c)), add(mul(b, a), mul(a, c))),
    (add(mul(a, b), mul(c, mul(a, b))), mul(b, add(a, mul(a, c)))),
    (mul(a, add(b, mul(c, b))), mul(b, add(a, mul(c, a)))),
    (mul(a, add(b, c)), add(mul(b, a), mul(c, a))),
    (mul(a, mul(a, mul(b, c))), mul(mul(b, a), mul(c, a))),
    (mul(a, mul(b, c)), mul(c, mul(b, a))),
    (mul(mul(a, b), mul(b, c)), mul(b, mul(b, mul(a, c)))),
    (mul(a, mul(a, mul(b, c))), mul(c, mul(a, mul(b, a)))),
    (add(mul(a, b), mul(c, mul(a, b))), mul(a, add(b, mul(b, c)))),
    (mul(a, add(b, mul(b, c))), mul(b, add(a, mul(c, a)))),
    (mul(a, add(b, c)), add(mul(c, a), mul(b, a))),
    (mul(a, mul(a, mul(b, c))), mul(mul(c, a), mul(b, a))),
    (mul(a, mul(b, c)), mul(b, mul(c, a))),
    (mul(a, add(b, mul(c, b))), add(mul(b, a), mul(c, mul(b, a)))),
    (mul(mul(a, b), mul(a, c)), mul(a, mul(a, mul(b, c)))),
    (mul(a, mul(a, mul(b, c))), mul(b, mul(a, mul(c, a)))),
    (conv(mul(p, mul(q, r)), mul(p, mul(q, r))), conv(mul(r, mul(q, p)), mul(r, mul(q, p)))),
    (fused(mul(p, mul(q, r)), mul(p, mul(q, r))), fused(mul(r, mul(q, p)), mul(r, mul(q, p)))),
    (conv(mul(p, mul(q, r)), mul(p, mul(q, r))), conv(mul(q, mul(r, p)), mul(q, mul(r, p)))),
    (fused(mul(p, mul(q, r)), mul(p, mul(q, r))), fused(mul(q, mul(r, p)), mul(q, mul(r, p)))),
    (mul(a, add(b, c)), add(mul(a, c), mul(a, b))),
    (mul(a, add(b, c)), add(mul(a, c), mul(b, a))),
    (conv(x, add(k, j)), add(conv(x, k), conv(x, j))),
    (conv(add(x, y), k), add(conv(x, k), conv(y, k))),
    (conv(x, add(k, j)), add(conv(x, j), conv(x, k))),
    (conv(add(x, y), k), add(conv(y, k), conv(x, k))),
    (relu(joined(1, x, conv(y, k))), joined(1, relu(x), fused(y, k))),
    (relu(joined(0, x, conv(y, k))), joined(0, relu(x), fused(y, k))),
    (joined(1, relu(a), relu(b)), relu(joined(1, a, b))),
    (joined(1, add(a, b), add(b, c)), add(joined(1, a, b), joined(1, b, c))),
    (joined(1, mul(a, b), mul(b, c)), mul(joined(1, a, b), joined(1, b, c))),
    (add(mm(a, b), mm(c, d)), mm(joined(1, a, c), joined(0, b, d))),
    (joined(1, add(a, b), add(b, c)), add(joined(1, b, c), joined(1, a, b))),
    (joined(1, mul(a, b), mul(b, c)), mul(joined(1, b, c), joined(1, a, b))),
    (joined(1, mm(a, b), mm(a, c)), mm(a, joined(1, b, c))),
    (joined(0, mm(a, b), mm(c, b)), mm(joined(0, a, c), b)),
    (joined(0, relu(a), relu(b)), relu(joined(0, a, b))),
    (joined(0, add(a, b), add(c, d)), add(joined(0, a, c), joined(0, b, d))),
    (joined(0, mul(a, b), mul(c, d)), mul(joined(0, a, c), joined(0, b, d))),
    (joined(0, joined(1, a, b), joined(1, c, d)), joined(1, joined(0, a, c), joined(0, b, d))),
    (joined(0, add(a, b), add(c, d)), add(joined(0, a, d), joined(0, b, c))),
    (joined(0, mul(a, b), mul(c, d)), mul(joined(0, a, d), joined(0, b, c))),
    (joined(0, add(a, b), add(c, d)), add(joined(0, b, c), joined(0, a, d))),
    (joined(0, mul(a, b), mul(c, d)), mul(joined(0, b, c), joined(0, a, d))),
    (joined(0, add(a, b), add(c, d)), add(joined(0, b, d), joined(0, a, c))),
    (joined(0, mul(a, b), mul(c, d)), mul(joined(0, b, d), joined(0, a, c))),
    (
        conv(joined(1, p, joined(1, q, r)), joined(1, p, joined(1, q, r))),
        conv(joined(1, q, joined(1, p, r)), joined(1, q, joined(1, p, r))),
    ),
    (
        fused(joined(1, p, joined(1, q, r)), joined(1, p, joined(1, q, r))),
        fused(joined(1, q, joined(1, p, r)), joined(1, q, joined(1, p, r))),
    ),
    (joined(1, relu(x), relu(y)), relu(joined(1, x, y))),
    (joined(1, add(x, y), add(y, z)), add(joined(1, x, y), joined(1, y, z))),
    (joined(1, mul(x, y), mul(y, z)), mul(joined(1, x, y), joined(1, y, z))),
    (add(conv(x, k), conv(y, j)), conv(joined(1, x, y), joined(1, k, j))),
    (joined(1, conv(x, k), conv(y, j)), conv(joined(1, x, y), joined(0, k, j), 2)),
    (joined(1, fused(x, k), fused(y, j)), fused(joined(1, x, y), joined(0, k, j), 2)),
    (joined(1, add(x, y), add(y, z)), add(joined(1, y, z), joined(1, x, y))),
    (joined(1, mul(x, y), mul(y, z)), mul(joined(1, y, z), joined(1, x, y))),
    (add(joined(1, x, y), joined(1, z, w)), add(joined(1, z, y), joined(1, x, w))),
    (mul(joined(1, x, y), joined(1, z, w)), mul(joined(1, z, y), joined(1, x, w))),
    (
        conv(joined(1, p, joined(1, q, r)), joined(1, p, joined(1, q, r))),
        conv(joined(1, r, joined(1, q, p)), joined(1, r, joined(1, q, p))),
    ),
    (
        fused(joined(1, p, joined(1, q, r)), joined(1, p, joined(1, q, r))),
        fused(joined(1, r, joined(1, q, p)), joined(1, r, joined(1, q, p))),
    ),
    (
        conv(joined(1, p, joined(1, q, r)), joined(1, p, joined(1, q, r))),
        conv(joined(1, q, joined(1, r, p)), joined(1, q, joined(1, r, p))),
    ),
    (
        fused(joined(1, p, joined(1, q, r)), joined(1, p, joined(1, q, r))),
        fused(joined(1, q, joined(1, r, p)), joined(1, q, joined(1, r, p))),
    ),
    (add(joined(0, x, y), joined(0, z, w)), add(joined(0, x, w), joined(0, z, y))),
    (mul(joined(0, x, y), joined(0, z, w)), mul(joined(0, x, w), joined(0, z, y))),
    (add(joined(0, x, y), joined(0, z, w)), add(joined(0, z, y), joined(0, x, w))),
    (mul(joined(0, x, y), joined(0, z, w)), mul(joined(0, z, y), joined(0, x, w))),
    (joined(0, conv(x, k), conv(y, k)), conv(joined(0, x, y), k)),
    (joined(0, fused(x, k), fused(y, k)), fused(joined(0, x, y), k)),
    (joined(0, relu(x), relu(y)), relu(joined(0, x, y))),
    (joined(0, add(x, y), add(y, z)), add(joined(0, x, y), joined(0, y, z))),
    (joined(0, mul(x, y), mul(y, z)), mul(joined(0, x, y), joined(0, y, z))),
    (joined(0, add(x, y), add(y, z)), add(joined(0, y, z), joined(0, x, y))),
    (joined(0, mul(x, y), mul(y, z)), mul(joined(0, y, z), joined(0, x, y))),
    (joined(1, conv(x, k), conv(x, j)), conv(x, joined(0, k, j))),
    (joined(1, fused(x, k), fused(x, j)), fused(x, joined(0, k, j))),
    (joined(0, joined(1, x, y), joined(1, y, z)), joined(1, joined(0, x, y), joined(0, y, z))),
]

RING = Pad((0, 0, 1, 1), (0, 0, 1, 1))

MULTI = [
    ((mm(mm(a, b), a), mm(b, mm(a, b))), (mm(a, mm(b, a)), mm(mm(b, a), b))),
    ((relu(a), relu(b)), (half(1, relu(joined(1, a, b)), 0), half(1, relu(joined(1, a, b)), 1))),
    ((mm(a, b), mm(a, c)), (half(1, mm(a, joined(1, b, c)), 0), half(1, mm(a, joined(1, b, c)), 1))),
    ((mm(a, b), mm(c, b)), (half(0, mm(joined(0, a, c), b), 0), half(0, mm(joined(0, a, c), b), 1))),
    ((relu(a), relu(b)), (half(0, relu(joined(0, a, b)), 0), half(0, relu(joined(0, a, b)), 1))),
    ((relu(x), relu(y)), (half(1, relu(joined(1, x, y)), 0), half(1, relu(joined(1, x, y)), 1))),
    ((conv(x, k), conv(y, k)), (half(0, conv(joined(0, x, y), k), 0), half(0, conv(joined(0, x, y), k), 1))),
    ((fused(x, k), fused(y, k)), (half(0, fused(joined(0, x, y), k), 0), half(0, fused(joined(0, x, y), k), 1))),
    ((relu(x), relu(y)), (half(0, relu(joined(0, x, y)), 0), half(0, relu(joined(0, x, y)), 1))),
    ((conv(x, k), conv(x, j)), (half(1, conv(x, joined(0, k, j)), 0), half(1, conv(x, joined(0, k, j)), 1))),
    ((fused(x, k), fused(x, j)), (half(1, fused(x, joined(0, k, j)), 0), half(1, fused(x, joined(0, k, j)), 1))),
    *(
        (
            (act(conv2d(x, dot, Conv2d())), act(conv(x, k))),
            tuple(half(1, act(conv(x, joined(0, pad(dot, RING), k))), i) for i in (0, 1)),
        )
        for act in (relu, lambda result: result)
    ),
]

CASES = [
    *(Rule(f"single-{i}", before, after, reason="") for i, (before, after) in enumerate(SINGLE)),
    *(Rule(f"multi-{i}", before, after, reason="") for i, (before, after) in enumerate(MULTI)),
]

NEED_A_CONDITION = {
    (conv(add(x, y), k), add(conv(x, k), conv(y, k))): "x and y have the same shape",
    (conv(add(x, y), k), add(conv(y, k), conv(x, k))): "x and y have the same shape",
    (joined(1, conv(x, k), conv(y, j)), conv(joined(1, x, y), joined(0, k, j), 2)): "k and j have the same shape",
    (joined(1, fused(x, k), fused(y, j)), fused(joined(1, x, y), joined(0, k, j), 2)): "k and j have the same shape",
}

LAWS = [rule for rule in EXTENDED_RULES if not isinstance(rule, Group)]
MERGE_GROUPS = next(rule for rule in LAWS if rule.name == "merge-groups")


def side_by_side(rule: Rule, types: Mapping[str, TensorType], attrs: Mapping[str, Any]) -> TermGraph:
    """Both sides of a rule in one graph: its outputs are those of the left side, then those of the right one."""
    graphs = term_graphs(rule, types, attrs)
    assert graphs is not None
    both, right = graphs
    index: list[int] = []
    for term, ty, constant in zip(right.terms, right.types, right.constant, strict=True):
        moved = replace(term, args=tuple(index[argument] for argument in term.args))
        index.append(both.add_typed(moved, ty, constant))
    both.outputs = [*both.outputs, *(index[output] for output in right.outputs)]
    return both


def is_proved(rule: Rule, types: Mapping[str, TensorType], attrs: Mapping[str, Any] | None = None) -> bool:
    """Whether the two sides meet in a few rounds."""
    egraph = EGraph(side_by_side(rule, types, attrs or {}), LAWS)
    for _ in range(8):
        roots = egraph.view().roots
        if roots[: len(roots) // 2] == roots[len(roots) // 2 :]:
            return True
        if not egraph.apply(e_node_limit=20_000).changed:
            break
    return False


def types_of(rule: Rule) -> dict[str, TensorType]:
    return {var.name: TensorType(SHAPES[var.name]) for var in rule.variables}


@pytest.mark.parametrize("rule", CASES, ids=lambda rule: rule.name)
def test_published_rule_is_proved(rule: Rule) -> None:
    assert is_proved(rule, types_of(rule))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("activation", [relu, lambda result: result], ids=["relu", "none"])
def test_merging_groups_is_proved(stride: int, activation: Any) -> None:
    """TASO's four rules by hand: what it calls `merge` of a kernel is what merge-groups makes of it."""
    before, after = activation(MERGE_GROUPS.before), activation(MERGE_GROUPS.after)
    rule = replace(MERGE_GROUPS, name="merge", before=before, after=after, worth=())
    types = {"x": TensorType((1, 8, 6, 6)), "w": TensorType((8, 2, 3, 3))}
    assert is_proved(rule, types, {"a": Conv2d((stride, stride), (1, 1, 1, 1), groups=4)})


def test_all_published_rules_are_here() -> None:
    assert (len(SINGLE) + 4, len(MULTI)) == (116, 13)


def test_what_is_wrong_is_not_proved() -> None:
    for before, after in ((mm(a, b), mm(b, a)), (conv(add(x, y), k), conv(x, k)), (relu(add(a, b)), add(a, b))):
        rule = Rule("wrong", before, after, reason="")
        assert not is_proved(rule, types_of(rule))


@pytest.mark.parametrize("rule", CASES, ids=lambda rule: rule.name)
def test_published_rule_holds_for_other_shapes_or_says_why_not(rule: Rule) -> None:
    verdict = verify_rule(rule, instances=24)
    assert (verdict.counterexample is not None) == ((rule.before, rule.after) in NEED_A_CONDITION), str(verdict)
