"""Operators that TVM lacks, or computes wrongly for some arguments, written as others: for importers and `tasks`."""

from .. import _checked  # noqa: F401 - refuses versions that cannot work
