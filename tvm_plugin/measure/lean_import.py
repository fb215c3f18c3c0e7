"""Importing TVM in half the time or less, where not all of it is needed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["leave_out", "load_routines", "without_torch"]

_OPTIONAL = (
    "torch",  # which tvm_ffi imports, where it is installed, to exchange tensors with it: one to three seconds
    # Distributed runs. The wheel lacks what their Python classes stand for, and the first error that C++ raises reads
    # the symbols of all libraries for its traceback: 0.3 s of 0.7.
    "tvm.runtime.disco",
)


def leave_out() -> None:
    """Make TVM do without what only other processes need: these build and run kernels. Call it before TVM is loaded."""
    for name in _OPTIONAL:
        sys.modules[name] = None  # type: ignore[assignment]
    _list_functions_once()


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Meanwhile, torch counts as not installed, unless it or TVM is loaded already."""
    if "torch" in sys.modules or "tvm" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def _list_functions_once() -> None:
    """Let the fifty modules of TVM that bind C++ functions share a list of them: making it takes a quarter of all."""
    from tvm_ffi import registry

    names: list[str] = []

    def listed() -> list[str]:
        nonlocal names
        name_at = registry.get_global_func("ffi.FunctionListGlobalNamesFunctor")()
        count = name_at(-1)
        if count != len(names):  # functions are added as libraries are loaded, and none is taken away
            names = [name_at(index) for index in range(count)]
        return names

    registry.list_global_func_names = listed


def load_routines() -> None:
    """Load what kernels may call (sorting, random numbers): workers do without the backends that come along with it."""
    from tvm.base import _LOADED_LIBS
    from tvm_ffi.libinfo import load_lib_ctypes

    folder = Path(_LOADED_LIBS["tvm_runtime"]._name).resolve().parent
    with contextlib.suppress(OSError, RuntimeError):  # as TVM does: not every build has it
        _LOADED_LIBS["tvm_runtime_extra"] = load_lib_ctypes(
            "tvm", "tvm_runtime_extra", "RTLD_LOCAL", extra_lib_paths=[folder]
        )
