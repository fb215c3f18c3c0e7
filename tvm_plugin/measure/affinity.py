"""Keep the calling thread off the cores to which TVM binds its pool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["on_first_core", "start_pool"]


def start_pool() -> None:
    """Let TVM start the calling thread's pool, before `on_first_core`. The caller keeps its cores. May be repeated.

    The pool's threads have the cores of who starts them until TVM binds them, which it does not with TVM_BIND_THREADS=0
    and cannot in a container without the machine's first cores: started from the first core, all of them shared it.
    And TVM binds the caller, who also compiles, to as many cores as the pool has threads.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    import tvm

    cores = os.sched_getaffinity(0)
    try:
        tvm.get_global_func("runtime.NumThreads")()
    finally:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def on_first_core() -> Iterator[None]:
    """Bind the calling thread to the first of its cores, for as long as this is entered.

    TVM binds its pool's threads to the second core and on, and runs the first share of the work in the caller, which it
    leaves free. A caller that happens to wake up on the second core shares it with the pool's thread for tens of
    milliseconds: kernels then took 1.75 times as long, or not, by chance.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
