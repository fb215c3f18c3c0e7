"""Tasks: the distinct fused kernels of a model, and how a model becomes kernels."""

from .extract import extract_tasks, task_of
from .flops import count_bytes, count_flops, count_integer_operations
from .lower import lower_to_kernels
from .task import Task

__all__ = [
    "Task",
    "count_bytes",
    "count_flops",
    "count_integer_operations",
    "extract_tasks",
    "lower_to_kernels",
    "task_of",
]
