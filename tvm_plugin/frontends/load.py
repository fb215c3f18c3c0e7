"""One door for every kind of model, told apart by type and suffix."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import tvm

from ..errors import InputError, MissingExtraError
from .imported import ImportedModel, imported_model

__all__ = ["load_model"]

KINDS = (
    "a Relax IRModule, a torch.nn.Module with example_inputs, a torch.export.ExportedProgram, an onnx.ModelProto, "
    'the path of a .onnx, .pt2, .json or .relay file, the text of a Relay program, or "zoo:NAME"'
)

_WITH_WEIGHTS = (("torch", "Module"), ("torch", "ExportedProgram"), ("onnx", "ModelProto"))


def load_model(
    model: Any,
    example_inputs: Sequence[Any] | None = None,
    params: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> ImportedModel:
    """Import a model, with its weights as constants and every shape concrete.

    torch and onnx are imported only for models that come from them. Weights are shared with the model where that is
    possible, not copied: do not train it further while it is tuned.

    Parameters
    ----------
    model
        A Relax IRModule; a torch.nn.Module; a torch.export.ExportedProgram; an onnx.ModelProto; a path ending in .onnx,
        .pt2 (torch.export.save), .relay (`mod.astext()` of a Relay module) or .json (tvm.ir.save_json of a Relax
        module, or of a Relay module by TVM 0.8 to 0.19); the text of a Relay program; or "zoo:NAME" (`eqtune.zoo`),
        with options as in "zoo:bert_base:sequence_length=128".
    example_inputs
        Positional inputs of a torch.nn.Module, for torch.export.
    params
        Weights by name, for a Relax module or a Relay program that takes them as parameters.
    shapes
        Concrete shapes by input name, for inputs with symbolic dimensions.

    Raises
    ------
    InputError
        There is no such file, it is corrupt, or an argument does not belong to this kind of model.
    MissingExtraError
        torch or onnx is needed and not installed.
    UnsupportedModelError
        The model has something that cannot be tuned: dynamic shapes, a foreign dtype, an unknown operator.
    """
    shapes = dict(shapes or {})
    if example_inputs is not None and not _derives_from(model, "torch", "Module"):
        raise InputError("example_inputs are for a torch.nn.Module; every other kind of model knows its inputs")
    if isinstance(model, tvm.IRModule):
        from .relax_model import from_relax

        return from_relax(model, params, shapes)
    if isinstance(model, str) and model.startswith("zoo:"):
        if params or shapes:
            raise InputError(
                f'{model!r} has weights and shapes; give options as in "zoo:bert_base:sequence_length=128"'
            )
        return _zoo_model(model)
    if isinstance(model, str) and model.lstrip().startswith(("#[version", "def @", "fn (", "free_var %")):
        from .relay_model import from_relay_text

        return from_relay_text(model, params, shapes)
    if isinstance(model, str | Path):
        return _load_file(Path(model), params, shapes)
    if params and any(_derives_from(model, *kind) for kind in _WITH_WEIGHTS):
        raise InputError(
            f"params are for Relax modules and Relay programs; a {type(model).__name__} has its own weights"
        )
    if _derives_from(model, "torch", "Module"):
        from .torch_model import from_module

        return from_module(model, example_inputs, shapes)
    if _derives_from(model, "torch", "ExportedProgram"):
        from .torch_model import from_exported_program

        return from_exported_program(model, shapes)
    if _derives_from(model, "onnx", "ModelProto"):
        return _onnx_door().from_onnx(model, shapes)
    raise InputError(f"cannot load a model from {type(model).__name__}; give {KINDS}")


def _zoo_model(text: str) -> ImportedModel:
    from .. import zoo

    _, name, *assignments = text.split(":")
    options: dict[str, Any] = {}
    for assignment in assignments:
        option, _, value = assignment.partition("=")
        try:
            options[option] = ast.literal_eval(value)
        except (SyntaxError, ValueError) as error:
            raise InputError(
                f'{assignment!r} in {text!r} is not OPTION=VALUE, as in "zoo:bert_base:sequence_length=128"'
            ) from error
    return imported_model(zoo.relax(name, **options), ":".join([name, *assignments]), "zoo")


def _derives_from(model: Any, package: str, name: str) -> bool:
    """Whether a class of that package and name is among the model's, without importing the package."""
    return any(base.__name__ == name and base.__module__.split(".")[0] == package for base in type(model).__mro__)


def _onnx_door() -> ModuleType:
    try:
        from . import onnx_model
    except ImportError as error:
        raise MissingExtraError('ONNX models need onnx and onnxruntime: pip install "eqtune[onnx]"') from error
    return onnx_model


def _load_file(path: Path, params: Mapping[str, Any] | None, shapes: Mapping[str, Sequence[int]]) -> ImportedModel:
    if not path.is_file():
        raise InputError(f"no file {path}; give {KINDS}")
    if path.suffix == ".relay":
        from .relay_model import from_relay_file

        return from_relay_file(path, params, shapes)
    if path.suffix == ".json":
        from .relax_model import from_relax_json
        from .relay_model import from_relay_json_file, is_relay_json

        return (from_relay_json_file if is_relay_json(path) else from_relax_json)(path, params, shapes)
    if params and path.suffix in (".onnx", ".pt2"):
        raise InputError(f"params are for Relax modules and Relay programs; {path} has its own weights")
    if path.suffix == ".onnx":
        return _onnx_door().from_onnx_file(path, shapes)
    if path.suffix == ".pt2":
        try:
            from .torch_file import load_program
            from .torch_model import from_exported_program
        except ImportError as error:
            raise MissingExtraError('.pt2 files need PyTorch: pip install "eqtune[torch]"') from error
        return from_exported_program(load_program(path), shapes, path.stem)
    if path.suffix in (".pt", ".pth"):
        raise InputError(
            f"{path} is a pickle, which may run any code when it is loaded. Export the model instead: "
            'torch.export.save(torch.export.export(model, example_inputs), "model.pt2")'
        )
    raise InputError(f"{path} has an unknown suffix {path.suffix!r}; give {KINDS}")
