"""Search spaces: what a kernel computes, and the sketches that schedule it.

Attributes are loaded when first used, because the generator needs TVM and the protocols do not.
"""

from __future__ import annotations

from typing import Any

from .base import Decision, DecisionSpace, Knob, Points, Sketch, Space
from .hardware import Hardware

__all__ = ["Decision", "DecisionSpace", "Hardware", "Knob", "Points", "Sketch", "Space", "build_space"]


def __getattr__(name: str) -> Any:
    if name == "build_space":
        from .generate import build_space

        return build_space
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
