"""The best recorded schedules, ready to be applied."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import ir

from eqtune.records import Context, Record, RecordDatabase

from ..errors import InputError
from ..files import as_path
from ..gpu_machine import is_gpu
from ..machine import device_name, is_host, target_json
from ..search.space.base import Decision
from ..search.space.gpu.hardware import GpuHardware
from ..search.space.gpu.warpgroup_lowering import MULTIPLY
from ..search.space.replay import replay_schedule

__all__ = ["StoredSchedule", "keep_tiles", "stored_decisions", "stored_schedules"]

_LEFT_OUT = "tiles_left_out"
"""Key of the tiles, by workload hash, with which a model of open sizes was no faster than by estimate."""

LOGGER = logging.getLogger("eqtune")


@dataclass(frozen=True)
class StoredSchedule:
    """A recorded schedule: called with a workload, it gives the scheduled one.

    What the records say the workload is does not matter: only the trace is used.

    Attributes
    ----------
    trace : str
        As it is stored.
    latency_s : float
        Measured seconds of one call.
    decision : Decision or None
        What made the trace, where the records say so; None of tiles that are left out (`keep_tiles`).
    """

    trace: str
    latency_s: float
    decision: Decision | None = None

    def __call__(self, mod: ir.IRModule) -> Any:
        """The scheduled workload, a `tvm.s_tir.Schedule`. Raises RecordError when the trace does not fit."""
        return replay_schedule(self.trace, mod)


def stored_schedules(
    records: str | os.PathLike[str] | RecordDatabase, context: Context | None = None
) -> dict[str, StoredSchedule]:
    """The fastest recorded schedule of each kernel, by workload hash.

    Parameters
    ----------
    records : path or RecordDatabase
        A work directory, its `records.sqlite`, or an open database.
    context : Context, optional
        Records of any other context are left out. Without it: those of the current target, this device and this
        version of TVM, with the most threads where there are several, and as large models leave the caches where there
        are such; for a target that is not this machine's own CPU or GPU, of whichever device measured it. Where there
        are none of a GPU's very target, those of its architecture.

    Raises
    ------
    InputError
        When there is no such file, no current target to look for, or the context is none.
    RecordError
        When the database cannot be read.
    """
    if context is not None and not isinstance(context, Context):
        raise InputError(f"context is an eqtune.records.Context, such as one of `database.contexts()`, not {context!r}")
    if isinstance(records, RecordDatabase):
        return _schedules(records, context)
    path = as_path(records, "records is the work_dir of an eqtune.tune_model run, or its database")
    path = path / "records.sqlite" if path.is_dir() else path
    if not path.exists():
        raise InputError(f"there are no records at {str(path)!r}; give the work_dir of an eqtune.tune_model run")
    with RecordDatabase(path) as database:
        return _schedules(database, context)


def _schedules(database: RecordDatabase, context: Context | None) -> dict[str, StoredSchedule]:
    best: dict[str, Record] = {}
    for one in _matching_contexts(database) if context is None else [context]:
        best |= _usable(database, one)
    left_out = database.get_object(_LEFT_OUT)
    return {key: _stored(record, key in left_out) for key, record in best.items() if record.trace}


def _usable(database: RecordDatabase, context: Context) -> dict[str, Record]:
    """The fastest record of each kernel; products by warpgroups only where code for the current target has them."""
    best = database.best_by_workload(context)
    target = tvm.target.Target.current(allow_none=True)
    if target is None or not is_gpu(target) or GpuHardware(arch=str(target.attrs.get("arch", ""))).has_warpgroups:
        return best
    for key in [key for key, record in best.items() if MULTIPLY in record.trace]:
        del best[key]
        others = [r for r in database.for_workload(key, context) if r.latencies_s and MULTIPLY not in r.trace]
        if others:
            best[key] = min(others, key=lambda record: record.latency_s)
    return best


def _stored(record: Record, left_out: bool) -> StoredSchedule:
    decision = Decision.from_json(json.loads(record.decision)) if record.decision and not left_out else None
    return StoredSchedule(record.trace, record.latency_s, decision)


def keep_tiles(database: RecordDatabase, tiles: Iterable[str], keep: bool) -> None:
    """Whether models with open sizes use what was measured of tiles, by workload hash, from now on.

    As a whole, a model may be slower with them than by estimate; what it was found to be is what passes build.
    """
    left_out = dict.fromkeys(tiles, True)
    known = {key: True for key in database.get_object(_LEFT_OUT) if key not in left_out}
    if known or left_out:
        database.put_json(_LEFT_OUT, known if keep else known | left_out)


def stored_decisions(stored: Mapping[str, Any]) -> dict[str, Decision]:
    """Of stored schedules, what was decided, by workload hash: tiles of kernels with symbolic sizes need that."""
    return {key: one.decision for key, one in stored.items() if getattr(one, "decision", None) is not None}


def _matching_contexts(database: RecordDatabase) -> list[Context]:
    """Of one machine and number of threads; the last is worth most."""
    target = tvm.target.Target.current(allow_none=True)
    if target is None:
        raise InputError("which records apply depends on the target: work inside `with target:`, or give a context")
    wanted = target_json(target), device_name(target), str(tvm.__version__)
    known = database.contexts()
    matching = [c for c in known if (c.target, c.machine, c.tvm_version) == wanted]
    if not matching and is_gpu(target):
        # What targets say of limits changes no code, and a letter only adds instructions; the same letter counts more.
        of_device = [c for c in known if (c.machine, c.tvm_version) == wanted[1:]]
        matching = [c for c in of_device if _arch(c.target) == _arch(wanted[0])]
        matching.sort(key=lambda c: _arch(c.target, "") == _arch(wanted[0], ""))
    elif not matching and not is_host(target):
        # Code for other machines, or for any that has its instructions: whichever measured it knows best.
        matching = [c for c in known if (c.target, c.tvm_version) == (wanted[0], wanted[2])]
    if not matching:
        LOGGER.warning(
            "%s holds no records for target %s on %s with TVM %s; it holds: %s",
            database.path,
            *wanted,
            "; ".join(f"{c.target} on {c.device} with TVM {c.tvm_version}" for c in known) or "nothing",
        )
        return []
    best = max(matching, key=lambda c: c.threads)
    alike = [c for c in matching if (c.machine, c.threads) == (best.machine, best.threads)]
    return sorted(alike, key=lambda c: c.device != c.machine)


def _arch(target: str, letters: str = "af") -> str:
    """The GPU architecture in a target's JSON, less a letter at its end; "" where there is none."""
    try:
        fields = json.loads(target)
    except ValueError:
        return ""
    return str(fields.get("arch", "")).rstrip(letters) if isinstance(fields, dict) else ""
