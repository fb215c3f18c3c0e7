"""The graph search goes by prices of kernels: from records, else measured, else estimated."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from eqtune import GraphConfig, GraphResult, optimize_graph
from eqtune.graph_prices import GraphPrices
from eqtune.machine import detect_target
from eqtune.measure import LocalMeasurer
from eqtune.measure.base import Price
from eqtune.records import Context, Record, RecordDatabase
from eqtune.search.graph.decode import decode_block
from eqtune.search.graph.encode import encode_block
from eqtune.search.graph.rules.pattern import matmul, reduce, tensors
from eqtune.search.graph.rules.rule import Match, Rule
from eqtune.search.graph.terms import TermGraph
from eqtune.search.space import Hardware, build_space
from eqtune.search.space.base import Decision
from eqtune.tasks import Task, extract_tasks, lower_to_kernels
from eqtune.tune.prices import KernelPrices, defaults

CONTEXT = Context('{"kind": "llvm"}', "here", 1, "0.27")
CONFIG = GraphConfig(verify=False)


def two_products(before: int = 0) -> tvm.IRModule:
    """x @ a and x @ b: two kernels, or one and slices of its result; x is relu of so many products in a row."""
    rng = np.random.default_rng(0)
    a, b, *others = (relax.const(rng.standard_normal((64, 64)).astype("float32")) for _ in range(2 + before))
    x: Any = relax.Var("x", relax.TensorType((8, 64), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            for other in others:
                x = builder.emit(relax.op.matmul(x, other))
            x = builder.emit(relax.op.nn.relu(x))
            left, right = builder.emit(relax.op.matmul(x, a)), builder.emit(relax.op.matmul(x, b))
            result = builder.emit_output(relax.op.multiply(relax.op.tanh(left), right))
        builder.emit_func_output(result)
    return builder.get()


def prices(price_s: Callable[[Task], float]) -> GraphPrices:
    def kernels(tasks: Sequence[Task]) -> list[float]:
        return [price_s(task) for task in tasks]

    return GraphPrices(kernels, detect_target(1), Hardware(), kernels)


def product(task: Task) -> float:
    """A millisecond for a product of any size; little for anything else."""
    return 1e-3 if task.flops >= 2 * 8 * 64 * 64 else 1e-4


def wide(task: Task) -> bool:
    """Whether it is the merged product, 8 x 64 by 64 x 128."""
    return task.flops >= 2 * 8 * 64 * 128


def rules_used(result: GraphResult) -> set[str]:
    return {name for name, rule in result.rules.items() if rule.used}


def test_what_kernels_cost_decides_which_graph_is_chosen() -> None:
    merged = optimize_graph(two_products(), CONFIG, prices=prices(product))
    assert merged.changed
    assert "merge-matmul-shared-input" in rules_used(merged)
    assert merged.price_after_s is not None
    assert merged.price_before_s is not None
    assert merged.price_after_s < merged.price_before_s
    kept = optimize_graph(two_products(), CONFIG, prices=prices(lambda task: 1.0 if wide(task) else product(task)))
    assert not kept.changed


def test_a_graph_whose_fused_kernels_cost_more_is_refused() -> None:
    # By itself the merged product is cheap; what it is fused with, the slices, makes it dear.
    def price_s(task: Task) -> float:
        return 1.0 if "slice" in task.name else product(task)

    result = optimize_graph(two_products(), CONFIG, prices=prices(price_s))
    assert not result.changed
    assert "priced kernel by kernel" in result.kept_because


def test_a_rule_that_spoils_a_graph_is_taken_back_and_the_others_stay() -> None:
    def price_s(task: Task) -> float:
        return 1.0 if "slice" in task.name else product(task)

    config = replace(CONFIG, extractors=("ilp",))  # one graph, with both rewrites
    source = replace(prices(price_s), terms=None)
    assert "merge-matmul-shared-input" in rules_used(optimize_graph(two_products(before=2), config))
    result = optimize_graph(two_products(before=2), config, prices=source)
    assert result.changed
    used = rules_used(result)
    assert used & {"matmul-associate-left", "matmul-associate-right"}
    assert "merge-matmul-shared-input" not in used


def test_prices_of_two_calls_are_not_compared() -> None:
    """What measuring shows of estimates moves from call to call, and all prices with it."""

    class Falling(GraphPrices):
        calls = 0

        def modules_s(self, mods: Sequence[tvm.IRModule], seconds: float = math.inf) -> list[float]:
            Falling.calls += 1
            return [price_s / Falling.calls for price_s in super().modules_s(mods, seconds)]

    def price_s(task: Task) -> float:
        return 1.0 if "slice" in task.name else product(task)

    config = replace(CONFIG, extractors=("ilp",))
    plain = replace(prices(price_s), terms=None)
    falling = Falling(plain.kernels, plain.target, plain.hardware, None)
    expected, found = (optimize_graph(two_products(before=2), config, prices=source) for source in (plain, falling))
    assert Falling.calls > 1
    assert expected.changed
    assert (found.price_before_s, found.price_after_s) == pytest.approx(
        (expected.price_before_s, expected.price_after_s)
    )


def test_the_next_graph_is_tried_where_the_cheapest_computes_something_else() -> None:
    def run(mod: tvm.IRModule, _: object) -> list[np.ndarray]:
        seen.append(mod)
        return [np.full(3, float(len(seen) == 2), "float32")]

    seen: list[tvm.IRModule] = []
    model = two_products(before=2)
    best = optimize_graph(model, CONFIG, prices=prices(product))
    assert len(best.alternatives) == 1
    result = optimize_graph(model, replace(CONFIG, verify=True), prices=prices(product), run=run)
    assert result.changed
    assert not result.kept_because
    tvm.ir.assert_structural_equal(result.mod, best.alternatives[0])
    assert result.exact is result.mod
    assert result.alternatives == []
    assert None not in (best.price_after_s, result.price_after_s)
    assert result.price_after_s > best.price_after_s


def test_no_graph_that_was_refused_is_called_exact() -> None:
    def run(mod: tvm.IRModule, _: object) -> list[np.ndarray]:
        seen.append(mod)
        return [np.full(3, float(len(seen) % 2), "float32")]

    seen: list[tvm.IRModule] = []
    result = optimize_graph(two_products(before=2), replace(CONFIG, verify=True), prices=prices(product), run=run)
    assert len(seen) > 2
    assert result.kept_because
    assert result.exact is None


def of_rows(m: Match) -> bool:
    return bool(m.r.kind == "sum" and m.r.keepdims and m.r.axes == (1,) and len(m.x.shape) == len(m.y.shape) == 2)


def test_what_exact_rules_make_of_a_lossy_rule_s_result_is_not_exact() -> None:
    # Sums of rows of (x @ y) @ w: the lossy rule gives (x @ y) @ column, and association then x @ (y @ column).
    x, y = (relax.Var(name, relax.TensorType((128, 128), "float32")) for name in "xy")
    w = relax.const(np.ones((128, 128), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y]):
        with builder.dataflow():
            value = builder.emit(relax.op.matmul(builder.emit(relax.op.matmul(x, y)), w))
            result = builder.emit_output(relax.op.sum(value, axis=[1], keepdims=True))
        builder.emit_func_output(result)
    p, q = tensors("x y")
    lossy = Rule("row-sums", reduce(matmul(p, q), "r"), matmul(p, reduce(q, "r")), "", when=(of_rows,), fast_math=True)
    config = replace(CONFIG, rules=("matmul-associate-right",), extra_rules=(lossy,), fast_math=True)
    found = optimize_graph(builder.get(), config, prices=prices(lambda task: task.flops * 1e-9))
    assert found.changed
    assert found.exact is None
    other = optimize_graph(two_products(), replace(config, rules=None), prices=prices(product))
    assert other.changed
    assert other.exact is not None


def test_a_module_that_is_not_well_formed_has_no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_its_first_binding(*block: Any) -> relax.DataflowBlock:
        return relax.DataflowBlock(decode_block(*block).bindings[1:])

    def price_s(task: Task) -> float:
        raise AssertionError("there is nothing to price")

    monkeypatch.setattr("eqtune.graph_search.decode_block", without_its_first_binding)
    result = optimize_graph(two_products(), CONFIG, prices=replace(prices(price_s), terms=None))
    assert not result.changed
    assert "not well-formed" in result.kept_because


def kernel() -> Task:
    return max(extract_tasks(lower_to_kernels(two_products(), detect_target(1))), key=lambda task: task.flops)


class Watch:
    """A measurer that prices everything the same and counts."""

    def __init__(self, price_s: float, fastest: int = 0) -> None:
        self.price_s, self.fastest, self.asked = price_s, fastest, 0

    def price(self, candidates: Sequence[tuple[Task, Sequence[Decision]]]) -> Sequence[Price]:
        assert all(decisions for _, decisions in candidates)
        self.asked += len(candidates)
        return [Price(self.price_s, self.fastest) for _ in candidates]


def source(database: RecordDatabase, measurer: Any, **settings: Any) -> KernelPrices:
    return KernelPrices(database, CONTEXT, "here", lambda task: build_space(task.mod, Hardware()), measurer, **settings)


def test_records_come_before_measurements_and_those_before_estimates(tmp_path: Path) -> None:
    task = kernel()
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        assert 0 < source(database, None)([task])[0] < 1e-3
        watch = Watch(0.25)
        assert source(database, watch)([task, task]) == [0.25, 0.25]
        assert source(database, watch)([task]) == [0.25]
        assert watch.asked == 1, "a price is measured once, also in another session"
        database.add([Record(task.workload_hash, "", "", CONTEXT, (0.0625,))])
        assert source(database, watch)([task]) == [0.25], "a schedule that was imported is not the search's"
        database.add([Record(task.workload_hash, '{"sketch": "rows", "values": {}}', "", CONTEXT, (0.5, 0.125))])
        assert source(database, watch)([task]) == [0.125]


def test_a_price_is_told_beside_its_estimate_to_whoever_debugs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "eqtune")
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        source(database, Watch(0.25))([kernel()])
    assert "0.25 s, estimated" in caplog.text


def test_the_candidate_that_was_fastest_is_the_first_choice_from_now_on(tmp_path: Path) -> None:
    task = kernel()
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        before = source(database, None).defaults(task)
        source(database, Watch(0.25, fastest=2))([task])
        assert source(database, None).defaults(task) == [before[2], before[0], before[1]]


def test_a_price_by_another_version_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it made of the same decision may be another schedule, or one that no longer applies."""
    task, watch = kernel(), Watch(0.25)
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        for version, asked in (("1", 1), ("1", 1), ("2", 2)):
            monkeypatch.setattr("eqtune.tune.prices.__version__", version)
            assert source(database, watch)([task]) == [0.25]
            assert watch.asked == asked


def test_without_time_left_prices_are_estimated(tmp_path: Path) -> None:
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        watch = Watch(0.25)
        late = source(database, watch, budget_s=0.0)
        assert late([kernel()])[0] < 0.25
        assert not watch.asked
        assert (late.measured, late.estimated) == (0, 1)


def test_estimates_are_scaled_by_what_measuring_shows(tmp_path: Path) -> None:
    task = kernel()
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        estimate_s = source(database, None).guess_s(task)
        prices = source(database, Watch(0.25))
        kernels = extract_tasks(lower_to_kernels(two_products(), detect_target(1)))
        other = next(t for t in kernels if t.workload_hash != task.workload_hash)
        assert prices([other]) == [0.25]
        assert prices.guess_s(task) > 10 * estimate_s
        assert prices.is_measured(other)
        assert not prices.is_measured(task)


def test_a_candidate_that_does_not_run_is_priced_by_the_estimate(tmp_path: Path) -> None:
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        failing = source(database, Watch(math.inf))
        assert math.isfinite(failing([kernel()])[0])


def test_prices_tell_how_long_a_candidate_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, now_s = kernel(), [0.0]

    class Slow(Watch):
        def price(self, candidates: Sequence[tuple[Task, Sequence[Decision]]]) -> Sequence[Price]:
            now_s[0] += 6.0
            return super().price(candidates)

    monkeypatch.setattr("eqtune.tune.prices.time.monotonic", lambda: now_s[0])
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        prices = source(database, Slow(0.25))
        assert prices.candidate_s == 0.0
        assert prices([task]) == [0.25]
        assert prices.candidate_s == 6.0 / len(prices.defaults(task))


def test_a_kernel_of_one_number_takes_no_second(tmp_path: Path) -> None:
    """No sketch schedules it, or says how long it takes."""
    builder = relax.BlockBuilder()
    count = relax.Var("count", relax.TensorType((), "float32"))
    with builder.function("main", [count]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.add(count, relax.const(1.0, "float32")))
        builder.emit_func_output(result)
    (task,) = extract_tasks(lower_to_kernels(builder.get(), detect_target(1)))
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        assert 0 < source(database, None).guess_s(task) < 1e-6


@pytest.mark.slow
def test_prices_are_measured_without_running_the_untuned_kernel() -> None:
    task = kernel()
    decisions, estimate_s = defaults(build_space(task.mod, Hardware()))
    assert len(decisions) > 1
    assert estimate_s > 0
    with LocalMeasurer(detect_target(1), hardware=Hardware(), threads=1, workers=1) as measurer:
        ((price_s, _),) = measurer.price([(task, decisions)])
        assert 0 < price_s < 1e-2
        assert measurer.price([(task, [])]) == [(math.inf, 0)]
        (measured,) = measurer.measure(task, decisions[:1])
        assert not measured.error, "it is compared with the reference all the same"


def test_under_a_budget_only_kernels_that_differ_are_measured() -> None:
    def of(*functions: Any) -> tvm.IRModule:
        x = relax.Var("x", relax.TensorType((32, 32), "float32"))
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            with builder.dataflow():
                y = builder.emit(relax.op.matmul(x, x))
                for function in functions:
                    y = builder.emit(function(relax.op.nn.softmax(y)))
                y = builder.emit_output(relax.op.matmul(y, x))
            builder.emit_func_output(y)
        return builder.get()

    measured = list[Task]()

    def measure(tasks: Sequence[Task]) -> list[float]:
        measured.extend(tasks)
        return [1.0 for _ in tasks]

    guessing = GraphPrices(measure, detect_target(1), Hardware(), None, lambda task: 10.0)
    short_s, long_s = guessing.modules_s([of(), of(relax.op.exp)])
    assert all("matmul" not in task.name for task in measured)
    assert short_s == 20.0
    assert long_s > short_s
    hurried = guessing.modules_s([of(), of(relax.op.exp), of(relax.op.tanh)], seconds=0.0)
    assert hurried == [short_s, long_s, math.inf]  # two at least: one to compare with the other


def test_under_a_budget_terms_are_measured_only_for_graphs_that_promise_something() -> None:
    def product(size: int) -> TermGraph:
        x = relax.Var("x", relax.TensorType((size, size), "float32"))
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            with builder.dataflow():
                y = builder.emit_output(relax.op.matmul(x, x))
            builder.emit_func_output(y)
        return encode_block(builder.get()["main"].body.blocks[0]).graph

    asked = list[Task]()

    def measure(tasks: Sequence[Task]) -> list[float]:
        asked.extend(tasks)
        return [1.0 for _ in tasks]

    def learnt(guess: Callable[[Task], float] | None, *sizes: int, terms_s: float = math.inf) -> bool:
        source = GraphPrices(measure, detect_target(1), Hardware(), measure, guess, terms_s=terms_s)
        return source.learn([product(n) for n in sizes])

    assert not learnt(lambda task: 1.0, 256, 256)
    assert not asked
    assert learnt(lambda task: 1.0, 256, 128)
    assert asked
    assert learnt(None, 256, 256)  # without a budget, everything is
    asked.clear()
    many = (64, 56, 48, 40, 32)
    assert not learnt(lambda task: 1.0, *many, terms_s=0.0)  # pricing all of them would take longer
    assert not asked
    assert learnt(lambda task: 1.0, *many, terms_s=60.0)
    assert len(asked) == len(many)
