"""Programs as files: written where they are built, loaded where the device is."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..arguments import BufferSpec, Interface
from ..build import Packing, Program

__all__ = ["export_programs", "interface_fields", "interface_of", "libraries_of", "load_program"]


def export_programs(programs: Mapping[str, Program], directory: Path, kind: str) -> dict[str, dict[str, Any]]:
    """Write the libraries that hold `programs`, each once.

    Parameters
    ----------
    programs : mapping
        By key.
    directory : Path
        Where to write.
    kind : str
        "so" links here; "tar" holds object files, for the far side to link.

    Returns
    -------
    dict
        By key, as JSON: "symbol" and "library", and "packing" where weights are repacked; or the error of a library
        that cannot be written.
    """
    paths: dict[int, str] = {}

    def library(module: Any) -> str:
        if id(module) not in paths:
            path = directory / f"{uuid.uuid4().hex}.{kind}"
            module.export_library(str(path))
            paths[id(module)] = str(path)
        return paths[id(module)]

    exported: dict[str, dict[str, Any]] = {}
    for key, program in programs.items():
        try:
            fields: dict[str, Any] = {"symbol": program.symbol, "library": library(program.module)}
            if program.packing is not None:
                fields["packing"] = _packing_fields(program.packing) | {"library": library(program.pack_module)}
        except Exception as error:  # noqa: BLE001 - the linker's failures are the candidates'
            detail = (str(error).strip() or type(error).__name__).splitlines()[-1]
            fields = {"error": "build_error", "detail": f"cannot be exported: {detail}"[:300]}
        exported[key] = fields
    return exported


def libraries_of(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Paths of the libraries that an exported program needs, each once."""
    packing = fields.get("packing")
    return tuple(dict.fromkeys([fields["library"], *([packing["library"]] if packing else [])]))


def load_program(fields: Mapping[str, Any], load: Callable[[str], Any]) -> Program:
    """The inverse of `export_programs`; `load` gives the module of a library's path."""
    packing_fields = fields.get("packing")
    module = load(fields["library"])
    if packing_fields is None:
        return Program(module, fields["symbol"])
    packed = _specs(packing_fields["packed"])
    packing = Packing(None, tuple(packing_fields["sources"]), packed, packing_fields["key"])
    pack_module = load(packing_fields["library"])
    return Program(module, fields["symbol"], packing, pack_module.get_function(packing_fields["symbol"]), pack_module)


def interface_fields(interface: Interface) -> dict[str, Any]:
    """The interface of a kernel as JSON."""
    return {
        "params": [[list(spec.shape), spec.dtype] for spec in interface.params],
        "outputs": list(interface.outputs),
        "index_bound": interface.index_bound,
        "reduction": interface.reduction,
        "factors": interface.factors,
        "quantizes": interface.quantizes,
    }


def interface_of(fields: Mapping[str, Any]) -> Interface:
    """What `interface_fields` wrote; which inputs are weights stays behind: devices elsewhere time no cold ones."""
    return Interface(
        _specs(fields["params"]),
        tuple(fields["outputs"]),
        fields["index_bound"],
        fields["reduction"],
        str(fields.get("factors", "")),
        quantizes=bool(fields.get("quantizes")),
    )


def _specs(fields: Sequence[Sequence[Any]]) -> tuple[BufferSpec, ...]:
    return tuple(BufferSpec(tuple(shape), dtype) for shape, dtype in fields)


def _packing_fields(packing: Packing) -> dict[str, Any]:
    return {
        "symbol": packing.symbol,
        "key": packing.key,
        "sources": list(packing.sources),
        "packed": [[list(spec.shape), spec.dtype] for spec in packing.packed],
    }
