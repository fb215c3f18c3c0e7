"""Allocators: which kernel of a model to measure next, and when to stop.

| name | module | what it does |
|---|---|---|
| `gradient` | `gradient` | the default: where the next round should save most (Ansor's task scheduler) |
| `round-robin` | `round_robin` | every kernel in turn |

Both finish a kernel by the rules of `stopping`. They see a `TaskStatus` of each kernel and nothing else, and the same
statuses give the same choice.
"""

from __future__ import annotations

from .base import Allocation, Allocator, TaskStatus
from .registry import create, names

__all__ = ["Allocation", "Allocator", "TaskStatus", "create", "names"]
