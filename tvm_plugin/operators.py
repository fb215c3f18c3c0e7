"""Operators of Relax that eqtune brings, registered with TVM from Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import ir, relax

__all__ = ["register_operator"]


def register_operator(
    name: str,
    description: str,
    infer_type: Callable[[relax.Call, relax.BlockBuilder], Any],
    legalize: Callable[[relax.BlockBuilder, relax.Call], Any],
) -> None:
    """Make a pure operator known to TVM, with what its calls' types are and what `LegalizeOps` makes of them.

    Registering one again changes nothing.
    """
    if name in ir.Op.list_op_names():
        return
    tvm_ffi.get_global_func("ir.RegisterOp")(name, description)
    for attribute, value in {
        "FInferType": infer_type,
        "FLegalize": legalize,
        "FPurity": True,
        "TScriptPrinterName": name,
    }.items():
        ir.register_op_attr(name, attribute, value)
