"""From graphs to executables: kernels and their schedules as passes, memory, and code."""

from .. import _checked  # noqa: F401 - refuses versions that cannot work
