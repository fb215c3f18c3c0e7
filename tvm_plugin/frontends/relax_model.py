"""Relax modules, as objects or saved JSON: bind weights and symbolic dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ..errors import InputError, RecordError
from ..records.object_graph import check_order
from .imported import ImportedModel, check_shapes, imported_model, is_number

__all__ = ["bind_shapes", "from_relax", "from_relax_json", "read_module", "with_weights_bound"]


def from_relax_json(
    path: Path,
    params: Mapping[str, Any] | None,
    shapes: Mapping[str, Sequence[int]],
    function: str | None = None,
    any_size: bool = False,
) -> ImportedModel:
    """`from_relax` of what `read_module` reads; raises as they do."""
    return from_relax(read_module(path), params, shapes, path.stem, function, any_size)


def read_module(path: Path) -> tvm.IRModule:
    """Load what `tvm.ir.save_json(mod)` wrote.

    Raises
    ------
    InputError
        The file is not a module of this version of TVM.
    """
    try:
        text = path.read_text(encoding="utf-8")
        check_order(text)  # TVM follows references in circles until its stack is full
        mod = tvm.ir.load_json(text)
    except (RecordError, ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"{path} is not a module saved with tvm.ir.save_json by TVM {tvm.__version__}: {reason[-1]}"
        ) from error
    if not isinstance(mod, tvm.IRModule):
        raise InputError(f"{path} holds {type(mod).__name__}, not an IRModule")
    return mod


def from_relax(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    shapes: Mapping[str, Sequence[int]],
    name: str = "relax",
    function: str | None = None,
    any_size: bool = False,
) -> ImportedModel:
    """Bind `params` by name, and the symbolic dimensions that `shapes` determines. `mod` itself stays as it is.

    With `any_size`, others may stay open.

    Weights that an importer left in the function's attribute "params" are bound too. What is tuned is `function`, or
    the module's only one, or "main"; it is called "main" then.

    Raises
    ------
    InputError
        There is no such function, or there are several, none of them "main"; or something does not fit the function.
    """
    mod = with_weights_bound(_as_main(mod, function))
    if params:
        mod = _bind_params(mod, params)
    if shapes:
        mod = bind_shapes(mod, shapes)
    _check_nothing_is_missing(mod)
    return imported_model(mod, name, "relax", any_size=any_size)


def _as_main(mod: tvm.IRModule, function: str | None) -> tvm.IRModule:
    """The module with one of its Relax functions as "main", and what that one calls."""
    found = [var.name_hint for var, value in mod.functions_items() if isinstance(value, relax.Function)]
    names = ", ".join(sorted(found))
    if not found:
        raise InputError("the module has no Relax function")
    if function is None and "main" not in found and len(found) != 1:
        raise InputError(
            f"the module has no function main; its Relax functions are: {names}. Say which to tune: "
            'function="NAME", or --function NAME'
        )
    function = function or ("main" if "main" in found else found[0])
    if function not in found:
        raise InputError(f"the module has no Relax function {function!r}; its Relax functions are: {names}")
    if function == "main":
        return mod
    needed = {var: mod[var] for var in _called_by(mod, function)}
    return tvm.IRModule({**needed, tvm.ir.GlobalVar("main"): mod[function].with_attr("global_symbol", "main")})


def _called_by(mod: tvm.IRModule, function: str) -> set[tvm.ir.GlobalVar]:
    """The functions that one calls, and those that these call."""
    called: set[tvm.ir.GlobalVar] = set()
    waiting = [mod[function]]

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, tvm.ir.GlobalVar) and expr not in called:
            called.add(expr)
            waiting.append(mod[expr])

    while waiting:
        value = waiting.pop()
        if isinstance(value, relax.Function):
            relax.analysis.post_order_visit(value, visit)
    return called


def with_weights_bound(mod: tvm.IRModule) -> tvm.IRModule:
    """With weights that an importer left in the attribute "params" of "main" as constants."""
    main = mod["main"]
    if main.attrs is None or "params" not in main.attrs:
        return mod
    expected = len(main.attrs["params"]) + int(main.attrs.get("num_input", 0))
    if len(main.params) < expected:  # of a TFLite model, where the attribute repeats what are constants
        return tvm.IRModule({**dict(mod.functions_items()), mod.get_global_var("main"): main.without_attr("params")})
    mod, detached = relax.frontend.detach_params(mod)
    weights = detached["main"]
    names = [param.name for param in main.params][len(main.params) - len(weights) :]
    return relax.transform.BindParams("main", dict(zip(names, weights, strict=True)))(mod)


def _bind_params(mod: tvm.IRModule, params: Mapping[str, Any]) -> tvm.IRModule:
    by_name = {param.name: param for param in mod["main"].params}
    bound = {}
    for name, value in params.items():
        if name not in by_name:
            raise InputError(f"no parameter {name!r} in main; its parameters are: {', '.join(by_name)}")
        array = value if isinstance(value, tvm.runtime.Tensor) else tvm.runtime.tensor(np.asarray(value, order="C"))
        wanted = by_name[name].ty
        given = relax.TensorType(array.shape, array.dtype)
        if str(wanted.dtype) != str(given.dtype) or not _fits(wanted, tuple(array.shape)):
            raise InputError(f"parameter {name!r} is {wanted}, but params has {given}")
        bound[name] = array
    return relax.transform.BindParams("main", bound)(mod)


def _fits(ty: relax.TensorType, shape: tuple[int, ...]) -> bool:
    if ty.shape is None or len(ty.shape) != len(shape):
        return False
    return all(int(dim) == extent for dim, extent in zip(ty.shape, shape, strict=True) if is_number(dim))


def bind_shapes(mod: tvm.IRModule, shapes: Mapping[str, Sequence[int]]) -> tvm.IRModule:
    """Give the symbolic dimensions of inputs the extents that `shapes` has for them."""
    by_name = {param.name: param for param in mod["main"].params}
    check_shapes(shapes, list(by_name))
    extents: dict[Any, int] = {}
    for name, shape in shapes.items():
        ty = by_name[name].ty
        if not _fits(ty, tuple(shape)):
            raise InputError(f"input {name!r} is {ty}, which the shape {tuple(shape)} does not fit")
        for dim, extent in zip(ty.shape, shape, strict=True):
            if isinstance(dim, tvm.tirx.Var) and extents.setdefault(dim, extent) != extent:
                raise InputError(f"the symbolic dimension {dim} would be both {extents[dim]} and {extent}")
    if not extents:
        return mod
    binding = {dim: tvm.tirx.IntImm("int64", extent) for dim, extent in extents.items()}
    return relax.transform.BindSymbolicVars(binding, "main")(mod)


def _check_nothing_is_missing(mod: tvm.IRModule) -> None:
    main = mod["main"]
    num_input = int(main.attrs["num_input"]) if main.attrs is not None and "num_input" in main.attrs else None
    if num_input is not None and num_input < len(main.params):
        missing = [param.name for param in main.params][num_input:]
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise InputError(
            f'main takes {len(missing)} weights as parameters ({shown}): give them as params={{"NAME": array}}'
        )
