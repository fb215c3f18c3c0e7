"""Importing TVM in half the time, in processes that only build and run kernels."""

from __future__ import annotations

import sys

__all__ = ["leave_out"]

_OPTIONAL = (
    "torch",  # which tvm_ffi imports, where it is installed, to exchange tensors with it: a second
    # Distributed runs. The wheel lacks what their Python classes stand for, and the first error that C++ raises reads
    # the symbols of all libraries for its traceback: 0.3 s of 0.7.
    "tvm.runtime.disco",
)


def leave_out() -> None:
    """Make TVM do without what it can do without. Call it before anything imports TVM."""
    for name in _OPTIONAL:
        sys.modules[name] = None  # type: ignore[assignment]
