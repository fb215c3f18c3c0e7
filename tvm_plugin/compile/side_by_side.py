"""Compile the kernels of a module on all cores: LLVM takes ten seconds for a large network on one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tvm
from tvm import ir, relax, tirx, transform

from ..gpu_machine import is_gpu
from ..machine import core_count, runs_here
from ..measure.cuda.code import compiling_as_measured

__all__ = ["build"]

FEWEST = 8
"""Kernels that are worth a module of their own."""


def build(mod: ir.IRModule, target: Any, config: Mapping[str, Any], calls_compiled: bool = False) -> relax.VMExecutable:
    """`relax.build` of a module that went through its pipeline, with its kernels in one library for each core.

    Parameters
    ----------
    mod : tvm.ir.IRModule
        Lowered to the virtual machine. Kernels of a GPU become machine code as measured candidates do.
    target : tvm.target.Target
    config : mapping
        Of the `PassContext`.
    calls_compiled : bool
        Whether the functions that call the kernels become machine code, too, instead of bytecode: 0.15 us less a call,
        for 2 to 8 ms of compiling each. Such code finds kernels in its own library only: there is one.

    Returns
    -------
    relax.VMExecutable
        On this machine's CPU, its code is ready to run.
    """
    kernels = [variable for variable, function in mod.functions_items() if isinstance(function, tirx.PrimFunc)]
    parts = 1 if is_gpu(target) or calls_compiled else max(1, min(core_count(), len(kernels) // FEWEST))
    shares = [kernels[part::parts] for part in range(parts)]
    elsewhere = {variable for share in shares[1:] for variable in share}
    here = {variable: function for variable, function in mod.functions_items() if variable not in elsewhere}
    ready = runs_here(target)
    as_measured = compiling_as_measured(target) if is_gpu(target) else contextlib.nullcontext()
    with as_measured, ThreadPoolExecutor(max(1, parts - 1)) as pool:
        libraries = [pool.submit(_library, mod, share, target, config, ready) for share in shares[1:]]
        with target, transform.PassContext(opt_level=3, config=dict(config)):
            rest = ir.IRModule(here, attrs=mod.attrs, global_infos=mod.global_infos)
            mode = "compiled" if calls_compiled else "bytecode"
            executable = relax.build(rest, target, relax_pipeline=None, exec_mode=mode)
        if ready and shares[0]:
            executable.mod.get_function(shares[0][0].name_hint, query_imports=True)
        for future in libraries:
            executable.mod.import_module(future.result())
    return executable


def _library(
    mod: ir.IRModule, share: Sequence[ir.GlobalVar], target: Any, config: Mapping[str, Any], ready: bool
) -> Any:
    """These kernels as one library; `ready`: LLVM makes the code now, not when the first one is called."""
    with target, transform.PassContext(opt_level=3, config=dict(config)):
        library = tvm.tirx.build(ir.IRModule({variable: mod[variable] for variable in share}), target)
    if ready:
        library.get_function(share[0].name_hint)
    return library
