"""The record database: one SQLite file that loses nothing that was reported."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from eqtune.errors import RecordError
from eqtune.files import as_path

from .record import Context, Record, Workload
from .schema import check, prepare
from .validation import check_context, check_hash, check_number, check_record, check_text, parse_json

__all__ = ["RecordDatabase"]

_PUT_FACT = "INSERT OR REPLACE INTO facts VALUES (?, ?)"

_COLUMNS = (
    "r.id, r.workload_hash, r.decision, r.trace, r.latencies_s, r.error, r.detail, r.timestamp_s, r.seed, "
    "r.eqtune_version, r.notes, c.target, c.device, c.threads, c.tvm_version"
)
_FROM = "FROM records r JOIN contexts c ON c.id = r.context"


class RecordDatabase:
    """Measurements, the kernels they belong to, and facts worth keeping, in one file.

    Several processes may read and write one file at the same time. Each call that writes is one transaction: when it
    has returned, the data survive a killed process and a power cut; when it raises, nothing of it was written.
    Everything that is read is checked before it is believed. Not to be shared between threads.

    Parameters
    ----------
    path : str or path
        The file; created when it does not exist, in a directory that does.
    timeout_s : float
        How long to wait for another process that is writing, in seconds.
    read_only : bool
        Look at a file that exists, and change nothing that it holds.

    Raises
    ------
    RecordError
        Whenever the file cannot be opened, read or written: not a database, cut short, of another version, not
        writable, disk full, locked too long. The message is one line that names the file.
    """

    def __init__(self, path: str | os.PathLike[str], timeout_s: float = 30.0, read_only: bool = False) -> None:
        self.path = as_path(path, "a database of records is a file at a path")
        self._timeout_s = timeout_s
        with self._errors():
            # Autocommit: transactions are begun by hand, so that it is plain to see what is in one.
            name = f"{self.path.absolute().as_uri()}?mode=rw" if read_only else self.path
            self._connection = sqlite3.connect(name, timeout=timeout_s, isolation_level=None, uri=read_only)
        try:
            with self._errors():
                if read_only:  # mode=ro would leave an empty write-ahead log behind
                    self._connection.execute("PRAGMA query_only = ON")
                    check(self._connection)
                    return
                # FULL also survives a power cut; it costs one fsync a batch, which takes seconds to measure.
                self._connection.execute("PRAGMA synchronous = FULL")
                prepare(self._connection, _eqtune_version(), timeout_s)
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> RecordDatabase:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Closing twice is fine; any other use after it raises RecordError."""
        self._connection.close()

    # Workloads

    def add_workload(self, workload_hash: str, text: str, *, name: str, flops: float) -> None:
        """Keep a kernel: its `serialize_workload` text, a name for people, FLOPs of a call. Known hashes stay as is."""
        row = (
            check_hash(workload_hash),
            check_text("text", text),
            check_text("name", name),
            check_number("flops", flops),
        )
        with self._transaction() as connection:
            connection.execute("INSERT INTO workloads VALUES (?, ?, ?, ?) ON CONFLICT (hash) DO NOTHING", row)

    def workload(self, workload_hash: str) -> Workload | None:
        """The kernel with that hash, or None."""
        rows = self._query("SELECT hash, text, name, flops FROM workloads WHERE hash = ?", (workload_hash,))
        return self._workload(rows[0]) if rows else None

    def workloads(self) -> list[Workload]:
        """All kernels, in the order in which they were added."""
        return [
            self._workload(row) for row in self._query("SELECT hash, text, name, flops FROM workloads ORDER BY rowid")
        ]

    # Records

    def add(
        self,
        records: Sequence[Record],
        facts: Mapping[str, Any] | None = None,
        sums: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Keep a batch of records, and facts, in one transaction: all or, after an error, nothing.

        Raises RecordError for a wrong record, and for a fact that JSON cannot hold.

        Parameters
        ----------
        records : sequence of Record
        facts : mapping, optional
            JSON values by key, as `put_json` keeps them.
        sums : mapping, optional
            By key and name, what is added to a number that is kept there as `get_number` reads it: by several
            processes at once, too.
        """
        rows = [_to_row(check_record(record)) for record in records]
        fact_rows = [_to_fact(key, value) for key, value in (facts or {}).items()]
        if not rows and not fact_rows and not sums:
            return
        with self._transaction() as connection:
            connection.executemany(_PUT_FACT, fact_rows)
            for key, more in (sums or {}).items():
                total = {name: (self.get_number(key, name) or 0) + number for name, number in more.items()}
                connection.execute(_PUT_FACT, _to_fact(key, total))
            contexts = dict.fromkeys(record.context for record in records)  # a set has another order in each process
            numbers = {context: self._context_number(context) for context in contexts}
            connection.executemany(
                "INSERT INTO records (context, workload_hash, decision, trace, latencies_s, latency_s, error, detail, "
                "timestamp_s, seed, eqtune_version, notes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(numbers[record.context], *row) for record, row in zip(records, rows, strict=True)],
            )

    def best(self, workload_hash: str, context: Context, searched: bool = False) -> Record | None:
        """The fastest record of a kernel in exactly this context, the earlier of equals; None without a success.

        With `searched`, of those that have a decision: imported schedules have none.
        """
        decided = "AND r.decision != '' " if searched else ""
        rows = self._query(
            f"SELECT {_COLUMNS} {_FROM} WHERE r.workload_hash = ? AND {_IN_CONTEXT} AND r.latency_s IS NOT NULL "
            f"{decided}ORDER BY r.latency_s, r.id LIMIT 1",
            (workload_hash, *_context_row(context)),
        )
        return self._record(rows[0]) if rows else None

    def best_by_workload(self, context: Context) -> dict[str, Record]:
        """Workload hash to `best`, for every kernel with a success in exactly this context."""
        rows = self._query(
            f"SELECT {_COLUMNS} {_FROM} WHERE r.id IN (SELECT id FROM (SELECT r.id AS id, row_number() OVER "
            f"(PARTITION BY r.workload_hash ORDER BY r.latency_s, r.id) AS place {_FROM} "
            f"WHERE {_IN_CONTEXT} AND r.latency_s IS NOT NULL) WHERE place = 1) ORDER BY r.id",
            _context_row(context),
        )
        return {record.workload_hash: record for record in map(self._record, rows)}

    def for_workload(self, workload_hash: str, context: Context) -> list[Record]:
        """All records of a kernel in exactly this context, failures included, in the order of measuring."""
        return self.all(workload_hash, context)

    def all(
        self, workload_hash: str | None = None, context: Context | None = None, traces: bool = True
    ) -> list[Record]:
        """All records in the order of measuring, of one kernel, one context, or both where they are given.

        Traces take most of the space: without `traces`, they are "".
        """
        where, values = _filter(workload_hash, context)
        columns = _COLUMNS if traces else _COLUMNS.replace("r.trace", "''")
        return [self._record(row) for row in self._query(f"SELECT {columns} {_FROM} {where} ORDER BY r.id", values)]

    def count(self, workload_hash: str | None = None, context: Context | None = None) -> int:
        """How many records `all` with the same arguments would give."""
        where, values = _filter(workload_hash, context)
        return int(self._query(f"SELECT count(*) {_FROM} {where}", values)[0][0])

    def kernels(self, context: Context) -> list[tuple[str, int, int, float | None]]:
        """Of each kernel in exactly this context: its hash, records, how many failed, and the best latency in seconds.

        In the order of measuring; None without a success.
        """
        rows = self._query(
            "SELECT r.workload_hash, count(*), count(*) FILTER (WHERE r.error != ''), min(r.latency_s) "
            f"{_FROM} WHERE {_IN_CONTEXT} GROUP BY r.workload_hash ORDER BY min(r.id)",
            _context_row(context),
        )
        with self._damage("a record"):
            return [
                (check_hash(found), int(count), int(failed), None if best is None else check_number("a latency", best))
                for found, count, failed, best in rows
            ]

    def totals(self) -> tuple[int, int, int]:
        """Kernels with records, records, and how many of these failed; of all contexts."""
        counts = "count(DISTINCT workload_hash), count(*), count(*) FILTER (WHERE error != '')"
        kernels, records, failed = self._query(f"SELECT {counts} FROM records")[0]
        return int(kernels), int(records), int(failed)

    def contexts(self) -> list[Context]:
        """All contexts that records were measured in."""
        rows = self._query("SELECT target, device, threads, tvm_version FROM contexts ORDER BY id")
        with self._damage("a context"):
            return [check_context(Context(*row)) for row in rows]

    # Facts

    def put_json(self, key: str, value: Any) -> None:
        """Keep a JSON value under a key, in place of an older one. Raises RecordError for what JSON cannot hold."""
        self.add([], {key: value})

    def get_json(self, key: str) -> Any:
        """The value kept under a key; None when there is none."""
        rows = self._query("SELECT value FROM facts WHERE key = ?", (key,))
        if not rows:
            return None
        with self._damage(f"the fact {key!r}"):
            return parse_json("value", rows[0][0])

    def get_object(self, key: str) -> dict[str, Any]:
        """The JSON object kept under a key; an empty one when there is none, or something else."""
        value = self.get_json(key)
        return value if isinstance(value, dict) else {}

    def get_number(self, key: str, name: str) -> float | None:
        """The entry `name` of the object kept under a key; None where that is no finite number from 0."""
        with suppress(RecordError):
            number = check_number(name, self.get_object(key).get(name))
            return number if number >= 0 else None
        return None

    # Rows and transactions

    def _query(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._errors():
            return self._connection.execute(statement, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._errors():
            try:
                # Within: a Ctrl-C that came while it waited for the lock is raised once it has the lock.
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite has rolled back by itself after some errors, a full disk among them.
                if self._connection.in_transaction:
                    with suppress(sqlite3.Error):
                        self._connection.execute("ROLLBACK")
                raise

    def _context_number(self, context: Context) -> int:
        row = _context_row(context)
        self._connection.execute(
            "INSERT INTO contexts (target, device, threads, tvm_version) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
            row,
        )
        found = self._connection.execute(f"SELECT c.id FROM contexts c WHERE {_IN_CONTEXT}", row).fetchone()
        return int(found[0])

    def _record(self, row: Sequence[Any]) -> Record:
        number, workload_hash, decision, trace, latencies, error, detail, timestamp_s, seed, version, notes = row[:11]
        with self._damage(f"record {number}"):
            latencies_s = parse_json("latencies_s", latencies)
            return check_record(
                Record(
                    workload_hash=workload_hash,
                    decision=decision,
                    trace=trace,
                    context=Context(*row[11:]),
                    latencies_s=tuple(latencies_s) if isinstance(latencies_s, list) else latencies_s,
                    error=error,
                    detail=detail,
                    timestamp_s=timestamp_s,
                    seed=seed,
                    eqtune_version=version,
                    notes=notes,
                )
            )

    def _workload(self, row: Sequence[Any]) -> Workload:
        with self._damage("a workload"):
            return Workload(
                check_hash(row[0]),
                check_text("text", row[1]),
                check_text("name", row[2]),
                check_number("flops", row[3]),
            )

    @contextmanager
    def _damage(self, what: str) -> Iterator[None]:
        """Add to an error about a row which file and which row."""
        try:
            yield
        except RecordError as error:
            raise RecordError(f"{self.path}: {what} is damaged: {error}; {_RESTORE}") from error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """SQLite's errors as RecordError, one line that names the file and says what to do."""
        try:
            yield
        except RecordError as error:
            raise RecordError(f"{self.path}: {error}") from error
        except (sqlite3.Error, UnicodeError, OverflowError) as error:
            raise RecordError(f"{self.path}: {_explain(str(error), self._timeout_s)}") from error


_IN_CONTEXT = "c.target = ? AND c.device = ? AND c.threads = ? AND c.tvm_version = ?"


def _context_row(context: Context) -> tuple[str, str, int, str]:
    return (context.target, context.device, context.threads, context.tvm_version)


def _filter(workload_hash: str | None, context: Context | None) -> tuple[str, list[Any]]:
    terms: list[str] = []
    values: list[Any] = []
    if workload_hash is not None:
        terms.append("r.workload_hash = ?")
        values.append(workload_hash)
    if context is not None:
        terms.append(_IN_CONTEXT)
        values.extend(_context_row(context))
    return ("WHERE " + " AND ".join(terms) if terms else "", values)


def _to_fact(key: str, value: Any) -> tuple[str, str]:
    check_text("key", key)
    try:
        return key, json.dumps(value, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"{key!r} cannot be kept as JSON: {error}") from error


def _to_row(record: Record) -> tuple[Any, ...]:
    return (
        record.workload_hash,
        record.decision,
        record.trace,
        json.dumps([float(latency_s) for latency_s in record.latencies_s]),
        float(record.latency_s) if record.latencies_s else None,
        record.error,
        record.detail,
        float(record.timestamp_s),
        record.seed,
        record.eqtune_version,
        record.notes,
    )


_RESTORE = "restore the file from a copy, or move it away to start a new one"
_LACKING = f"it lacks a table or column that belongs there; {_RESTORE}"
_EXPLANATIONS: Mapping[str, str] = {
    "not a database": "it is not a database; give the path of a records file, or move it away to start a new one",
    "malformed": f"the file is damaged or was cut short; {_RESTORE}",
    "no such table": _LACKING,
    "no such column": _LACKING,
    "has no column": _LACKING,
    "disk is full": "the disk is full; nothing of this batch was recorded. Free some space and run again",
    "locked": "another process has kept it locked for more than {timeout_s:g} s; end that process, or wait for it",
    "readonly": "it is not writable; choose a work directory that is",
    "unable to open": "it cannot be opened; its directory must exist and be writable",
    "disk I/O error": "the disk gave an error while it was read or written; nothing of this batch was recorded",
    "closed database": "it was closed",
}


def _explain(message: str, timeout_s: float) -> str:
    for words, explanation in _EXPLANATIONS.items():
        if words in message:
            return explanation.format(timeout_s=timeout_s) + (
                "" if words == "closed database" else f" (SQLite: {message})"
            )
    return f"SQLite says: {message}"


def _eqtune_version() -> str:
    import eqtune

    return str(getattr(eqtune, "__version__", "unknown"))
