"""Why a captured graph is left to PyTorch."""

from __future__ import annotations

__all__ = ["Stays"]


class Stays(Exception):
    """Why a graph is not tuned; empty where nobody need know."""
