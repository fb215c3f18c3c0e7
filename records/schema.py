"""The tables of a record database, and how a file becomes one."""

from __future__ import annotations

import sqlite3
import time

from eqtune.errors import RecordError

__all__ = ["SCHEMA_VERSION", "check", "prepare"]

SCHEMA_VERSION = 2
"""Raised whenever the tables change."""

APPLICATION_ID = 0x65717475
"""Marks the file as ours in its header ("eqtu"), so that no other program's database is ever written to."""

TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE workloads (
        hash TEXT PRIMARY KEY,
        text TEXT NOT NULL,
        name TEXT NOT NULL,
        flops REAL NOT NULL
    )""",
    """CREATE TABLE contexts (
        id INTEGER PRIMARY KEY,
        target TEXT NOT NULL,
        device TEXT NOT NULL,
        threads INTEGER NOT NULL,
        tvm_version TEXT NOT NULL,
        UNIQUE (target, device, threads, tvm_version)
    )""",
    # latencies_s is a JSON list, empty when the candidate failed; latency_s its minimum, for the index, or NULL.
    """CREATE TABLE records (
        id INTEGER PRIMARY KEY,
        workload_hash TEXT NOT NULL,
        context INTEGER NOT NULL REFERENCES contexts (id),
        decision TEXT NOT NULL,
        trace TEXT NOT NULL,
        latencies_s TEXT NOT NULL,
        latency_s REAL,
        error TEXT NOT NULL,
        detail TEXT NOT NULL,
        timestamp_s REAL NOT NULL,
        seed INTEGER NOT NULL,
        eqtune_version TEXT NOT NULL,
        notes TEXT NOT NULL DEFAULT ''
    )""",
    "CREATE INDEX records_by_speed ON records (workload_hash, context, latency_s)",
    "CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)

UPGRADES = {1: "ALTER TABLE records ADD COLUMN notes TEXT NOT NULL DEFAULT ''"}
"""From a version to the next."""


def prepare(connection: sqlite3.Connection, eqtune_version: str, timeout_s: float) -> None:
    """Switch to a write-ahead log, and create the tables in a new file, or check and upgrade those of an old one.

    Raises
    ------
    RecordError
        When the file is another program's database, or of another version of the schema.
    sqlite3.Error
        When SQLite refuses.
    """
    # Checked before anything is written: journal_mode would change another program's file. One transaction, so that
    # a file which another process is just creating is seen either new or complete.
    connection.execute("BEGIN")
    _is_new(connection)
    connection.execute("COMMIT")
    _use_write_ahead_log(connection, timeout_s)
    connection.execute("BEGIN IMMEDIATE")
    if _is_new(connection):  # another process may have created the tables in between
        for statement in TABLES:
            connection.execute(statement)
        connection.execute("INSERT INTO meta VALUES ('eqtune_version', ?)", (eqtune_version,))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    else:
        for version in range(_version(connection), SCHEMA_VERSION):
            connection.execute(UPGRADES[version])
    if _version(connection) != SCHEMA_VERSION:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def check(connection: sqlite3.Connection) -> None:
    """Raise RecordError unless the file is a record database that can be read; writes nothing."""
    if _is_new(connection):
        raise RecordError("it holds no records yet")


def _is_new(connection: sqlite3.Connection) -> bool:
    """Whether the file is new; raises RecordError when it is not ours."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    version = _version(connection)
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not tables and not application:
        return True
    if application != APPLICATION_ID:
        raise RecordError("it is an SQLite database of another program, not one of eqtune's records")
    if version != SCHEMA_VERSION and version not in UPGRADES:
        row = connection.execute("SELECT value FROM meta WHERE key = 'eqtune_version'").fetchone()
        writer = f"eqtune {row[0]}" if row else "another eqtune"
        raise RecordError(
            f"it was written by {writer} with schema {version}, and this eqtune reads schema {SCHEMA_VERSION}; "
            "use that version, or start a new work directory"
        )
    return False


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _use_write_ahead_log(connection: sqlite3.Connection, timeout_s: float) -> None:
    # SQLite does not wait for a lock while it changes the journal mode, so several processes that open a new file
    # at once would fail; wait here. A file system without shared memory keeps the rollback journal: slower, as safe.
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
