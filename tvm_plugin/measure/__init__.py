"""Building and running candidates: on this machine (`LocalMeasurer`), or from records (`ReplayMeasurer`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .base import ERROR_KINDS, Measurement, Measurer, Overheads

if TYPE_CHECKING:
    from ..search.space.hardware import Hardware
    from .local import LocalMeasurer
    from .replay import ReplayMeasurer

__all__ = [
    "ERROR_KINDS",
    "LocalMeasurer",
    "Measurement",
    "Measurer",
    "Overheads",
    "ReplayMeasurer",
    "create",
]

_HOMES = {"LocalMeasurer": ".local", "ReplayMeasurer": ".replay"}


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
        "local", or an instance, which is returned as it is.
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
    """
    if measure == "local":
        from ..machine import detect_target
        from .local import LocalMeasurer

        target = detect_target(threads) if target is None else target
        return LocalMeasurer(target, hardware=hardware, threads=threads, seed=seed)
    if isinstance(measure, str):
        known = "'local', or an instance with the methods of eqtune.measure.Measurer"
        if measure.startswith("rpc://"):
            raise InputError(f"measuring over RPC ({measure}) is not available in this version; give {known}")
        raise InputError(f"unknown measurer {measure!r}; give {known}")
    missing = [name for name in ("baseline", "measure", "retime", "close", "describe") if not hasattr(measure, name)]
    if missing:
        raise InputError(f"{type(measure).__name__} is no measurer: it has no {', '.join(missing)}")
    return measure


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module 'eqtune.measure' has no attribute {name!r}")
