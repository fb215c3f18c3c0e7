"""Which schedule a kernel gets in the end, and what looking at finalists again may cost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tvm import relax
from tvm.s_tir import ScheduleError

from eqtune.machine import detect_target
from eqtune.measure.base import Measurement
from eqtune.records import RecordDatabase
from eqtune.search import strategies
from eqtune.search.allocation.base import TaskStatus
from eqtune.search.space import Decision, Hardware, build_space
from eqtune.tasks import extract_tasks, lower_to_kernels
from eqtune.tune import acceptance, budget
from eqtune.tune.acceptance import Acceptance
from eqtune.tune.baselines import Baselines
from eqtune.tune.budget import Budget
from eqtune.tune.kernel_search import KernelSearch
from eqtune.tune.prices import defaults
from eqtune.tune.progress import Progress

from .small_models import module

TARGET = detect_target(1)
LOOK_S = 0.2


def unmeasured(size: int) -> KernelSearch:
    """A kernel that nobody has looked at."""
    mod = lower_to_kernels(module((size, size), lambda bb, x: relax.op.nn.softmax(x)), TARGET)
    (task,) = extract_tasks(mod)
    space = build_space(task.mod, Hardware())
    status = TaskStatus(task.name, 1, task.flops, 1e-9, "rows", [])
    search = strategies.create("random").begin(space, 0)
    return KernelSearch(task, space, search, status, baseline_s=1.0)


def searched(size: int, more: bool = False) -> KernelSearch:
    """A kernel whose first candidate seemed to be the faster of two, by a hair; `more`: until a third one was."""
    kernel = unmeasured(size)
    first, second, third = defaults(kernel.space)[0]
    kernel.tell([Measurement(first, (1e-3,)), Measurement(second, (1.01e-3,))])
    if more:
        kernel.tell([Measurement(third, (1e-4,))])
    return kernel


class SlowMeasurer:
    """Finds, after a while, that the second of all finalists is the fastest. A clock, too."""

    def __init__(self) -> None:
        self.looked = 0
        self.asked = []

    def retime(self, task, decisions):
        self.looked += 1
        self.asked = decisions
        latencies_s = [1e-3 / (1 + number) for number in range(len(decisions))]
        return [Measurement(d, (s,), trace="built anew") for d, s in zip(decisions, latencies_s, strict=True)]

    def monotonic(self):
        return LOOK_S * self.looked


@pytest.fixture
def measurer(monkeypatch):
    slow = SlowMeasurer()
    for module_with_clock in (acceptance, budget):
        monkeypatch.setattr(module_with_clock, "time", slow)
    return slow


def acceptance_of(database, measurer, time_s=None, finish_s=0.0):
    prices = SimpleNamespace(is_measured=lambda task: False)
    left = Budget(time_s=time_s, _started=0.0)
    untuned = Baselines(database, measurer, detect_target(), runs=True)
    return Acceptance(database, "here", measurer, left, prices, Progress(False), finish_s, untuned)


def results(path, measurer, time_s=None, finish_s=0.0, look=True, more=False):
    with RecordDatabase(path / "records.sqlite") as database:
        kernels = [searched(size, more) for size in (32, 48, 64, 80)]
        return acceptance_of(database, measurer, time_s, finish_s).of(kernels, look=look)


def accepted(path: Path, measurer: SlowMeasurer, time_s: float | None, finish_s: float, **options: bool):
    return [result.latency_s for result in results(path, measurer, time_s, finish_s, **options)]


def test_contenders_are_timed_again_and_the_fastest_is_taken(tmp_path, measurer):
    assert accepted(tmp_path, measurer, None, 0.0) == [0.5e-3] * 4
    assert measurer.looked == 4


def test_after_an_interrupt_nothing_is_timed_again_and_nothing_settled(tmp_path, measurer):
    assert accepted(tmp_path, measurer, None, 0.0, look=False) == [1e-3] * 4
    assert measurer.looked == 0
    assert accepted(tmp_path, measurer, None, 0.0) == [0.5e-3] * 4


def test_what_slow_looks_take_is_not_taken_from_what_follows(tmp_path, measurer):
    """The first look teaches how long one takes: there is time for one more, not for three."""
    assert accepted(tmp_path, measurer, 10.0 + 2.5 * LOOK_S, 10.0) == [0.5e-3, 0.5e-3, 1e-3, 1e-3]


def test_what_was_accepted_stays_until_more_is_measured(tmp_path, measurer):
    """Whoever measured it: a run that was killed before it accepted anything has left its records."""
    assert accepted(tmp_path, measurer, None, 0.0) == [0.5e-3] * 4
    assert accepted(tmp_path, measurer, None, 0.0) == [0.5e-3] * 4
    assert measurer.looked == 4
    assert accepted(tmp_path, measurer, None, 0.0, more=True) == [1e-4] * 4


def test_what_there_was_no_time_to_time_again_is_not_settled(tmp_path, measurer):
    assert accepted(tmp_path, measurer, 10.0, 10.0) == [1e-3] * 4
    assert accepted(tmp_path, measurer, None, 0.0) == [0.5e-3] * 4


def test_the_schedule_that_was_timed_is_the_one_that_is_applied(tmp_path, measurer):
    assert {result.trace for result in results(tmp_path, measurer)} == {"built anew"}


@pytest.mark.parametrize(("old_s", "wins"), [(0.98e-3, False), (0.4e-3, True)])
def test_what_an_earlier_version_measured_counts_though_its_sketch_has_gone(tmp_path, measurer, old_s, wins):
    """It cannot be built anew: if asked for, the kernel would stay untuned."""
    kernel = searched(32)
    old = Decision("tiled_as_it_was", {"mr": 4})
    kernel.tell([Measurement(old, (old_s,), trace="its trace")])
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        (result,) = acceptance_of(database, measurer).of([kernel])
    assert old not in measurer.asked
    assert (result.decision == old.to_json()) == wins


def test_a_priced_candidate_that_no_longer_applies_gives_way_to_the_next(tmp_path, measurer, monkeypatch):
    """The search is over: a schedule that TVM refuses now would take all of it along."""
    kernel = unmeasured(32)
    apply = kernel.space.apply
    first, second, _ = defaults(kernel.space)[0]

    def refuse_first(decision):
        if decision == first:
            raise ScheduleError("not with this version")
        return apply(decision)

    monkeypatch.setattr(kernel.space, "apply", refuse_first)
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        accepting = acceptance_of(database, measurer)
        accepting.prices = SimpleNamespace(
            defaults=lambda task: [first, second],
            has_run=lambda task, decision: decision == first,
            guess_s=lambda task: 1e-3,
            is_measured=lambda task: True,
        )
        (result,) = accepting.of([kernel], guess=True)
    assert result.decision == second.to_json()
    assert not result.measured
