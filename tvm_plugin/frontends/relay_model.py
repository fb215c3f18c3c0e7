"""Relay programs, as text or JSON; `eqtune.relay` reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tvm

from .. import relay
from ..errors import InputError
from ..relay.activations import RecognizeActivations
from ..relay.unflatten import UnflattenProducts
from .imported import ImportedModel, check_shapes, imported_model

__all__ = ["from_relay_file", "from_relay_json_file", "from_relay_text", "is_relay_json"]

_MAX_FILE_BYTES = 4 << 30
"""Weights in a text are base64 in memory, twice: more belongs into a .params file."""


def is_relay_json(path: Path) -> bool:
    """Whether a TVM that had Relay saved a .json file: since 0.20, nodes have "type" where they had "type_key"."""
    with path.open("rb") as file:
        return b'"type_key"' in file.read(1 << 16)


def from_relay_text(
    text: str, params: Mapping[str, Any] | None, shapes: Mapping[str, Sequence[int]], name: str = "relay"
) -> ImportedModel:
    """Convert a program; see `eqtune.relay.from_text`."""
    check_shapes(shapes, list(shapes))
    return _imported(relay.from_text(text, params, shapes), name)


def from_relay_file(path: Path, params: Mapping[str, Any] | None, shapes: Mapping[str, Sequence[int]]) -> ImportedModel:
    """Load a .relay file.

    Raises
    ------
    InputError
        It is no text, too large, or no program that can be converted; the message names the file.
    """
    with _naming(path):
        return from_relay_text(_read(path), params, shapes, path.stem)


def from_relay_json_file(
    path: Path, params: Mapping[str, Any] | None, shapes: Mapping[str, Sequence[int]]
) -> ImportedModel:
    """Load a .json file of TVM 0.8 to 0.19; errors as `from_relay_file`."""
    check_shapes(shapes, list(shapes))
    with _naming(path):
        return _imported(relay.from_json(_read(path), params, shapes), path.stem)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file before the place in an error's message."""
    try:
        yield
    except relay.RelayError as error:
        error.args = (f"{path}: {error}",)
        raise


def _imported(mod: tvm.IRModule, name: str) -> ImportedModel:
    return imported_model(tvm.transform.Sequential([UnflattenProducts(), RecognizeActivations()])(mod), name, "relay")


def _read(path: Path) -> str:
    size = path.stat().st_size
    if size > _MAX_FILE_BYTES:
        raise InputError(
            f"{path} has {size:,} bytes; {_MAX_FILE_BYTES:,} are allowed. Keep weights in a file of their own, written "
            "with relay.save_param_dict, and give it with --params"
        )
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors on Windows put a mark of the encoding first
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text: {error}") from error
