"""One door for every kind of model, told apart by type and suffix."""

from __future__ import annotations

import ast
import importlib.util
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import tvm

from ..errors import InputError, MissingExtraError
from .imported import ImportedModel, imported_model

__all__ = ["check_model", "load_model"]

KINDS = (
    "a Relax IRModule, a torch.nn.Module with example_inputs, a torch.export.ExportedProgram, an onnx.ModelProto, "
    'the path of a .onnx, .pt2, .tflite, .json or .relay file, the text of a Relay program, or "zoo:NAME"'
)

_WITH_WEIGHTS = (("torch", "Module"), ("torch", "ExportedProgram"), ("onnx", "ModelProto"))

_KERAS_ADVICE = (
    'Keras models are exported first: model.export("model.onnx", format="onnx"), with an input_signature of concrete '
    "shapes, or converted to a .tflite file"
)

_SUFFIXES = (".onnx", ".pt2", ".tflite", ".json", ".relay")

_NEEDS_ONNX = 'ONNX models need onnx and onnxruntime: pip install "eqtune[onnx]"'
_NEEDS_TORCH = '.pt2 files need PyTorch: pip install "eqtune[torch]"'
_NEEDS_TFLITE = 'TFLite models need the package tflite: pip install "eqtune[tflite]"'
_NEEDED = {
    ".onnx": (("onnx", "onnxruntime"), _NEEDS_ONNX),
    ".pt2": (("torch",), _NEEDS_TORCH),
    ".tflite": (("tflite",), _NEEDS_TFLITE),
}
"""Suffix to the packages that reading such a file takes, and what to say where one is missing."""

_READING = threading.RLock()
"""torch.export, its decompositions and what silences them change the whole process: one thread reads at a time."""


def check_model(model: Any) -> None:
    """Refuse what can be refused before anything is read: a type, a name or option of the zoo, a path, a suffix.

    Raises
    ------
    InputError
        As `load_model` does.
    MissingExtraError
        torch, onnx, onnxruntime or tflite is needed for such a file and not installed.
    """
    if isinstance(model, str) and model.startswith("zoo:"):
        from .. import zoo

        name, options = _zoo_arguments(model)
        zoo.check(name, **options)
    elif isinstance(model, str) and _is_relay_text(model):
        return
    elif isinstance(model, str | Path):
        _check_file(Path(model))
    elif not isinstance(model, tvm.IRModule) and not any(_derives_from(model, *kind) for kind in _WITH_WEIGHTS):
        if _derives_from(model, "keras", "Model"):  # with PyTorch behind it, it is a torch.nn.Module, too
            raise InputError(_KERAS_ADVICE)
        raise InputError(f"cannot load a model from {type(model).__name__}; give {KINDS}")


def load_model(
    model: Any,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    function: str | None = None,
    any_size: bool = False,
) -> ImportedModel:
    """Import a model, with its weights as constants and, unless sizes may be open, every shape concrete.

    torch and onnx are imported only for models that come from them. Weights are shared with the model where that is
    possible, not copied: do not train it further while it is tuned.

    Parameters
    ----------
    model
        A Relax IRModule; a torch.nn.Module; a torch.export.ExportedProgram; an onnx.ModelProto; a path ending in .onnx,
        .pt2 (torch.export.save), .tflite, .relay (`mod.astext()` of a Relay module) or .json (tvm.ir.save_json of a
        Relax module, or of a Relay module by TVM 0.8 to 0.19); the text of a Relay program; or "zoo:NAME"
        (`eqtune.zoo`), with options as in "zoo:bert_base:sequence_length=128".
    example_inputs
        Inputs of a torch.nn.Module, for torch.export: positional, or by keyword where they are a mapping.
    params
        Weights by name, for a Relax module or a Relay program that takes them as parameters.
    shapes
        Concrete shapes by input name, for inputs with symbolic dimensions.
    function
        Which function of a Relax module, where it has several; unless given "main", or the only one.
    any_size
        Symbolic dimensions of inputs for which there are no `shapes` stay open. Not in Relay programs and .tflite.

    Raises
    ------
    InputError
        There is no such file, it is corrupt, or an argument does not belong to this kind of model.
    MissingExtraError
        torch, onnx or tflite is needed and not installed.
    UnsupportedModelError
        The model has something that cannot be tuned: shapes that depend on data, or are open without `any_size`, a
        foreign dtype, an unknown operator.
    """
    for argument, given in (("shapes", shapes), ("params", params)):
        if given is not None and not isinstance(given, Mapping):
            raise InputError(f"{argument} is a mapping by name, not {type(given).__name__}")
    shapes = dict(shapes or {})
    if example_inputs is not None and not _derives_from(model, "torch", "Module"):
        raise InputError("example_inputs are for a torch.nn.Module; every other kind of model knows its inputs")
    check_model(model)
    with _READING:
        return _read(model, example_inputs, params, shapes, function, any_size)


def _read(
    model: Any,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None,
    params: Mapping[str, Any] | None,
    shapes: dict[str, Sequence[int]],
    function: str | None,
    any_size: bool,
) -> ImportedModel:
    if isinstance(model, tvm.IRModule):
        from .relax_model import from_relax

        return from_relax(model, params, shapes, function=function, any_size=any_size)
    if function is not None and not (isinstance(model, str | Path) and Path(model).suffix == ".json"):
        raise InputError("function is for Relax modules, which may have several; every other kind of model is one")
    if isinstance(model, str) and model.startswith("zoo:"):
        if params or shapes:
            raise InputError(
                f'{model!r} has weights and shapes; give options as in "zoo:bert_base:sequence_length=128"'
            )
        return _zoo_model(model)
    if isinstance(model, str) and _is_relay_text(model):
        from .relay_model import from_relay_text

        return from_relay_text(model, params, shapes)
    if isinstance(model, str | Path):
        return _load_file(Path(model), params, shapes, function, any_size)
    if params:
        raise InputError(
            f"params are for Relax modules and Relay programs; a {type(model).__name__} has its own weights"
        )
    if _derives_from(model, "torch", "Module"):
        from .torch.model import from_module

        return from_module(model, example_inputs, shapes)
    if _derives_from(model, "torch", "ExportedProgram"):
        from .torch.model import from_exported_program

        return from_exported_program(model, shapes, any_size=any_size)
    return _onnx_door().from_onnx(model, shapes, any_size=any_size)


def _is_relay_text(text: str) -> bool:
    return text.lstrip().startswith(("#[version", "def @", "fn (", "free_var %"))


def _zoo_model(text: str) -> ImportedModel:
    from .. import zoo

    name, options = _zoo_arguments(text)
    return imported_model(zoo.relax(name, **options), text.removeprefix("zoo:"), "zoo")


def _zoo_arguments(text: str) -> tuple[str, dict[str, Any]]:
    """ "zoo:bert_base:sequence_length=128" -> "bert_base", {"sequence_length": 128}."""
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
    return name, options


def _derives_from(model: Any, package: str, name: str) -> bool:
    """Whether a class of that package and name is among the model's, without importing the package."""
    return any(base.__name__ == name and base.__module__.split(".")[0] == package for base in type(model).__mro__)


def _onnx_door() -> ModuleType:
    try:
        from .onnx import model
    except ImportError as error:
        raise MissingExtraError(_NEEDS_ONNX) from error
    return model


def _check_file(path: Path) -> None:
    try:
        is_file = path.is_file()
    except OSError as error:  # the name is too long, as of a text, or a folder is another user's
        raise InputError(f"cannot look for a file {str(path)[:80]!r}: {error.strerror}; give {KINDS}") from error
    if not is_file:
        from .. import zoo

        if str(path) in zoo.MODELS:
            raise InputError(f'no file {path}; the model of the zoo is "zoo:{path}"')
        raise InputError(f"{f'{path} is a folder' if path.is_dir() else f'no file {path}'}; give {KINDS}")
    if path.suffix in (".pt", ".pth"):
        raise InputError(
            f"{path} is a pickle, which may run any code when it is loaded. Export the model instead: "
            'torch.export.save(torch.export.export(model, example_inputs), "model.pt2")'
        )
    if path.suffix in (".h5", ".keras"):
        raise InputError(f"{path} cannot be read. {_KERAS_ADVICE}")
    if path.suffix not in _SUFFIXES:
        raise InputError(f"{path} has an unknown suffix {path.suffix!r}; give {KINDS}")
    packages, message = _NEEDED.get(path.suffix, ((), ""))
    if any(importlib.util.find_spec(package) is None for package in packages):
        raise MissingExtraError(message)


def _load_file(
    path: Path,
    params: Mapping[str, Any] | None,
    shapes: Mapping[str, Sequence[int]],
    function: str | None,
    any_size: bool,
) -> ImportedModel:
    if path.suffix == ".relay":
        from .relay_model import from_relay_file

        return from_relay_file(path, params, shapes)
    if path.suffix == ".json":
        from .relax_model import from_relax_json
        from .relay_model import from_relay_json_file, is_relay_json

        if not is_relay_json(path):
            return from_relax_json(path, params, shapes, function, any_size)
        if function is not None:
            raise InputError(f"function is for Relax modules; {path} is a Relay program")
        return from_relay_json_file(path, params, shapes)
    if params:
        raise InputError(f"params are for Relax modules and Relay programs; {path} has its own weights")
    if path.suffix == ".tflite":
        from .tflite.model import from_tflite_file

        return from_tflite_file(path, shapes)
    if path.suffix == ".onnx":
        return _onnx_door().from_onnx_file(path, shapes, any_size)
    try:
        from .torch.file import load_program
        from .torch.model import from_exported_program
    except ImportError as error:
        raise MissingExtraError(_NEEDS_TORCH) from error
    return from_exported_program(load_program(path), shapes, path.stem, any_size=any_size)
