"""Building and running candidates: on this machine, elsewhere (RPC, Ray), by compiling alone, or from records.

Here is what measures on this machine's CPU. `cuda`, `rpc` and `ray` build on it, and share what is in `elsewhere`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .base import ERROR_KINDS, Measurement, Measurer, Overheads

if TYPE_CHECKING:
    from ..search.space.hardware import Hardware
    from .cuda.compile_only import CompileOnlyMeasurer
    from .cuda.measurer import CudaMeasurer
    from .local import LocalMeasurer
    from .ray.measurer import RayMeasurer
    from .replay import ReplayMeasurer
    from .rpc.measurer import RpcMeasurer

__all__ = [
    "ERROR_KINDS",
    "CompileOnlyMeasurer",
    "CudaMeasurer",
    "LocalMeasurer",
    "Measurement",
    "Measurer",
    "Overheads",
    "RayMeasurer",
    "ReplayMeasurer",
    "RpcMeasurer",
    "create",
]

FORMS = ("local", "local:flush-l2", "rpc://HOST:PORT/KEY", "ray", "compile-only")
"""What a `measure=` text may be."""

_HOMES = {
    "CompileOnlyMeasurer": ".cuda.compile_only",
    "CudaMeasurer": ".cuda.measurer",
    "LocalMeasurer": ".local",
    "RayMeasurer": ".ray.measurer",
    "ReplayMeasurer": ".replay",
    "RpcMeasurer": ".rpc.measurer",
}


def create(
    measure: str | Measurer = "local",
    *,
    target: Any = None,
    hardware: Hardware | None = None,
    threads: int | None = None,
    seed: int = 0,
) -> Measurer:
    """The measurer that a user's `measure=` argument means.

    Parameters
    ----------
    measure : str or Measurer
        "local", this machine: its CPU, or for a GPU target its GPUs ("local:flush-l2" empties their L2 before each
        timed call); "rpc://HOST:PORT/KEY", the servers that registered under KEY with TVM's RPC tracker; "ray", the
        nodes of a Ray cluster; "compile-only", which judges candidates for a GPU by compiling them, without one; or an
        instance, which is returned as it is. TVM's RPC executes what it is sent, without a password: loopback or
        private networks only.
    target : tvm.target.Target, optional
        What to compile for; by default, this machine's CPU.
    hardware : Hardware, optional
        What spaces are built from; must be what the search uses.
    threads : int, optional
        Threads that a kernel may use.
    seed : int
        Of the inputs.

    Raises
    ------
    InputError
        For another name, or for something that cannot measure.
    SetupError
        When there is no tracker, or no server.
    """
    if isinstance(measure, str):
        return _named_measurer(measure, target, hardware, threads, seed)
    if isinstance(measure, type):
        raise InputError(f"measure is a text or a measurer, not a class: give {measure.__name__}(...)")
    needed = ("baseline", "measure", "retime", "close", "describe", "overheads")
    missing = [name for name in needed if not hasattr(measure, name)]
    if missing:
        raise InputError(f"{type(measure).__name__} is no measurer: it has no {', '.join(missing)}")
    return measure


def _named_measurer(name: str, target: Any, hardware: Hardware | None, threads: int | None, seed: int) -> Measurer:
    if name == "compile-only":
        from ..gpu_machine import resolve_target
        from ..search.space.gpu.hardware import GpuHardware
        from .cuda.compile_only import CompileOnlyMeasurer

        if not (hardware is None or isinstance(hardware, GpuHardware)):
            raise InputError(f'measure="compile-only" is for GPUs, not for {hardware.name}; give target="nvidia/..."')
        return CompileOnlyMeasurer(resolve_target("cuda" if target is None else target), hardware)
    from ..machine import detect_target

    target = detect_target(threads) if target is None else target
    if name.partition(":")[0] == "local" and str(target.kind.name) == "cuda":
        from ..search.space.gpu.hardware import GpuHardware
        from .cuda.measurer import CudaMeasurer

        if not (hardware is None or isinstance(hardware, GpuHardware)):
            raise InputError(f"the target is a GPU, and the hardware is not: {hardware.name}")
        if name in ("local", "local:flush-l2"):
            return CudaMeasurer(target, hardware=hardware, seed=seed, flush_l2=name != "local")
    if name == "local:flush-l2":
        raise InputError(f'measure="{name}" is for GPUs, not for a target of the kind {target.kind.name}; give "local"')
    if name == "local":
        from .local import LocalMeasurer

        return LocalMeasurer(target, hardware=hardware, threads=threads, seed=seed)
    if name == "ray":
        from .ray.measurer import RayMeasurer

        return RayMeasurer(target, hardware=hardware, threads=threads, seed=seed)
    if name.startswith("rpc:"):
        from .rpc.measurer import RpcMeasurer

        return RpcMeasurer(name, target, hardware=hardware, threads=threads, seed=seed)
    raise InputError(
        f"unknown way to measure, {name!r}; give {', '.join(FORMS)}, or (in Python) an instance with the methods of "
        "eqtune.measure.Measurer"
    )


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module 'eqtune.measure' has no attribute {name!r}")
