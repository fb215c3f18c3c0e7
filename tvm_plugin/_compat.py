"""Refuse combinations of packages that are known to crash, before any of them is loaded."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from .errors import SetupError

__all__ = ["check_versions"]

_ADVICE = 'pip install "apache-tvm>=0.27,<0.28" "apache-tvm-ffi>=0.1.14.post0,<0.1.15"'


def check_versions() -> None:
    """Check the installed versions by their metadata alone: nothing is imported.

    Raises
    ------
    SetupError
        When apache-tvm is missing or is not 0.27, or when apache-tvm-ffi is 0.1.15.*, with which TVM 0.27 ends
        in a segmentation fault as soon as a module is serialised. The message holds the command that repairs it.
    """
    tvm, ffi = _installed("apache-tvm"), _installed("apache-tvm-ffi")
    if tvm is None or ffi is None:
        missing = "apache-tvm" if tvm is None else "apache-tvm-ffi"
        raise SetupError(f"{missing} is not installed; run: {_ADVICE}")
    if _release(tvm)[:2] != (0, 27):
        raise SetupError(f"apache-tvm {tvm} is installed, eqtune works with 0.27; run: {_ADVICE}")
    if _release(ffi)[:3] == (0, 1, 15):
        raise SetupError(f"apache-tvm {tvm} crashes with apache-tvm-ffi {ffi}, it works with 0.1.14; run: {_ADVICE}")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 0.1.14.post1 -> (0, 1, 14)."""
    numbers = []
    for part in text.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
