"""The whole way of a model or of single kernels: search, apply, check, time."""

from __future__ import annotations

from .. import _checked  # noqa: F401 - refuses versions that cannot work
from .kernels import tune_kernels
from .model import tune_model
from .result import KernelsResult, TaskResult, TuneResult

__all__ = ["KernelsResult", "TaskResult", "TuneResult", "tune_kernels", "tune_model"]
