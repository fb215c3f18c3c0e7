"""One line that moves: best so far, trials, seconds left."""

from __future__ import annotations

import logging
import math
import sys
import time
from typing import TextIO

from tqdm import tqdm

from ..report.units import duration
from .budget import Budget

__all__ = ["Progress"]

LOGGER = logging.getLogger(__name__)


class Progress:
    """Reports a search: a moving line on a terminal, a plain line now and then in a pipe, nothing when quiet.

    Parameters
    ----------
    enabled : bool
        False is quiet.
    stream : text stream, optional
        Standard error unless given.
    every_s : float
        Seconds between plain lines.

    Attributes
    ----------
    note : str
        What every line of progress starts with.
    """

    def __init__(self, enabled: bool = True, stream: TextIO | None = None, every_s: float = 10.0) -> None:
        self._stream = stream or sys.stderr
        self._enabled = enabled
        self._every_s = every_s
        self._last = -every_s
        self._bar: tqdm | None = None
        self.note = ""

    def say(self, text: str) -> None:
        """A line that stays, also in the log."""
        LOGGER.info("%s", text)
        if self._enabled:
            if self._bar is not None:
                self._bar.clear()
            print(text, file=self._stream, flush=True)

    def update(self, stage: str, latency_s: float, trials: int, failed: int, budget: Budget) -> None:
        """Show how far the search is. `latency_s` is the estimate for the whole model, `inf` while unknown."""
        if not self._enabled:
            return
        left = budget.seconds_left
        best = f"best {duration(latency_s)}" if math.isfinite(latency_s) else "no best yet"
        text = (
            f"{self.note}{stage} | {best} | {trials}"
            + ("" if budget.trials is None else f"/{budget.trials}")
            + f" trials, {failed} failed | "
            + (f"{budget.elapsed_s:.0f} s" if left is None else f"{max(0.0, left):.0f} s left")
        )
        if self._stream.isatty():
            if self._bar is None:
                self._bar = tqdm(file=self._stream, bar_format="{desc}", leave=False)
            self._bar.set_description_str(text)
        elif time.monotonic() - self._last >= self._every_s:
            self._last = time.monotonic()
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """End the moving line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
