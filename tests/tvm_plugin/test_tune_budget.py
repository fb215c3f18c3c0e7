"""Budgets, progress lines, and the work directory."""

from __future__ import annotations

import io
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eqtune.errors import InputError, RecordError
from eqtune.machine import detect_target
from eqtune.measure import ReplayMeasurer
from eqtune.search.space import Hardware
from eqtune.tune.budget import Budget
from eqtune.tune.loop import Variant
from eqtune.tune.progress import Progress
from eqtune.tune.session import Session, Settings
from eqtune.tune.workdir import WorkDirectory


def test_trials_of_earlier_runs_count() -> None:
    budget = Budget(trials=100, spent_trials=96)
    assert budget.trials_left == 4
    assert budget.allows()
    budget.spent_trials += 4
    assert not budget.allows()


def test_a_round_that_would_not_fit_is_not_started() -> None:
    budget = Budget(time_s=10.0, reserve_s=2.0, spent_s=7.0)
    assert budget.allows(round_s=0.5)
    assert not budget.allows(round_s=1.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trials": 0}, "at least 1"),
        ({"time_s": -1.0}, "more than 0"),
        ({"time_s": float("inf")}, "leave it out"),
    ],
)
def test_an_impossible_budget_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Budget(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("left_s", "expected_s"), [(None, 1.0), (30.0, 1.0), (0.5, 0.5), (-2.0, 0.2)])
def test_models_are_timed_for_a_moment_of_what_is_left(
    left_s: float | None, expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eqtune.tune.session.TIMING_S", 1.0)  # shorter for other tests
    session = SimpleNamespace(budget=SimpleNamespace(whole_seconds_left=left_s))
    assert Session.timing_s.fget(session) == expected_s  # type: ignore[attr-defined]


def test_two_runs_of_one_model_spend_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wrote what it knew of, and the last one's trials were all that counted."""
    monkeypatch.setattr(Session, "_describe_machine", lambda self: Hardware())
    settings = Settings(
        detect_target(1), measure=ReplayMeasurer([]), cost_model="random", work_dir=tmp_path, progress=False
    )
    model = Variant("only", {"a" * 16: 1})
    with Session(settings) as one, Session(settings) as other:
        for session in (one, other):
            session.identify(model)
        for session, trials in ((one, 8), (other, 4), (one, 16)):
            session.budget.spent_trials += trials
            session.save_spent()
        seconds = one.budget.elapsed_s + other.budget.elapsed_s
    with Session(settings) as later:
        later.identify(model)
        assert later.budget.spent_trials == 28
        assert 0.0 < later.budget.spent_s <= seconds


@pytest.mark.parametrize(("measured", "told"), [(True, "GB/s measured"), (False, "GB/s by a table of processors")])
def test_speeds_that_were_guessed_are_not_said_to_be_measured(measured: bool, told: str) -> None:
    """As where the machine was too busy to measure them."""
    session: Any = SimpleNamespace(hardware=Hardware(), _speeds_measured=measured, _runs_here=True, runs=True)
    assert told in Session.describe(session)


def test_no_limit_allows_everything() -> None:
    assert Budget().allows(round_s=1e9)
    assert Budget().seconds_left is None


@pytest.mark.parametrize(("latency_s", "best"), [(1.5e-3, "1.50 ms"), (2.5, "2.50 s"), (1.23e-7, "123 ns")])
def test_a_pipe_gets_plain_lines_now_and_then(latency_s: float, best: str) -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream, every_s=3600.0)
    for trials in range(5):
        progress.update("conv", latency_s, trials, 0, Budget(trials=64))
    assert stream.getvalue() == f"conv | best {best} | 0/64 trials, 0 failed | 0 s\n"


def test_before_every_kernel_is_known_there_is_no_best() -> None:
    stream = io.StringIO()
    Progress(stream=stream).update("conv", math.inf, 1, 0, Budget(trials=64))
    assert stream.getvalue() == "conv | no best yet | 1/64 trials, 0 failed | 0 s\n"


def test_quiet_is_quiet() -> None:
    stream = io.StringIO()
    progress = Progress(enabled=False, stream=stream)
    progress.say("something")
    progress.update("conv", 1.0, 1, 0, Budget())
    assert stream.getvalue() == ""


def test_references_survive_and_a_damaged_one_is_computed_again(tmp_path: Path) -> None:
    with WorkDirectory(tmp_path / "work") as work:
        outputs = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, dtype=np.int64)]
        assert work.load_reference("model") is None
        work.save_reference("model", outputs)
        loaded = work.load_reference("model")
        assert loaded is not None
        for got, want in zip(loaded, outputs, strict=True):
            np.testing.assert_array_equal(got, want)
        (path,) = (tmp_path / "work").glob("reference-*.npz")
        path.write_bytes(path.read_bytes()[:40])
        assert work.load_reference("model") is None


def test_a_file_in_the_way_of_the_work_directory_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written.*work_dir"):
        WorkDirectory(tmp_path / "file" / "work")
    with pytest.raises(InputError, match="work_dir is the path of a folder, not ''"):
        WorkDirectory("")


def test_the_users_logging_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def state() -> list[object]:
        return [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]

    loggers = logging.getLogger(), logging.getLogger("eqtune")
    before = state()
    with WorkDirectory(tmp_path / "work"), WorkDirectory(tmp_path / "another"):
        logging.getLogger("eqtune.tune").info("noted")
        logging.getLogger("eqtune.tune").warning("warned")
    assert state() == before
    assert [record.message for record in caplog.records] == ["warned"]  # the user's handlers are as loud as before
    for name in ("work", "another"):
        log = (tmp_path / name / "eqtune.log").read_text()
        assert "noted" in log
        assert "warned" in log


def test_records_that_cannot_be_read_leave_no_log_open(tmp_path: Path) -> None:
    handlers = list(logging.getLogger("eqtune").handlers)
    (tmp_path / "records.sqlite").write_text("no database")
    with pytest.raises(RecordError):
        WorkDirectory(tmp_path)
    assert logging.getLogger("eqtune").handlers == handlers


def test_a_level_that_the_user_chose_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("eqtune"), "level", logging.DEBUG)
    logging.getLogger("eqtune")._cache.clear()  # type: ignore[attr-defined]
    with WorkDirectory(tmp_path / "work"):
        logging.getLogger("eqtune").debug("in detail")
    assert "in detail" in (tmp_path / "work" / "eqtune.log").read_text()
