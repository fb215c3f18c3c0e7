"""Ctrl-C that is never lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupt"]


class Interrupt:
    """Remembers SIGINT while it is entered, and raises KeyboardInterrupt as usual.

    The exception alone is not enough: raised inside a callback that C code calls, Python prints it and goes on.
    Outside the main thread, where no handler can be set, nothing changes.
    """

    def __init__(self) -> None:
        self.happened = False
        self._before: Any = None
        self._is_held = False

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Only remember a first SIGINT meanwhile, for what is short and has such callbacks; a second one is raised."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        again, self.happened = self.happened, True
        if again or not self._is_held:
            signal.default_int_handler(signum, frame)
