"""The result as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from .summary import KernelRow, RunSummary
from .units import about, compared, count, counted, duration, number, percent, times

__all__ = ["OF_SLOWER_FORMS", "closing_lines", "kernel_table", "why_not_measured"]

NAME_WIDTH = 32
"""Longer kernel names lose their middle, so that a row fits 112 columns."""

_HEADERS = ("kernel", "calls", "FLOPs", "baseline us", "tuned us", "speedup", "GFLOPS", "% peak", "trials", "% time")


def kernel_table(summary: RunSummary) -> str:
    """A row for each kernel, slowest first, then the whole model before and after; ends without a newline.

    Only printable ASCII of the names is kept: they come from the model.
    """
    rows = [_cells(summary, row) for row in summary.by_time()]
    measured = not summary.unmeasured
    rows.append(
        (
            f"{counted(len(summary.kernels), 'kernel')}, all calls",
            str(sum(row.calls for row in summary.kernels)),
            count(sum(row.calls * row.flops for row in summary.kernels)),
            about(_microseconds(summary.kernels_baseline_s), measured),
            about(_microseconds(summary.kernels_tuned_s), measured),
            times(_ratio(summary.kernels_baseline_s, summary.kernels_tuned_s) if measured else None),
            "",
            "",
            str(summary.trials),
            "",
        )
    )
    footnote = [] if measured else [f"~ not measured: {why_not_measured(summary)}"]
    return "\n".join([*_align(_HEADERS, rows), *footnote, "", *closing_lines(summary)])


NOT_REACHED = "the search did not reach these kernels: times of a few candidates, or estimates; baselines are guesses"
"""What a tilde before a kernel's numbers means..."""

OF_OPEN_SIZES = "the kernel's tiles are scheduled by estimate; its time is one, its baseline a guess"
"""... and where sizes are open."""

OF_SLOWER_FORMS = "kernels that only slower forms of the model have"
"""Where trials went that no row counts."""

DISTURBED = 1.5
"""A model that takes so many times as long as its kernels together..."""

DISTURBED_S = 1e-3
"""... and so many seconds, which running a small one costs anyway, was timed in a bad moment."""


def why_not_measured(summary: RunSummary) -> str:
    """What the tilde means in this run."""
    return OF_OPEN_SIZES if summary.open_sizes else NOT_REACHED


def closing_lines(summary: RunSummary) -> list[str]:
    """What follows the table: the whole model, the check, failures, and where the time went."""
    lines = []
    if not summary.context.measured:
        lines.append(
            f"NOT MEASURED: nothing was run. Latencies are estimates for {printable(summary.context.machine)}"
            + (f"; all kernels together {duration(summary.tuned_s)}" if summary.tuned_s else "")
        )
    if summary.baseline_s is not None and summary.tuned_s is not None:
        lines.append(
            f"{printable(summary.model)}: {summary.baseline_name} "
            f"{duration(summary.baseline_s)}, tuned {duration(summary.tuned_s)}, "
            f"{compared(summary.speedup)} on {printable(summary.context.machine)}, "
            f"{counted(summary.context.threads, 'thread')}"
        )
        if summary.open_sizes:
            lines.append(f"for any size, timed at {printable(summary.open_sizes)}; --shape tunes for one size alone")
        else:
            lines += _disturbed(summary)
    if summary.max_rel_error is not None and summary.max_abs_error is not None:
        lines.append(
            f"largest difference from the reference: {summary.max_rel_error:.1e} relative"
            + ("" if summary.tolerance is None else f" ({summary.tolerance:.1e} permitted)")
            + f", {summary.max_abs_error:.1e} absolute"
        )
    if "fast math" in summary.graph:
        lines.append(f"fast math: {printable(str(summary.graph['fast math']))}")
    if "choice" in summary.graph:
        choice = printable(str(summary.graph["choice"]))
        lines.append(f"{choice}; kernels behind what the model chooses are scheduled by estimate, and have no row")
    if summary.trials or summary.other_trials:
        kinds = ", ".join(f"{number} {printable(kind)}" for kind, number in summary.errors.items())
        lines.append(
            f"trials: {summary.trials}, of which {summary.failed} failed"
            + (f" ({kinds})" if kinds else "")
            + (f"; {summary.other_trials} more of {OF_SLOWER_FORMS}" if summary.other_trials else "")
        )
    if summary.wall_s:
        parts = [f"{printable(name)} {duration(seconds)}" for name, seconds in summary.overheads_s.items()]
        lines.append(f"took {duration(summary.wall_s)}: " + ", ".join([*parts, f"other {duration(summary.other_s)}"]))
    if summary.interrupted:
        lines.append("interrupted: this is the best so far; run the same command again to go on")
    return lines


def _disturbed(summary: RunSummary) -> list[str]:
    """A warning, where the model takes far longer than its kernels did."""
    kernels_s, model_s = summary.kernels_tuned_s, summary.tuned_s or 0.0
    if model_s < DISTURBED * kernels_s + DISTURBED_S:
        return []
    return [
        f"that is {times(_ratio(model_s, kernels_s))} what its kernels took one by one ({duration(kernels_s)}): the "
        "machine was perhaps busy with something else; the same command times the model again"
    ]


def printable(text: str, width: int | None = None) -> str:
    """Printable ASCII only (no escape codes reach the terminal); the middle left out where it is too long."""
    clean = "".join(character if " " <= character <= "~" else "?" for character in text)
    if width is None or len(clean) <= width:
        return clean
    head = (width - 2) // 2
    return f"{clean[:head]}..{clean[len(clean) - (width - 2 - head) :]}"


def _cells(summary: RunSummary, row: KernelRow) -> tuple[str, ...]:
    return (
        printable(row.name, NAME_WIDTH),
        str(row.calls),
        count(row.flops),
        about(_microseconds(row.baseline_s), row.measured),
        about(_microseconds(row.tuned_s), row.measured),
        times(row.speedup),
        about(number(row.gflops), row.measured),
        about(percent(summary.peak_fraction(row)), row.measured),
        str(row.trials),
        about(percent(summary.share(row)), row.measured),
    )


def _align(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in (headers, *rows)) for column in range(len(headers))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (headers, *rows)
    ]
    rule = "-" * max(map(len, lines))
    return [lines[0], rule, *lines[1:-1], rule, lines[-1]]


def _microseconds(seconds: float) -> str:
    return number(seconds * 1e6)


def _ratio(before: float, after: float) -> float | None:
    return before / after if after else None
