"""Which machine is this: its target, and its limits and speeds as `Hardware`."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from . import _checked  # noqa: F401 - refuses versions that cannot work
from .cgroup import cpu_quota, memory_limit_bytes
from .errors import InputError, SetupError
from .files import text_of
from .gpu_machine import describe_gpu, is_gpu
from .search.space.hardware import Hardware

__all__ = [
    "allowed_cores",
    "core_count",
    "describe_machine",
    "detect_target",
    "device_name",
    "features_here",
    "has_matrix_tiles",
    "is_host",
    "logical_count",
    "memory_bytes",
    "missing_here",
    "missing_instructions",
    "runs_here",
    "target_json",
    "thread_count",
    "vector_registers",
]

CPUS = Path("/sys/devices/system/cpu")
CPU_DIRECTORY = CPUS / "cpu0" / "cache"
CPU_INFO = Path("/proc/cpuinfo")


class Processor(NamedTuple):
    """What is known of a processor without running on it. Sizes in KiB, the clock in GHz, FLOP a cycle in float32, and
    `Hardware.fmas_per_load`."""

    l1: int
    l2: int
    l3: int
    clock: float
    flops_per_cycle: int
    fmas_per_load: float = 1.0


PROCESSORS: Mapping[str, Processor] = {
    "znver2": Processor(32, 512, 16384, 3.2, 32),
    "znver3": Processor(32, 512, 32768, 3.5, 32),
    "znver4": Processor(32, 1024, 32768, 3.5, 32),
    "znver5": Processor(48, 1024, 32768, 3.8, 64),
    "haswell": Processor(32, 256, 8192, 3.0, 32),
    "skylake": Processor(32, 256, 8192, 3.5, 32),
    "skylake-avx512": Processor(32, 1024, 32768, 2.6, 64),
    "cascadelake": Processor(32, 1024, 32768, 2.8, 64),
    "icelake-server": Processor(48, 1280, 32768, 2.8, 64, 1.8),
    "sapphirerapids": Processor(48, 2048, 65536, 2.8, 64),
    "neoverse-n1": Processor(64, 1024, 32768, 2.6, 16),
    "neoverse-v1": Processor(64, 1024, 32768, 2.6, 32),
    "neoverse-v2": Processor(64, 2048, 65536, 3.0, 32),
    "apple-m1": Processor(128, 12288, 8192, 3.2, 32),
    "cortex-a72": Processor(32, 1024, 1024, 1.8, 8),
}
"""For targets that are not this machine; rounded, and only as good as a first ranking needs. From vendors' manuals."""

SLOW_LAST_CACHES = frozenset({"icelake-server"})
"""Processors whose L3 copies a quarter of what their L2 does (22 GB/s and 80). AMD's copy about half."""

FALLBACK = Processor(32, 512, 8192, 2.5, 16)

HALF_VECTORS = "prefer-256-bit"
"""What LLVM does on Intel's processors with AVX-512 unless told: copies of whole vectors become copies of two halves,
and a whole vector loaded right afterwards waits for both stores (an operand of 512 x 128 split for AMX: 80 of 140 us).
Sketches choose whole vectors for what is long enough, so that LLVM need not."""

TILE_FLOPS_PER_CYCLE = 1024
"""Of AMX with bfloat16."""

INSTRUCTION_SETS = (
    *("sse", "ssse", "avx", "fma", "f16c", "amx", "bmi", "lzcnt", "popcnt", "movbe"),
    *("neon", "fp-armv8", "fullfp16", "dotprod", "bf16", "i8mm", "sve", "sme", "lse"),
)
"""How those of LLVM's CPU features begin that code needs; others say what is fast, or are of no use to kernels."""

OPTIONAL_SETS = ("amx-tile", "amx-int8", "amx-bf16", "avx512", "avxvnni")
"""Of these, what processors of one name have or lack, by how they are sold, and what virtual machines hide."""


def detect_target(threads: int | None = None) -> Any:
    """This machine's CPU as a TVM target: its instruction set as LLVM names it, and its cores.

    Where the CPU has more or fewer instructions than others of that name, as in virtual machines, "mattr" says so.

    Parameters
    ----------
    threads : int, optional
        Threads that kernels may use; by default, all cores (`core_count`).

    Returns
    -------
    tvm.target.Target

    Raises
    ------
    InputError
        When `threads` is not positive, or more than this machine has.
    SetupError
        When this TVM has no LLVM.
    """
    import tvm
    from tvm.target import codegen

    if codegen.llvm_version_major(allow_none=True) is None:
        raise SetupError("this TVM was built without LLVM and cannot compile for CPUs; install apache-tvm's wheel")
    cpu = str(codegen.llvm_get_system_cpu())
    fields: dict[str, Any] = {"kind": "llvm", "mcpu": cpu, "num-cores": _threads(threads, here=True)}
    differences = _differences(_features_of(cpu), _host_features())
    return tvm.target.Target({**fields, "mattr": differences} if differences else fields)


def describe_machine(
    target: Any = None,
    threads: int | None = None,
    measure: bool = True,
    limit_s: float | None = None,
    here: bool | None = None,
    **overrides: Any,
) -> Hardware:
    """The limits and speeds of the machine behind `target`.

    A GPU target gives a `GpuHardware`: of the device where it is this machine's, else from a table of products.
    Vector registers come from the target, cache sizes from the operating system, speeds from about a second of
    measuring with the target's instructions, which may be fewer than this machine has ("x86-64-v3"). For a target
    that does not run here, sizes and speeds come from a table of processors.

    Parameters
    ----------
    target : tvm.target.Target, optional
        By default, this machine's CPU.
    threads : int, optional
        Threads that a kernel may use; by default what the target says, else all cores.
    measure : bool
        False takes the speeds from the table for this machine, too: instant, and a rough guess.
    limit_s : float, optional
        Give up measuring after so many seconds and take the speeds from the table.
    here : bool, optional
        Whether kernels will run on this machine; by default, where it can run them.
    **overrides
        Fields of `Hardware` that are known better.

    Raises
    ------
    InputError
        For a field that `Hardware` does not have, or `threads` that are not positive.
    """
    target = detect_target(threads) if target is None else target
    if is_gpu(target):
        return describe_gpu(target, **overrides)
    here = runs_here(target) if here is None else here
    count = _threads(thread_count(target) if threads is None else threads, here)
    mcpu = str(target.attrs.get("mcpu", ""))
    processor = PROCESSORS.get(mcpu, FALLBACK)
    vector_bytes, registers = vector_registers(target)
    caches = _caches() if here else {}
    peak = processor.clock * 1e9 * processor.flops_per_cycle
    fields: dict[str, Any] = {
        "name": device_name(target, here),
        "threads": count,
        "vector_bytes": vector_bytes,
        "vector_registers": registers,
        "dot_products": _dot_products(target),
        "l1_bytes": caches.get(1, processor.l1 * 1024),
        "l2_bytes": caches.get(2, processor.l2 * 1024),
        "l3_bytes": caches.get(3, processor.l3 * 1024),
        "slow_last_cache": mcpu in SLOW_LAST_CACHES,
        "cache_line_bytes": _cache_line_bytes() if here else 64,
        "peak_flops_per_s": peak,
        "peak_flops_per_s_all": peak * count,
        # Two units, each of which takes a whole vector or half of one, unless wide ones take both.
        "half_vector_rate": min(2.0, max(1.0, 4.0 * (vector_bytes // 4) / processor.flops_per_cycle)),
        "fmas_per_load": processor.fmas_per_load,
    }
    if "amx-bf16" in fields["dot_products"]:
        fields["tile_flops_per_s"] = TILE_FLOPS_PER_CYCLE * processor.clock * 1e9
    if here and measure:
        from .measure.peaks import measure_speeds

        fields |= measure_speeds(json.loads(target_json(target)), Hardware(**fields), limit_s)
    unknown = sorted(overrides.keys() - Hardware.__dataclass_fields__.keys())
    if unknown:
        raise InputError(f"unknown fields {unknown}; Hardware has {sorted(Hardware.__dataclass_fields__)}")
    return Hardware(**{**fields, **overrides})


def thread_count(target: Any) -> int:
    """The cores that a target names, or else this machine's."""
    cores = target.attrs.get("num-cores", None) if hasattr(target.attrs, "get") else None
    return int(cores) if cores else core_count()


def core_count() -> int:
    """Cores that this process may keep busy; two hardware threads of one core count once.

    Where its container (cgroup) has a CPU quota, no more than the whole part of that: a process that has used its quota
    stands still for the rest of a tenth of a second, and TVM's threads use it up by waiting, too.
    """
    allowed = allowed_cores()
    cores = len({text_of(CPUS / f"cpu{core}" / "topology" / "thread_siblings_list") or str(core) for core in allowed})
    return max(1, int(min(cores, psutil.cpu_count(logical=False) or cores, cpu_quota())))


def logical_count() -> int:
    """Logical cores that this process may keep busy, as `core_count`: for compilers, which gain from both threads."""
    return max(1, int(min(len(allowed_cores()), cpu_quota())))


def memory_bytes() -> int:
    """Memory of this machine, or of this process's container (cgroup) where that has less."""
    return int(min(psutil.virtual_memory().total, memory_limit_bytes()))


def allowed_cores() -> set[int]:
    """The logical cores that this process may run on: all of them where the system cannot tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def is_host(target: Any) -> bool:
    """Whether code for `target` is code for this very machine, so that it can be measured here."""
    from tvm.target import codegen

    if str(target.kind.name) != "llvm" or codegen.llvm_version_major(allow_none=True) is None:
        return False
    triple = str(target.attrs.get("mtriple", ""))
    architecture = str(codegen.llvm_get_system_triple()).partition("-")[0]
    return str(target.attrs.get("mcpu", "")) == str(codegen.llvm_get_system_cpu()) and (
        not triple or triple.partition("-")[0] == architecture
    )


def runs_here(target: Any) -> bool:
    """Whether this machine runs code for `target`: its own CPU, or one whose instructions it has."""
    from tvm.target import codegen

    is_cpu = str(target.kind.name) == "llvm" and codegen.llvm_version_major(allow_none=True) is not None
    return is_cpu and not missing_here(target)


def missing_here(target: Any) -> str:
    """Why code for the CPU `target` cannot run on this machine, for people; "" where it can."""
    from tvm.target import codegen

    triple = str(target.attrs.get("mtriple", ""))
    here, there = str(codegen.llvm_get_system_triple()).partition("-")[0], triple.partition("-")[0]
    if there and there != here:
        return f"this is {here}, not {there}"
    cpu = str(codegen.llvm_get_system_cpu())
    missing = missing_instructions(cpu, target, features_here())
    return f"this CPU, {cpu}, lacks {', '.join(missing[:5])}" if missing else ""


def missing_instructions(cpu: str, target: Any, there: Collection[str] = ()) -> list[str]:
    """Instruction sets that code for `target` may use and the processor that LLVM calls `cpu` does not have.

    Of that very processor, what it has may be known better: the features `there`.
    """
    from tvm.target import codegen

    there = there or _features_of(cpu, target)
    needed = {str(feature) for feature in codegen.llvm_get_cpu_features(target)}
    return sorted(feature for feature in needed - set(there) if feature.startswith(INSTRUCTION_SETS))


def _features_of(cpu: str, target: Any = None) -> set[str]:
    """What LLVM says that a processor of this name has, where code is for the same system as `target`'s."""
    from tvm.target import Target, codegen

    known = {} if target is None else target.export()
    fields = {"kind": "llvm", **{name: value for name, value in known.items() if name in ("kind", "mtriple")}}
    return {str(feature) for feature in codegen.llvm_get_cpu_features(Target({**fields, "mcpu": cpu}))}


def features_here() -> set[str]:
    """What this very processor has, as LLVM names it: others of its name may have more or less."""
    from tvm.target import codegen

    named, found = _features_of(str(codegen.llvm_get_system_cpu())), _host_features()
    hidden = {name for name in named - found if name.startswith(OPTIONAL_SETS)} if found else set()
    return (named | found) - hidden


def _host_features() -> set[str]:
    """What this very processor has and the system lets this process use, as LLVM names it; empty where unknown."""
    import tvm_ffi

    ask = tvm_ffi.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures", allow_missing=True)
    found = {str(name) for name, has in ask().items() if has} if ask is not None else set()
    return found if _permits_tiles() else {name for name in found if not name.startswith("amx")}


def _permits_tiles() -> bool:
    """Whether the system lets this process use AMX: Linux wants to be asked."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, request_permission, tile_data) == 0


def _differences(named: Collection[str], found: Collection[str]) -> list[str]:
    """Instruction sets of vectors and tiles that are `found` and not `named`, and the other way round, as "mattr"."""
    wide = [f"-{HALF_VECTORS}"] if HALF_VECTORS in named else []
    if not found:
        return wide
    more = [f"+{name}" for name in sorted(set(found) - set(named)) if name.startswith(OPTIONAL_SETS)]
    return more + [f"-{name}" for name in sorted(set(named) - set(found)) if name.startswith(OPTIONAL_SETS)] + wide


def device_name(target: Any, here: bool | None = None) -> str:
    """What the device calls itself, for example "AMD EPYC (znver4)"; of a target that runs elsewhere, the processor."""
    mcpu = str(target.attrs.get("mcpu", "")) or "generic"
    if is_gpu(target):
        return describe_gpu(target).name
    if str(target.kind.name) != "llvm":
        return str(target.attrs.get("arch", "") or target.kind.name)
    here = runs_here(target) if here is None else here
    return f"{_cpu_model()} ({mcpu})" if here else mcpu


def target_json(target: Any) -> str:
    """The target as canonical JSON: the same text for the same target, in every process."""
    return json.dumps(_plain(target.export()), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    return [_plain(item) for item in value]


def _threads(threads: int | None, here: bool) -> int:
    if threads is not None:
        if threads < 1:
            raise InputError(f"threads must be at least 1, got {threads}")
        if here and threads > (os.cpu_count() or threads):
            raise InputError(f"threads must be at most {os.cpu_count()}, this machine's logical cores, got {threads}")
        return threads
    return core_count()


def vector_registers(target: Any) -> tuple[int, int]:
    """Bytes of a vector register, and how many there are."""
    from tvm.target import codegen

    if str(target.kind.name) != "llvm":
        return Hardware.vector_bytes, Hardware.vector_registers
    features = {str(feature) for feature in codegen.llvm_get_cpu_features(target)}
    width = target.attrs.get("vector-width", None)
    if "avx512f" in features:
        found = 64, 32
    elif "avx" in features:
        found = 32, 16
    elif "neon" in features:
        found = 16, 32
    else:
        found = 16, 16
    return (int(width) // 8 if width else found[0]), found[1]


def has_matrix_tiles(target: Any) -> bool:
    """Whether it is a CPU that multiplies tiles of bfloat16 (AMX)."""
    return "amx-bf16" in _dot_products(target)


def _dot_products(target: Any) -> tuple[str, ...]:
    """Of the features with instructions for groups of small numbers that sketches know, those that the target has."""
    from tvm.target import codegen

    from .search.space.amx.products import AMX_FEATURES
    from .search.space.contraction.dot_intrinsics import DOT_PRODUCTS

    if str(target.kind.name) != "llvm":
        return ()
    features = {str(feature) for feature in codegen.llvm_get_cpu_features(target)}
    known = (*(dot.feature for dot in DOT_PRODUCTS), *AMX_FEATURES)
    return tuple(name for name in dict.fromkeys(known) if name in features)


def _caches() -> dict[int, int]:
    """Bytes of the data caches of core 0 by level, as the operating system knows them."""
    sizes: dict[int, int] = {}
    for index in sorted(CPU_DIRECTORY.glob("index*")):
        if text_of(index / "type") in ("Data", "Unified"):
            size, level = text_of(index / "size"), text_of(index / "level")
            if size.endswith("K") and size[:-1].isdecimal() and level.isdecimal():
                sizes[int(level)] = int(size[:-1]) * 1024
    return sizes


def _cache_line_bytes() -> int:
    text = text_of(CPU_DIRECTORY / "index0" / "coherency_line_size")
    return int(text) if text.isdecimal() else 64


def _cpu_model() -> str:
    for line in text_of(CPU_INFO).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "CPU"
