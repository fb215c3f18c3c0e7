"""The tuning loop on toy kernels, with a measurer that looks latencies up: no compiler, no clock."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from eqtune import cost_model
from eqtune.errors import InputError
from eqtune.measure.base import NO_REFERENCE, Measurement, Overheads
from eqtune.records import Context, Record, RecordDatabase
from eqtune.search import allocation, strategies
from eqtune.search.allocation.base import TaskStatus
from eqtune.search.space.base import Decision, Knob, Sketch, Space
from eqtune.search.space.features import FEATURES
from eqtune.tune import budget as budget_module
from eqtune.tune import loop as loop_module
from eqtune.tune.budget import Budget
from eqtune.tune.kernel_search import KernelSearch, decision_key
from eqtune.tune.loop import TuningLoop, Variant
from eqtune.tune.progress import Progress

K0, K1, FAST, SLOW = "a" * 16, "b" * 16, "c" * 16, "d" * 16
CONTEXT = Context('{"kind": "toy"}', "toy", 1, "0.27")


class ToySketch(Sketch):
    """Latency 1 + (a - best)^2 + (b - best)^2 microseconds times `scale`."""

    name = "toy"
    knobs = (Knob("a", tuple(range(20))), Knob("b", tuple(range(20))))

    def __init__(self, scale: float, best: int) -> None:
        self.scale, self.best = scale, best

    def legal(self, values: NDArray[np.int64]) -> NDArray[np.bool_]:
        return values.sum(axis=1) < 36

    def latency_s(self, values: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.scale * 1e-6 * (1.0 + ((values - self.best) ** 2).sum(axis=1))

    def features(self, values: NDArray[np.int64]) -> NDArray[np.float32]:
        result = np.zeros((len(values), len(FEATURES)), dtype=np.float32)
        result[:, :2] = values
        return result

    def apply(self, values: Mapping[str, int]) -> Any:
        raise AssertionError("nothing is lowered here")


class LookUp:
    """A measurer that knows the answer, and fails where a + b = 7."""

    def __init__(self, sketches: Mapping[str, ToySketch], stop_after: float = math.inf) -> None:
        self.sketches, self.stop_after = sketches, stop_after
        self.overheads = Overheads()
        self.asked: list[tuple[str, str]] = []
        self.batches: list[int] = []

    def measure(self, task: Any, decisions: Sequence[Decision], best_s: float = math.inf) -> list[Measurement]:
        if len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.batches.append(len(decisions))
        results = []
        for decision in decisions:
            values = np.array([[decision.values["a"], decision.values["b"]]])
            self.asked.append((task.workload_hash, str(sorted(decision.values.items()))))
            if values.sum() == 7:
                results.append(Measurement(decision, error="crash", detail="on purpose"))
            else:
                latency = float(self.sketches[task.workload_hash].latency_s(values)[0])
                results.append(Measurement(decision, (latency, latency * 1.01), trace="[[],[]]"))
        return results


def kernel(name: str, sketch: ToySketch, calls: int = 1, seed: int = 0) -> KernelSearch:
    space = Space([sketch])
    task = SimpleNamespace(name=name, workload_hash=name, calls=calls, flops=1e6, bytes_moved=1e3)
    search = strategies.create("annealed-evolution").begin(space, seed)
    status = TaskStatus(name, calls, 1e6, 1e-9, "toy", [])
    return KernelSearch(task, space, search, status, baseline_s=1.0)  # type: ignore[arg-type]


def loop_over(
    kernels: list[KernelSearch], measurer: LookUp, path: Path, variants: list[Variant] | None = None, trials: int = 96
) -> TuningLoop:
    database = RecordDatabase(path / "records.sqlite")
    for one in kernels:
        database.add_workload(one.task.workload_hash, "{}", name=one.task.name, flops=1e6)
    return TuningLoop(
        kernels=kernels,
        variants=variants or [Variant("only", {k.task.workload_hash: k.task.calls for k in kernels})],
        measurer=measurer,  # type: ignore[arg-type]
        database=database,
        context=CONTEXT,
        model=cost_model.create("xgboost", seed=0),
        allocation=allocation.create("gradient").begin(0),
        budget=Budget(trials=trials),
        progress=Progress(enabled=False),
        seed=0,
        eqtune_version="test",
    )


class Together(LookUp):
    """One that takes several kernels at a time."""

    def measure_together(self, requests: Sequence[tuple[Any, Sequence[Decision], float]]) -> list[list[Measurement]]:
        self.groups = [*getattr(self, "groups", []), [task.workload_hash for task, _, _ in requests]]
        return [self.measure(*request) for request in requests]


def test_kernels_with_few_candidates_each_are_measured_together(tmp_path: Path) -> None:
    sketches = {name * 16: ToySketch(1.0 + i, 3 + i) for i, name in enumerate("abcdef")}
    measurer = Together(sketches)
    kernels = [kernel(name, sketch) for name, sketch in sketches.items()]
    loop_over(kernels, measurer, tmp_path, trials=6).run()
    assert [len(group) for group in measurer.groups] == [4, 2]
    assert sorted(name for group in measurer.groups for name in group) == sorted(sketches)
    assert [k.status.trials for k in kernels] == [1] * 6
    assert not any(k.status.finished for k in kernels)


def test_a_kernel_among_few_begins_with_few_candidates(tmp_path: Path) -> None:
    sketch = ToySketch(1.0, 5)
    measurer = LookUp({K0: sketch})
    loop_over([kernel(K0, sketch)], measurer, tmp_path, trials=36).run()
    assert measurer.batches == [4, 12, 16, 4]


def test_a_kernel_that_hardly_counts_has_its_opening_only(tmp_path: Path) -> None:
    large, small = ToySketch(1000.0, 5), ToySketch(1.0, 5)
    measurer = LookUp({K0: large, K1: small})
    kernels = [kernel(K0, large), kernel(K1, small)]
    kernels[0].status.roofline_s, kernels[1].status.roofline_s = 1e-6, 1e-9  # the larger one is first
    loop_over(kernels, measurer, tmp_path, trials=36).run()
    assert measurer.batches == [4, 12, 4, 16]
    assert [k.status.trials for k in kernels] == [32, 4]


def test_untuned_kernels_are_run_for_several_turns_in_advance(tmp_path: Path) -> None:
    sketches = {name * 16: ToySketch(1.0 + i, 3 + i) for i, name in enumerate("abcdef")}
    kernels = [kernel(name, sketch) for name, sketch in sketches.items()]
    loop = loop_over(kernels, LookUp(sketches), tmp_path, trials=5 * 16)
    groups: list[int] = []

    def run_untuned(some: Sequence[KernelSearch]) -> None:
        groups.append(len(some))
        for one in some:
            one.baseline_s = 1.0

    for one in kernels:
        one.baseline_s = math.nan
    loop.baselines = run_untuned
    loop.run()
    assert groups == [4, 2]


def test_an_untuned_kernel_that_takes_too_long_is_not_begun(tmp_path: Path) -> None:
    sketches = {FAST: ToySketch(1.0, 5), SLOW: ToySketch(50.0, 5)}
    kernels = [kernel(name, sketch) for name, sketch in sketches.items()]
    for one in kernels:
        one.baseline_s = math.nan
    loop = loop_over(kernels, LookUp(sketches), tmp_path, trials=32)
    loop.budget.time_s = 60.0
    loop.untuned_s = lambda task: 100.0 if task.workload_hash == SLOW else 1.0
    loop.baselines = lambda some: [setattr(one, "baseline_s", 1.0) for one in some]  # type: ignore[func-returns-value]
    loop.run()
    assert [one.status.trials for one in kernels] == [32, 0]
    assert math.isnan(kernels[1].baseline_s)


def test_a_kernel_whose_price_is_near_its_roofline_gives_its_trials_to_others(tmp_path: Path) -> None:
    sketches = {FAST: ToySketch(1.0, 5), SLOW: ToySketch(50.0, 5)}
    kernels = [kernel(name, sketch) for name, sketch in sketches.items()]
    for one, price_s in zip(kernels, (1.001e-9, 1e-3), strict=True):
        one.status.price_s = price_s
    loop_over(kernels, LookUp(sketches), tmp_path, trials=32).run()
    assert [one.status.trials for one in kernels] == [0, 32]


@pytest.mark.parametrize("trials", [3, 18, 34])
def test_no_trial_more_than_the_budget_allows(tmp_path: Path, trials: int) -> None:
    sketches = {K0: ToySketch(1.0, 5), K1: ToySketch(3.0, 9)}
    kernels = [kernel(name, sketch) for name, sketch in sketches.items()]
    loop_over(kernels, LookUp(sketches), tmp_path, trials=trials).run()
    assert sum(one.status.trials for one in kernels) == trials


def test_it_finds_good_candidates_within_its_trials_and_records_each_once(tmp_path: Path) -> None:
    sketches = {K0: ToySketch(1.0, 5), K1: ToySketch(3.0, 9)}
    measurer = LookUp(sketches)
    loop = loop_over([kernel(name, sketch) for name, sketch in sketches.items()], measurer, tmp_path)
    loop.run()
    assert len(measurer.asked) <= 96
    assert len(set(measurer.asked)) == len(measurer.asked)
    assert loop.kernels[0].best_s == pytest.approx(1e-6, rel=1.5)
    assert loop.kernels[1].best_s == pytest.approx(3e-6, rel=1.5)
    assert len(loop.database.for_workload(K0, CONTEXT)) == loop.kernels[0].status.trials


def test_a_second_run_measures_nothing_again(tmp_path: Path) -> None:
    sketches = {K0: ToySketch(1.0, 5)}
    first = LookUp(sketches)
    loop = loop_over([kernel(K0, sketches[K0])], first, tmp_path, trials=48)
    loop.run()
    loop.database.close()
    resumed = kernel(K0, sketches[K0])
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        resumed.resume(database.for_workload(K0, CONTEXT))
    assert resumed.status.trials == 48
    assert len(resumed.status.history) == 3  # rounds that brought nothing count: patience does not begin anew
    assert resumed.best_s == loop.kernels[0].best_s
    second = LookUp(sketches)
    loop_over([resumed], second, tmp_path, trials=48).run()
    assert not set(first.asked) & set(second.asked)


def test_a_narrowed_space_resumes_from_candidates_that_it_has() -> None:
    """Others pack weights otherwise: the fastest of all was reported, and not used."""
    sketch = ToySketch(1.0, 0)
    sketch.knobs = (Knob("a", (3,)), ToySketch.knobs[1])
    decisions = [Decision("toy", {"a": a, "b": 5}) for a in (0, 3)]
    records = [Record(K0, decision_key(d), "[[],[]]", CONTEXT, (1e-6 * (1 + d.values["a"]),)) for d in decisions]
    narrowed = kernel(K0, sketch)
    narrowed.resume(records, within=True)
    assert narrowed.status.trials == 1
    assert [one.decision for one in narrowed.finalists(2)] == decisions[1:]


def test_failed_candidates_are_counted_and_never_best(tmp_path: Path) -> None:
    sketches = {K0: ToySketch(1.0, 3)}
    loop = loop_over([kernel(K0, sketches[K0])], LookUp(sketches), tmp_path, trials=200)
    loop.run()
    assert loop.kernels[0].failed > 0
    best = loop.kernels[0].best
    assert best is not None
    assert sum(best.decision.values.values()) != 7


def test_a_kernel_that_cannot_be_compared_is_finished_without_a_record_or_a_trial(tmp_path: Path) -> None:
    class NoReference(LookUp):
        def measure(self, task: Any, decisions: Sequence[Decision], best_s: float = math.inf) -> list[Measurement]:
            if task.workload_hash != K0:
                return super().measure(task, decisions, best_s)
            return [Measurement(decision, error=NO_REFERENCE, detail="there is none") for decision in decisions]

    sketch = ToySketch(1.0, 5)
    kernels = [kernel(K0, ToySketch(1e3, 5)), kernel(K1, sketch)]
    measurer = NoReference({K1: sketch})
    loop = loop_over(kernels, measurer, tmp_path, trials=24)
    loop.run()
    assert len(measurer.asked) == 24, "the other kernel gets all trials"
    assert loop.database.for_workload(K0, CONTEXT) == []
    assert kernels[0].status.finished == "the untuned kernel fails"
    assert (kernels[0].failed, kernels[0].unreached) == (0, False)


def test_a_form_that_is_clearly_slower_gets_no_more_trials(tmp_path: Path) -> None:
    sketches = {FAST: ToySketch(1.0, 5), SLOW: ToySketch(50.0, 5)}
    variants = [Variant("fast form", {FAST: 1}), Variant("slow form", {SLOW: 1})]
    loop = loop_over([kernel(n, s) for n, s in sketches.items()], LookUp(sketches), tmp_path, variants, trials=120)
    loop.run()
    assert [variant.name for variant in loop.variants] == ["fast form"]
    assert loop.kernels[1].status.trials <= 32
    assert loop.kernels[1].status.finished


def test_a_form_that_can_hardly_catch_up_gets_few_trials(tmp_path: Path) -> None:
    sketches = {FAST: ToySketch(1.0, 5), SLOW: ToySketch(1.2, 5)}
    variants = [Variant("fast form", {FAST: 1}), Variant("slow form", {SLOW: 1})]
    kernels = [kernel(name, sketch) for name, sketch in sketches.items()]
    for one, scale in zip(kernels, (1.0, 1.2), strict=True):
        one.status.price_s, one.status.estimate_s = scale * 3e-6, scale * 1e-6
        one.baseline_s = scale * 3e-6  # no form is more than 1.3 times as slow as the other
    loop_over(kernels, LookUp(sketches), tmp_path, variants, trials=160).run()
    assert kernels[0].best_s == pytest.approx(1e-6)
    assert kernels[1].status.trials <= 32


def test_a_form_is_given_up_as_soon_as_a_part_of_it_is_too_slow(tmp_path: Path) -> None:
    sketches = {FAST: ToySketch(1.0, 5), SLOW: ToySketch(50.0, 5), K0: ToySketch(0.1, 5)}
    variants = [Variant("fast form", {FAST: 1}), Variant("slow form", {SLOW: 1, K0: 1})]
    kernels = [kernel(name, sketch) for name, sketch in sketches.items()]
    for one, roofline_s in zip(kernels, (1e-6, 4e-5, 1e-7), strict=True):
        one.status.roofline_s = roofline_s  # the most expensive first
    loop = loop_over(kernels, LookUp(sketches), tmp_path, variants, trials=96)
    loop.run()
    assert [variant.name for variant in loop.variants] == ["fast form"]
    assert kernels[2].status.trials == 0


@pytest.mark.parametrize(
    "asked",
    [
        None,
        "abc",
        np.zeros((1, 3)),
        np.zeros((1, 2), dtype=np.int16),
        np.zeros((5, 3), dtype=np.int16),
        [[0, 20, 0]],
        [[1, 0, 0]],
        [[0, -1, 0]],
        [[0, 19, 19]],
    ],
    ids=["None", "text", "floats", "narrow", "too many", "no value", "no sketch", "negative", "illegal"],
)
def test_what_a_strategy_may_not_ask_for_is_one_error(asked: Any) -> None:
    """It was measured nevertheless, beyond the budget's trials, or ended in an IndexError."""
    one = kernel(K0, ToySketch(1.0, 3))
    one.search = SimpleNamespace(ask=lambda count, score: asked)  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"ask must return at most 4 legal points, integers of shape \[n, 3\], not"):
        one.ask(4, lambda points: np.zeros(len(points)))


def test_what_a_strategy_repeats_is_not_measured_again() -> None:
    one = kernel(K0, ToySketch(1.0, 3))
    twice = SimpleNamespace(ask=lambda count, score: [[0, 2, 0], [0, 3, 0], [0, 2, 0]], tell=lambda *_: None)
    one.search = twice  # type: ignore[assignment]
    asked = one.ask(4, lambda points: np.zeros(len(points)))
    assert asked == [one.space.decision(np.array(point)) for point in ([0, 2, 0], [0, 3, 0])]
    one.tell([Measurement(asked[0], (1.0,)), Measurement(asked[1], error="timeout")])
    assert one.ask(4, lambda points: np.zeros(len(points))) == []


@pytest.mark.parametrize("asked", [[], np.zeros((0, 3), dtype=np.int16)], ids=["list", "array"])
def test_a_strategy_with_nothing_left_may_say_so_plainly(asked: Any) -> None:
    one = kernel(K0, ToySketch(1.0, 3))
    one.search = SimpleNamespace(ask=lambda count, score: asked)  # type: ignore[assignment]
    assert one.ask(4, lambda points: np.zeros(len(points))) == []


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    sketches = {K0: ToySketch(1.0, 5)}
    loop = loop_over([kernel(K0, sketches[K0])], LookUp(sketches, stop_after=32), tmp_path)
    loop.run()
    assert loop.interrupted
    assert loop.kernels[0].status.trials == 32
    assert math.isfinite(loop.latency_s)


class SlowOnce(LookUp):
    """Takes a second for each batch, but twenty for the third. A clock, too."""

    now = 0.0

    def measure(self, task: Any, decisions: Sequence[Decision], best_s: float = math.inf) -> list[Measurement]:
        self.now += 20.0 if len(self.batches) == 2 else 1.0
        return super().measure(task, decisions, best_s)

    def monotonic(self) -> float:
        return self.now

    time = monotonic


def test_one_slow_batch_does_not_end_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sketch = ToySketch(1.0, 5)
    slow = SlowOnce({K0: sketch})
    monkeypatch.setattr(loop_module, "time", slow)
    monkeypatch.setattr(budget_module, "time", slow)
    loop = loop_over([kernel(K0, sketch)], slow, tmp_path)
    loop.budget = Budget(time_s=30.0, _started=0.0)
    loop.run()
    assert len(slow.batches) >= 5
    assert slow.now <= 30.0


def test_the_same_seed_asks_the_same(tmp_path: Path) -> None:
    asked = []
    for run in range(2):
        sketches = {K0: ToySketch(1.0, 5), K1: ToySketch(2.0, 12)}
        measurer = LookUp(sketches)
        (tmp_path / str(run)).mkdir()
        loop_over([kernel(n, s) for n, s in sketches.items()], measurer, tmp_path / str(run)).run()
        asked.append(measurer.asked)
    assert asked[0] == asked[1]


@pytest.mark.parametrize(("signals", "learns"), [(1, [True]), (2, [])])
def test_ctrl_c_waits_while_the_cost_model_learns_unless_it_comes_again(
    tmp_path: Path, signals: int, learns: list[bool]
) -> None:
    """Raised there, Python printed a traceback out of XGBoost's callbacks."""
    sketches = {K0: ToySketch(1.0, 5)}
    loop = loop_over([kernel(K0, sketches[K0])], LookUp(sketches), tmp_path)
    learnt = []

    def interrupted_fit(*_: Any) -> None:
        for _ in range(signals):
            signal.raise_signal(signal.SIGINT)
        learnt.append(True)

    loop.model.fit = interrupted_fit  # type: ignore[method-assign]
    loop.run()
    assert loop.interrupted
    assert learnt == learns
    assert loop.kernels[0].status.trials == 4


@pytest.mark.parametrize("swallowed", [True, False])
def test_ctrl_c_inside_a_callback_that_makes_something_else_of_it_ends_the_search(
    tmp_path: Path, swallowed: bool
) -> None:
    sketches = {K0: ToySketch(1.0, 5)}
    loop = loop_over([kernel(K0, sketches[K0])], LookUp(sketches), tmp_path)
    fit = loop.model.fit

    def interrupted_fit(*arguments: Any) -> None:
        fit(*arguments)
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if not swallowed:
            raise RuntimeError("0 rows instead of 4")

    loop.model.fit = interrupted_fit  # type: ignore[method-assign]
    loop.run()
    assert loop.interrupted
    assert loop.kernels[0].status.trials == 4
