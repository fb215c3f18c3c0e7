"""What `python -m benchmarks.models` derives from records."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.models import within_s
from eqtune.records import Context, Record
from eqtune.report.summary import KernelRow, RunSummary

HERE = Context(target="llvm", device="cpu", threads=1, tvm_version="0.27")


def record(workload: str, latency_s: float, timestamp_s: float, context: Context = HERE) -> Record:
    return Record(workload, "{}", "", context, (latency_s,), timestamp_s=timestamp_s)


def summary(*workloads: str) -> RunSummary:
    rows = [KernelRow(w, w, calls=1, flops=1, bytes_moved=1, baseline_s=9, tuned_s=1, trials=2) for w in workloads]
    return RunSummary("model", HERE, tuple(rows))


def test_seconds_until_nearly_as_fast_as_in_the_end() -> None:
    records = [
        record("a", 4.0, 101.0),
        record("other", 0.1, 102.0),
        record("a", 0.5, 103.0, replace(HERE, threads=2)),
        record("a", 1.02, 107.0),
        record("a", 1.0, 150.0),
    ]
    assert within_s(summary("a"), records, started_at=100.0) == 7.0
    assert within_s(summary("a"), records, started_at=200.0) == 0.0  # older records were enough
    assert within_s(summary("a", "other"), records, started_at=100.0) == 7.0
    assert within_s(summary("b"), records, started_at=100.0) is None
    assert within_s(summary(), records, started_at=100.0) is None
