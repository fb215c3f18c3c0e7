"""From a module of kernels to an executable of TVM's virtual machine."""

from __future__ import annotations

import contextlib
from typing import Any

from tvm import ir, relax, tirx, transform

from ..gpu_machine import is_gpu
from ..schedules.apply import Schedules, schedule_kernels
from ..search.space.lowering import ASYNC_COPIES
from ..symbolic import TILED
from . import side_by_side
from .check_sizes import CheckSizes
from .huge_pages import in_huge_pages
from .in_place import WriteInPlace
from .plan_memory import PlanMemory
from .round_storage import RoundStorage

__all__ = ["after_kernels", "build_executable", "build_plain", "build_scheduled", "scheduled"]

_BUILD_CONFIG = {"tirx.disable_assert": True, **ASYNC_COPIES}
"""The virtual machine checks the arguments of the whole model; kernels need not check theirs again. CPU kernels have no
asynchronous copies."""

_TILED_CONFIG = {"tirx.disable_cse_tir": True}
"""Of kernels with tiles of many lengths: LLVM finds what they compute twice in a third of the time."""

_GRAPH_CONFIG = {"relax.backend.use_cuda_graph": True}
"""Kernels whose arguments stay where they are become one CUDA graph, which is launched as a whole."""


def build_executable(mod: ir.IRModule, target: Any, schedules: Schedules | None = None) -> relax.VMExecutable:
    """Compile a module of kernels (`lower_to_kernels`) without fusing it again: `build_scheduled` of `scheduled`.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    target : tvm.target.Target
    schedules : mapping, optional
        By workload hash; a kernel without one is compiled as TVM compiles it by default.

    Raises
    ------
    RecordError
        When a trace does not fit its kernel.
    """
    return build_scheduled(scheduled(mod, target, schedules or {}), target)


def scheduled(mod: ir.IRModule, target: Any, schedules: Schedules) -> ir.IRModule:
    """The module with its schedules, weights packed, on a CPU in huge pages. RecordError as `schedule_kernels`."""
    with target:
        mod = schedule_kernels(mod, schedules)
        return mod if is_gpu(target) else in_huge_pages(mod)


def build_scheduled(mod: ir.IRModule, target: Any, calls_compiled: bool = False) -> relax.VMExecutable:
    """Compile what `scheduled` made, without fusing it again. `calls_compiled` as in `side_by_side.build`."""
    with target, transform.PassContext(config=_GRAPH_CONFIG) if is_gpu(target) else contextlib.nullcontext():
        mod = transform.Sequential(after_kernels())(mod)
    is_tiled = any(isinstance(f, tirx.PrimFunc) and TILED in (f.attrs or {}) for f in mod.functions.values())
    config = _BUILD_CONFIG | (_TILED_CONFIG if is_tiled else {})
    return side_by_side.build(mod, target, config, calls_compiled)


def build_plain(mod: ir.IRModule, target: Any) -> relax.VMExecutable:
    """Compile kernels with plain schedules, which do not check their arguments: that took a third of the time."""
    return side_by_side.build(mod, target, _BUILD_CONFIG)


def after_kernels() -> list[transform.Pass]:
    """The passes of TVM's default pipeline that follow fusion: memory planning and lowering to the virtual machine."""
    return [
        relax.transform.RewriteDataflowReshape(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        WriteInPlace(),
        PlanMemory(),
        relax.transform.RewriteCUDAGraph(),
        relax.transform.LowerAllocTensor(),
        RoundStorage(),
        relax.transform.KillAfterLastUse(),
        relax.transform.LowerRuntimeBuiltin(),
        relax.transform.ComputePrimValue(),
        CheckSizes(),
        relax.transform.VMShapeLower(),
        relax.transform.AttachGlobalSymbol(),
    ]
