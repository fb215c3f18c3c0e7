"""Tasks: the distinct fused kernels of a model, and how a model becomes kernels."""

from .. import _checked  # noqa: F401 - refuses versions that cannot work
from .extract import extract_tasks, known_tasks, task_of
from .flops import count_bytes, count_flops, count_integer_operations
from .lossy import lossy_products, permit_lossy_products
from .lower import lower_to_kernels
from .task import Task

__all__ = [
    "Task",
    "count_bytes",
    "count_flops",
    "count_integer_operations",
    "extract_tasks",
    "known_tasks",
    "lossy_products",
    "lower_to_kernels",
    "permit_lossy_products",
    "task_of",
]
