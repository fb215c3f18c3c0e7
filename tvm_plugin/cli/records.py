"""`eqtune records list | best | export | import`: look at what was measured, and exchange it with MetaSchedule."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, RecordError
from .options import WORK_DIR

if TYPE_CHECKING:
    from ..records import Context, RecordDatabase

__all__ = ["add_parser", "run"]


def add_parser(commands: Any) -> None:
    """Register the command and its actions."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "records",
        help="look at, export and import measurements",
        description="Look at what was measured, and exchange it with MetaSchedule's JSON database.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    for name, action, text in (
        ("list", _list, "contexts and kernels with how much was measured"),
        ("best", _best, "the fastest schedule of each kernel"),
        ("export", _export, "write a MetaSchedule database"),
        ("import", _import, "add the records of a MetaSchedule database"),
    ):
        sub = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.add_argument(
            *("--db", "--work-dir"),
            default=WORK_DIR,
            metavar="PATH",
            help=f"a work directory, or a file of records ({WORK_DIR})",
        )
        sub.add_argument("--json", action="store_true", help="print JSON on standard output")
        if name != "list":
            sub.add_argument(
                "--context",
                type=int,
                metavar="N",
                help="which context, by its number in `records list`; needed if many",
            )
        if name == "best":
            sub.add_argument("--workload", metavar="HASH", help="only this kernel; a unique beginning is enough")
        if name == "export":
            sub.add_argument("directory", help="where to write the database")
            sub.add_argument("--every", action="store_true", help="all successes, not only the best of each kernel")
            sub.add_argument("--overwrite", action="store_true", help="replace a database that is already there")
        if name == "import":
            sub.add_argument("directory", help="holds database_workload.json and database_tuning_record.json")
            sub.add_argument(
                "--new-context",
                metavar="JSON",
                help='where it was measured: {"target": {...}, "device": "...", "threads": N, "tvm_version": "..."}',
            )
        sub.set_defaults(run=run, do=action)


def run(args: argparse.Namespace) -> int:
    """Open the database and do what was asked for."""
    from ..records import RecordDatabase

    path = Path(args.db)
    begins = args.action == "import" and args.new_context is not None
    # A file where a work directory is meant would be in the way of `eqtune tune`.
    path = path / "records.sqlite" if path.is_dir() or (begins and not path.exists() and not path.suffix) else path
    # Only an import that says where it comes from may begin a database.
    if not path.exists() and not begins:
        more = ", or say --new-context" if args.action == "import" else ""
        raise InputError(f"there are no records at {str(path)!r}; give --db a work directory of `eqtune tune`{more}")
    if begins:
        _new_context(args.new_context)  # refused before there is a file
        with contextlib.suppress(OSError):  # the database says what is wrong with it
            path.parent.mkdir(parents=True, exist_ok=True)
    with RecordDatabase(path) as database:
        args.do(database, args)
    return 0


def _list(database: RecordDatabase, args: argparse.Namespace) -> None:
    from ..report.table import printable
    from ..report.units import count

    workloads = {workload.hash: workload for workload in database.workloads()}
    contexts: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for number, context in enumerate(database.contexts(), start=1):
        kernels = database.kernels(context)
        contexts.append({"context": number, "records": sum(kernel[1] for kernel in kernels)} | asdict(context))
        for found, records, failed, best_s in kernels:
            known = workloads.get(found)
            rows.append(
                {
                    "context": number,
                    "workload": found,
                    "name": known.name if known else "",
                    "flops": known.flops if known else None,
                    "records": records,
                    "failed": failed,
                    "best_us": None if best_s is None else best_s * 1e6,
                }
            )
    if args.json:
        _print_json({"contexts": contexts, "kernels": rows})
        return
    if not rows:
        print("nothing was measured yet")
        return
    for one in contexts:
        line = (
            f"context {one['context']}: {one['device']}, {one['threads']} threads, TVM {one['tvm_version']}, "
            f"{one['records']} records, target {one['target']}"
        )
        print(printable(line))
    print()
    _print_table(
        ("context", "workload", "kernel", "FLOPs", "records", "failed", "best us"),
        [
            (
                str(row["context"]),
                row["workload"],
                row["name"],
                "-" if row["flops"] is None else count(row["flops"]),
                str(row["records"]),
                str(row["failed"]),
                _number(row["best_us"]),
            )
            for row in rows
        ],
    )


def _best(database: RecordDatabase, args: argparse.Namespace) -> None:
    names = {workload.hash: workload.name for workload in database.workloads()}
    best = database.best_by_workload(_context(database, args.context))
    if args.workload:
        best = {found: record for found, record in best.items() if found.startswith(args.workload)}
        if len(best) != 1:
            raise InputError(f"{len(best)} kernels have a hash that begins with {args.workload!r}; see `records list`")
    rows: list[dict[str, Any]] = [
        {
            "workload": found,
            "name": names.get(found, ""),
            "best_us": record.latency_s * 1e6,
            "decision": json.loads(record.decision) if record.decision else None,
            "trace": record.trace,
        }
        for found, record in best.items()
    ]
    if args.json:
        _print_json(rows)
        return
    _print_table(
        ("workload", "kernel", "best us", "decision"),
        [
            (
                row["workload"],
                row["name"],
                _number(row["best_us"]),
                json.dumps(row["decision"]) if row["decision"] else "-",
            )
            for row in rows
        ],
    )


def _export(database: RecordDatabase, args: argparse.Namespace) -> None:
    from ..records.metaschedule import export_metaschedule
    from ..search.space.replay import replay_schedule

    context = _context(database, args.context)
    done = export_metaschedule(
        database, args.directory, context, every=args.every, overwrite=args.overwrite, replay=replay_schedule
    )
    _print_exchange(done, f"exported to {args.directory}", args.json)


def _import(database: RecordDatabase, args: argparse.Namespace) -> None:
    from ..records.metaschedule import import_metaschedule
    from ..search.space.replay import replay_schedule

    context = _new_context(args.new_context) if args.new_context else _context(database, args.context)
    done = import_metaschedule(database, args.directory, context, replay=replay_schedule)
    _print_exchange(done, f"imported from {args.directory}", args.json)


def _context(database: RecordDatabase, number: int | None) -> Context:
    """The context with that number; the only one when no number is given."""
    contexts = database.contexts()
    if not contexts:
        raise InputError(f"{database.path} holds no records yet; with `records import`, say --new-context")
    if number is None and len(contexts) == 1:
        return contexts[0]
    if number is None or not 1 <= number <= len(contexts):
        listed = "; ".join(
            f"{n}: {c.device}, {c.threads} threads, TVM {c.tvm_version}" for n, c in enumerate(contexts, start=1)
        )
        given = "was not given" if number is None else f"{number} does not exist"
        raise InputError(f"--context {given}; records of one context are never mixed with another's: {listed}")
    return contexts[number - 1]


def _new_context(text: str) -> Context:
    from ..records import Context
    from ..records.validation import check_context

    try:
        fields = json.loads(text)
        target = json.dumps(fields.pop("target"), sort_keys=True)
        context = check_context(Context(target=target, **fields))
    except (ValueError, TypeError, KeyError, AttributeError, RecordError) as error:
        raise InputError(
            f"--new-context is not usable ({error}); write it as "
            '{"target": {"kind": "llvm"}, "device": "...", "threads": 2, "tvm_version": "0.27.0"}'
        ) from error
    return context


def _print_exchange(done: Any, what: str, as_json: bool) -> None:
    if as_json:
        _print_json({"workloads": done.workloads, "records": done.records, "skipped": dict(done.skipped)})
        return
    print(f"{what}: {done.records} records of {done.workloads} kernels")
    for reason, number in done.skipped.items():
        print(f"left out: {number} ({reason})")


def _number(value: float | None) -> str:
    from ..report.units import number

    return "-" if value is None else number(value)


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1)
    print()


def _print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from ..report.table import printable

    lines = [[printable(cell, 60) for cell in line] for line in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
