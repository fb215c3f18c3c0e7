"""When a run of eqtune had found what: from its records, which carry the time of each measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eqtune.records import Record, RecordDatabase
from eqtune.report.curves import convergence
from eqtune.report.summary import RunSummary

__all__ = ["reached_s", "records_of", "within_s"]


def records_of(work_dir: Path) -> list[Record]:
    """All records of a work directory, oldest first."""
    if not (work_dir / "records.sqlite").exists():
        return []
    with RecordDatabase(work_dir / "records.sqlite") as database:
        return list(database.all())


def reached_s(summary: RunSummary, records: Sequence[Record], started_at: float, latency_s: float) -> float | None:
    """Seconds from `started_at` (of `time.time()`) until the kernels' sum was at most `latency_s`.

    None where it never was, 0 where older records were enough. Where prices were, until the first trial ended.
    """
    return _reached_s(*_curve(summary, records), started_at, latency_s)


def within_s(summary: RunSummary, records: Sequence[Record], started_at: float, share: float = 0.05) -> float | None:
    """Seconds until the kernels' sum was within `share` of its last value; None without a kernel or a record of one."""
    used, curve = _curve(summary, records)
    return _reached_s(used, curve, started_at, (1 + share) * curve[-1][1]) if curve and used else None


def _reached_s(
    used: Sequence[Record], curve: Sequence[tuple[int, float]], started_at: float, latency_s: float
) -> float | None:
    trial = next((trial for trial, sum_s in curve if sum_s <= latency_s), None)
    if trial is None:
        return None
    # Prices carry no time: what they were enough for is known when the first trial is.
    return max(0.0, used[max(0, trial - 1)].timestamp_s - started_at) if used else 0.0


def _curve(summary: RunSummary, records: Sequence[Record]) -> tuple[list[Record], list[tuple[int, float]]]:
    """The records of the kernels in use, and the sum of the kernels' latencies after so many of them."""
    rows = summary.kernels
    wanted = {row.workload_hash for row in rows}
    used = [r for r in records if r.workload_hash in wanted and r.context == summary.context]
    curve = convergence(
        [(record.workload_hash, record.latency_s) for record in used],
        {row.workload_hash: row.calls for row in rows},
        {row.workload_hash: row.before_s for row in rows},
    )
    return used, curve
