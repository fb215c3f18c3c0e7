"""The result as one self-contained HTML page: no request leaves it, and nothing from the model is taken as markup."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ..errors import InputError
from ..files import as_path, replacing
from .charts import Size, curve_svg
from .summary import KernelRow, RunSummary
from .table import OF_SLOWER_FORMS, why_not_measured
from .units import about, binary, count, counted, duration, number, percent, times

__all__ = ["render_html", "write_html"]

SMALL_CHART = Size(width=300, height=150, left=54, right=8, top=8, bottom=24)

ERROR_KINDS: Mapping[str, str] = {
    "build_error": "the schedule or the compiler refused the candidate",
    "timeout": "building or running took longer than allowed; the worker was replaced",
    "crash": "the worker process died; it was replaced",
    "out_of_memory": "the candidate needed more memory than allowed",
    "wrong_result": "the candidate's output differed from the reference; it was thrown away",
}
"""What the kinds of failure mean."""


def write_html(summary: RunSummary, path: str | os.PathLike[str]) -> Path:
    """Write `render_html(summary)` to a file, whose folder is made. Raises InputError when it cannot be written.

    Whatever was there stays until the page is whole.
    """
    page = as_path(path, "a report is written to a path")
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        with replacing(page) as temporary:
            temporary.write_text(render_html(summary), encoding="utf-8", errors="replace")  # names may be no text
    except OSError as error:
        raise InputError(f"the report cannot be written to {os.fspath(path)!r}: {error.strerror}") from error
    return page


def render_html(summary: RunSummary) -> str:
    """The page: result, convergence, kernels, where the time went, failures, machine, how to run it again."""
    sections = (
        _head(summary),
        _convergence(summary),
        _kernels(summary),
        _kernel_curves(summary),
        _time_spent(summary),
        _failures(summary),
        _form(summary),
        _machine(summary),
        _again(summary),
    )
    template = Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(title=escape(f"{summary.model}: eqtune report"), body="\n".join(filter(None, sections)))


def _head(summary: RunSummary) -> str:
    context = summary.context
    threads = counted(context.threads, "thread")
    tiles = []
    if summary.baseline_s is not None and summary.tuned_s is not None:
        tiles += [
            _tile(summary.baseline_name.capitalize(), duration(summary.baseline_s)),
            _tile("Tuned", duration(summary.tuned_s), accent=True),
            _tile("Speedup", times(summary.speedup), accent=True),
        ]
    if summary.max_rel_error is not None:
        permitted = "" if summary.tolerance is None else f"; {summary.tolerance:.1e} permitted"
        note = f"relative to the reference{permitted}"
        tiles.append(_tile("Largest difference", f"{summary.max_rel_error:.1e}", note=note))
    elsewhere = f", {summary.other_trials} more of {OF_SLOWER_FORMS}" if summary.other_trials else ""
    tiles.append(_tile("Trials", str(summary.trials), note=f"{summary.failed} failed{elsewhere}"))
    if summary.wall_s:
        tiles.append(_tile("Tuning took", duration(summary.wall_s)))
    warning = (
        '<p class="warning">The run was interrupted: this is the best so far. Run the same command again to go on.</p>'
        if summary.interrupted
        else ""
    )
    return (
        f"<h1>{escape(summary.model)}</h1>"
        f'<p class="soft">on {escape(context.machine)}, {threads}</p>{warning}<dl class="tiles">{"".join(tiles)}</dl>'
    )


def _tile(name: str, value: str, note: str = "", accent: bool = False) -> str:
    extra = f'<div class="note">{escape(note)}</div>' if note else ""
    return (
        f'<div class="tile{" accent" if accent else ""}"><dt>{escape(name)}</dt><dd>{escape(value)}</dd>{extra}</div>'
    )


def _convergence(summary: RunSummary) -> str:
    if not summary.curve:
        return ""
    baseline_s = summary.kernels_baseline_s
    title = f"Time of all kernels after each trial: from {duration(baseline_s)} to {duration(summary.curve[-1][1])}"
    return (
        "<h2>Convergence</h2><p class='note'>Time of all calls of all kernels (logarithmic) against trials. "
        f"<span class='key'></span> best so far &nbsp; <span class='key dashed'></span> {summary.baseline_name}</p>"
        f'<div class="card wide">{curve_svg(summary.curve, baseline_s, title)}</div>'
    )


def _kernels(summary: RunSummary) -> str:
    columns = (
        ("Kernel", "name"),
        ("Calls", "calls in one run of the model"),
        ("FLOPs", "floating-point operations of one call"),
        (
            ("Plain us", "microseconds of one call with a plain schedule: sums outside of vectors, the rest parallel")
            if summary.plain_baseline
            else ("Untuned us", "microseconds of one call as TVM compiles it without a schedule")
        ),
        ("Tuned us", "microseconds of one call as tuned"),
        ("Speedup", f"{summary.baseline_name} over tuned"),
        ("GFLOPS", "speed as tuned"),
        ("% of peak", "of this machine's measured float32 peak with these threads"),
        ("Trials", "candidates measured"),
        ("Failed", "candidates that failed"),
        ("% of time", "of all kernels as tuned"),
    )
    heads = "".join(
        f'<th scope="col" title="{escape(hint)}"{_sorted_by(name)}><button type="button">{escape(name)}</button></th>'
        for name, hint in columns
    )
    rows = "".join(_kernel_row(summary, row) for row in summary.by_time())
    before, after = summary.kernels_baseline_s, summary.kernels_tuned_s
    calls = sum(row.calls for row in summary.kernels)
    flops = sum(row.calls * row.flops for row in summary.kernels)
    measured = not summary.unmeasured
    foot = (
        f"<th>{counted(len(summary.kernels), 'kernel')}, all calls</th><td>{calls}</td><td>{count(flops)}</td>"
        f"<td>{about(number(before * 1e6), measured)}</td><td>{about(number(after * 1e6), measured)}</td>"
        f"<td>{times(before / after if measured and after else None)}</td>"
        f"<td></td><td></td><td>{summary.trials}</td><td>{summary.failed}</td><td></td>"
    )
    return (
        '<h2>Kernels</h2><div class="scroll"><table class="sortable">'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody><tfoot><tr>{foot}</tr></tfoot></table></div>"
        + ("" if measured else f"<p class='note'>~ Not measured: {why_not_measured(summary)}.</p>")
    )


def _sorted_by(name: str) -> str:
    return ' aria-sort="descending"' if name == "% of time" else ""


def _kernel_row(summary: RunSummary, row: KernelRow) -> str:
    peak, share = summary.peak_fraction(row), summary.share(row)
    hint = f"{row.name} ({row.sketch or 'untuned kernel kept'}, workload {row.workload_hash})"
    cells = (
        (row.calls, str(row.calls)),
        (row.flops, count(row.flops)),
        (row.baseline_s, about(number(row.baseline_s * 1e6), row.measured)),
        (row.tuned_s, about(number(row.tuned_s * 1e6), row.measured)),
        (row.speedup or 0.0, times(row.speedup)),
        (row.gflops, about(number(row.gflops), row.measured)),
        (peak or 0.0, about(percent(peak), row.measured)),
        (row.trials, str(row.trials)),
        (row.failed, str(row.failed)),
    )
    return (
        f'<tr><th scope="row" class="name" title="{escape(hint)}">{escape(row.name)}</th>'
        + "".join(f'<td data-value="{value!r}">{text}</td>' for value, text in cells)
        + f'<td class="share" style="--part: {100 * share:.1f}%" data-value="{share!r}">'
        f"{about(percent(share), row.measured)}</td></tr>"
    )


def _kernel_curves(summary: RunSummary) -> str:
    charts = [
        f'<div class="card"><h3 title="{escape(row.name)}">{escape(row.name)}</h3>'
        f"{curve_svg(row.curve, row.baseline_s, f'{row.name}: best time after each trial', SMALL_CHART)}</div>"
        for row in summary.by_time()
        if row.curve
    ]
    if not charts:
        return ""
    return (
        "<h2>Best so far, kernel by kernel</h2><p class='note'>Time of one call (logarithmic) against trials of that "
        f'kernel, the most expensive kernel first.</p><div class="charts">{"".join(charts)}</div>'
    )


def _time_spent(summary: RunSummary) -> str:
    if not summary.wall_s:
        return ""
    parts = [*summary.overheads_s.items(), ("other", summary.other_s)]
    bars = "".join(
        f'<div>{escape(name)}</div><span style="width: {min(100.0, 100 * seconds / summary.wall_s):.1f}%"></span>'
        f"<div>{duration(seconds)} ({percent(seconds / summary.wall_s)} %)</div>"
        for name, seconds in parts
    )
    return (
        "<h2>Where the tuning time went</h2><p class='note'>Other: importing, untuned reference times, building and "
        f'checking the whole model.</p><div class="card bars">{bars}</div>'
    )


def _failures(summary: RunSummary) -> str:
    if not summary.errors:
        return ""
    rows = [(kind, f"{failed}: {ERROR_KINDS.get(kind, 'no description')}") for kind, failed in summary.errors.items()]
    return f"<h2>Failed candidates</h2>{_facts(rows)}"


def _form(summary: RunSummary) -> str:
    rows = ((name, _text(value)) for name, value in summary.graph.items())
    if not summary.graph:
        return ""
    return (
        "<h2>Form</h2><p class='note'>Of the equal forms that were tuned, the fastest: the graph as given or as the "
        f"graph search rewrote it, with channels first or last.</p>{_facts(rows)}"
    )


def _machine(summary: RunSummary) -> str:
    rows = [
        ("device", summary.context.machine),
        ("threads", str(summary.context.threads)),
        ("target", summary.context.target),
    ]
    # A speed of zero is of what the machine does not have, such as matrix tiles.
    known = {name: value for name, value in summary.machine.items() if value or not name.endswith("_per_s")}
    rows += [_machine_fact(name, value) for name, value in known.items() if name not in ("name", "threads")]
    versions = _facts(summary.versions.items()) if summary.versions else ""
    return f'<h2>Machine and versions</h2><div class="columns">{_facts(rows)}{versions}</div>'


def _machine_fact(name: str, value: Any) -> tuple[str, str]:
    """A field of `Hardware` with its unit spelled out: the suffix of the name says which."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return name.replace("_", " "), _text(value)
    for suffix, show in (
        ("_flops_per_s_all", lambda v: f"{count(v)}FLOP/s, all threads"),
        ("_flops_per_s", lambda v: f"{count(v)}FLOP/s, one thread"),
        ("_bytes_per_s", lambda v: f"{count(v)}B/s"),
        ("_bytes", binary),
        ("_s", duration),
    ):
        if name.endswith(suffix):
            return name.removesuffix(suffix).replace("_", " "), show(value)
    return name.replace("_", " "), _text(value)


def _again(summary: RunSummary) -> str:
    command = f'<div class="card"><pre>{escape(summary.command)}</pre></div>' if summary.command else ""
    return (
        "<h2>Run it again</h2>"
        f"{command}<p class='note'>Seed {summary.seed}. The same command in the same work directory "
        "measures nothing twice; budgets are totals over all runs there, and a larger one goes on. In another "
        "directory it starts afresh. Times differ from run to run by some percent.</p>"
    )


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    return f'<div class="card"><dl class="facts">{items}</dl></div>'


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return number(value) if isinstance(value, float) else str(value)
