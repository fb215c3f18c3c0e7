"""`eqtune watch WORK_DIR`: follow a run that goes on elsewhere."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from ..errors import InputError
from .options import WORK_DIR

__all__ = ["add_parser", "run"]

A_DAY_S = 86400.0


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "watch",
        help="follow a run",
        description="Print how many measurements a work directory holds, whenever there are more, until `eqtune tune` "
        "has written a new result there, or Ctrl-C. Where the run may be over, give --once.",
    )
    parser.add_argument("work_dir", nargs="?", default=WORK_DIR, help=f"the run's work directory ({WORK_DIR})")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="seconds between looks (2)")
    parser.add_argument("--once", action="store_true", help="print one line and end")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look at the records now and then; never writes."""
    from ..records import RecordDatabase

    path, summary = Path(args.work_dir) / "records.sqlite", Path(args.work_dir) / "summary.json"
    if not os.access(path, os.R_OK):
        raise InputError(f"{args.work_dir!r} has no records.sqlite to read; give a work directory of `eqtune tune`")
    if not 0 <= args.every <= A_DAY_S:
        raise InputError(f"--every is a number of seconds, at most a day, not {args.every}")
    older, said = _written(summary), None
    while True:
        last = args.once or _written(summary) != older  # looked at first: what is read then is all there will be
        with RecordDatabase(path, read_only=True) as database:
            totals = database.totals()
        if totals != said:
            kernels, trials, failed = said = totals
            line = {"kernels": kernels, "trials": trials, "failed": failed}
            print(json.dumps(line) if args.json else f"{kernels} kernels, {trials} trials, {failed} failed", flush=True)
        if last:
            return 0
        time.sleep(max(0.1, args.every))


def _written(file: Path) -> int | None:
    """When a file was written, in nanoseconds; None where there is none."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return None
