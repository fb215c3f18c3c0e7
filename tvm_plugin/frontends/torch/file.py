"""Reading .pt2 archives (torch.export.save) without running what they contain."""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.export

from ...errors import InputError
from ...runtime import first_line
from .export import quiet

__all__ = ["load_program"]

# torch.load then takes weights_only=True whatever torch.export.load asks for.
_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"

_ADVICE = 'write one with torch.export.save(torch.export.export(model, example_inputs), "model.pt2")'


def load_program(path: Path) -> torch.export.ExportedProgram:
    """Load what `torch.export.save` wrote.

    `torch.export.load` unpickles where the archive asks for it, and loads compiled code. Here tensors are read with
    weights_only, and archives with pickled objects or shared libraries are refused before they are opened. The graph
    itself is still parsed by torch, so prefer files whose origin you know.

    Raises
    ------
    InputError
        The file is no such archive, it is cut short, or holds objects or code.
    """
    _refuse_code(path)
    with _weights_only(), quiet():
        try:
            return torch.export.load(path)
        except Exception as error:  # a corrupt archive fails anywhere in torch
            raise InputError(f"{path} cannot be read by torch {torch.__version__}: {first_line(error)}") from error


def _refuse_code(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            configs = [name for name in names if name.endswith("_constants_config.json")]
            entries = [entry for name in configs for entry in json.loads(archive.read(name))["config"].values()]
            are_tensors = [entry["path_name"].startswith("tensor_") for entry in entries]
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not an archive of torch.export.save ({error}); {_ADVICE}") from error
    if any(name.count("/") == 1 and name.endswith("/data.pkl") for name in names):
        raise InputError(f"{path} is not an archive of torch.export.save, but a pickle of torch.save; {_ADVICE}")
    if any("/aotinductor/" in name or name.endswith((".so", ".dll", ".dylib")) for name in names):
        raise InputError(f"{path} holds compiled code, not a program; save it with torch.export.save")
    if not all(are_tensors):
        raise InputError(f"{path} holds pickled objects, which may run any code; only tensors are read")


@contextlib.contextmanager
def _weights_only() -> Iterator[None]:
    before = os.environ.get(_WEIGHTS_ONLY)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_WEIGHTS_ONLY]
        else:
            os.environ[_WEIGHTS_ONLY] = before
