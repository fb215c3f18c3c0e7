"""One measured candidate, as it is kept."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

__all__ = ["COLD_WEIGHTS", "NOT_MEASURED", "Context", "Record", "Workload", "notes_of"]

NOT_MEASURED = "estimated by compiling, not measured"
"""Part of the device's name where nothing was run: such records never pass for measurements."""

COLD_WEIGHTS = " (weights not cached)"
"""End of the device's name where calls found their weights in no near cache, as in models with many."""


@dataclass(frozen=True)
class Context:
    """Where a measurement is valid. Records of another context never match silently.

    Attributes
    ----------
    target : str
        The target as canonical JSON (sorted keys).
    device : str
        The device's name as the machine gives it.
    threads : int
        Threads that the kernel could use.
    tvm_version : str
        Version of TVM that compiled it.
    """

    target: str
    device: str
    threads: int
    tvm_version: str

    @property
    def measured(self) -> bool:
        """False when latencies are estimates: nothing was run."""
        return NOT_MEASURED not in self.device

    @property
    def machine(self) -> str:
        """The device's name without how kernels were timed there."""
        return self.device.removesuffix(COLD_WEIGHTS)


@dataclass(frozen=True)
class Record:
    """One measured candidate.

    Attributes
    ----------
    workload_hash : str
        Structural hash of the kernel, 16 hexadecimal digits.
    decision : str
        The candidate as JSON: {"sketch": ..., "values": {...}}; "" for an imported record without one, and for a
        kernel that was timed alone but compared only as part of its model.
    trace : str
        The schedule's trace as TVM's JSON.
    context : Context
        Where it was measured.
    latencies_s : tuple of float
        Seconds of one call, one entry a repeat; empty when it failed.
    error : str
        "" or the kind of failure.
    detail : str
        What went wrong.
    timestamp_s : float
        Wall-clock time of the measurement, seconds since the epoch.
    seed : int
        Seed of the run that proposed it.
    eqtune_version : str
        Version that proposed it.
    notes : str
        What else was learnt of it, as a JSON object of numbers by name; "" for nothing. See `notes_of`.
    """

    workload_hash: str
    decision: str
    trace: str
    context: Context
    latencies_s: tuple[float, ...] = ()
    error: str = ""
    detail: str = ""
    timestamp_s: float = 0.0
    seed: int = 0
    eqtune_version: str = ""
    notes: str = ""

    @property
    def latency_s(self) -> float:
        """The minimum of the repeats; `inf` when it failed."""
        return min(self.latencies_s, default=math.inf)


def notes_of(record: Record) -> dict[str, float]:
    """The record's notes by name: what a GPU's compiler told ("registers", ...), the clock ("clock_mhz")."""
    return json.loads(record.notes) if record.notes else {}


@dataclass(frozen=True)
class Workload:
    """A kernel as it is kept.

    Attributes
    ----------
    hash : str
        `workload_hash` of the kernel, 16 hexadecimal digits.
    text : str
        `serialize_workload` of the kernel.
    name : str
        A name for people.
    flops : float
        Floating-point operations of one call (an FMA counts two).
    """

    hash: str
    text: str
    name: str
    flops: float
