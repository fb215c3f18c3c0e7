"""Checks on records and rows: what comes from a file is not trusted, what goes in is not wrong."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from eqtune.errors import RecordError

from .record import Context, Record

__all__ = ["check_hash", "check_record", "check_text", "parse_object"]

MAX_TEXT = 64 * 1024 * 1024
"""Longest text of one field, in characters: traces and workloads are tens of thousands."""

MAX_LATENCIES = 100_000
"""Most repeats of one record."""

MAX_NOTE = 3e38
"""Largest note: cost models read them as float32."""

_HASH = re.compile(r"[0-9a-f]{16}\Z")


def check_record(record: Record) -> Record:
    """The record, when every field has the right type and a sensible value; raises RecordError when not."""
    check_hash(record.workload_hash)
    for name in ("decision", "trace", "error", "detail", "eqtune_version", "notes"):
        check_text(name, getattr(record, name))
    check_context(record.context)
    if record.decision:
        _check_decision(record.decision)
    if record.notes:
        for name, value in parse_object("notes", record.notes).items():
            if abs(check_number(f"the note {name!r:.60}", value)) > MAX_NOTE:
                raise RecordError(f"the note {name!r:.60} must be at most {MAX_NOTE:g}, not {value!r:.60}")
    _check_latencies(record.latencies_s)
    if bool(record.latencies_s) == bool(record.error):
        raise RecordError(
            "a record has either latencies or an error, but this one has "
            f"{len(record.latencies_s)} latencies and error {record.error!r}"
        )
    check_number("timestamp_s", record.timestamp_s)
    if not isinstance(record.seed, int) or isinstance(record.seed, bool) or not -(2**63) <= record.seed < 2**63:
        raise RecordError(f"seed must be a 64-bit integer, not {record.seed!r}")
    return record


def check_context(context: Context) -> Context:
    """The context, when its fields have the right types; raises RecordError when not."""
    for name in ("target", "device", "tvm_version"):
        check_text(name, getattr(context, name))
    threads = context.threads
    if not isinstance(threads, int) or isinstance(threads, bool) or not 0 < threads < 2**31:
        raise RecordError(f"threads must be a positive integer, not {threads!r}")
    return context


def check_hash(value: Any) -> str:
    """The workload hash, when it is one; raises RecordError when not."""
    if not isinstance(value, str) or not _HASH.match(value):
        raise RecordError(f"a workload hash is 16 hexadecimal digits, not {value!r:.60}")
    return value


def check_text(name: str, value: Any) -> str:
    """The text, when it is one that is not absurdly long; raises RecordError when not."""
    if not isinstance(value, str):
        raise RecordError(f"{name} must be text, not {type(value).__name__}")
    if len(value) > MAX_TEXT:
        raise RecordError(f"{name} has {len(value)} characters; at most {MAX_TEXT} are kept")
    return value


def check_number(name: str, value: Any) -> float:
    """The number, when it is finite; raises RecordError when not."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer beyond all floats
            if math.isfinite(value):
                return float(value)
    raise RecordError(f"{name} must be a finite number, not {value!r:.60}")


def parse_object(name: str, text: str) -> dict[str, Any]:
    """A JSON object from text; raises RecordError for anything else."""
    value = parse_json(name, text)
    if not isinstance(value, dict):
        raise RecordError(f"{name} must be a JSON object, not {text!r:.60}")
    return value


def parse_json(name: str, text: str) -> Any:
    """Strict JSON (no NaN, no infinity) from text; raises RecordError for anything else."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordError(f"{name} is not JSON: {error}") from error


def _check_decision(text: str) -> None:
    match parse_object("decision", text):
        case {"sketch": str(), "values": dict(values), **others} if not others:
            if all(type(value) is int and abs(value) < 2**63 for value in values.values()):
                return
    raise RecordError(f"a decision names a sketch and integers as values, but this one is {text!r:.80}")


def _check_latencies(latencies_s: Sequence[float]) -> None:
    if not isinstance(latencies_s, tuple) or len(latencies_s) > MAX_LATENCIES:
        raise RecordError(f"latencies_s must be a tuple of at most {MAX_LATENCIES} numbers")
    for latency_s in latencies_s:
        if check_number("a latency", latency_s) <= 0:
            raise RecordError(f"a latency must be positive, not {latency_s!r}")


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")
