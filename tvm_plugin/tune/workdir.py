"""The work directory: records, log, summary. Running again in the same one resumes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from ..dtypes import numpy_dtype
from ..errors import InputError, RecordError
from ..files import replacing
from ..records import RecordDatabase

__all__ = ["WorkDirectory"]

LOGGER = logging.getLogger("eqtune")


class _Log(logging.FileHandler):
    """A log that stops growing where the disk is full; Python's own prints a traceback for every line lost."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Lose the line."""


class _UsersHandlers(logging.Handler):
    """Gives the root logger's handlers what they would get without a log, which wants more than most users do."""

    def __init__(self) -> None:
        super().__init__(LOGGER.getEffectiveLevel())
        self._before = LOGGER.level, LOGGER.propagate
        LOGGER.setLevel(min(self.level, logging.INFO))
        LOGGER.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Pass it on; without any handler, Python would print warnings among the progress."""
        if self._before[1] and logging.root.handlers:
            logging.root.callHandlers(record)

    def close(self) -> None:
        """Leave the logger as it was."""
        level, LOGGER.propagate = self._before
        LOGGER.setLevel(level)
        super().close()


class WorkDirectory:
    """Everything one tuning run keeps on disk.

    `records.sqlite` (measurements and cached facts), `eqtune.log`, `summary.json` (what the report shows) and
    `reference-*.npz` (what the outputs must be).

    Parameters
    ----------
    path : str or path
        Created when it does not exist. Raises InputError when it cannot be written, or is no path at all.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):  # not a folder called None, nor this one
            raise InputError(f"work_dir is the path of a folder, not {path!r}")
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handler = _Log(self.path / "eqtune.log", encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"the work directory {str(self.path)!r} cannot be written ({error.strerror}); "
                "choose another with work_dir"
            ) from error
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._handler = handler
        if not any(isinstance(other, _UsersHandlers) for other in LOGGER.handlers):
            LOGGER.addHandler(_UsersHandlers())
        LOGGER.addHandler(handler)
        try:
            self.database = RecordDatabase(self.path / "records.sqlite")
        except BaseException:
            self._close_log()
            raise

    def __enter__(self) -> WorkDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the database and the log."""
        self.database.close()
        self._close_log()

    def _close_log(self) -> None:
        LOGGER.removeHandler(self._handler)
        self._handler.close()
        if not any(isinstance(handler, _Log) for handler in LOGGER.handlers):  # another run may go on
            for handler in [handler for handler in LOGGER.handlers if isinstance(handler, _UsersHandlers)]:
                LOGGER.removeHandler(handler)
                handler.close()

    def write_json(self, name: str, value: Mapping[str, Any]) -> Path:
        """Write `value` to the file `name`, atomically. Raises RecordError where that fails; an older file stays."""
        path = self.path / name
        text = json.dumps(value, indent=1)
        with self._replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
        return path

    def load_reference(self, key: str) -> list[NDArray[Any]] | None:
        """The outputs saved under `key`, or None."""
        path = self._reference_path(key)
        if not path.exists():
            return None
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return [_as_stored(name, arrays[name]) for name in sorted(arrays.files)]
        except (ValueError, OSError, EOFError, BadZipFile) as error:
            LOGGER.warning("%s cannot be read (%s); the reference is computed again", path.name, error)
            return None

    def save_reference(self, key: str, outputs: list[NDArray[Any]]) -> None:
        """Keep the untuned model's outputs, so that a resumed run need not wait for them."""
        path = self._reference_path(key)
        with self._replacing(path) as temporary:
            np.savez(temporary, **dict(_to_store(index, value) for index, value in enumerate(outputs)))  # type: ignore[arg-type]

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[Path]:
        """As `files.replacing`, with an error of the records."""
        try:
            with replacing(path) as temporary:
                yield temporary
        except OSError as error:
            raise RecordError(
                f"{path} cannot be written ({error.strerror or error}); what was measured is kept: run again to go on"
            ) from error

    def _reference_path(self, key: str) -> Path:
        return self.path / f"reference-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.npz"


def _to_store(index: int, output: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    """A name and numbers that numpy's files can hold: bfloat16 as integers."""
    if output.dtype.name != "bfloat16":
        return f"output{index:04d}", output
    return f"output{index:04d}.bfloat16", output.view(np.uint16)


def _as_stored(name: str, array: NDArray[Any]) -> NDArray[Any]:
    return array.view(numpy_dtype("bfloat16")) if name.endswith(".bfloat16") else array
