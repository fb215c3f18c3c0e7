"""Stored traces of schedules on a kernel: what `records.traces` does, with the intrinsics that they name."""

from __future__ import annotations

import re
from typing import Any

from tvm.s_tir import ScheduleError

from eqtune.errors import RecordError
from eqtune.records.traces import replay

__all__ = ["replay_schedule"]

_NAMED = re.compile(r'"Tensorize",\[[^\]]*\],\["(eqtune_(?:wgmma|mma|wmma)_[\w.]+)"')


def replay_schedule(text: str, mod: Any) -> Any:
    """A new `tvm.s_tir.Schedule` of `mod` with the trace applied.

    Intrinsics are registered when a schedule needs them, and another process made this one. What threads would do wrong
    is mended (`gpu.words.keep_narrow_sums_apart`). Raises RecordError as `records.traces.replay` does.
    """
    if '"eqtune_dot_' in text:
        from .contraction import dot_intrinsics  # noqa: F401  which registers them
    named = set(_NAMED.findall(text))
    if named:
        from .gpu.intrinsics import register_intrinsic

        for name in named:
            register_intrinsic(name)
    schedule = replay(text, mod)
    if '"threadIdx.' in text:
        from .gpu.words import keep_narrow_sums_apart

        try:
            keep_narrow_sums_apart(schedule)
        except ScheduleError as error:
            raise RecordError(
                "a stored trace reduces a narrow type across threads straight into memory, where they would not wait "
                "for each other"
            ) from error
    return schedule
