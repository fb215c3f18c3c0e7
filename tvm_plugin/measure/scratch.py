"""Directories for a measurer's files. What a killed process left behind goes when the next one begins."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows, where the system's own tidying up has to do
    fcntl = None  # type: ignore[assignment]

__all__ = ["Scratch"]

PREFIX = "eqtune-"

LOCK = "in-use"
"""A file that a living owner holds a lock on. The system lets go of it however the owner ends."""

YOUNG_S = 60.0
"""A directory may be younger than its lock."""


class Scratch(tempfile.TemporaryDirectory[str]):
    """A temporary directory that is removed when it is cleaned up, or once its owner was killed. What its owner forks
    leaves it alone.

    Parameters
    ----------
    kind : str
        What it is for; part of its name.
    """

    _finalizer: weakref.finalize[Any, Any]

    def __init__(self, kind: str) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        super().__init__(prefix=f"{PREFIX}{kind}-", ignore_cleanup_errors=True)
        self._owner = os.getpid()
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _remove, self._owner, self.name)
        self._lock = (Path(self.name) / LOCK).open("w")
        _lock(self._lock)

    def cleanup(self) -> None:
        """Remove it. May be repeated."""
        if os.getpid() == self._owner:
            super().cleanup()
        self._lock.close()


def _remove(owner: int, directory: str) -> None:
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


def _remove_abandoned(directory: Path) -> None:
    for lock in directory.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):  # somebody else's, or just removed
            if time.time() - lock.stat().st_mtime < YOUNG_S:
                continue
            with lock.open("r+") as file:
                if _lock(file):
                    shutil.rmtree(lock.parent, ignore_errors=True)


def _lock(file: IO[str]) -> bool:
    """Whether this process holds the lock now."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
