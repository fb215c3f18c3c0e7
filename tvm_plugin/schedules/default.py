"""TVM's own schedules for GPUs, dlight's, at their best: what tuning is compared with."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType, ModuleType
from typing import Any

import tvm
from tvm.target import Target

from ..machine import target_json

__all__ = ["as_dlight_expects", "default_schedule"]

PARSER = "tvm.tirx.script.parser.entry"
"""Where TVM's parser of functions lists the frames of its caller."""

_WITHOUT_LINES = ContextVar("without_lines", default=False)


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
    and 2 s without the lines. Other threads, and whoever else lists frames, get them.
    """
    fields = json.loads(target_json(target))
    parser: Any = importlib.import_module(PARSER)
    if parser.inspect is inspect:
        parser.inspect = _inspect_of_parser()
    before = _WITHOUT_LINES.set(True)
    try:
        with Target(fields | {"arch": str(fields["arch"]).rstrip("af")}):
            yield
    finally:
        _WITHOUT_LINES.reset(before)


def _inspect_of_parser() -> ModuleType:
    """The module `inspect`, with another `stack`; it stays, as threads come and go."""
    module = ModuleType("inspect")
    module.__dict__.update(vars(inspect), stack=_frames)
    return module


def _frames(context: int = 1) -> list[inspect.FrameInfo]:
    """`inspect.stack`, without source lines where a thread does without."""
    if not _WITHOUT_LINES.get():
        return inspect.stack(context)[1:]
    found: list[inspect.FrameInfo] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        found.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
        frame = frame.f_back
    return found
