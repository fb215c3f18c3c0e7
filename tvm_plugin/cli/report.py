"""`eqtune report WORK_DIR`: make the report of the last run again."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..errors import InputError
from .options import WORK_DIR

__all__ = ["add_parser", "run"]


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="make the report of the last run again",
        description="Read a work directory (summary and records) and write a report, one HTML page, of the model that "
        "was tuned there last.",
    )
    parser.add_argument("work_dir", nargs="?", default=WORK_DIR, help=f"the run's work directory ({WORK_DIR})")
    parser.add_argument("-o", "--output", metavar="FILE", help="the page to write (WORK_DIR/report.html)")
    parser.add_argument(
        "--json", action="store_true", help="print the numbers as JSON instead; writes a page only with -o"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table and write the page, of the last model."""
    from ..report import kernel_table, write_html

    summary = _load(Path(args.work_dir))
    if args.json:
        json.dump(summary.to_json(), sys.stdout, indent=1)
        print()
    else:
        print(f"the model that was tuned last in {args.work_dir}:\n\n{kernel_table(summary)}")
    if args.output or not args.json:
        output = Path(args.output) if args.output else Path(args.work_dir) / "report.html"
        write_html(summary, output)
        if not args.json:
            print(f"report: {output}")
    return 0


def _load(work_dir: Path) -> Any:
    """The saved summary, brought up to date from the records where they are there."""
    from ..records import RecordDatabase
    from ..report import RunSummary, with_records

    path = work_dir / "summary.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{str(path)!r} cannot be read ({error.strerror}); give the work directory of a finished `eqtune tune`"
        ) from error
    except ValueError as error:
        raise InputError(f"{str(path)!r} is not JSON ({error}); run `eqtune tune` again to write it anew") from error
    summary = RunSummary.from_json(fields)
    records = work_dir / "records.sqlite"
    if not records.exists():
        return summary
    with RecordDatabase(records) as database:
        return with_records(summary, database.all(context=summary.context, traces=False))
