"""Paths, and files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import InputError

__all__ = ["as_path", "replacing", "text_of"]


def as_path(value: Any, meant: str) -> Path:
    """`value` as a path. Raises InputError, which begins with what is `meant`, for what is none."""
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"{meant}, not {value!r}")
    return Path(value)


def text_of(path: Path) -> str:
    """The text of one of the system's files; "" where it is not there: not every system, or container, has them."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path`, of this process alone, for a file that takes its place once it is written.

    Its suffix is that of `path`, by which writers choose a format; its permissions are those of the file before. Of a
    link, it takes the place of what that leads to; devices and pipes stay, and are written to themselves.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        yield path
        return
    suffix, path = path.suffix, Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.stem[:40]}-{os.getpid()}-{secrets.token_hex(4)}{suffix}")  # names have limits
    try:
        yield temporary
        with contextlib.suppress(OSError):  # where there is none yet, or another user's
            temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
