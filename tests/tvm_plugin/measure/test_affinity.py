"""Which cores the threads of TVM's pool get, and who calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import tvm

from eqtune.measure import affinity, rpc_server
from eqtune.measure.affinity import on_first_core, own_cores, start_pool

TOPOLOGY, CLOCK = "topology/thread_siblings_list", "cpufreq/cpuinfo_max_freq"


def machine(folder: Path, cores: Mapping[int, Mapping[str, str]]) -> Path:
    """A machine as Linux describes it."""
    for core, files in cores.items():
        for name, text in files.items():
            file = folder / f"cpu{core}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("threads", "allowed", "cores"),
    [(2, {0, 1}, [0, 1]), (2, {1, 2}, [1, 2]), (2, {9, 4, 7}, [4, 7]), (1, {3}, [3]), (3, {1, 2}, [])],
)
def test_cores_are_of_those_that_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, allowed: Collection[int], cores: list[int]
) -> None:
    monkeypatch.setattr(affinity, "CPUS", tmp_path)  # as in a container that tells nothing of them
    assert own_cores(threads, allowed) == cores


def test_hardware_threads_of_one_core_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}
    cpus = machine(tmp_path, {core: {TOPOLOGY: pair} for core, pair in pairs.items()})
    monkeypatch.setattr(affinity, "CPUS", cpus)
    assert [own_cores(threads, range(4)) for threads in (2, 3)] == [[0, 2], [0, 2, 1]]
    assert own_cores(2, {1, 2, 3}) == [1, 2]


def test_fast_cores_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {core: {CLOCK: "1800000" if core < 4 else "2400000"} for core in range(6)}
    monkeypatch.setattr(affinity, "CPUS", machine(tmp_path, clocks))
    assert own_cores(3, range(6)) == [4, 5, 0]
    assert own_cores(2, {0, 1, 5}) == [5, 0]


class Pool:
    """TVM's, of so many threads: notes what it is told."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.told: list[tuple[int, int, list[str]]] = []

    def function(self, name: str) -> Callable[..., Any]:
        known = {"runtime.NumThreads": lambda: self.threads, "runtime.config_threadpool": self.configure}
        return known[name]

    def configure(self, mode: int, threads: int, cores: list[str]) -> None:
        self.told.append((mode, threads, cores))


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The caller may run on cores 1 and 2; to which it is bound from now on."""
    cores = [{1, 2}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores[-1], raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, new: cores.append(set(new)), raising=False)
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    return cores


def test_a_caller_that_may_not_run_on_the_first_core_shares_none_with_its_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: list[set[int]]
) -> None:
    """With `taskset -c 1,2`, TVM would bind its thread to core 1, where the caller is."""
    pool = Pool(2)
    monkeypatch.setattr(affinity, "CPUS", tmp_path)
    monkeypatch.setattr(tvm, "get_global_func", pool.function)
    with on_first_core():
        assert bound[-1] == {1}
    assert pool.told == [(-2, 2, ["1", "2"])]
    assert bound[-1] == {1, 2}


@pytest.mark.parametrize(("asked", "threads"), [("2", 2), ("", 1), ("4", None)])
def test_a_pool_has_the_threads_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, bound: list[set[int]], asked: str, threads: int | None
) -> None:
    """Of two cores that are faster than the others, TVM uses those alone; of too few cores, it is told nothing."""
    pool = Pool(1)
    monkeypatch.setattr(tvm, "get_global_func", pool.function)
    monkeypatch.setenv("TVM_NUM_THREADS", asked)
    assert start_pool() in (1, 2)
    assert [count for _, count, _ in pool.told] == ([] if threads is None else [threads])
    assert bound[-1] == {1, 2}


def test_a_session_of_a_server_runs_on_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: list[set[int]]
) -> None:
    """The client has told TVM how many threads, and TVM has taken the machine's first cores."""
    pool = Pool(2)
    monkeypatch.setattr(affinity, "CPUS", tmp_path)
    monkeypatch.setattr(tvm, "get_global_func", pool.function)
    monkeypatch.setenv("TVM_NUM_THREADS", "3")  # of the server
    for name in ("restore_crash_signals", "limit_memory"):
        monkeypatch.setattr(rpc_server, name, lambda *_: None)
    rpc_server._prepare_session({4, 5, 6})
    assert pool.told == [(-2, 2, ["4", "5", "6"])]
    assert bound[-1] == {4}


CORES_OF_THREADS = """
import os
import sys
from pathlib import Path

from eqtune.measure import affinity
from eqtune.measure.lean_import import leave_out

leave_out()
from eqtune.runtime import _thread_with_pool

affinity.CPUS = Path(sys.argv[1])
print(sorted(_thread_with_pool(2).submit(os.sched_getaffinity, 0).result()))
for thread in map(int, os.listdir("/proc/self/task")):
    print(sorted(os.sched_getaffinity(thread)))
"""


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs Linux, and two cores")
def test_threads_of_a_model_have_the_cores_that_were_chosen(tmp_path: Path) -> None:
    """The second core is the faster one: TVM's thread gets the other."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    cpus = machine(tmp_path, {first: {CLOCK: "1"}, second: {CLOCK: "2"}})
    command = [sys.executable, "-c", CORES_OF_THREADS, str(cpus)]
    environment = {name: value for name, value in os.environ.items() if name != "TVM_BIND_THREADS"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    caller, *found = ended.stdout.splitlines()
    assert caller == str([second])
    assert found.count(str([first])) == found.count(caller) == 1
