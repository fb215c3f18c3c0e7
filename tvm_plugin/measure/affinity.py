"""A core of its own for each thread of TVM's pool, and for the thread that calls it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from ..files import text_of

__all__ = ["bind_pool", "on_core", "on_first_core", "own_cores", "start_pool"]

CPUS = Path("/sys/devices/system/cpu")

FASTEST_CORES, ONE_CORE_EACH = 1, -2
"""How TVM binds a pool (`ThreadGroup::AffinityMode` in its threading_backend.h): to the machine's cores, the fastest
first, whether this process may run there or not; or to those that it is given."""


def own_cores(threads: int, allowed: Collection[int]) -> list[int]:
    """A core for each thread of a pool, the caller's first; empty where fewer are allowed than there are threads.

    The fastest first, as TVM takes them, but one hardware thread of each core before the second of any.
    """
    return list(_ranked(CPUS, frozenset(allowed))[:threads]) if len(allowed) >= threads else []


def bind_pool(threads: int, allowed: Collection[int], workers: int = 0) -> int:
    """Let the calling thread's pool have so many threads, on cores of their own. Returns the one that is the caller's.

    TVM takes the machine's first cores, whichever are allowed: with `taskset -c 1,2`, a thread of its pool shared core
    1 with the caller. It still does where fewer are allowed than there are threads. The caller is bound to all of them.

    Parameters
    ----------
    threads : int
    allowed : collection of int
        Cores that they may run on.
    workers : int
        Threads that the pool was started with, where these are more.
    """
    import tvm

    own = own_cores(max(threads, workers), allowed)
    mode, cores = (ONE_CORE_EACH, own) if own else (FASTEST_CORES, [min(allowed)] * threads)  # whose number counts
    tvm.get_global_func("runtime.config_threadpool")(mode, threads, [str(core) for core in cores])
    return cores[0]


def start_pool() -> int | None:
    """Let TVM start the calling thread's pool. The caller keeps its cores. May be repeated.

    The pool's threads have the cores of who starts them until TVM binds them, which it does not with
    TVM_BIND_THREADS=0: started from one core, all of them shared it. And TVM binds the caller, who also compiles, to as
    many cores as the pool has threads. Returns the core that is the caller's; None where the system binds no thread.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    import tvm

    cores = os.sched_getaffinity(0)
    try:
        started = int(tvm.get_global_func("runtime.NumThreads")())
        asked = os.environ.get("TVM_NUM_THREADS", "")  # of which TVM uses as many as the machine has fastest cores
        threads = max(started, int(asked) if asked.isdecimal() else 0)
        return bind_pool(threads, cores) if len(cores) >= threads else min(cores)
    finally:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def on_first_core() -> Iterator[None]:
    """Bind the calling thread to a core that its pool, which is started, leaves free, for as long as this is entered.

    TVM runs the first share of the work in the caller. One that happens to wake up on the core of a pool's thread
    shares it for tens of milliseconds: kernels then took 1.75 times as long, or not, by chance.
    """
    core = start_pool()
    with contextlib.nullcontext() if core is None else on_core(core):
        yield


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Bind the calling thread to a core, for as long as this is entered. Linux only."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@functools.cache
def _ranked(cpus: Path, cores: frozenset[int]) -> tuple[int, ...]:
    """Logical cores by how many of the same core come before them, then by their highest clock, then by number."""
    before: Counter[str] = Counter()
    places = []
    for core in sorted(cores):
        siblings = text_of(cpus / f"cpu{core}" / "topology" / "thread_siblings_list") or str(core)
        clock_khz = text_of(cpus / f"cpu{core}" / "cpufreq" / "cpuinfo_max_freq")
        places.append((before[siblings], -int(clock_khz) if clock_khz.isdecimal() else 0, core))
        before[siblings] += 1
    return tuple(core for _, _, core in sorted(places))
