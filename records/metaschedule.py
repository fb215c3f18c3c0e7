"""Records to and from MetaSchedule's JSON database. TVM is imported when a function is called, not with the module.

Such a database is a directory with two files, one JSON value a line:

- `database_workload.json`: [structural hash, base64 of the module's JSON behind its length in eight bytes];
- `database_tuning_record.json`: [line number of the workload, [trace, seconds, target, arguments]].

It knows neither device, threads nor TVM version: the caller says where its numbers were, or may be, measured. Failed
candidates are 1e10 seconds there; they are neither exported nor imported.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eqtune.errors import InputError, RecordError
from eqtune.files import as_path

from .database import RecordDatabase
from .record import Context, Record
from .traces import parse_trace, replay, trace_to_json
from .validation import check_record
from .workload import deserialize_workload, serialize_workload, workload_hash

__all__ = ["Exchange", "export_metaschedule", "import_metaschedule"]

WORKLOAD_FILE = "database_workload.json"
RECORD_FILE = "database_tuning_record.json"

_DIRECTORY = "a MetaSchedule database is a directory at a path"

Replay = Callable[[str, Any], Any]

_FAILED_S = 1e10
"""MetaSchedule's time of a candidate that failed."""


@dataclass(frozen=True)
class Exchange:
    """What an import or export did.

    Attributes
    ----------
    workloads, records : int
        Kernels and records that were carried over.
    skipped : mapping of str to int
        Reason to records that were left out.
    """

    workloads: int
    records: int
    skipped: Mapping[str, int] = field(default_factory=dict)


def export_metaschedule(
    database: RecordDatabase,
    directory: str | os.PathLike[str],
    context: Context,
    *,
    every: bool = False,
    overwrite: bool = False,
    replay: Replay = replay,
) -> Exchange:
    """Write the records of one context as a MetaSchedule database, which `MetaScheduleApplyDatabase` applies.

    That pass must run before global symbols are attached, as with MetaSchedule's own tuning. TVM's file format turns
    boolean annotations into the integer 1.

    Parameters
    ----------
    database : RecordDatabase
    directory : str or path
        Created when it does not exist.
    context : Context
        Whose records.
    every : bool
        All successes instead of the best of each kernel. TVM then picks by the mean of the repeats, eqtune by the
        minimum.
    overwrite : bool
        Replace a database that is already there.
    replay : callable
        Makes a schedule of a trace and a module. `eqtune.search.space.replay.replay_schedule` also knows the intrinsics
        that eqtune's own schedules name (products of bytes, matrix units of GPUs); without it, such records are skipped
        where nothing has registered them yet.

    Raises
    ------
    InputError
        When a database is already there, or the context's target is not one.
    RecordError
        When the directory cannot be written.
    """
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

    directory = as_path(directory, _DIRECTORY)
    if not overwrite and any((directory / name).exists() for name in (WORKLOAD_FILE, RECORD_FILE)):
        raise InputError(f"{str(directory)!r} already holds a MetaSchedule database; give another one, or overwrite it")
    target = _target(context.target)
    skipped: Counter[str] = Counter()
    workloads = exported = 0
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".export-") as unfinished:
            written = JSONDatabase(
                path_workload=os.path.join(unfinished, WORKLOAD_FILE),
                path_tuning_record=os.path.join(unfinished, RECORD_FILE),
            )
            for found, records in _by_workload(database, context, every):
                text = database.workload(found)
                if text is None:
                    skipped["its kernel was not recorded"] += len(records)
                    continue
                mod = _named_main(deserialize_workload(text.text))
                workload = written.commit_workload(mod)
                workloads += 1
                for record in records:
                    try:
                        trace = replay(record.trace, mod).trace
                    except RecordError:
                        skipped["its trace does not replay"] += 1
                        continue
                    arguments = ArgInfo.from_entry_func(mod, remove_preproc=True)
                    seconds = list(record.latencies_s)
                    written.commit_tuning_record(TuningRecord(trace, workload, seconds, target, arguments))
                    exported += 1
            # Records name workloads by their lines: none may be left beside those of another database.
            (directory / RECORD_FILE).unlink(missing_ok=True)
            for name in (WORKLOAD_FILE, RECORD_FILE):
                os.replace(os.path.join(unfinished, name), directory / name)
    except OSError as error:
        raise RecordError(f"cannot export to {str(directory)!r}: {error.strerror or error}") from error
    return Exchange(workloads, exported, dict(skipped))


def import_metaschedule(
    database: RecordDatabase, directory: str | os.PathLike[str], context: Context, *, replay: Replay = replay
) -> Exchange:
    """Add the successes of a MetaSchedule database.

    Records of another target are skipped, and so are those that are already there. Lines that cannot be read (a last
    line that was cut short, say) are skipped and counted.

    Parameters
    ----------
    database : RecordDatabase
    directory : str or path
        Holds the two files.
    context : Context
        Where the records were measured: MetaSchedule does not note device, threads and TVM version.
    replay : callable
        As in `export_metaschedule`.

    Raises
    ------
    InputError
        When the files are not there, or the context's target is not one.
    RecordError
        When `database` cannot be written.
    """
    directory = as_path(directory, _DIRECTORY)
    target = _canonical(context.target)
    skipped: Counter[str] = Counter()
    kernels = [_kernel(line) for line in _lines(directory / WORKLOAD_FILE)]
    mods = dict(kernel for kernel in kernels if kernel is not None)
    known = {found: {record.trace for record in database.for_workload(found, context)} for found in mods}
    batch = []
    for line in _lines(directory / RECORD_FILE):
        record, reason = _record(line, kernels, target, context, replay)
        if record is not None and record.trace in known[record.workload_hash]:
            record, reason = None, "already there"
        if record is None:
            skipped[reason] += 1
        else:
            known[record.workload_hash].add(record.trace)
            batch.append(record)
    used = {record.workload_hash for record in batch}
    for found in sorted(used):
        database.add_workload(found, serialize_workload(mods[found]), name=found, flops=0.0)
    database.add(batch)
    return Exchange(len(used), len(batch), dict(skipped))


def _by_workload(database: RecordDatabase, context: Context, every: bool) -> Iterator[tuple[str, list[Record]]]:
    for found, best in database.best_by_workload(context).items():
        yield found, [r for r in database.for_workload(found, context) if not r.error] if every else [best]


def _named_main(mod: Any) -> Any:
    """The workload as MetaSchedule keeps it: its entry carries the global symbol "main"."""
    import tvm

    return tvm.IRModule({"main": mod["main"].with_attr("global_symbol", "main")})


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from file
    except OSError as error:
        raise InputError(
            f"{str(path)!r} cannot be read ({error.strerror}); a MetaSchedule database is a directory with "
            f"{WORKLOAD_FILE} and {RECORD_FILE}"
        ) from error


def _kernel(line: str) -> tuple[str, Any] | None:
    """Hash and module of a line, or None when it holds no kernel that can be read."""
    try:
        _, encoded = json.loads(line)
        data = base64.b64decode(encoded)
        length = int.from_bytes(data[:8], "little")
        mod = deserialize_workload(data[8 : 8 + length].decode())
    except (ValueError, TypeError, RecursionError, RecordError):
        return None
    return workload_hash(mod), mod


def _record(
    line: str, kernels: list[tuple[str, Any] | None], target: str, context: Context, replay: Replay
) -> tuple[Record | None, str]:
    """The record of a line, or None and why it is left out."""
    try:
        index, (trace, seconds, own_target, _) = json.loads(line)
        kernel = kernels[index] if 0 <= index < len(kernels) else None
        latencies_s = tuple(float(second) for second in seconds or ())
        text = json.dumps(trace)
        parse_trace(text)
        same_target = own_target is None or _canonical(json.dumps(own_target)) == target
    except (ValueError, TypeError, OverflowError, RecursionError, RecordError):
        return None, "the line cannot be read"
    if kernel is None:
        return None, "its kernel cannot be read"
    if not latencies_s or any(not 0 < latency_s < _FAILED_S for latency_s in latencies_s):
        return None, "the candidate failed"
    if not same_target:
        return None, "another target"
    if '"Tensorize"' in text:
        import tvm.s_tir.tensor_intrin  # noqa: F401  it takes many seconds, and only such traces need it
    try:
        # Replayed, for it shows that the trace fits, and gives the text that eqtune would write itself.
        text = trace_to_json(replay(text, kernel[1]).trace)
        return check_record(Record(kernel[0], "", text, context, latencies_s)), ""
    except RecordError:
        return None, "its trace does not replay"


def _target(text: str) -> Any:
    """A `tvm.target.Target` from JSON text."""
    from tvm.target import Target

    try:
        return Target(json.loads(text))
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(f"the context's target is not a target of TVM ({reason}): {text:.200}") from error


def _canonical(text: str) -> str:
    """One text for equal targets: all of the defaults that TVM fills in, sorted keys."""
    return json.dumps(json.loads(str(_target(text))), sort_keys=True)
