"""Keep the calling thread off the cores to which TVM binds its pool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["on_first_core"]


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
