"""What every front end returns, and the checks that all models pass before they are tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any, Literal

import numpy as np
import tvm
import tvm_ffi
from numpy.typing import NDArray
from tvm import relax

from ..dtypes import is_floating, numpy_dtype
from ..errors import InputError, UnsupportedModelError
from ..recurrent import OPERATOR as RECURRENT
from ..recurrent import Layer
from ..relax_ir.tensors import sizes_read, symbols_of
from ..repairs.bounded_indices import with_bounded_indices
from ..repairs.partial_scatters import with_partial_scatters
from ..repairs.wide_norms import with_norms_of_doubles
from .chosen import with_choices_apart
from .einsum import with_einsum_products
from .normalize import (
    with_blocked_convolutions,
    with_boolean_logic,
    with_channels_first,
    with_corners_apart,
    with_no_division_by_zero,
    with_out_dtypes,
    with_places_of_extrema,
    with_plain_powers,
    with_signs_of_unsigned,
    with_small_integers_sorted,
    with_unequal_nans,
    with_what_bfloat16_lacks,
    with_wide_sums,
)
from .open_size import OpenSize, open_sizes_of
from .whole_rows import with_whole_rows

__all__ = [
    "ANY_SIZE",
    "KNOWN_SHAPES",
    "ImportedModel",
    "InputInfo",
    "Reference",
    "check_shapes",
    "check_static",
    "check_tunable",
    "foreign_dtype",
    "imported_model",
    "is_number",
    "random_input",
]

ANY_SIZE = 'or compile it for any size, unmeasured, by relax_pipeline="eqtune"'
"""What a message about symbolic shapes ends with."""

KNOWN_SHAPES = 'give the shapes of all inputs, shapes={"NAME": (1, 128)} or --shape NAME=1,128, for that size alone'
"""What a message about a model ends with that needs them."""

Reference = Callable[..., list[NDArray[Any]]]
Source = Literal["relax", "relay", "torch", "onnx", "tflite", "zoo"]

_COMPUTED = tuple(
    getattr(tvm.tirx, name) for name in ("Add", "Sub", "Mul", "FloorDiv", "FloorMod", "Min", "Max", "Select")
)

SUPPORTED_DTYPES = ("bfloat16", "float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool")

NOT_IMPORTED = {"onnx": "bfloat16"}
"""Dtypes that tuning knows, but that the reference (ONNX Runtime) cannot handle."""


_ADVICE = {
    "bfloat16": "; ONNX Runtime, which models are compared with, does not compute in it: give the model in float16 or "
    "float32, or as it is in PyTorch"
}
"""What to do about a dtype that is not allowed."""


@dataclass(frozen=True)
class InputInfo:
    """One input: its name, shape and dtype.

    `high` is set for an integer input that looks up rows of a table, or tells how long sequences are: its values must
    be in [0, high). Open sizes are what they are called, or computed as.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    high: int | None = None


@dataclass(frozen=True)
class ImportedModel:
    """A model ready to be tuned.

    Attributes
    ----------
    mod
        Weights are constants; the function "main" takes the inputs alone, in the order of `inputs`.
    name
        Short, for tables.
    inputs
        Every shape is concrete, unless sizes were left open.
    reference
        What the model computes according to torch or ONNX Runtime: takes numpy arrays in the order of `inputs`, returns
        the list of outputs. None where there is no such thing.
    source
        Where the model came from.
    unfused
        The same as `reference`, operator by operator, where there is such a way: how far the two are apart tells how
        much the roundings of a quantised model matter.
    examples
        Of each input, what its user gave as an example; empty where nobody did.
    """

    mod: tvm.IRModule
    name: str
    inputs: tuple[InputInfo, ...]
    reference: Reference | None
    source: Source
    unfused: Reference | None = None
    examples: tuple[NDArray[Any], ...] = ()

    @cached_property
    def open_sizes(self) -> dict[str, OpenSize]:
        """By name, what inputs leave open, and what that may be, as far as known."""
        return open_sizes_of(self.mod["main"])

    def at(self, sizes: Mapping[str, int]) -> ImportedModel:
        """The same model with its open sizes known."""
        binding = {symbol: tvm.tirx.IntImm("int64", sizes[str(symbol)]) for symbol in symbols_of(self.mod["main"])}
        mod = _with_numbers(relax.transform.BindSymbolicVars(binding, "main")(self.mod))
        inputs = tuple(
            replace(info, shape=_shape(parameter.ty))
            for info, parameter in zip(self.inputs, mod["main"].params, strict=True)
        )
        return replace(self, mod=mod, inputs=inputs)

    def random_inputs(self, seed: int = 0) -> list[NDArray[Any]]:
        """Arrays for all inputs: standard normal, whole numbers below `high`, booleans, or any bytes.

        Wider integers are those of the example, unless all of it is one number: not all may be possible. Without one,
        and without a `high`, they are 0 or 1: they may be masks, or indices of anything.
        """
        generator = np.random.default_rng(seed)
        arrays = [random_input(generator, info) for info in self.inputs]
        return [_example_of(*pair) for pair in zip(arrays, self.examples, strict=True)] if self.examples else arrays


def random_input(generator: np.random.Generator, info: InputInfo) -> NDArray[Any]:
    """An array for one input, of known sizes; see `ImportedModel.random_inputs`."""
    dtype, shape = numpy_dtype(info.dtype), [int(extent) for extent in info.shape]
    if is_floating(info.dtype):
        return np.asarray(generator.standard_normal(shape), dtype)
    if info.high is None and info.dtype in ("int8", "uint8"):
        limits = np.iinfo(dtype)
        return np.asarray(generator.integers(limits.min, limits.max, shape, dtype, endpoint=True))
    return np.asarray(generator.integers(0, info.high or 2, shape), dtype)


def _example_of(array: NDArray[Any], example: NDArray[Any]) -> NDArray[Any]:
    """The example in the place of random integers, if it tells more than a shape."""
    tells = str(array.dtype) in ("int32", "int64") and example.shape == array.shape and example.size > 0
    return np.array(example) if tells and example.min() < example.max() else array


def imported_model(
    mod: tvm.IRModule,
    name: str,
    source: Source,
    reference: Reference | None = None,
    unfused: Reference | None = None,
    examples: tuple[NDArray[Any], ...] = (),
    any_size: bool = False,
) -> ImportedModel:
    """Check and normalize `mod`, and describe it; with `any_size`, sizes of its inputs may stay open."""
    dtypes = tuple(dtype for dtype in SUPPORTED_DTYPES if dtype != NOT_IMPORTED.get(source))
    check_tunable(mod, dtypes, any_size)
    mod = with_blocked_convolutions(with_channels_first(with_out_dtypes(with_einsum_products(mod))))
    mod = with_small_integers_sorted(with_what_bfloat16_lacks(with_places_of_extrema(with_unequal_nans(mod))))
    mod = with_no_division_by_zero(with_corners_apart(with_plain_powers(with_boolean_logic(mod))))
    mod = with_signs_of_unsigned(mod)
    mod = with_bounded_indices(with_partial_scatters(with_whole_rows(with_norms_of_doubles(mod))))
    if reference is not None:  # whose sums are wide; Relax says itself what it sums in
        mod = with_wide_sums(mod)
    mod = with_choices_apart(mod)
    main = mod["main"]
    bounds = _index_bounds(main)
    inputs = tuple(
        InputInfo(param.name, _shape(param.ty), str(param.ty.dtype), bounds.get(param)) for param in main.params
    )
    return ImportedModel(mod, name, inputs, reference, source, unfused, examples)


def _with_numbers(mod: tvm.IRModule) -> tvm.IRModule:
    """What is computed of numbers in "main" as a number: a slice's end, min(16, 6)."""
    analyzer = tvm.sym.Analyzer()
    simplify = [(kind, analyzer.simplify) for kind in _COMPUTED]
    main = tvm_ffi.structural_map(mod["main"], simplify)
    return tvm.IRModule({**dict(mod.functions_items()), mod.get_global_var("main"): main})


def _shape(ty: relax.TensorType) -> tuple[int | str, ...]:
    return tuple(int(dim) if is_number(dim) else str(dim) for dim in ty.shape)


def foreign_dtype(what: str, dtype: str, allowed: Sequence[str]) -> UnsupportedModelError:
    """The error that says which dtypes `what` may have, and what to do."""
    known = ", ".join(allowed)
    return UnsupportedModelError(
        f"{what} has dtype {dtype or 'unknown'}; allowed here: {known}{_ADVICE.get(dtype, '')}"
    )


def check_tunable(mod: tvm.IRModule, dtypes: Sequence[str] = SUPPORTED_DTYPES, any_size: bool = False) -> None:
    """Refuse what cannot be tuned, by name: dynamic shapes, foreign dtypes, inputs that are not tensors.

    With `any_size`, shapes may be dynamic. They may depend on data where they tell so: are made of a size that the
    model computes.

    Raises
    ------
    InputError
        The module has no Relax function "main".
    UnsupportedModelError
        It has something that eqtune cannot tune.
    """
    functions = [var.name_hint for var, function in mod.functions_items() if isinstance(function, relax.Function)]
    if "main" not in functions:
        found = ", ".join(functions) or "none"
        raise InputError(f'the module has no Relax function "main" (Relax functions: {found}); rename the one to tune')
    main = mod["main"]
    for param in main.params:
        _check_tensor(param.ty, f"input {param.name!r}", dtypes)
        if not any_size:
            check_static(param.ty.shape, f"input {param.name!r}")
    asked = sizes_read(main)
    for var, value in _bindings(main):
        what = f"the result of {_operator(value)} ({var.name})"
        for ty in _parts(var.ty):
            _check_tensor(ty, what, dtypes)
            if not any_size and not all(map(is_number, ty.shape)):  # of inputs whose shapes are known
                raise UnsupportedModelError(f"{what} {_OF_DATA}")
        if _is_choice(value) and not (any_size and var in asked):
            raise UnsupportedModelError(f"{what} {_OF_DATA}: end the model before it, {ANY_SIZE}")


_OF_DATA = "has a shape that depends on data; only static shapes can be tuned"


def _is_choice(value: Any) -> bool:
    """Whether it is as many boxes as are chosen; its type says as many as there are."""
    return _operator(value) == "relax.vision.all_class_non_max_suppression" and value.attrs.output_format == "onnx"


def _parts(ty: tvm.ir.Type) -> list[tvm.ir.Type]:
    """What a result consists of, but for shapes, which are computed with at compile time."""
    if isinstance(ty, relax.TupleType):
        return [part for field in ty.fields for part in _parts(field)]
    return [] if isinstance(ty, relax.ShapeType) else [ty]


def _check_tensor(ty: tvm.ir.Type, what: str, dtypes: Sequence[str]) -> None:
    if not isinstance(ty, relax.TensorType):
        raise UnsupportedModelError(f"{what} is not a tensor but {ty}; only tensors can be tuned")
    if not isinstance(ty.shape, relax.ShapeExpr):  # none, or one that is a variable
        raise UnsupportedModelError(f"{what} {_OF_DATA}")
    if str(ty.dtype) not in dtypes:
        raise foreign_dtype(what, str(ty.dtype or ""), dtypes)


def check_static(shape: Sequence[Any], what: str) -> None:
    """Refuse a shape with extents that are not known."""
    symbolic = [f"dimension {axis} ({dim})" for axis, dim in enumerate(shape) if not is_number(dim)]
    if symbolic:
        raise UnsupportedModelError(
            f"{what} has the dynamic {', '.join(symbolic)}; only static shapes can be tuned. Give the shapes of all "
            f'inputs: shapes={{"NAME": (1, 3, 224, 224)}}, or --shape NAME=1,3,224,224; {ANY_SIZE}'
        )


def is_number(dim: Any) -> bool:
    """Whether an extent is known."""
    return isinstance(dim, int | tvm.tirx.IntImm)


def _operator(value: Any) -> str:
    return value.op.name if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) else type(value).__name__


def _bindings(function: relax.Function) -> Iterator[tuple[relax.Var, relax.Expr]]:
    if not isinstance(function.body, relax.SeqExpr):
        return
    for block in function.body.blocks:
        for binding in block.bindings:
            yield binding.var, getattr(binding, "value", None)


def _index_bounds(function: relax.Function) -> dict[relax.Var, int]:
    """Rows of the table that each integer input looks up, through casts and reshapes of the input; or one more than the
    steps of the sequences whose lengths it tells."""
    origin = {param: param for param in function.params}
    bounds: dict[relax.Var, int] = {}
    for var, value in _bindings(function):
        if not isinstance(value, relax.Call):
            continue
        operator = _operator(value)
        if operator in ("relax.astype", "relax.reshape") and value.args[0] in origin:
            origin[var] = origin[value.args[0]]
        elif operator == "relax.take" and value.args[1] in origin and value.attrs.axis is not None:
            table, indices = value.args
            rows, param = table.ty.shape[int(value.attrs.axis)], origin[indices]
            if is_number(rows):
                bounds[param] = min(int(rows), bounds.get(param, int(rows)))
        elif operator == RECURRENT and value.args[-1] in origin and Layer.of(value).has_lengths:
            param, most = origin[value.args[-1]], Layer.of(value).steps + 1
            bounds[param] = min(most, bounds.get(param, most))
    return bounds


def check_shapes(shapes: Mapping[str, Sequence[int]], names: Sequence[str]) -> None:
    """Refuse shapes for inputs that are not there, what is no shape, and extents below one."""
    for name, shape in shapes.items():
        if name not in names:
            raise InputError(f"no input {name!r} to give a shape to; the inputs are: {', '.join(names)}")
        if isinstance(shape, str) or not isinstance(shape, Iterable) or not all(isinstance(e, Integral) for e in shape):
            raise InputError(f"the shape of input {name!r} is a sequence of whole numbers, not {shape!r}")
        if any(extent < 1 for extent in shape):
            raise InputError(f"the shape {tuple(shape)} of input {name!r} has an extent below 1")
