"""The graph search keeps meaning, minds its limits, and finds what it should."""

from __future__ import annotations

import numpy as np
import pytest

from eqtune.errors import InputError, MismatchError
from eqtune.search.graph.attributes import Axis, Full, Kind, Leaf, Permute, Pool2d, Shape, Slice, TensorType
from eqtune.search.graph.cost import AnalyticCost, MeasuredCost, graph_cost_s
from eqtune.search.graph.database import Database
from eqtune.search.graph.egraph import EGraph
from eqtune.search.graph.extract import EXTRACTORS, extract
from eqtune.search.graph.extract.ilp import _further_needs
from eqtune.search.graph.extract.necessary import without_impossible
from eqtune.search.graph.extract.problem import make_problem
from eqtune.search.graph.groups import subsets
from eqtune.search.graph.operators import NotTypeable, infer
from eqtune.search.graph.rules import RULES, Group, Rule, select
from eqtune.search.graph.rules.pattern import Var, add, matmul, permute, slice_, tensors
from eqtune.search.graph.saturate import SMALL, Limits, saturate
from eqtune.search.graph.superoptimize import superoptimize
from eqtune.search.graph.terms import Term, TermGraph
from eqtune.search.graph.toy import ArbitraryCost, leaf_values, random_graph
from eqtune.search.graph.verify.evaluate import evaluate
from eqtune.search.graph.verify.floats import Floats

LIMITS = Limits(e_nodes=2000, iterations=4, seconds=5)


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_keep_their_values(seed: int) -> None:
    graph = random_graph(seed)
    found = superoptimize(graph, select(fast_math=True), limits=LIMITS, cost=ArbitraryCost(seed))
    leaves = leaf_values(graph, seed)
    for before, after in zip(
        evaluate(graph, leaves, Floats(np.float64)), evaluate(found.graph, leaves, Floats(np.float64)), strict=True
    ):
        assert after.shape == before.shape
        np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-9)


def test_some_of_these_random_graphs_change() -> None:
    changed = 0
    for seed in range(20):
        graph = random_graph(seed)
        found = superoptimize(graph, RULES, limits=LIMITS, cost=ArbitraryCost(seed))
        changed += bool(found.rules_used)
    assert changed >= 2


def projections(count: int, *, rows: int = 64, width: int = 256) -> TermGraph:
    """`count` products of one input with different weights."""
    graph = TermGraph()
    x = graph.add_typed(Term("leaf", Leaf(0), ()), TensorType((rows, width)), False)
    for i in range(count):
        w = graph.add_typed(Term("leaf", Leaf(i + 1), ()), TensorType((width, width)), True)
        graph.outputs.append(graph.add("unary", Kind("tanh"), (graph.add("matmul", None, (x, w)),)))
    return graph


def test_products_of_one_input_become_one_product() -> None:
    graph = projections(8, rows=1, width=64)
    found = superoptimize(graph, RULES)
    products = [term for i, term in enumerate(found.graph.terms) if term.op == "matmul" and not found.graph.constant[i]]
    assert len(products) == 1
    assert found.cost_after_s < found.cost_before_s
    assert "merge-matmul-shared-input" in found.rules_used
    assert any("merge-matmul-shared-input" in replacement.rules for replacement in found.replacements)


def test_products_of_weights_are_free() -> None:
    graph = TermGraph()
    x = graph.add_typed(Term("leaf", Leaf(0), ()), TensorType((64, 512)), False)
    value = x
    for i in range(4):
        w = graph.add_typed(Term("leaf", Leaf(i + 1), ()), TensorType((512, 512)), True)
        value = graph.add("matmul", None, (value, w))
    graph.outputs = [value]
    found = superoptimize(graph, RULES)
    live = [found.graph.terms[i].op for i in found.graph.live() if not found.graph.constant[i]]
    assert live.count("matmul") == 1
    assert found.cost_after_s < 0.3 * found.cost_before_s


@pytest.mark.parametrize("weight", [True, False])
def test_softmax_forgets_biases_and_no_masks(weight: bool) -> None:
    """A mask of whole rows, of the least number there is, swamps the scores: softmax of them is uniform."""
    graph = TermGraph()
    scores = graph.add_typed(Term("leaf", Leaf(0), ()), TensorType((4, 8)), False)
    rows = graph.add_typed(Term("leaf", Leaf(1), ()), TensorType((4, 1)), weight)
    graph.outputs = [graph.add("softmax", Axis(1), (graph.add("binary", Kind("add"), (scores, rows)),))]
    found = superoptimize(graph, RULES)
    assert [found.graph.terms[i].op for i in found.graph.live()].count("binary") == (0 if weight else 1)


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_weights_are_computed_by_operators_that_fold(kind: str) -> None:
    """Pooling a constant takes time in every run; the reduction that equals it is computed ahead of time."""
    graph = TermGraph()
    x = graph.add_typed(Term("leaf", Leaf(0), ()), TensorType((1, 8, 4, 4)), False)
    w = graph.add_typed(Term("leaf", Leaf(1), ()), TensorType((1, 8, 4, 4)), True)
    pooled = graph.add("pool2d", Pool2d(kind, (4, 4)), (w,))
    graph.outputs = [graph.add("binary", Kind("add"), (x, pooled))]
    found = superoptimize(graph, RULES)
    assert found.cost_after_s < found.cost_before_s
    assert [found.graph.terms[i].op for i in found.graph.live()].count("reduce") == 1


def test_the_same_search_twice_gives_the_same_graph() -> None:
    graph = random_graph(3, size=20)
    first, second = (superoptimize(graph, RULES, limits=LIMITS, cost=ArbitraryCost(1)) for _ in range(2))
    assert first.graph.terms == second.graph.terms
    assert first.saturation.matches == second.saturation.matches


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(e_nodes=1), "e_nodes"),
        (Limits(seconds=0), "seconds"),
        (Limits(iterations=0), "iterations"),
    ],
)
def test_a_search_without_room_returns_the_original(limits: Limits, reason: str) -> None:
    graph = projections(3)
    found = superoptimize(graph, RULES, limits=limits)
    assert found.graph is graph
    assert found.saturation.stop_reason == reason
    assert found.cost_after_s == found.cost_before_s


def chain(length: int) -> TermGraph:
    """A product of so many matrices: associativity makes exponentially many terms of it."""
    graph = TermGraph()
    value = graph.add_typed(Term("leaf", Leaf(0), ()), TensorType((8, 8)), False)
    for i in range(1, length):
        value = graph.add(
            "matmul", None, (value, graph.add_typed(Term("leaf", Leaf(i), ()), TensorType((8, 8)), False))
        )
    graph.outputs = [value]
    return graph


def test_the_limit_of_e_nodes_holds_and_is_the_reason() -> None:
    graph = chain(40)
    rules = select(["matmul-associate-left", "matmul-associate-right"])
    egraph = EGraph(graph, rules)
    result = saturate(egraph, rules, Limits(e_nodes=2000, iterations=50, seconds=30))
    assert result.stop_reason == "e_nodes"
    assert 500 < egraph.e_nodes <= 2000


def test_rules_that_feed_themselves_do_not_fill_the_e_graph() -> None:
    """x / 1 is x, and x * w of an unknown w: from there on, x is x * w * w, and so on."""
    graph = TermGraph()
    value = graph.add_typed(Term("leaf", Leaf(0), ()), TensorType((8, 8)), False)
    one = graph.add("full", Full((), 1.0, "float32"), ())
    for i in range(1, 8):
        weight = graph.add_typed(Term("leaf", Leaf(i), ()), TensorType((8, 8)), True)
        block = graph.add("binary", Kind("add"), (value, graph.add("matmul", None, (value, weight))))
        value = graph.add("binary", Kind("divide"), (block, one))
    graph.outputs = [value]
    result = saturate(EGraph(graph, RULES), RULES, Limits())
    assert result.stop_reason == "e_nodes"
    assert result.e_nodes < SMALL


def test_saturation_is_the_reason_when_nothing_changes_any_more() -> None:
    graph = chain(5)
    rules = select(["matmul-associate-left", "matmul-associate-right"])
    egraph = EGraph(graph, rules)
    result = saturate(egraph, rules, Limits())
    assert result.stop_reason == "saturated"
    # The classes are the 15 intervals of 5 matrices; an interval of n can be split in n - 1 places.
    assert egraph.e_nodes == 5 + sum((5 - n + 1) * (n - 1) for n in range(2, 6))


def test_rules_apply_by_name_and_snapshots_undo_them() -> None:
    graph = chain(6)
    egraph = EGraph(graph, select(["matmul-associate-left", "matmul-associate-right"]))
    before = egraph.e_nodes
    egraph.push()
    assert egraph.apply(["matmul-associate-right"]).changed
    grown = egraph.e_nodes
    assert grown > before
    egraph.push()
    egraph.apply(e_node_limit=1000)
    assert egraph.e_nodes > grown
    egraph.pop()
    assert egraph.e_nodes == grown
    egraph.pop()
    assert egraph.e_nodes == before
    assert egraph.apply(["matmul-associate-right"]).matches == {"matmul-associate-right": 4}
    assert egraph.e_nodes == grown


def test_unknown_rules_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="matmul-associate-right"):
        EGraph(chain(3), select(["matmul-associate-right"])).apply(["no-such-rule"])
    with pytest.raises(InputError, match="no-such-rule"):
        select(["no-such-rule"])


def test_multi_pattern_rules_stop_after_k_rounds_and_mind_their_budget() -> None:
    pair = RULES_BY_NAME["merge-matmul-shared-input"].make(2)
    graph = projections(5)
    for budget, expected in ((3, 3), (1000, 10)):
        egraph = EGraph(graph, [pair])
        assert egraph.apply(budget=budget).matches == {pair.name: expected}
    egraph = EGraph(graph, [pair])
    result = saturate(egraph, [pair], Limits(k_multi=1))
    assert result.matches == {pair.name: 10}
    assert result.stop_reason == "saturated"
    egraph = EGraph(graph, [pair])
    assert saturate(egraph, [pair], Limits(k_multi=2)).matches[pair.name] > 10


RULES_BY_NAME = {rule.name: rule for rule in RULES}


def test_groups_stay_with_the_classes_of_the_graph() -> None:
    group = RULES_BY_NAME["merge-matmul-shared-input"]
    assert isinstance(group, Group)
    egraph = EGraph(projections(3), [group])
    first = egraph.apply()
    assert first.matches == {group.name: 4}  # three pairs and all three
    assert not egraph.apply().changed
    assert EGraph(projections(3), [group]).apply(budget=2).matches == {group.name: 2}


def test_a_rule_that_would_change_a_type_is_not_applied() -> None:
    (x,) = tensors("x")
    wrong = Rule("wrong", permute(x, "p"), x, reason="")
    graph = TermGraph()
    leaf = graph.add_typed(Term("leaf", Leaf(0), ()), TensorType((2, 3)), False)
    graph.outputs = [graph.add("permute", Permute((1, 0)), (leaf,))]
    egraph = EGraph(graph, [wrong])
    assert not egraph.apply().changed
    assert len(egraph.view().classes) == 2


def test_what_was_there_stays_original_when_a_rule_s_term_becomes_the_same() -> None:
    """A rule takes out what it made, and nothing else; the graph as given is always left."""
    graph = TermGraph()
    p = graph.add_typed(Term("leaf", Leaf(0), ()), TensorType((4, 4)), False)
    relu = graph.add("unary", Kind("relu"), (p,))
    twice = graph.add("unary", Kind("relu"), (relu,))
    reshaped = graph.add("reshape", Shape((16,)), (relu,))
    graph.outputs = [graph.add("unary", Kind("tanh"), (value,)) for value in (reshaped, twice)]
    rules = select(["unary-after-reshape", "relu-relu"])
    egraph = EGraph(graph, rules)
    saturate(egraph, rules, Limits())
    view = egraph.view()
    tanh = [n for n, op in enumerate(view.ops) if op == "unary" and view.attrs[n] == Kind("tanh")]
    assert sorted(view.made_by[n] for n in tanh if view.types[view.node_class[n]].shape == (4, 4)) == [""]
    for result in extract(view, AnalyticCost(), without={"unary-after-reshape"}):
        assert [result.graph.terms[i].op for i in result.graph.live()].count("reshape") == 1


def test_a_graph_of_which_nothing_is_left_is_refused() -> None:
    view = EGraph(projections(1), []).view()
    view.made_by[view.classes[view.roots[0]][0]] = "a rule"
    for name in EXTRACTORS:
        with pytest.raises(MismatchError, match="no node was chosen"):
            extract(view, AnalyticCost(), (name,), without={"a rule"})


@pytest.mark.parametrize("seed", range(12))
def test_the_integer_program_is_never_beaten(seed: int) -> None:
    egraph = EGraph(random_graph(seed, size=16), RULES)
    saturate(egraph, RULES, Limits(e_nodes=600, iterations=3))
    results = {r.extractor: r for r in extract(egraph.view(), ArbitraryCost(seed), EXTRACTORS)}
    ilp = results["ilp"]
    assert ilp.gap == 0.0
    for result in results.values():
        assert ilp.cost_s <= result.cost_s * (1 + 1e-4)
        assert result.cost_s == pytest.approx(graph_cost_s(result.graph, ArbitraryCost(seed)))


def unrolled(steps: int) -> TermGraph:
    """Additions one after another, of which all results are needed at the end, as in an unrolled layer."""
    graph = TermGraph()
    x = graph.add_typed(Term("leaf", Leaf(0), ()), TensorType((2, 3)), False)
    values = [x]
    for _ in range(steps):
        values.append(graph.add("binary", Kind("add"), (values[-1], x)))
    graph.outputs = [graph.add("concat", Axis(0), tuple(values))]
    return graph


def test_needs_of_a_deep_graph_are_found_without_looking_at_what_they_imply() -> None:
    """Each class of a chain needs all before it; looking at each of those took 20 s for an LSTM of 200 steps."""

    class Needs(dict[int, int]):
        looked_at = 0

        def __getitem__(self, c: int) -> int:
            self.looked_at += 1
            return super().__getitem__(c)

    def looked_at(steps: int) -> tuple[int, int]:
        egraph = EGraph(unrolled(steps), [])
        problem = make_problem(egraph.view(), ArbitraryCost(0))
        possible, need = without_impossible(problem)
        counted = Needs(need)
        rows = list(_further_needs(list(possible.classes), counted))
        return len(rows), counted.looked_at

    (rows, small), (more_rows, large) = looked_at(20), looked_at(40)
    assert (rows, more_rows) == (21, 41)
    assert large < 3 * small


def test_loading_a_deep_graph_takes_programs_in_proportion_to_its_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that look for the next terms took as many rounds as the graph is deep, and joined 200 operands in each."""
    programs: list[str] = []
    run = Database.run

    def counted(self: Database, program: str) -> list[object]:
        programs.append(program)
        return run(self, program)

    monkeypatch.setattr(Database, "run", counted)
    graph = unrolled(300)
    egraph = EGraph(graph, [])
    assert not any("saturate" in program for program in programs)
    assert sum(program.count("\n") + 1 for program in programs) < 4 * len(graph.terms) + 100
    assert egraph.e_nodes == len(graph.terms)


def test_hundreds_of_equal_members_are_grouped_in_runs() -> None:
    members = [(i,) for i in range(130)]
    runs = list(subsets(members))
    assert [len(run) for run in runs] == [44, 44, 42]
    assert [key for run in runs for key in run] == members
    assert list(subsets(members[:5])) == [members[:5]]
    assert len(list(subsets(members[:3]))) == 4


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (3, 2, 1, 0), (1, 0)])
def test_slices_with_biases_are_found_in_any_order(order: tuple[int, ...]) -> None:
    graph = TermGraph()
    x = graph.add_typed(Term("leaf", Leaf(0), ()), TensorType((4, 2 * len(order))), False)
    for i in order:
        bias = graph.add_typed(Term("leaf", Leaf(i + 1), ()), TensorType((2,)), True)
        part = graph.add("slice", Slice((0, 2 * i), (4, 2 * i + 2)), (x,))
        graph.outputs.append(graph.add("binary", Kind("add"), (part, bias)))
    assert EGraph(graph, RULES).apply(["bias-of-slices"]).matches == {"bias-of-slices": 1}


def test_a_product_that_does_not_fit_keeps_no_others_apart() -> None:
    graph = projections(4)
    batched = graph.add_typed(Term("leaf", Leaf(9), ()), TensorType((2, 256, 256)), True)
    graph.outputs.append(graph.add("matmul", None, (0, batched)))
    assert EGraph(graph, RULES).apply(["merge-matmul-shared-input"]).matches == {"merge-matmul-shared-input": 1}


def test_sharing_is_seen_by_the_integer_program_alone() -> None:
    """Each product is cheaper by itself than the merged one, which is cheaper than both."""
    graph = projections(2)
    merged = TensorType((64, 512))

    class Prices:
        def term_s(self, op: str, attrs: object, types: object, weights: object, result: object, fused: bool) -> float:
            return {"matmul": 10e-6 if result == merged else 8e-6}.get(op, 0.0)

    egraph = EGraph(graph, RULES)
    saturate(egraph, RULES, Limits())
    costs = {r.extractor: r.cost_s for r in extract(egraph.view(), Prices())}
    assert costs["greedy"] == pytest.approx(16e-6)
    assert costs["ilp"] == pytest.approx(10e-6)


def test_a_rule_is_left_out_by_the_extractor_that_sees_sharing() -> None:
    """With the rule, all extractors find the same graph; without it, only the integer program the merged product."""
    merged = TensorType((64, 512))
    x, w = Var("x"), Var("w", weight=True)
    cheap = Rule("cheap", matmul(x, w), add(x, slice_(w, lambda m: Slice((0, 0), (1, 256)))), reason="")

    class Prices:
        def term_s(self, op: str, attrs: object, types: object, weights: object, result: object, fused: bool) -> float:
            return {"matmul": 10e-6 if result == merged else 8e-6}.get(op, 0.0)

    found = superoptimize(projections(2), (*select(["merge-matmul-shared-input"]), cheap), cost=Prices())
    assert [extraction.cost_s for extraction in found.extractions] == [0.0] * len(EXTRACTORS)
    candidate = found.without({"cheap"})
    assert candidate is not None
    assert candidate.cost_s == pytest.approx(10e-6)


def test_a_choice_with_a_cycle_or_a_hole_is_refused() -> None:
    graph = TermGraph()
    leaf = graph.add_typed(Term("leaf", Leaf(0), ()), TensorType((4, 4)), False)
    graph.outputs = [graph.add("permute", Permute((1, 0)), (graph.add("permute", Permute((1, 0)), (leaf,)),))]
    egraph = EGraph(graph, RULES)
    saturate(egraph, RULES, Limits())
    view = egraph.view()
    (leaf_class,) = (c for c, nodes in enumerate(view.classes) if any(view.ops[n] == "leaf" for n in nodes))
    choice = {c: next(n for n in nodes if view.ops[n] == "permute") for c, nodes in enumerate(view.classes)}
    assert view.roots == [leaf_class]
    with pytest.raises(MismatchError, match="cycle"):
        view.graph(choice)
    with pytest.raises(MismatchError, match="no node"):
        view.graph({})


def test_measured_prices_come_before_estimated_ones() -> None:
    graph = projections(1)
    term = graph.terms[2]
    key = (term.op, term.attrs, (graph.types[0], graph.types[1]), (graph.constant[0], graph.constant[1]))
    cost = MeasuredCost({key: 1.0})
    assert graph_cost_s(graph, cost) > 1.0 > graph_cost_s(graph, AnalyticCost())


def test_concatenating_what_kernels_write_in_place_is_cheaper_than_what_is_read_again() -> None:
    image = TensorType((1, 64, 28, 28))
    price = [
        AnalyticCost().term_s("concat", Axis(1), [image] * 2, [False] * 2, TensorType((1, 128, 28, 28)), fused)
        for fused in (False, True)
    ]
    assert price[0] < 0.5 * price[1]


def test_rules_are_checked_when_they_are_written() -> None:
    x, y, z = tensors("x y z")
    with pytest.raises(ValueError, match="does not bind"):
        Rule("free", matmul(x, y), matmul(x, z), reason="")
    with pytest.raises(ValueError, match="roots"):
        Rule("uneven", (matmul(x, y), matmul(x, z)), matmul(x, y), reason="")
    with pytest.raises(AttributeError, match="binds"):
        EGraph(
            projections(1),
            [Rule("typo", matmul(x, y), slice_(matmul(x, y), lambda m: Slice(m.nothing, ())), reason="")],
        ).apply()


def test_a_reshape_that_relax_would_read_otherwise_has_no_type() -> None:
    assert infer("reshape", Shape((0, 2, 3)), TensorType((0, 6))) == TensorType((0, 2, 3))
    with pytest.raises(NotTypeable, match="0 for the extent that was there"):
        infer("reshape", Shape((6, 0)), TensorType((0, 6)))


@pytest.mark.parametrize(
    ("dtype", "size"), [("bool", 1), ("uint16", 2), ("bfloat16", 2), ("float32", 4), ("uint64", 8)]
)
def test_traffic_is_counted_in_bytes_of_the_dtype(dtype: str, size: int) -> None:
    assert TensorType((3, 5), dtype).size_bytes == 15 * size
