"""`eqtune doctor`: does tuning work on this machine, and if not, what to do."""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.util
import json
import math
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..errors import EqtuneError
from ..report.units import binary, counted

__all__ = ["Finding", "add_parser", "examine", "run"]

EXTRAS = {
    "torch": ("torch", "to read PyTorch models"),
    "onnx": ("onnx", "to read ONNX models"),
    "onnxruntime": ("onnx", "to read ONNX models"),
    "tflite": ("tflite", "to read TFLite models"),
    "ai_edge_litert": ("tflite", "to compare TFLite models with LiteRT"),
    "ray": ("ray", "to measure on a Ray cluster"),
    "cloudpickle": ("rpc", "for TVM's RPC tracker"),
    "tornado": ("rpc", "for TVM's RPC tracker"),
}
"""Package, which is also its module, to (extra of eqtune that installs it, what it is for)."""


BUSY = "something else keeps the cores busy: tune when it has ended, or candidates are timed wrongly"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes
    ----------
    check : str
        What was looked at.
    status : str
        "ok", "absent" (optional, and not there) or "problem" (tuning does not work).
    detail : str
        What was found.
    advice : str
        What to do; "" when nothing is to be done.
    """

    check: str
    status: str
    detail: str
    advice: str = ""


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check that tuning works on this machine",
        description="Check versions, compiler, target, speeds and workers. Exit code 0 when tuning works here, else 1.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what `examine` finds, as it is found."""
    findings = []
    for finding in examine():
        findings.append(finding)
        if not args.json:
            print(f"{finding.status:9}{finding.check:15}{finding.detail}", flush=True)
            if finding.advice:
                print(f"{'':24}-> {finding.advice}")
    works = all(finding.status != "problem" for finding in findings)
    if args.json:
        json.dump({"works": works, "findings": [asdict(finding) for finding in findings]}, sys.stdout, indent=1)
        print()
    else:
        print("tuning works on this machine" if works else "tuning does not work on this machine")
    return 0 if works else 1


def examine() -> Iterator[Finding]:
    """All findings. Stops after the first problem that the rest depends on; takes a few seconds."""
    for check in (_versions, _compiler, _limits, _machine, _worker):
        try:
            yield from check()
        except EqtuneError as error:
            yield Finding(check.__name__.strip("_"), "problem", str(error))
            return
    yield from _graph_search()
    yield from _extras()
    yield from _gpu()


def _versions() -> Iterator[Finding]:
    from .. import __version__
    from .._compat import check_versions

    yield Finding("eqtune", "ok", f"{__version__} on Python {platform.python_version()}")
    check_versions()
    yield Finding("versions", "ok", f"apache-tvm {version('apache-tvm')}, apache-tvm-ffi {version('apache-tvm-ffi')}")


def _graph_search() -> Iterator[Finding]:
    try:
        from .. import graph_result  # noqa: F401
    except EqtuneError as error:
        yield Finding("graphs", "absent", str(error))
    else:
        yield Finding("graphs", "ok", f"egglog {version('egglog')}")


def _compiler() -> Iterator[Finding]:
    from tvm.target import codegen

    from ..machine import detect_target, target_json

    target = detect_target()
    yield Finding("compiler", "ok", f"LLVM {codegen.llvm_version_major()}")
    yield Finding("target", "ok", target_json(target))


def _limits() -> Iterator[Finding]:
    """What kernels may use of the machine: its cores, or what a container leaves of them."""
    from ..cgroup import cpu_quota
    from ..machine import allowed_cores, core_count, memory_bytes

    quota = cpu_quota()
    limited = f" and a CPU quota of {quota:g}" if math.isfinite(quota) else ""
    yield Finding(
        "threads",
        "ok",
        f"{core_count()} unless told otherwise, of {len(allowed_cores())} logical cores{limited}; "
        f"{binary(memory_bytes())} of memory",
    )


def _machine() -> Iterator[Finding]:
    from ..machine import describe_machine
    from ..measure.peaks import BUSY_START_S

    machine = describe_machine()
    tiles = f"; {machine.tile_flops_per_s / 1e12:.1f} TFLOP/s of bfloat16 tiles" if machine.tile_flops_per_s else ""
    yield Finding(
        "machine",
        "ok",
        f"{machine.name}: {counted(machine.threads, 'thread')}, {machine.vector_registers} vector registers of "
        f"{machine.vector_bytes} bytes, caches {machine.l1_bytes // 1024} KiB, {machine.l2_bytes // 1024} KiB, "
        f"{machine.l3_bytes // 1024**2} MiB",
    )
    yield Finding(
        "speeds",
        "ok",
        f"{machine.peak_flops_per_s / 1e9:.0f} GFLOP/s on one thread, {machine.peak_flops_per_s_all / 1e9:.0f} on all; "
        f"{machine.bandwidth_bytes_per_s / 1e9:.0f} GB/s from memory, {machine.cache_bandwidth_bytes_per_s / 1e9:.0f} "
        f"from L2; {machine.parallel_overhead_s * 1e6:.1f} us to start a parallel region{tiles}",
        BUSY if machine.parallel_overhead_s >= BUSY_START_S else "",
    )


def _worker() -> Iterator[Finding]:
    """A worker starts; a kernel is built there, checked and timed."""
    from tvm import te

    from ..machine import detect_target
    from ..measure.local import LocalMeasurer
    from ..records.workload import as_workload, workload_hash
    from ..tasks.task import Task

    x = te.placeholder((64, 64), name="x")
    mod = as_workload(te.create_prim_func([x, te.compute((64, 64), lambda i, j: x[i, j] + 1.0, name="y")]))
    task = Task("doctor", mod, workload_hash(mod), calls=1, flops=4096.0, bytes_moved=32768.0)
    with LocalMeasurer(detect_target(), workers=1) as measurer:
        (seconds,) = measurer.baseline([task])
    if math.isinf(seconds):
        yield Finding("worker", "problem", "a worker starts, but cannot build and run a kernel", "check free memory")
    else:
        yield Finding("worker", "ok", f"builds and runs a kernel ({seconds * 1e6:.1f} us)")


def _extras() -> Iterator[Finding]:
    for name, (extra, purpose) in EXTRAS.items():
        if importlib.util.find_spec(name) is None:
            yield Finding(name, "absent", "not installed", f'{purpose}: pip install "eqtune[{extra}]"')
            continue
        try:
            yield Finding(name, "ok", version(name))
        except PackageNotFoundError:
            yield Finding(name, "ok", "version unknown")


def _gpu() -> Iterator[Finding]:
    """The GPU, what compiles for it, and for which architectures."""
    from ..gpu_machine import find_compiler, local_gpu, supported_archs

    found, compiler = local_gpu(), find_compiler()
    if found is not None:
        detail = (
            f"{found.name} ({found.arch}), {found.multiprocessors} multiprocessors at {found.clock_hz / 1e9:.2f} GHz"
        )
        yield Finding("gpu", "ok", f"{detail}, {found.bandwidth_bytes_per_s / 1e9:.0f} GB/s")
    elif ctypes.util.find_library("cuda") is None:
        advice = "kernels can still be tuned for one by compiling: --target nvidia/nvidia-h100 --measure compile-only"
        yield Finding("gpu", "absent", "no NVIDIA driver (libcuda)", advice)
    else:
        yield Finding("gpu", "absent", "a driver, but no NVIDIA GPU that TVM can use", "look at nvidia-smi")
    if compiler is None:
        yield Finding(
            "cuda",
            "absent",
            "neither nvcc nor nvrtc",
            'to compile for GPUs: install the CUDA toolkit (nvcc), or pip install "eqtune[cuda]" for nvrtc',
        )
        return
    archs = sorted(supported_archs(compiler), key=lambda arch: (len(arch), arch))
    yield Finding("cuda", "ok", f"{compiler.kind} {compiler.version} at {compiler.path}" + _archs(archs))
    if compiler.kind != "nvcc":
        yield Finding("nvcc", "absent", "nvrtc alone", "to tune for GPUs: install the CUDA toolkit")
    if found is not None and archs and found.arch.rstrip("af") not in archs:
        yield Finding("cuda arch", "problem", f"nvcc does not know {found.arch}", "install a newer CUDA toolkit")
    elif found is not None and found.has_warpgroups and compiler.version.partition(".")[0] in ("10", "11"):
        yield Finding(
            "cuda arch", "problem", f"nvcc {compiler.version} has no {found.arch}", "install CUDA 12 or newer"
        )


def _archs(archs: list[str]) -> str:
    return f"; {archs[0]} to {archs[-1]}" if archs else ""
