"""Rows to JSON and to a plain table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["comparison", "report", "table", "write"]


def comparison(
    model: str, result: Any, tune_s: float, timed: Mapping[str, Any], peers: Iterable[str]
) -> dict[str, Any]:
    """The row of a tuned model (`TuneResult`) that took turns with others; it is "eqtune" in `timed`."""
    return {
        "model": model,
        **{f"{name}_ms": one.latency_s * 1e3 for name, one in timed.items()},
        **{f"vs_{peer}": timed[peer].latency_s / timed["eqtune"].latency_s for peer in peers},
        "rel_err": result.max_rel_error,
        "tune_s": tune_s,
        "trials": sum(task.trials for task in result.tasks),
        "kernels": len(result.tasks),
        **{f"{name}_start_ns": one.start_ns for name, one in timed.items()},
    }


def report(rows: Iterable[dict[str, Any]], path: str | None) -> None:
    """Write and print each row when it is there: a sweep that is cut short has lost nothing. At the end, print all."""
    done: list[dict[str, Any]] = []
    for row in rows:
        done.append(row)
        write(done, path)
        print(table([row]), flush=True)
    print(table(done))


def write(rows: Sequence[dict[str, Any]], path: str | None) -> None:
    """A list of flat objects, one a row, keyed by "model" or "kernel"; nothing when `path` is None.

    Numbers that are not finite become null. Raises ValueError for a row that is not flat or has no key.
    """
    for row in rows:
        nested = [name for name, value in row.items() if isinstance(value, list | tuple | dict)]
        if nested or not {"model", "kernel"} & set(row):
            raise ValueError(f"a row is flat and has a model or a kernel; this one has {list(row)}, nested {nested}")
    if path is not None:
        finite = [{name: _finite(value) for name, value in row.items()} for row in rows]
        Path(path).write_text(json.dumps(finite, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Columns in order of first appearance, aligned."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *[[_cell(row.get(name)) for name in columns] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> str:
    if _finite(value) is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2e}" if value and abs(value) < 1e-2 else f"{value:.2f}"
    return str(value)
