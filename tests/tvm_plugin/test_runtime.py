"""Whole models are timed in turns, and longer while the cores are not at full speed."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from eqtune import runtime
from eqtune.errors import InputError
from eqtune.measure.affinity import own_cores
from eqtune.measure.gauge import Gauge


class Model:
    """Runs of 1 s of a clock that only they turn; `slow` runs, at first, take twice as long."""

    def __init__(self, clock: list[float], slow: int) -> None:
        self.clock, self.slow, self.runs = clock, slow, 0

    def prepare(self, inputs: Sequence[Any]) -> list[Any]:
        return list(inputs)

    def time_s(self, arguments: Sequence[Any]) -> float:
        self.runs += 1
        seconds = 2.0 if self.runs <= self.slow else 1.0
        self.clock[0] += seconds
        return seconds

    def disturbed(self, gauge: Gauge | None) -> bool:
        return gauge is not None and self.runs < self.slow


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(runtime.time, "monotonic", lambda: now[0])
    return now


GAUGE = Gauge(lambda: 1.0)


@pytest.mark.parametrize(
    ("slow", "gauge", "fastest_s", "runs"),
    [(0, GAUGE, 1.0, 1 + 4), (5, None, 2.0, 1 + 3), (5, GAUGE, 1.0, 1 + 5), (math.inf, GAUGE, 2.0, 1 + 6)],
    ids=["quiet", "without a gauge", "quiet later", "never quiet"],
)
def test_a_model_runs_until_it_was_undisturbed(
    clock: list[float], slow: int, gauge: Gauge | None, fastest_s: float, runs: int
) -> None:
    model = Model(clock, slow)
    assert runtime.time_side_by_side([model], [], budget_s=4.0, at_least=3, gauge=gauge) == [fastest_s]  # type: ignore[list-item]
    assert model.runs == runs


@pytest.mark.parametrize(("budget_s", "runs"), [(100.0, 100), (500.0, 200), (1000.0, 300)])
def test_a_short_model_does_not_take_all_of_a_large_budget(clock: list[float], budget_s: float, runs: int) -> None:
    model = Model(clock, slow=0)
    runtime.time_side_by_side([model], [], budget_s, at_least=3)  # type: ignore[list-item]
    assert model.runs == 1 + runs


def test_each_model_gets_as_many_runs(clock: list[float]) -> None:
    models = [Model(clock, slow=0), Model(clock, slow=4)]
    assert runtime.time_side_by_side(models, [], budget_s=4.0, at_least=3, gauge=GAUGE) == [1.0, 1.0]  # type: ignore[arg-type]
    assert models[0].runs == models[1].runs


def test_a_path_is_no_executable() -> None:
    with pytest.raises(InputError, match=r"load_module\('model.so'\)"):
        runtime.ModelRunner("model.so")


def test_threads_that_silence_native_code_leave_standard_error_as_it_was() -> None:
    inside, left, kept = threading.Event(), threading.Event(), os.dup(2)

    def first() -> None:
        with runtime._quiet_native_stderr():
            inside.set()
            time.sleep(0.1)
        left.set()

    def second() -> None:
        inside.wait()
        with runtime._quiet_native_stderr():
            left.wait()

    threads = [threading.Thread(target=target) for target in (first, second)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert os.path.sameopenfile(2, kept)
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_threads_that_ask_at_once_get_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a forked process do, whose first calls are of one machine."""
    both = threading.Barrier(2)

    class Slow(ThreadPoolExecutor):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(1.0)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(runtime, "_POOLS", {})
    monkeypatch.setattr(runtime, "ThreadPoolExecutor", Slow)
    with ThreadPoolExecutor(2) as callers:
        one, other = callers.map(runtime._thread_with_pool, [3, 3])
    assert one is other


CORES_OF_THREADS = """
import os
import subprocess
import sys
from eqtune.runtime import _thread_with_pool

_thread_with_pool(2).submit(lambda: None).result()
for thread in sorted(map(int, os.listdir("/proc/self/task"))):
    print(thread, sorted(os.sched_getaffinity(thread)))
"""


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs Linux, and two cores")
def test_one_thread_alone_has_the_first_core_where_tvm_binds_none() -> None:
    """The others were started by it, and shared its core: models took twice as long."""
    environment = os.environ | {"TVM_BIND_THREADS": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", CORES_OF_THREADS], env=environment, capture_output=True, text=True, check=True
    )
    cores = sorted(os.sched_getaffinity(0))
    found = [line.split(" ", 1)[1] for line in ended.stdout.splitlines()]
    assert found.count(str(own_cores(2, cores)[:1])) == 1  # the fastest, where clocks differ
    assert found.count(str(cores)) == len(found) - 1
