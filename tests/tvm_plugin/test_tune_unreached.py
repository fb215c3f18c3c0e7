"""Kernels that the budget does not reach get a schedule that was not measured, if the model stays right with it."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
import tvm
from tvm import relax

import eqtune
from eqtune.machine import detect_target
from eqtune.records import RecordDatabase
from eqtune.schedules.stored import stored_schedules
from eqtune.tasks import lower_to_kernels
from eqtune.tune import accuracy
from eqtune.tune.prices import KernelPrices
from eqtune.tune.result import TaskResult
from eqtune.tune.session import Session

from .small_models import module, weight


def product_and_softmax() -> tvm.IRModule:
    return module((96, 64), lambda bb, x: relax.op.nn.softmax(bb.emit(relax.op.matmul(x, weight(64, 80)))))


def tuned_once(work_dir: Path, **arguments: object) -> eqtune.TuneResult:
    """With one trial for both kernels."""
    defaults = {"trials": 1, "graph": "off", "progress": False, "work_dir": work_dir, "threads": 1}
    return eqtune.tune_model(product_and_softmax(), **{**defaults, **arguments})  # type: ignore[arg-type]


def test_every_kernel_has_a_schedule_and_the_result_tells_which_was_measured(tmp_path: Path) -> None:
    result = tuned_once(tmp_path)
    assert all(task.tuned for task in result.tasks)
    assert sorted(task.measured for task in result.tasks) == [False, True]
    assert [task.trials for task in result.tasks if not task.measured] == [0]
    assert sorted(row.measured for row in result.summary.kernels) == [False, True]
    assert "~ not measured" in str(result)
    assert result.summary.tolerance == 1e-4
    assert result.max_rel_error <= 1e-4


def test_a_kernel_that_cannot_be_scheduled_does_not_stop_the_others(tmp_path: Path) -> None:
    product_and_sort = module(
        (32, 64), lambda bb, x: relax.op.topk(bb.emit(relax.op.matmul(x, weight(64, 48))), 2, ret_type="values")
    )
    arguments = {"time_budget_s": 10, "trials": 8, "threads": 1, "progress": False}
    result = eqtune.tune_model(product_and_sort, work_dir=tmp_path, **arguments)
    assert result.max_rel_error <= 1e-4
    assert any(task.trials for task in result.tasks)


def test_pooling_whose_windows_vary_in_size(tmp_path: Path) -> None:
    ragged = module((1, 8, 16, 16), lambda bb, x: relax.op.nn.adaptive_avg_pool2d(bb.emit(relax.op.nn.relu(x)), (3, 5)))
    result = eqtune.tune_model(ragged, trials=4, work_dir=tmp_path, threads=1, progress=False)
    assert result.max_rel_error <= 1e-4


def test_where_it_would_be_wrong_it_stays_untuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy.Accuracy, "errors", wrong_at_first(accuracy.Accuracy.errors))
    result = tuned_once(tmp_path)
    assert sorted(task.tuned for task in result.tasks) == [False, True]
    assert all(task.measured for task in result.tasks)
    assert result.max_rel_error <= 1e-4


def test_of_kernels_that_were_not_measured_those_that_ran_for_a_price_are_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def three_kernels(bb: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        return relax.op.mean(bb.emit(relax.op.nn.softmax(bb.emit(relax.op.matmul(x, weight(64, 80))))), 0)

    def tuned_in(name: str) -> list[TaskResult]:
        arguments = {"trials": 1, "graph": "off", "progress": False, "threads": 1}
        return eqtune.tune_model(module((96, 64), three_kernels), work_dir=tmp_path / name, **arguments).tasks

    priced, guessed = (task.workload_hash for task in tuned_in("all") if not task.measured)
    monkeypatch.setattr(accuracy.Accuracy, "errors", wrong_at_first(accuracy.Accuracy.errors))
    monkeypatch.setattr(KernelPrices, "priced_s", lambda self, workload: 1e-6 if workload == priced else None)
    tuned = {task.workload_hash: task.tuned for task in tuned_in("some")}
    assert (tuned[priced], tuned[guessed]) == (True, False)


def wrong_at_first(errors):  # type: ignore[no-untyped-def]
    """The outputs differ when the model is compared for the first time."""
    asked = []

    def instead(self, run):  # type: ignore[no-untyped-def]
        asked.append(run)
        return (1.0, 1.0) if len(asked) == 1 else errors(self, run)

    return instead


def test_where_candidates_take_long_more_time_is_kept_back_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole model is compiled as they are: 3 seconds a kernel here."""
    kept: list[float] = []
    keep_back = Session.keep_back

    def watched(self: Session, finish_s: float, kernels: int) -> None:
        kept.append(finish_s)
        keep_back(self, finish_s, kernels)

    monkeypatch.setattr(Session, "keep_back", watched)
    monkeypatch.setattr(KernelPrices, "candidate_s", 3.0)
    result = tuned_once(tmp_path, time_budget_s=30)
    assert kept[0] < 3.0 * len(result.tasks) < kept[-1]


def test_the_schedule_of_a_priced_kernel_is_kept_for_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eqtune.tune.session.TRIAL_S", 100.0)  # time seems short: all kernels are priced first
    arguments = {"time_budget_s": 60.0, "threads": 1}
    (unreached,) = [task for task in tuned_once(tmp_path, **arguments).tasks if not task.measured]
    with detect_target(1):
        assert stored_schedules(tmp_path)[unreached.workload_hash].trace == unreached.trace
    (same,) = [task for task in tuned_once(tmp_path, **arguments).tasks if not task.measured]
    assert (same.trials, same.trace) == (0, unreached.trace)
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        assert sum(record.workload_hash == same.workload_hash for record in database.all()) == 1


def test_what_nobody_compares_nobody_guesses(tmp_path: Path) -> None:
    result = tuned_once(tmp_path, verify=False)
    assert sorted(task.tuned for task in result.tasks) == [False, True]


@pytest.mark.parametrize(("whole", "plain"), [(True, False), (False, False), (False, True)])
def test_kernels_that_stay_as_they_were_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], whole: bool, plain: bool
) -> None:
    """Nobody guesses where nothing is compared: they looked as if nothing better had been found."""
    if plain:
        monkeypatch.setattr("eqtune.tune.baselines.UNTUNED_S_PER_OPERATION", 1e9)
    if whole:
        tuned_once(tmp_path, verify=False, progress=True)
    else:
        kernels = lower_to_kernels(product_and_softmax(), detect_target(1))
        eqtune.tune_kernels(kernels, trials=1, threads=1, work_dir=tmp_path)
    what = "have plain schedules, which are the baseline" if plain else "stay untuned"
    assert f"the search did not reach 1 of 2 kernels: they {what}\n" in capsys.readouterr().err


def test_single_kernels_all_have_a_measured_untuned_time(tmp_path: Path) -> None:
    arguments = {"time_budget_s": 60.0, "trials": 1, "threads": 1, "progress": False, "work_dir": tmp_path}
    result = eqtune.tune_kernels(lower_to_kernels(product_and_softmax(), detect_target(1)), **arguments)
    assert sorted(task.trials for task in result.tasks) == [0, 1]
    assert all(task.latency_s > 0.0 and task.baseline_latency_s > 0.0 for task in result.tasks)


def test_in_limited_time_an_untuned_kernel_is_run_once_its_turn_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eqtune.tune.loop.TOGETHER", 1)
    monkeypatch.setattr("eqtune.tune.forms.Forms.untuned_s_per_operation", lambda self, latency_s: 1e-15)
    result = tuned_once(tmp_path, time_budget_s=60.0)
    assert all(task.baseline_latency_s >= task.latency_s > 0.0 for task in result.tasks if not task.measured)
    with contextlib.closing(sqlite3.connect(tmp_path / "records.sqlite")) as database:
        keys = [key for (key,) in database.execute("SELECT key FROM facts")]
    assert sum("baseline:" in key for key in keys) == 1
