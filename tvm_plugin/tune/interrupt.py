"""Ctrl-C that is never lost."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupt"]


class Interrupt:
    """Remembers SIGINT while it is entered, and raises KeyboardInterrupt as usual.

    The exception alone is not enough: raised inside a callback that C code calls (XGBoost's data iterators), Python
    prints it and goes on. Outside the main thread, where no handler can be set, nothing changes.
    """

    def __init__(self) -> None:
        self.happened = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.happened = True
        signal.default_int_handler(signum, frame)
