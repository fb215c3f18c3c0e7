"""TFLite models by TVM's importer; LiteRT's interpreter, where it is installed, tells what they compute."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tflite
from numpy.typing import NDArray
from tvm.relax.frontend.tflite import from_tflite

from ...errors import InputError, UnsupportedModelError
from ...runtime import first_line
from ..imported import ImportedModel, Reference, imported_model
from ..relax_model import with_weights_bound
from .float_weights import with_float_weights
from .operators import Converter
from .quantised import IN_FLOATS

__all__ = ["from_tflite_file"]


def from_tflite_file(path: Path, shapes: Mapping[str, Sequence[int]]) -> ImportedModel:
    """Load a .tflite file.

    Raises
    ------
    InputError
        The file is no TFLite model, or `shapes` are given: a TFLite model has those that it was converted with.
    UnsupportedModelError
        It has operators that TVM's importer cannot translate.
    """
    if shapes:
        raise InputError("a TFLite model has the shapes that it was converted with; convert it with other ones")
    model, content = _read(path)
    try:
        mod = from_tflite(model, op_converter=Converter)
    except UnsupportedModelError:
        raise
    except Exception as error:  # the importer fails by assertions and errors of any kind
        raise UnsupportedModelError(f"TVM's importer cannot translate {path.stem}: {first_line(error)}") from error
    mod = with_weights_bound(mod)
    return imported_model(mod, path.stem, "tflite", *_references(content))


def _read(path: Path) -> tuple[Any, bytes]:
    """The model, every tensor and operator of which can be looked up, and the file's content."""
    try:
        content = path.read_bytes()
        if not tflite.Model.ModelBufferHasIdentifier(content, 0):
            raise InputError(f"{path} is not a TFLite model (it has no TFL3 in its header)")
        model = _Model(tflite.Model.GetRootAsModel(content, 0))
        for graph in map(model.Subgraphs, range(model.SubgraphsLength())):
            for tensor in map(graph.Tensors, range(graph.TensorsLength())):
                _ = tensor.ShapeAsNumpy(), tensor.Name(), model.Buffers(tensor.Buffer()).DataAsNumpy()
            for node in map(graph.Operators, range(graph.OperatorsLength())):
                _ = node.InputsAsNumpy(), node.OutputsAsNumpy(), model.OperatorCodes(node.OpcodeIndex())
    except InputError:
        raise
    except Exception as error:  # what reads flatbuffers trusts them
        raise InputError(f"{path} is not a readable TFLite model: {first_line(error)}") from error
    return model, content


class _Model(tflite.Model):
    """Whose tensors have names of their own: TVM's importer tells them apart by these, which a file need not."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.Init(model._tab.Bytes, model._tab.Pos)

    def Subgraphs(self, j: int) -> _Graph:
        """One of its graphs."""
        return _Graph(super().Subgraphs(j))


class _Graph(tflite.SubGraph):
    def __init__(self, graph: Any) -> None:
        super().__init__()
        self.Init(graph._tab.Bytes, graph._tab.Pos)
        self._names: list[bytes | None] = []
        taken: set[bytes] = set()
        for number in range(self.TensorsLength()):
            name = super().Tensors(number).Name() or None  # without one, TVM's importer makes one of the number
            while name is not None and name in taken:
                name += f"_{number}".encode()
            self._names.append(name)
            if name is not None:
                taken.add(name)

    def Tensors(self, j: int) -> _Tensor:
        """One of its tensors."""
        return _Tensor(super().Tensors(j), self._names[j])


class _Tensor(tflite.Tensor):
    def __init__(self, tensor: Any, name: bytes | None) -> None:
        super().__init__()
        self.Init(tensor._tab.Bytes, tensor._tab.Pos)
        self._name = name

    def Name(self) -> bytes | None:
        """What no other tensor of the graph is called."""
        return self._name


def _references(content: bytes) -> tuple[Reference | None, Reference | None]:
    """What the interpreter computes, as by default and without XNNPACK; floats wherever they are floats here."""
    if importlib.util.find_spec("ai_edge_litert") is None:
        return None, None
    from ai_edge_litert.interpreter import OpResolverType

    content = with_float_weights(content, IN_FLOATS)
    return _reference(content, OpResolverType.AUTO), _reference(
        content, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    )


def _reference(content: bytes, kernels: Any) -> Reference:
    @functools.cache
    def interpreter() -> Any:
        from ai_edge_litert.interpreter import Interpreter

        loaded = Interpreter(model_content=content, experimental_op_resolver_type=kernels)
        loaded.allocate_tensors()
        return loaded

    def reference(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
        loaded = interpreter()
        loaded.reset_all_variables()  # the states of recurrent layers, which begin anew here
        for details, array in zip(loaded.get_input_details(), arrays, strict=True):
            loaded.set_tensor(details["index"], array)
        loaded.invoke()
        return [np.array(loaded.get_tensor(details["index"])) for details in loaded.get_output_details()]

    return reference
