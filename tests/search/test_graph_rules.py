"""Every rule of the library is right, each of its conditions is needed, and verification tells wrong rules apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eqtune.errors import InputError
from eqtune.search.graph.attributes import Axis, Conv2d, Full, Kind, Leaf, Permute, Pool2d, Reduce, TensorType
from eqtune.search.graph.egraph import EGraph
from eqtune.search.graph.rules import EXTENDED_RULES, Group, Rule, select
from eqtune.search.graph.rules.blocked import BLOCKED_RULES
from eqtune.search.graph.rules.channels_last import CHANNELS_LAST_RULES
from eqtune.search.graph.rules.pattern import (
    add,
    concat,
    divide,
    matmul,
    multiply,
    permute,
    pool2d,
    reduce,
    relu,
    reshape,
    softmax,
    tensors,
    unary,
)
from eqtune.search.graph.rules.rule import term_graphs
from eqtune.search.graph.rules.winograd import WINOGRAD_RULES
from eqtune.search.graph.saturate import Limits, saturate
from eqtune.search.graph.terms import Term, TermGraph
from eqtune.search.graph.verify import verify_rule
from eqtune.search.graph.verify.evaluate import evaluate
from eqtune.search.graph.verify.floats import Floats

x, y, z = tensors("x y z")

CONDITIONS = [
    pytest.param(rule, condition, id=f"{rule.name}: {condition.__name__}")
    for rule in (rule.make(2) if isinstance(rule, Group) else rule for rule in EXTENDED_RULES)
    for condition in rule.when
]


@pytest.mark.parametrize("rule", EXTENDED_RULES, ids=lambda rule: rule.name)
def test_rule_is_right(rule: Rule | Group) -> None:
    verdict = verify_rule(rule)
    assert verdict.sound, str(verdict)
    assert verdict.survival_log2 <= -60


@pytest.mark.parametrize(("rule", "condition"), CONDITIONS)
def test_condition_is_needed(rule: Rule, condition: object) -> None:
    """Without it, the rule is wrong somewhere, or what it builds has the wrong type or cannot be built."""
    weaker = replace(rule, when=tuple(other for other in rule.when if other is not condition))
    try:
        for instances in (24, 200):  # mostly the first will do
            verdict = verify_rule(weaker, instances=instances)
            if verdict.counterexample is not None or verdict.refused > 0:
                break
    except (IndexError, ValueError, ZeroDivisionError):
        return
    assert verdict.counterexample is not None or verdict.refused > verify_rule(rule).refused == 0


_POOL, _PADDED = Pool2d("max", (3, 3), padding=(1,) * 4), Pool2d("avg", (2, 2), padding=(1,) * 4)
_SUM, _MEAN, _MAX = (Reduce(kind, (0,)) for kind in ("sum", "mean", "max"))

WRONG = {
    "matmul-commutes": (matmul(x, y), matmul(y, x)),
    "matmul-ignores-order": (matmul(matmul(x, y), z), matmul(matmul(x, z), y)),
    "relu-is-linear": (relu(add(x, y)), add(relu(x), relu(y))),
    "relu-scales": (relu(multiply(x, y)), multiply(relu(x), y)),
    "tanh-is-sigmoid": (unary(x, Kind("tanh")), unary(x, Kind("sigmoid"))),
    "quotients-add": (divide(x, add(y, z)), add(divide(x, y), divide(x, z))),
    "mean-is-sum": (reduce(x, _MEAN), reduce(x, _SUM)),
    "max-is-linear": (reduce(add(x, y), _MAX), add(reduce(x, _MAX), reduce(y, _MAX))),
    "any-transpose": (permute(x, Permute((1, 0, 2))), permute(x, Permute((2, 0, 1)))),
    "reshape-ignores-order": (reshape(permute(x, "p"), "s"), reshape(x, "s")),
    "softmax-of-softmax": (softmax(softmax(x, "a"), "a"), softmax(x, "a")),
    "concat-commutes": (concat((x, y), "c"), concat((y, x), "c")),
    "pools": (pool2d(x, _POOL), pool2d(x, replace(_POOL, pool_size=(3, 1), padding=(1, 0, 1, 0)))),
    "padding-counts": (pool2d(x, _PADDED), pool2d(x, replace(_PADDED, count_include_pad=True))),
}


@pytest.mark.parametrize("rule", [Rule(name, *sides, reason="") for name, sides in WRONG.items()], ids=lambda r: r.name)
def test_wrong_rule_is_rejected(rule: Rule) -> None:
    verdict = verify_rule(rule)
    assert not verdict.sound
    assert verdict.counterexample is not None
    assert rule.name in str(verdict)


def test_condition_too_weak_is_rejected() -> None:
    """Softmax forgets what is constant along its axis; that it is constant along some axis is not enough."""
    forgets = Rule("softmax-shift", softmax(add(x, y), "a"), softmax(x, "a"), reason="")
    some = replace(forgets, when=(lambda m: 1 in m.y.shape and m.out[0] == m.x,))
    along = replace(
        forgets,
        when=(lambda m: len(m.y.shape) == len(m.x.shape) and m.y.shape[m.a.axis] == 1 and m.out[0] == m.x,),
    )
    assert verify_rule(some).counterexample is not None
    assert verify_rule(along).sound


def test_rule_that_no_sample_fits_is_not_called_sound() -> None:
    verdict = verify_rule(Rule("never", relu(x), x, reason="", when=(lambda m: False,)))
    assert not verdict.sound
    assert verdict.counterexample is None
    assert "example" in str(verdict)


def test_what_is_only_worth_is_not_trusted() -> None:
    assert not verify_rule(Rule("relu-is-nothing", relu(x), x, reason="", worth=(lambda m: False,))).sound


def test_same_seed_same_verdict() -> None:
    rule = EXTENDED_RULES[0]
    assert verify_rule(rule, 3) == verify_rule(rule, 3)
    assert verify_rule(rule, 3).max_error != verify_rule(rule, 4).max_error


def test_refuses_to_verify_on_nothing() -> None:
    with pytest.raises(InputError, match="at least one"):
        verify_rule(EXTENDED_RULES[0], instances=0)


def test_order_of_a_reduction_may_change_but_not_its_axis() -> None:
    swapped = Rule(
        "max-of-transposed",
        before=reduce(permute(x, Permute((1, 0))), Reduce("max", (0,))),
        after=reduce(x, Reduce("max", (1,))),
        reason="",
    )
    assert verify_rule(swapped).sound
    assert not verify_rule(replace(swapped, after=reduce(x, Reduce("max", (0,))))).sound
    assert not verify_rule(replace(swapped, before=softmax(x, Axis(0)), after=softmax(x, Axis(1)))).sound


ERRORS = {
    "winograd-2x2": ((3, 3), 1e-6),
    "winograd-4x4": ((3, 3), 3e-6),
    "winograd-2x2-in-one-kernel": ((3, 3), 1e-6),
    "winograd-4x4-in-one-kernel": ((3, 3), 3e-6),
    "winograd-6x6-in-one-kernel": ((3, 3), 2e-5),
    "winograd-4x4-of-5x5-in-one-kernel": ((5, 5), 1e-5),
    "winograd-1x4-of-1x3-in-one-kernel": ((1, 3), 2e-6),
    "winograd-4x1-of-3x1-in-one-kernel": ((3, 1), 2e-6),
    "winograd-1x6-of-1x7-in-one-kernel": ((1, 7), 2e-5),
    "winograd-6x1-of-7x1-in-one-kernel": ((7, 1), 2e-5),
}


@pytest.mark.parametrize("rule", WINOGRAD_RULES, ids=lambda rule: rule.name)
def test_error_that_winograd_adds(rule: Rule) -> None:
    """In float32, for 64 channels of normally distributed numbers, relative to the largest result."""
    kernel, bound = ERRORS[rule.name]
    types = {"x": TensorType((1, 64, 28, 28)), "w": TensorType((64, 64, *kernel))}
    graphs = term_graphs(rule, types, {"a": Conv2d(padding=(1, 1, 1, 1))})
    assert graphs is not None
    generator = np.random.default_rng(0)
    leaves = [generator.standard_normal(ty.shape) for ty in types.values()]
    (exact,) = evaluate(graphs[0], leaves, Floats(np.float64))
    (direct,), (fast,) = (evaluate(g, [v.astype(np.float32) for v in leaves], Floats(np.float32)) for g in graphs)
    scale = np.abs(exact).max()
    assert np.abs(direct - exact).max() / scale < 1e-6
    assert np.abs(fast - exact).max() / scale < bound, np.abs(fast - exact).max() / scale


_X, _Y = TensorType((1, 4, 4, 4), "float16"), TensorType((4, 4, 1, 1), "float16")
_BIND = {"a": Conv2d(), "r": Reduce("sum", (1,))}
WAITS = (
    "matmul-of-scaled-by-one-number",
    "matmul-with-scaled-by-one-number",
    "reduce-of-scaled",
    "convolution-of-scaled-by-one-number",
    "convolution-with-scaled-by-one-number",
    "average-of-scaled",
)
"""Rules that sum before they scale."""


@pytest.mark.parametrize("name", [*WAITS, "scale-of-left-operand", "scale-of-right-operand", "scale-of-average"])
def test_scales_do_not_move_where_sums_in_half_precision_get_larger(name: str) -> None:
    (rule,) = (rule for rule in EXTENDED_RULES if rule.name == name)
    assert isinstance(rule, Rule)
    bound = _BIND | ({"a": Pool2d("avg", (2, 2))} if "average" in name else {})

    def applies(factor: float, dtype: str) -> bool:
        square = replace(_X, dtype=dtype)
        second = replace(_Y, dtype=dtype) if "convolution" in name else square
        types = {"x": square, "y": second, "p": second}
        attrs = {**{key: bound[key] for key in rule.attributes if key != "c"}, "c": Full((), factor, dtype)}
        return term_graphs(rule, {var.name: types[var.name] for var in rule.variables}, attrs) is not None

    assert applies(8.0, "float16") == (name in WAITS)
    assert applies(-0.125, "float16") == (name not in WAITS)
    assert applies(8.0, "bfloat16")
    assert applies(-0.125, "float32")


@pytest.mark.parametrize(
    "name",
    [
        "scale-of-bias",
        "sum-of-scaled",
        "matmul-of-biased",
        "reduce-of-matmul-rows",
        "reduce-of-reduce",
        "sum-of-matmuls-shared-input",
        "sum-of-convolutions-shared-input",
        "matmul-associate-left",
        "matmul-associate-right",
    ],
)
def test_sums_and_products_keep_their_order_where_half_precision_may_not_hold_them(name: str) -> None:
    """(1000 - 990) * 100 is 1000 there, and 1000 * 100 is infinite; so are 50000 + 50000 before they are halved."""
    (rule,) = (rule for rule in EXTENDED_RULES if rule.name == name)
    assert isinstance(rule, Rule)
    bound: dict[str, object] = {"r": Reduce("sum", (0,), True), "a": Conv2d()}
    bound |= {"inner": Reduce("mean", (1,), True), "outer": Reduce("mean", (0,), True)}
    matrices = "xyzvw" if "matmul" in name else "xy"

    def applies(dtype: str) -> bool:
        types = {var.name: TensorType((4, 4) if var.name in matrices else (4,), dtype) for var in rule.variables}
        if "convolutions" in name:
            types = dict.fromkeys(types, TensorType((4, 4, 1, 1), dtype))
        return term_graphs(rule, types, {key: bound[key] for key in rule.attributes}) is not None

    assert [applies(dtype) for dtype in ("float32", "bfloat16", "float16")] == [True, True, False]


@pytest.mark.parametrize("rule", WINOGRAD_RULES, ids=lambda rule: rule.name)
def test_pixels_of_half_precision_are_not_transformed(rule: Rule) -> None:
    """Pixels of 4000 are transformed to up to 32 times as much, and 65504 is the largest number."""
    kernel, _ = ERRORS[rule.name]

    def applies(dtype: str) -> bool:
        types = {"x": TensorType((1, 16, 28, 28), dtype), "w": TensorType((16, 16, *kernel), dtype)}
        return term_graphs(rule, types, {"a": Conv2d(padding=(1, 1, 1, 1))}) is not None

    assert [applies(dtype) for dtype in ("float32", "bfloat16", "float16")] == [True, True, False]


@pytest.mark.parametrize("layouts", [CHANNELS_LAST_RULES, BLOCKED_RULES], ids=["last", "blocked"])
def test_orders_of_dimensions_saturate(layouts: tuple[Rule, ...]) -> None:
    """A bias that goes to another order of dimensions and back is the same bias: the e-graph does not grow for ever."""
    graph = TermGraph()
    image = graph.add_typed(Term("leaf", Leaf(0), ()), TensorType((1, 8, 9, 9)), False)
    kernel = graph.add_typed(Term("leaf", Leaf(1), ()), TensorType((8, 8, 3, 3)), True)
    bias = graph.add_typed(Term("leaf", Leaf(2), ()), TensorType((8, 1, 1)), True)
    value = image
    for _ in range(2):
        value = graph.add("binary", Kind("add"), (graph.add("conv2d", Conv2d(), (value, kernel)), bias))
        value = graph.add("unary", Kind("relu"), (value,))
    graph.outputs = [graph.add("pool2d", Pool2d("max", (2, 2)), (value,))]
    rules = (*select(), *layouts)
    found = saturate(EGraph(graph, rules), rules, Limits())
    assert found.stop_reason == "saturated"
    assert found.matches[layouts[0].name] >= 2
