"""Which GPU: targets by tag or from the device, their limits and speeds, and the compiler that is there for them."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from .errors import InputError
from .search.space.gpu.hardware import ALIASES, ARCHITECTURES, DEVICES, Device, GpuHardware

__all__ = [
    "Compiler",
    "current_target",
    "describe_gpu",
    "find_compiler",
    "gpu_target",
    "is_gpu",
    "let_tvm_compile",
    "local_gpu",
    "not_run_by_gpu",
    "resolve_target",
    "supported_archs",
]

DRIVER_LIMITS = {
    "threads_per_multiprocessor": 39,
    "shared_bytes_per_multiprocessor": 81,
    "registers_per_multiprocessor": 82,
    "shared_bytes_per_block": 97,
    "blocks_per_multiprocessor": 106,
    "shared_bytes_reserved": 111,
}
"""CUdevice_attribute numbers (cuda.h) of fields of `GpuHardware`."""

DRIVER_ATTRIBUTES = {"memory_clock_khz": 36, "memory_bus_bits": 37, **DRIVER_LIMITS}
"""Those that TVM does not ask for."""

NO_MODELS = frozenset({"nvidia", "geforce", "rtx", "gtx", "quadro", "tesla", "sxm", "80gb"})
"""Words of products' names that do not tell them apart."""

VARIANTS = frozenset({"ti", "super", "laptop", "d"})
"""Words that do, and that other products' names lack."""


def is_gpu(target: Any) -> bool:
    """Whether the target is an NVIDIA GPU."""
    return str(target.kind.name) == "cuda"


def gpu_target(hardware: GpuHardware) -> Any:
    """The target with every limit that TVM's passes read. `arch` decides what the compiler emits."""
    import tvm

    return tvm.target.Target(
        {
            "kind": "cuda",
            "arch": hardware.arch,
            "max_num_threads": hardware.threads_per_block,
            "max_threads_per_block": hardware.threads_per_block,
            "thread_warp_size": hardware.warp_size,
            "registers_per_block": hardware.registers_per_multiprocessor,
            "max_shared_memory_per_block": hardware.shared_bytes_per_block,
            "l2_cache_size_bytes": hardware.l2_bytes,
            "tag": _tag_of(hardware),
        }
    )


def _tag_of(hardware: GpuHardware) -> str:
    return next((tag for tag, device in DEVICES.items() if device.name == hardware.name), "")


KINDS = ("llvm", "cuda")
"""Kinds of targets that there are search spaces for."""


def resolve_target(target: Any, threads: int | None = None) -> Any:
    """A `tvm.target.Target` from what users write: a target, a dict, or a tag of TVM's or of `DEVICES`.

    "cuda" means the GPU of this machine, "llvm" its CPU, with everything that it can do and `threads` cores (all unless
    given); for code that runs on any processor of a kind, name the least of them, `{"kind": "llvm", "mcpu":
    "x86-64-v3"}`.

    Raises
    ------
    InputError
        For anything else; the message lists the tags of GPUs.
    """
    import tvm

    from .machine import detect_target

    if isinstance(target, tvm.target.Target):
        return _checked(target)
    if isinstance(target, str):
        tag = ALIASES.get(target, target)
        if tag == "llvm":
            return detect_target(threads)
        if tag in DEVICES:
            return gpu_target(DEVICES[tag].hardware())
        if tag == "cuda":
            found = local_gpu()
            if found is None:
                raise InputError(
                    "the target 'cuda' means the GPU of this machine, and there is none; give a tag: "
                    + ", ".join(DEVICES)
                )
            return gpu_target(found)
    try:
        resolved = tvm.target.Target(target)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise InputError(
            f"unknown target {target!r}: give a tag such as 'nvidia/nvidia-h100' ({', '.join(DEVICES)}), or a dict "
            f"such as {{'kind': 'llvm', 'mcpu': 'znver4'}} (TVM says: {reason[:200]})"
        ) from error
    return _checked(resolved)


def current_target(needed_by: str) -> Any:
    """The target of the surrounding `with target:`. Raises InputError where there is none, or one as `resolve_target`
    refuses."""
    import tvm

    target = tvm.target.Target.current(allow_none=True)
    if target is None:
        raise InputError(
            f"{needed_by} needs a target: give relax.build or tvm.compile one, such as "
            "eqtune.machine.detect_target(), or run it within `with target:`"
        )
    return _checked(target)


def _checked(target: Any) -> Any:
    """The target, unless it is of a kind that cannot be tuned or names a CPU that LLVM would silently replace.

    Of a machine that LLVM does not know, TVM cannot even list the processors: it crashes.
    """
    from tvm.target import codegen

    kind = str(target.kind.name)
    if kind not in KINDS:
        raise InputError(f"targets of the kind {kind!r} cannot be tuned; give one of {', '.join(KINDS)}")
    cpu = str(target.attrs.get("mcpu", ""))
    triple = str(target.attrs.get("mtriple", "")) or str(codegen.llvm_get_system_triple())
    if kind == "llvm" and not codegen.llvm_is_valid_cpu(cpu or "generic", triple):
        if not codegen.llvm_is_valid_cpu("generic", triple):
            raise InputError(
                f"LLVM knows no machine {triple!r}; `llc --version` lists those that it does, and mtriple begins with "
                "one, as in 'aarch64-linux-gnu'"
            )
        raise InputError(f"LLVM knows no CPU {cpu!r} for {triple}; `llc -mtriple={triple} -mcpu=help` lists them")
    return target


def describe_gpu(target: Any, **overrides: Any) -> GpuHardware:
    """Limits and speeds of the GPU behind a target: of the device where it is this machine's, else from the table.

    Parameters
    ----------
    target : tvm.target.Target
        Of the kind "cuda".
    **overrides
        Fields of `GpuHardware` that are known better.

    Raises
    ------
    InputError
        For a field that `GpuHardware` does not have, or an architecture without an entry in the table.
    """
    asked = str(target.attrs.get("arch", ""))
    arch = _listed_arch(asked)
    local = local_gpu()
    tag = str(getattr(target, "tag", "") or "")
    tag = ALIASES.get(tag, tag)
    if local is not None and local.arch == arch and (not tag or _is_tag_of(tag, local.name)):
        found = local
    elif tag in DEVICES:
        found = DEVICES[tag].hardware()
    else:
        found = _of_arch(arch)
    # Without its letter, Hopper's code has no warpgroups.
    found = replace(found, arch=asked)
    shared = target.attrs.get("max_shared_memory_per_block", None)
    # TVM's own tags say 48 KiB, which is what a block has without asking; the table knows what it can have.
    if shared is not None and int(shared) != 48 * 1024:
        found = replace(found, shared_bytes_per_block=int(shared))
    unknown = sorted(overrides.keys() - GpuHardware.__dataclass_fields__.keys())
    if unknown:
        raise InputError(f"unknown fields {unknown}; GpuHardware has {sorted(GpuHardware.__dataclass_fields__)}")
    return replace(found, **overrides)


def _listed_arch(arch: str) -> str:
    """The entry of `ARCHITECTURES`; "sm_90" -> "sm_90a": the letter adds instructions and changes no limit."""
    base = arch.rstrip("af")
    return next((known for known in ARCHITECTURES if known.rstrip("af") == base), base)


def _of_arch(arch: str) -> GpuHardware:
    known: Device | None = next((device for device in DEVICES.values() if device.arch == arch), None)
    if known is None and arch in ARCHITECTURES:  # of which the table has no product: its limits, another one's speeds
        known = replace(DEVICES["nvidia/nvidia-h200"], arch=arch)
    if known is None:
        raise InputError(
            f"no description of the GPU architecture {arch!r}; give a target with an arch of {sorted(ARCHITECTURES)}, "
            f"or a tag: {', '.join(DEVICES)}"
        )
    return replace(known.hardware(), name=f"generic {arch.rstrip('af')}")


@functools.cache
def local_gpu() -> GpuHardware | None:
    """The first GPU of this machine as its driver describes it; None when there is none that can be used."""
    import tvm

    device = tvm.cuda(0)
    if not device.exist:
        return None
    name = str(device.device_name)
    arch = _listed_arch("sm_" + str(device.compute_version).replace(".", ""))
    listed = next((entry for entry in DEVICES.values() if _same_product(entry.name, name)), None)
    base = listed.hardware() if listed is not None else _of_arch(_known_arch(arch))
    known = _driver_attributes()
    clock_hz = float(device.max_clock_rate) * 1e3
    multiprocessors = int(device.multi_processor_count)
    peak = base.peak_flops_per_s / base.clock_hz * clock_hz
    scale = clock_hz * multiprocessors / (base.clock_hz * base.multiprocessors)
    # Twice a clock, so many bits.
    told = 2.0 * known.get("memory_clock_khz", 0) * 1e3 * known.get("memory_bus_bits", 0) / 8
    bandwidth = told or base.bandwidth_bytes_per_s
    l2 = int(getattr(device, "l2_cache_size_bytes", 0) or base.l2_bytes)
    limits: dict[str, Any] = {name: known[name] for name in DRIVER_LIMITS if known.get(name)}
    return replace(
        base,
        name=name,
        arch=arch,
        threads=multiprocessors,
        clock_hz=clock_hz,
        peak_flops_per_s=peak,
        peak_flops_per_s_all=peak * multiprocessors,
        tensor_flops_per_s=tuple(value * scale for value in base.tensor_flops_per_s),
        warp_size=int(device.warp_size),
        threads_per_block=int(device.max_threads_per_block),
        bandwidth_bytes_per_s=bandwidth,
        cache_bandwidth_bytes_per_s=base.cache_bandwidth_bytes_per_s * bandwidth / base.bandwidth_bytes_per_s,
        l2_bytes=l2,
        l3_bytes=l2,
        **limits,
    )


def not_run_by_gpu(target: Any, index: int = 0) -> str:
    """Why this machine's GPU of that number does not run code for a target; "" where it does, or is not there.

    Machine code runs on GPUs of its major version that are no older; with a letter, on those of its very version.
    """
    import tvm

    device, arch = tvm.cuda(index), str(target.attrs.get("arch", ""))
    if not device.exist:
        return ""
    own = "sm_" + str(device.compute_version).replace(".", "")
    asked, here = _number(arch), _number(own)
    runs = asked == here or (not arch.endswith("a") and asked // 10 == here // 10 and asked <= here)
    return "" if runs else f"code for {arch} does not run on this machine's {device.device_name} ({own})"


def _known_arch(arch: str) -> str:
    """The architecture itself where it is listed, else the last one before it."""
    numbers = {_number(known): known for known in ARCHITECTURES}
    return numbers[max((number for number in numbers if number <= _number(arch)), default=min(numbers))]


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("af"))


def _same_product(listed: str, name: str) -> bool:
    """ "NVIDIA H100 80GB HBM3" is the "NVIDIA H100 SXM" of the table: the model's word decides."""
    return _words(listed) - NO_MODELS <= _words(name)


def _is_tag_of(tag: str, name: str) -> bool:
    """Whether a tag, of ours or of TVM's, means the product of this name."""
    product = DEVICES[tag].name if tag in DEVICES else tag
    return _same_product(product, name) and _words(product) & VARIANTS == _words(name) & VARIANTS


def _words(name: str) -> set[str]:
    return set(re.split(r"[\s/-]+", name.lower()))


def _driver_attributes() -> dict[str, int]:
    """What the driver tells of the first GPU, by the names of `DRIVER_ATTRIBUTES`; without what it does not."""
    library = ctypes.util.find_library("cuda")
    if library is None:
        return {}
    cuda = ctypes.CDLL(library)
    if cuda.cuInit(0):
        return {}
    found = {}
    value = ctypes.c_int(0)
    for name, number in DRIVER_ATTRIBUTES.items():
        if not cuda.cuDeviceGetAttribute(ctypes.byref(value), number, 0):
            found[name] = value.value
    return found


class Compiler:
    """What turns CUDA source into machine code here.

    Attributes
    ----------
    kind : str
        "nvcc" or "nvrtc": what the environment variable `TVM_CUDA_COMPILE_MODE` should say.
    path : str
        The executable, or the Python package.
    version : str
    """

    def __init__(self, kind: str, path: str, version: str) -> None:
        self.kind, self.path, self.version = kind, path, version


@functools.cache
def find_compiler() -> Compiler | None:
    """nvcc on PATH or in CUDA_HOME, else nvrtc by the packages that TVM uses it through; None without either."""
    places: list[str | None] = [shutil.which("nvcc")]
    places += [
        str(Path(os.environ[name]) / "bin" / "nvcc") for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ
    ]
    for place in places:
        if place and Path(place).exists():
            said = subprocess.run([place, "--version"], capture_output=True, text=True, check=False).stdout
            version = next(
                (line.partition("release ")[2].partition(",")[0] for line in said.splitlines() if "release" in line), ""
            )
            return Compiler("nvcc", place, version)
    if _has_module("cuda.bindings.nvrtc"):
        return Compiler("nvrtc", "cuda-bindings", "")
    return None


def let_tvm_compile() -> None:
    """Make TVM compile CUDA with nvcc, in this process and its children, where nvcc is what there is.

    Its default is nvrtc through the package cuda-bindings; where that is missing, a tuned model would not compile.
    What the user said in `TVM_CUDA_COMPILE_MODE` stays.
    """
    compiler = find_compiler()
    if compiler is not None and not _has_module("cuda.bindings.nvrtc"):
        os.environ.setdefault("TVM_CUDA_COMPILE_MODE", compiler.kind)


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def supported_archs(compiler: Compiler) -> frozenset[str]:
    """Architectures that nvcc can compile for; empty when it does not tell."""
    if compiler.kind != "nvcc":
        return frozenset()
    said = subprocess.run([compiler.path, "--list-gpu-code"], capture_output=True, text=True, check=False).stdout
    return frozenset(said.split())
