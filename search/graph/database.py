"""egglog as a database: programs as text, rows as files, and one look at all tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from egglog.bindings import EggSmolError, EGraph

from eqtune.errors import MismatchError

from .compile_rule import Key

__all__ = ["Database"]

_COMMANDS_A_PROGRAM = 100
"""egglog keeps a program's text with each of its expressions: long programs cost quadratic time and memory."""


class Database:
    """The tables of one egglog e-graph."""

    def __init__(self) -> None:
        self._egglog = EGraph()
        self.integer = self._egglog.value_to_i64

    def run(self, program: str) -> list[Any]:
        """The outputs of a program. Raises MismatchError where egglog refuses it."""
        try:
            return self._egglog.run_program(*self._egglog.parse_program(program))
        except EggSmolError as error:
            raise MismatchError(f"egglog refused a program of the graph search: {error}") from error

    def run_all(self, commands: Sequence[str]) -> None:
        """Run many commands."""
        for start in range(0, len(commands), _COMMANDS_A_PROGRAM):
            self.run("\n".join(commands[start : start + _COMMANDS_A_PROGRAM]))

    def insert(self, facts: Mapping[str, Sequence[Key]]) -> None:
        """Add rows to relations. egglog reads a file's row in 1 us, and a program's command in 25."""
        with TemporaryDirectory() as folder:
            commands = []
            for i, (relation, rows) in enumerate(facts.items()):
                file = Path(folder, f"{i}.tsv")
                file.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="ascii")
                commands.append(f'(input {relation} "{file.as_posix()}")')
            self.run_all(commands)

    def tables(self) -> Mapping[str, Any]:
        """All tables as they are, by name: `rows`, each with `inputs` and `output`, whose values `integer` reads."""
        functions: Mapping[str, Any] = self._egglog.freeze().functions
        return functions
