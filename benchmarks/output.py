"""Rows to JSON and to a plain table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["table", "write"]


def write(rows: Sequence[dict[str, Any]], path: str | None) -> None:
    """A list of flat objects, one a row; nothing when `path` is None."""
    if path is not None:
        Path(path).write_text(json.dumps(list(rows), indent=1) + "\n", encoding="utf-8")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Columns in order of first appearance, aligned."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *[[_cell(row.get(name)) for name in columns] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2e}" if value and abs(value) < 1e-2 else f"{value:.2f}"
    return str(value)
