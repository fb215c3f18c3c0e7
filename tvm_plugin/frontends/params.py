"""Weights from a file, for the command line."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

__all__ = ["load_params"]

_HOW_TO_WRITE = "write one with numpy.savez('weights.npz', NAME=array)"


def load_params(path: str | Path) -> dict[str, NDArray[Any]]:
    """Arrays by name from a .npz file (`numpy.savez`) or a .params file (`relay.save_param_dict`).

    Pickled objects in a .npz file are refused.

    Raises
    ------
    InputError
        There is no such file, or it is something else.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no file {path} with weights; {_HOW_TO_WRITE}")
    if path.suffix == ".params":
        from ..relay import load_params as load_tvm_params

        try:
            return load_tvm_params(path.read_bytes())
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise InputError(f"{path} holds a single array without a name; write weights with numpy.savez")
        with archive:
            return dict(archive)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not a .npz file of plain arrays; {_HOW_TO_WRITE}") from error
