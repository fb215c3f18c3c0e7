"""How much code a schedule unrolls: LLVM's time grows faster than the code, to minutes, and nobody can stop it."""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

__all__ = ["MOST_STATEMENTS", "check_code_size", "unrolled_statements"]

MOST_STATEMENTS = 2048
"""Statements of a kernel, loops unrolled, that compile in seconds; nearly all candidates have fewer than 200."""

_NESTED = ("body", "block", "init", "then_case", "else_case")


def check_code_size(schedule: Any) -> None:
    """Raise ScheduleError where the scheduled "main" unrolls to more than `MOST_STATEMENTS`."""
    statements = unrolled_statements(schedule.mod["main"].body)
    if statements > MOST_STATEMENTS:
        raise s_tir.ScheduleError(f"{statements} statements when unrolled, which LLVM would compile for too long")


def unrolled_statements(statement: Any, copies: int = 1) -> int:
    """Stores in a scheduled statement, each counted as often as the loops that are marked as unrolled repeat it."""
    if isinstance(statement, tirx.BufferStore):
        return copies
    if isinstance(statement, tirx.SeqStmt):
        return sum(unrolled_statements(part, copies) for part in statement.seq)
    if isinstance(statement, tirx.For):
        unrolled = statement.kind == tirx.ForKind.UNROLLED and isinstance(statement.extent, tirx.IntImm)
        return unrolled_statements(statement.body, copies * int(statement.extent) if unrolled else copies)
    nested = (tirx.Stmt, s_tir.SBlock, s_tir.SBlockRealize)
    parts = [getattr(statement, name, None) for name in _NESTED]
    return sum(unrolled_statements(part, copies) for part in parts if isinstance(part, nested))
