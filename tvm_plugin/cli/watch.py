"""`eqtune watch WORK_DIR`: follow a run that goes on elsewhere."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ..errors import InputError

__all__ = ["add_parser", "run"]


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "watch", help="follow a run", description="Print how many measurements a work directory holds, until Ctrl-C."
    )
    parser.add_argument("work_dir", help="the run's work directory")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="seconds between lines (2)")
    parser.add_argument("--once", action="store_true", help="print one line and end")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the records now and then; never writes."""
    from ..records import RecordDatabase

    path = Path(args.work_dir) / "records.sqlite"
    if not os.access(path, os.R_OK):
        raise InputError(f"{args.work_dir!r} has no records.sqlite to read; give a work directory of `eqtune tune`")
    while True:
        with RecordDatabase(path) as database:
            records = list(database.all())
        best: dict[str, float] = {}
        for record in records:
            best[record.workload_hash] = min(best.get(record.workload_hash, float("inf")), record.latency_s)
        failed = sum(bool(record.error) for record in records)
        state = {
            "kernels": len(best),
            "trials": len(records),
            "failed": failed,
            "sum_of_best_ms": sum(value for value in best.values() if value < float("inf")) * 1e3,
        }
        if args.json:
            print(json.dumps(state), flush=True)
        else:
            print(
                f"{state['kernels']} kernels, {state['trials']} trials, {failed} failed, "
                f"sum of the best {state['sum_of_best_ms']:.3f} ms",
                flush=True,
            )
        if args.once:
            return 0
        sys.stdout.flush()
        time.sleep(max(0.1, args.every))
