"""Kernels as text and as hashes. TVM is imported when a function is called, not with the module.

A *workload* is a kernel in one form: an IRModule that holds a single PrimFunc "main", without a global symbol and
marked as free of aliasing (MetaSchedule does the same, so that its databases and ours name the same kernels).
Workloads with one hash are structurally equal and name their blocks alike. Traces find blocks by name, so what was
recorded for a hash replays on every kernel with that hash.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from eqtune.errors import InputError, RecordError

from .object_graph import KERNEL_TYPES, checked_graph

__all__ = ["as_workload", "deserialize_workload", "serialize_workload", "workload_hash"]

_ENTRY = "main"


def as_workload(kernel: Any) -> Any:
    """The kernel in the form that is hashed and stored.

    Parameters
    ----------
    kernel : tvm.tirx.PrimFunc or tvm.ir.IRModule
        A kernel, or a module that holds exactly one. It is not changed.

    Returns
    -------
    tvm.ir.IRModule
        One PrimFunc "main" without `global_symbol`, with `tirx.noalias`; other attributes are kept, among them
        `layout_free_buffers`.

    Raises
    ------
    InputError
        When `kernel` is something else.
    """
    import tvm
    from tvm import tirx

    function = kernel
    if isinstance(kernel, tvm.IRModule):
        names = [var.name_hint for var in kernel.get_global_vars()]
        if len(names) != 1:
            raise InputError(f"a workload is a module with one PrimFunc, but this one holds {sorted(names)}")
        function = kernel[names[0]]
    if not isinstance(function, tirx.PrimFunc):
        raise InputError(f"a workload is a PrimFunc or a module with one PrimFunc, not {type(function).__name__}")
    attributes = dict(function.attrs.items()) if function.attrs else {}
    if "global_symbol" in attributes or not attributes.get("tirx.noalias"):
        # A copy in depth: `with_attr` shares the body, and a schedule of a module that nobody else holds edits
        # such a body in place, in the caller's function too.
        function = tvm.ir.load_json(tvm.ir.save_json(function))
        function = function.without_attr("global_symbol").with_attr("tirx.noalias", True)
    return tvm.IRModule({_ENTRY: function})


def workload_hash(kernel: Any) -> str:
    """Hash of `as_workload(kernel)`, 16 hexadecimal digits; the same in every process.

    Structure, shapes, dtypes, attributes and the names of blocks count; names of the function, of buffers and of
    variables do not. Of constants that are part of the kernel only shape and dtype count.
    """
    import tvm_ffi

    workload = as_workload(kernel)
    structure = tvm_ffi.structural_hash(workload, skip_tensor_content=True)
    key = json.dumps([structure, _block_names(workload)])
    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()


def serialize_workload(kernel: Any) -> str:
    """`as_workload(kernel)` as TVM's JSON text."""
    import tvm

    return str(tvm.ir.save_json(as_workload(kernel)))


def deserialize_workload(text: str) -> Any:
    """The inverse of `serialize_workload`: an IRModule with one PrimFunc "main".

    Raises
    ------
    RecordError
        When the text is not such a module.
    """
    import tvm

    try:
        mod = tvm.ir.load_json(checked_graph(text, KERNEL_TYPES))
    except (RecordError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:  # TVM's, on bad text
        raise RecordError(f"a stored workload cannot be read: {_first_line(error)}") from error
    try:
        return as_workload(mod)
    except InputError as error:
        raise RecordError(f"a stored workload is not a kernel: {error}") from error


def _block_names(workload: Any) -> list[str]:
    """Inner blocks before those around them."""
    import tvm_ffi
    from tvm import s_tir

    names: list[str] = []
    tvm_ffi.structural_walk(workload, (s_tir.SBlock, lambda block: names.append(str(block.name_hint))), order="post")
    return names


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
