"""From scheduled kernels to CUDA source, and from source to what ptxas says of it. Needs no GPU."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx

from ...gpu_machine import Compiler, find_compiler
from ...search.space.features import COMPILED
from ...search.space.gpu.hardware import STATIC_SHARED_BYTES, GpuHardware
from ...search.space.lowering import ASYNC_COPIES
from ..process import run_limited
from ..scratch import Scratch

__all__ = [
    "CALLBACK",
    "Resources",
    "compile_cubin",
    "compile_kernels",
    "compiling_as_measured",
    "cuda_source",
    "launch_problem",
    "ptxas_resources",
    "resource_notes",
    "resource_problem",
]

CONFIG = {"tirx.disable_assert": True, **ASYNC_COPIES}

NVCC_FLAGS = (
    "-O3",
    "--use_fast_math",
    "--expt-relaxed-constexpr",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-Xptxas=-v",
)
"""What TVM's runtime compiles with (tvm.support.nvcc), so that the resources are those that a run would have."""

COMPILE_LIMIT_S = 120.0

CALLBACK = "tvm_callback_cuda_compile"
"""What TVM calls with the source of kernels for their machine code."""

MOST_SPILLED_BYTES = 512
"""Stored and loaded by a thread. 64 registers out and in: such a kernel is never the fastest, and slow to measure."""

_TURN = threading.RLock()


@dataclass(frozen=True)
class Resources:
    """What one CUDA kernel takes, as ptxas reports it.

    Attributes
    ----------
    registers : int
        Of a thread.
    spill_bytes : int
        Stored to and loaded from local memory because registers ran out, both together.
    static_shared_bytes : int
        Shared memory that the kernel declares; dynamic shared memory is asked for at launch.
    threads : int
        Of a block, from its launch bounds; 0 when it has none.
    stack_bytes : int
        Local memory of a thread: arrays whose places are not known when compiling, and what spills.
    """

    registers: int
    spill_bytes: int
    static_shared_bytes: int
    threads: int
    stack_bytes: int = 0


def cuda_source(functions: Mapping[str, Any], target: Any) -> str:
    """The CUDA source of scheduled PrimFuncs by symbol. Raises what TVM raises when one cannot be lowered."""
    mod = tvm.IRModule({name: function.with_attr("global_symbol", name) for name, function in functions.items()})
    with target, tvm.transform.PassContext(opt_level=3, config=CONFIG):
        library = tvm.compile(mod, target)
    return "\n".join(str(module.inspect_source()) for module in library.mod.imports)


def launch_problem(function: Any, hardware: GpuHardware) -> str:
    """Why a scheduled PrimFunc could not be launched: threads, shared memory, vectors; "" when it can.

    Lowers as TVM's own check for tuned kernels does, and applies its `verify_gpu_code`, which counts static and dynamic
    shared memory alike. Beside it: the lower limit of the former, and of both where TVM's runtime does not raise it
    (`CUDAWrappedFunc` in its cuda_module.cc looks at the dynamic part alone).
    """
    passes = [
        s_tir.transform.LowerCrossThreadReduction(),
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.LiftThreadBinding(),
        s_tir.transform.ManifestSharedMemoryLocalStage(),
        s_tir.transform.CompactBufferAllocation(),
        tirx.transform.StmtSimplify(),  # else flattening stumbles over the indices of buffers of one element
        s_tir.transform.LowerAutoCopy(),
        s_tir.transform.UnifyThreadBinding(),
        s_tir.transform.LowerMatchBuffer(),
        s_tir.transform.InjectSoftwarePipeline(),
        s_tir.transform.LowerOpaqueBlock(),
        tirx.transform.FlattenBuffer(),
        tirx.transform.BF16ComputeLegalize(),
        tirx.transform.NarrowDataType(32),
        tirx.transform.StmtSimplify(),
        tirx.transform.VectorizeLoop(True),
        s_tir.transform.InjectVirtualThread(),
        tirx.transform.StorageRewrite(),
        s_tir.transform.MergeSharedMemoryAllocations(),
    ]
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main").with_attr("tirx.noalias", True)})
    with tvm.transform.PassContext(opt_level=3):
        lowered = tvm.transform.Sequential(passes)(mod)["main"]
    limits = {
        "max_threads_per_block": hardware.threads_per_block,
        "max_shared_memory_per_block": hardware.shared_bytes_per_block,
        "max_vthread": 8,
        "max_vector_bytes": 16,
    }
    if not s_tir.analysis.verify_gpu_code(lowered, limits):
        return f"more than the limits {limits}"
    for static, dynamic in map(_shared_bytes, _launches(lowered)):
        if static > STATIC_SHARED_BYTES:
            return f"{static} bytes of static shared memory, where a block can have {STATIC_SHARED_BYTES}"
        most = hardware.shared_bytes_per_block
        if static + dynamic > most:
            return f"{static + dynamic} bytes of shared memory, where a block can have {most}"
        if dynamic < STATIC_SHARED_BYTES < static + dynamic:
            return (
                f"{static} bytes of static and {dynamic} of dynamic shared memory: TVM asks for more than "
                f"{STATIC_SHARED_BYTES} in all only where the dynamic part alone is as much"
            )
    return ""


def _launches(function: Any) -> list[Any]:
    """What a PrimFunc launches, one kernel after the other: its outermost loops over threads."""
    found: list[Any] = []

    def visit(statement: Any) -> Any:
        if str(statement.attr_key) != "thread_extent":
            return tvm_ffi.WalkResult.ADVANCE
        found.append(statement)
        return tvm_ffi.WalkResult.SKIP

    tvm_ffi.structural_walk(function.body, (tirx.AttrStmt, visit), order="pre")
    return found


def _shared_bytes(kernel: Any) -> tuple[int, int]:
    """Static and dynamic shared memory of one kernel; the dynamic allocations were merged into one."""
    sizes = {"shared": 0, "shared.dyn": 0}

    def visit(allocation: Any) -> None:
        buffer = allocation.buffer
        if str(buffer.scope()) in sizes:
            elements = math.prod(map(int, buffer.shape))
            sizes[str(buffer.scope())] += elements * max(1, int(tvm_ffi.dtype(str(buffer.dtype)).itemsize))

    tvm_ffi.structural_walk(kernel, (tirx.AllocBuffer, visit))
    return sizes["shared"], sizes["shared.dyn"]


def resource_problem(found: Iterable[Resources], hardware: GpuHardware) -> str:
    """Why compiled kernels should not be run: they could not be launched, or spill heavily; "" where they should."""
    for resources in found:
        registers = resources.registers * resources.threads
        if registers > hardware.registers_per_multiprocessor:
            return f"{resources.registers} registers for each of {resources.threads} threads cannot be launched"
        if resources.static_shared_bytes > STATIC_SHARED_BYTES:
            return f"{resources.static_shared_bytes} bytes of static shared memory, more than {STATIC_SHARED_BYTES}"
        if resources.spill_bytes > MOST_SPILLED_BYTES:
            return f"spills {resources.spill_bytes} bytes, more than {MOST_SPILLED_BYTES}: it is not run"
    return ""


def resource_notes(found: Iterable[Resources]) -> dict[str, float]:
    """The columns `search.space.features.COMPILED` of a candidate: of its kernels, the most."""
    kernels = [asdict(resources) for resources in found]
    return {name: float(max(fields[name] for fields in kernels)) for name in COMPILED} if kernels else {}


def compile_cubin(
    source: str,
    arch: str,
    cache: Path | None = None,
    hardware: GpuHardware | None = None,
    patient: bool = False,
) -> tuple[bytes, dict[str, Resources]]:
    """The machine code of CUDA source, and what its kernels take; kept by hash of source, arch, flags and compiler.

    Parameters
    ----------
    source : str
    arch : str
        For example "sm_90".
    cache : Path, optional
        By default `EQTUNE_CUBIN_CACHE`; without it nothing is kept.
    hardware : GpuHardware, optional
        What the kernels must suit (`resource_problem`); by default, whatever they take is right.
    patient : bool
        As of `compile_kernels`.

    Raises
    ------
    ValueError
        When nvcc is missing or refuses the source, or the kernels do not suit the hardware.
    """
    compiler = find_compiler()
    if compiler is None or compiler.kind != "nvcc":
        raise ValueError("compiling for CUDA needs nvcc on PATH or in CUDA_HOME; install the CUDA toolkit")
    kept = os.environ.get("EQTUNE_CUBIN_CACHE")
    code, found = compile_kernels(source, arch, compiler, cache or (Path(kept) if kept else None), patient)
    problem = "" if hardware is None else resource_problem(found.values(), hardware)
    if problem:
        raise ValueError(problem)
    return code, found


@contextlib.contextmanager
def compiling_as_measured(target: Any) -> Iterator[None]:
    """Let TVM make machine code for this GPU with `compile_cubin`, as for measured candidates, while this is entered.

    TVM's own callback has other flags (ptxas is told how many registers to use) and may take another arch. Where there
    is no nvcc, it stays. There is one for all threads, which take turns.
    """
    compiler = find_compiler()
    if compiler is None or compiler.kind != "nvcc":
        yield
        return
    arch = str(target.attrs["arch"])
    with _TURN:
        before = tvm_ffi.get_global_func(CALLBACK, allow_missing=True)
        tvm_ffi.register_global_func(
            CALLBACK, lambda source, *_: compile_cubin(str(source), arch, patient=True)[0], override=True
        )
        try:
            yield
        finally:
            if before is None:
                tvm_ffi.registry.remove_global_func(CALLBACK)
            else:
                tvm_ffi.register_global_func(CALLBACK, before, override=True)


def ptxas_resources(source: str, arch: str, compiler: Compiler, cache: Path | None = None) -> dict[str, Resources]:
    """What ptxas reports of every kernel of some CUDA source; see `compile_kernels`."""
    return compile_kernels(source, arch, compiler, cache)[1]


def compile_kernels(
    source: str, arch: str, compiler: Compiler, cache: Path | None = None, patient: bool = False
) -> tuple[bytes, dict[str, Resources]]:
    """Compile with nvcc: the cubin, and what ptxas reports of every kernel in it.

    Parameters
    ----------
    source : str
        CUDA source.
    arch : str
        For example "sm_90".
    compiler : Compiler
        An nvcc.
    cache : Path, optional
        A directory that keeps cubins and reports by hash of source, flags and compiler.
    patient : bool
        Let nvcc take longer than `COMPILE_LIMIT_S`: for the source of a whole model.

    Raises
    ------
    ValueError
        When nvcc refuses the source; the message ends with what it said.
    """
    key = hashlib.blake2b("\n".join([source, arch, compiler.version, *NVCC_FLAGS]).encode(), digest_size=16).hexdigest()
    if cache is not None and (cache / f"{key}.json").exists():  # written last
        known = json.loads((cache / f"{key}.json").read_text(encoding="utf-8"))
        return (cache / f"{key}.cubin").read_bytes(), {name: Resources(**fields) for name, fields in known.items()}
    with Scratch("nvcc") as directory:  # a builder that takes too long is killed
        file, cubin = Path(directory) / "kernels.cu", Path(directory) / "kernels.cubin"
        file.write_text(source, encoding="utf-8")
        command = [compiler.path, "-cubin", f"-arch={arch}", *NVCC_FLAGS, "-o", str(cubin), str(file)]
        try:
            done = run_limited(command, None if patient else COMPILE_LIMIT_S, temporary=directory)
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"nvcc took longer than {COMPILE_LIMIT_S:g} s") from error
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise ValueError(
                "nvcc: " + next((line for line in said if "error" in line), said[-1] if said else "failed")
            )
        code, found = cubin.read_bytes(), _parse(done.stderr + done.stdout, source)
    if cache is not None:
        report = json.dumps({name: asdict(resources) for name, resources in found.items()})
        with contextlib.suppress(OSError):  # a full disk, a place that cannot be written to: only time is lost
            cache.mkdir(parents=True, exist_ok=True)
            _keep(cache / f"{key}.cubin", code)
            _keep(cache / f"{key}.json", report.encode())
    return code, found


def _keep(file: Path, content: bytes) -> None:
    """Another process may write the same: whichever comes last, the file is whole."""
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(file)


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes stack frame")
_SHARED = re.compile(r"(\d+) bytes smem")
_BOUNDS = re.compile(r"__launch_bounds__\((\d+)[^)]*\)\s+(\w+)\(")


def _parse(report: str, source: str) -> dict[str, Resources]:
    threads = {name: int(count) for count, name in _BOUNDS.findall(source)}
    found: dict[str, Resources] = {}
    name, spills, stack = "", 0, 0
    for line in report.splitlines():
        if entry := _ENTRY.search(line):
            name, spills, stack = entry.group(1), 0, 0
        elif spilled := _SPILLS.search(line):
            spills = int(spilled.group(1)) + int(spilled.group(2))
            stack = int(framed.group(1)) if (framed := _STACK.search(line)) else 0
        elif name and (used := _REGISTERS.search(line)):
            shared = _SHARED.search(line)
            declared = int(shared.group(1)) if shared else 0
            found[name] = Resources(int(used.group(1)), spills, declared, threads.get(name, 0), stack)
    return found
