"""TVM's own schedules for GPUs, dlight's, at their best: what tuning is compared with."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import tvm
from tvm.target import Target

from ..machine import target_json

__all__ = ["as_dlight_expects", "default_schedule"]


def default_schedule(mod: Any, target: Any) -> Any:
    """What dlight makes of the kernel "main": a module with schedules for GPUs that need no tuning."""
    from tvm.s_tir import dlight

    rules = dlight.gpu
    with as_dlight_expects(target):
        return dlight.ApplyDefaultSchedule(
            rules.Matmul(),
            rules.GEMV(),
            rules.Reduction(),
            rules.GeneralReduction(),
            rules.Fallback(),
        )(tvm.IRModule({"main": mod["main"]}))


@contextlib.contextmanager
def as_dlight_expects(target: Any) -> Iterator[None]:
    """Make a GPU the current target, in the way in which dlight uses its tensor cores, and soon.

    It takes "sm_90a" for an architecture without any. For products of float16 and int8 it imports TVM's intrinsics, a
    hundred functions, whose parser lists the frames of its caller with their source lines, which nobody reads: 23 s,
    and 2 s without the lines.
    """
    fields = json.loads(target_json(target))
    stack = inspect.stack
    inspect.stack = _frames
    try:
        with Target(fields | {"arch": str(fields["arch"]).rstrip("af")}):
            yield
    finally:
        inspect.stack = stack


def _frames(context: int = 0) -> list[inspect.FrameInfo]:
    """`inspect.stack` without source lines."""
    found: list[inspect.FrameInfo] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        found.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
        frame = frame.f_back
    return found
