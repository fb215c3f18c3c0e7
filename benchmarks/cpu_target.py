"""The CPU that a benchmark compiles for."""

from __future__ import annotations

from typing import Any

__all__ = ["cpu_target"]


def cpu_target(cpu: str | None, threads: int) -> Any:
    """The target of a processor as LLVM names it, such as "x86-64-v3"; None is this machine's."""
    from eqtune.gpu_machine import resolve_target
    from eqtune.machine import detect_target

    return resolve_target({"kind": "llvm", "mcpu": cpu}, threads) if cpu else detect_target(threads)
