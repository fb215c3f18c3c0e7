"""What a tuning run did, as plain data: all that the table and the page show, and nothing that needs TVM.

The tuning session fills a `RunSummary`; `with_records` adds what follows from the records (curves, failures by kind).
`to_json` and `from_json` carry it through `summary.json`, so that a report can be made again later.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..errors import InputError
from ..records import Context, Record
from .curves import Curve, best_so_far, convergence

__all__ = ["KernelRow", "RunSummary", "plain", "with_records"]


@dataclass(frozen=True)
class KernelRow:
    """One distinct kernel.

    Attributes
    ----------
    name, workload_hash : str
    calls : int
        How often one run of the model calls it.
    flops, bytes_moved : float
        Floating-point operations and bytes of inputs and outputs, of one call.
    baseline_s, tuned_s : float
        Seconds of one call, untuned and as accepted; equal when the untuned kernel was kept.
    trials, failed : int
        Candidates measured, and how many of them failed.
    sketch : str
        The accepted schedule's sketch; "" when the untuned kernel was kept.
    curve : tuple of (int, float)
        Best latency in seconds after so many trials; see `best_so_far`.
    price_s : float or None
        Seconds of one call with the schedule that it was priced by before the search; None where it was not.
    measured : bool
        False where the budget did not reach the kernel: `tuned_s` is its price or an estimate, `baseline_s` a guess.
    """

    name: str
    workload_hash: str
    calls: int
    flops: float
    bytes_moved: float
    baseline_s: float
    tuned_s: float
    trials: int
    failed: int = 0
    sketch: str = ""
    curve: Curve = ()
    price_s: float | None = None
    measured: bool = True

    @property
    def speedup(self) -> float | None:
        """How many times faster than untuned; None where that was not measured."""
        return self.baseline_s / self.tuned_s if self.measured else None

    @property
    def before_s(self) -> float:
        """Seconds of one call before its first trial: with the schedule that it was priced by, or untuned."""
        return self.baseline_s if self.price_s is None else min(self.price_s, self.baseline_s)

    @property
    def gflops(self) -> float:
        """Speed as tuned, in 1e9 FLOP/s."""
        return self.flops / self.tuned_s / 1e9

    @property
    def total_s(self) -> float:
        """Seconds of all its calls in one run of the model, as tuned."""
        return self.calls * self.tuned_s


@dataclass(frozen=True)
class RunSummary:
    """One tuning run.

    Attributes
    ----------
    model : str
        A name for people.
    context : Context
        Target, device, threads and TVM version that everything was measured with.
    kernels : tuple of KernelRow
    baseline_s, tuned_s : float or None
        Seconds of one run of the whole model, untuned and tuned; None when only kernels were tuned.
    plain_baseline : bool
        Running the untuned model takes too long: baselines are of plain schedules, of the model and of its kernels.
    max_abs_error, max_rel_error : float or None
        Largest difference of the tuned outputs from the reference, absolute, and relative to the largest reference
        value; None when it was not checked.
    tolerance : float or None
        Largest `max_rel_error` that was accepted; None when it was not checked.
    machine : mapping
        `Hardware.to_json()`: the measured peaks are among them.
    versions : mapping of str to str
        Package to version.
    overheads_s : mapping of str to float
        Wall-clock seconds by what they were spent on: "search", "build", "run", "cost model".
    wall_s : float
        Wall-clock seconds of the whole run.
    spent_trials : int
        Candidates measured for the model, also of kernels that only its other forms have, by all runs in the work
        directory.
    errors : mapping of str to int
        Failed candidates by kind.
    curve : tuple of (int, float)
        Sum of the kernels' best latencies in seconds after so many trials; see `convergence`.
    graph : mapping
        Which form of the model won, what came of fast math, with what a choice was compared: name to value, as it
        should be shown.
    command : str
        How to run it again; "" when that is not known.
    seed : int
    interrupted : bool
        True after Ctrl-C: these are the best so far.
    """

    model: str
    context: Context
    kernels: tuple[KernelRow, ...]
    baseline_s: float | None = None
    tuned_s: float | None = None
    plain_baseline: bool = False
    max_abs_error: float | None = None
    max_rel_error: float | None = None
    tolerance: float | None = None
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    overheads_s: Mapping[str, float] = field(default_factory=dict)
    wall_s: float = 0.0
    spent_trials: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    curve: Curve = ()
    graph: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    seed: int = 0
    interrupted: bool = False

    @property
    def peak_flops_per_s(self) -> float | None:
        """The machine's measured float32 peak with all threads of the run, in FLOP/s; None when unknown."""
        peak = self.machine.get("peak_flops_per_s_all")
        return float(peak) if isinstance(peak, (int, float)) and peak > 0 else None

    @property
    def speedup(self) -> float | None:
        """How many times faster the whole model is."""
        if self.baseline_s is None or self.tuned_s is None:
            return None
        return self.baseline_s / self.tuned_s

    @property
    def open_sizes(self) -> str:
        """At which sizes a model was timed whose sizes are open; "" for others."""
        return str(self.graph.get("sizes", ""))

    @property
    def trials(self) -> int:
        """Candidates measured of these kernels."""
        return sum(row.trials for row in self.kernels)

    @property
    def other_trials(self) -> int:
        """Candidates measured of kernels that the model does not have in the end, but other forms of it."""
        return max(0, self.spent_trials - self.trials)

    @property
    def baseline_name(self) -> str:
        """What `baseline_s` is of, for people."""
        return "plain schedules" if self.plain_baseline else "untuned"

    @property
    def unmeasured(self) -> int:
        """How many kernels the budget did not reach."""
        return sum(not row.measured for row in self.kernels)

    @property
    def failed(self) -> int:
        """How many of them failed."""
        return sum(row.failed for row in self.kernels)

    @property
    def kernels_baseline_s(self) -> float:
        """Sum of all calls of all kernels, untuned, in seconds."""
        return sum(row.calls * row.baseline_s for row in self.kernels)

    @property
    def kernels_tuned_s(self) -> float:
        """Sum of all calls of all kernels, tuned, in seconds."""
        return sum(row.total_s for row in self.kernels)

    @property
    def other_s(self) -> float:
        """Wall-clock seconds outside `overheads_s`: importing, timing the baseline, building and checking the whole."""
        return max(0.0, self.wall_s - sum(self.overheads_s.values()))

    def peak_fraction(self, row: KernelRow) -> float | None:
        """The kernel's speed over the machine's peak, 0 to 1; None when the peak is unknown."""
        peak = self.peak_flops_per_s
        return None if peak is None else row.flops / row.tuned_s / peak

    def share(self, row: KernelRow) -> float:
        """The kernel's part of the time of all kernels, 0 to 1."""
        total = self.kernels_tuned_s
        return row.total_s / total if total else 0.0

    def by_time(self) -> list[KernelRow]:
        """The kernels, the one that takes most of the model's time first."""
        return sorted(self.kernels, key=lambda row: (-row.total_s, row.name))

    def to_json(self) -> dict[str, Any]:
        """As a JSON object. What follows from other fields is there too, for those who read the file."""
        fields = asdict(self)
        fields["speedup"] = self.speedup
        fields["trials"] = self.trials
        fields["failed"] = self.failed
        for row, kernel in zip(self.kernels, fields["kernels"], strict=True):
            kernel["speedup"] = row.speedup
            kernel["gflops"] = row.gflops
            kernel["peak_fraction"] = self.peak_fraction(row)
            kernel["share"] = self.share(row)
        return {name: plain(value) for name, value in fields.items()}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> RunSummary:
        """The inverse of `to_json`. Raises InputError when `fields` is something else."""
        try:
            return _summary(fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"this is not the summary of a tuning run: {type(error).__name__}: {error}") from error


def with_records(summary: RunSummary, records: Sequence[Record]) -> RunSummary:
    """The summary with curves, trials and failures by kind taken from the records of its context, in their order.

    Records without a decision are no trials: imported ones, and those of kernels that the budget did not reach.
    """
    wanted = {row.workload_hash for row in summary.kernels}
    records = [r for r in records if r.decision and r.context == summary.context and r.workload_hash in wanted]
    rows = []
    for row in summary.kernels:
        own = [record for record in records if record.workload_hash == row.workload_hash]
        rows.append(
            replace(
                row,
                trials=len(own),
                failed=sum(bool(record.error) for record in own),
                curve=best_so_far([record.latency_s for record in own]),
            )
        )
    return replace(
        summary,
        kernels=tuple(rows),
        errors=dict(Counter(record.error for record in records if record.error).most_common()),
        curve=convergence(
            [(record.workload_hash, record.latency_s) for record in records],
            calls={row.workload_hash: row.calls for row in rows},
            baselines_s={row.workload_hash: row.before_s for row in rows},
        ),
    )


def plain(value: Any) -> Any:
    """Only what JSON has: not-a-number and infinities become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, int)):
        return value
    return plain(value.item()) if hasattr(value, "item") else str(value)


def _summary(fields: Mapping[str, Any]) -> RunSummary:
    context = fields["context"]
    return RunSummary(
        model=str(fields["model"]),
        context=Context(
            str(context["target"]), str(context["device"]), int(context["threads"]), str(context["tvm_version"])
        ),
        kernels=tuple(_kernel(kernel) for kernel in fields["kernels"]),
        baseline_s=_optional(fields.get("baseline_s")),
        tuned_s=_optional(fields.get("tuned_s")),
        plain_baseline=bool(fields.get("plain_baseline", False)),
        max_abs_error=_optional(fields.get("max_abs_error")),
        max_rel_error=_optional(fields.get("max_rel_error")),
        tolerance=_optional(fields.get("tolerance")),
        machine=dict(fields.get("machine", {})),
        versions={str(k): str(v) for k, v in fields.get("versions", {}).items()},
        overheads_s={str(k): float(v) for k, v in fields.get("overheads_s", {}).items()},
        wall_s=float(fields.get("wall_s", 0.0)),
        spent_trials=int(fields.get("spent_trials", 0)),
        errors={str(k): int(v) for k, v in fields.get("errors", {}).items()},
        curve=_curve(fields.get("curve", ())),
        graph=dict(fields.get("graph", {})),
        command=str(fields.get("command", "")),
        seed=int(fields.get("seed", 0)),
        interrupted=bool(fields.get("interrupted", False)),
    )


def _kernel(fields: Mapping[str, Any]) -> KernelRow:
    return KernelRow(
        name=str(fields["name"]),
        workload_hash=str(fields["workload_hash"]),
        calls=int(fields["calls"]),
        flops=float(fields["flops"]),
        bytes_moved=float(fields["bytes_moved"]),
        baseline_s=_latency(fields["baseline_s"]),
        tuned_s=_latency(fields["tuned_s"]),
        trials=int(fields["trials"]),
        failed=int(fields.get("failed", 0)),
        sketch=str(fields.get("sketch", "")),
        curve=_curve(fields.get("curve", ())),
        price_s=_optional(fields.get("price_s")),
        measured=bool(fields.get("measured", True)),
    )


def _curve(points: Any) -> Curve:
    return tuple((int(trial), _latency(latency_s)) for trial, latency_s in points)


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)


def _latency(value: Any) -> float:
    """Seconds; `inf`, which JSON writes as null, for what never ran."""
    if value is None:
        return math.inf
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"a latency must be a positive number of seconds, not {value!r}")
    return number
