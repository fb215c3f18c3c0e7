"""Modules of which some kernels have symbolic sizes, and most do not."""

from __future__ import annotations

from tvm import ir

from ..tasks import Task, extract_tasks
from .kernel import is_symbolic

__all__ = ["known_tasks"]


def known_tasks(mod: ir.IRModule) -> list[Task]:
    """The tasks (`extract_tasks`) whose sizes are known: there is a space of schedules for no others."""
    return [task for task in extract_tasks(mod) if not is_symbolic(task.mod["main"])]
