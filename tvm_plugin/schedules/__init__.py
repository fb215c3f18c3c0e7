"""Schedules of kernels: where they come from, and how kernels get them, weights packed ahead of time."""

from .. import _checked  # noqa: F401 - refuses versions that cannot work
