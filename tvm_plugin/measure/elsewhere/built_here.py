"""Measurers of devices elsewhere whose candidates are built by processes of this machine."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...machine import target_json
from ...search.space.hardware import Hardware
from ..pool import Config, Request, WorkerPool
from ..scratch import Scratch
from ..trial import SPACE_BUILDER, worker_memory_bytes
from .fleet import Fleet
from .measurer import ElsewhereMeasurer, FarTrial

__all__ = ["BuiltHereMeasurer"]


class BuiltHereMeasurer(ElsewhereMeasurer):
    """Builds in a `WorkerPool`; the processes that run read what it wrote into a directory, which ends with it."""

    _directory: Scratch
    _pool: WorkerPool

    def _start_builders(
        self,
        kind: str,
        workers: int,
        hardware: Hardware,
        seed: int,
        export: str,
        threads: int = 1,
        space_builder: str = SPACE_BUILDER,
        command: Sequence[str] | None = None,
    ) -> None:
        """Start and configure the pool.

        Parameters
        ----------
        kind : str
            Names the directory.
        workers, threads : int
            Processes that compile, and the threads of each one's pool.
        hardware, seed, space_builder
            As in `Config`.
        export : str
            What programs are written as, "so" or "tar".
        command : sequence of str, optional
            Of a builder, unless it is the local measurer's worker.
        """
        self._directory = Scratch(kind)
        directory = Path(self._directory.name)
        commands = [] if command is None else [command]
        self._pool = WorkerPool(workers, threads, directory, self._workloads, *commands)
        self._close = weakref.finalize(self, _close, self._fleet, self._pool, self._directory)
        self._pool.configure(
            Config(
                target=json.loads(target_json(self.target)),
                hardware=hardware.to_json(),
                space_builder=space_builder,
                seed=seed,
                references=str(directory),
                memory_bytes=worker_memory_bytes(),
                export=export,
            )
        )

    @property
    def _builders(self) -> int:
        return len(self._pool)

    def _build_all(self, chunks: Sequence[Sequence[FarTrial]], limit_s: float) -> list[dict[str, Any]]:
        return self._pool.answers(
            [
                Request(
                    {"op": "build", "batch": self._batch, "candidates": [trial.spec for trial in chunk]},
                    limit_s,
                    tuple({trial.task for trial in chunk}),
                )
                for chunk in chunks
            ]
        )

    def _make_references(self, hashes: Sequence[str], limit_s: float) -> list[dict[str, Any]]:
        """What `cuda/builder.py` processes answer to a "reference" request for each workload."""
        return self._pool.answers([Request({"op": "reference", "task": h}, limit_s, (h,)) for h in hashes])

    def _refresh(self) -> None:
        for kind in ("so", "tar"):
            for library in Path(self._directory.name).glob(f"*.{kind}"):
                library.unlink()


def _close(fleet: Fleet, pool: WorkerPool, directory: Scratch) -> None:
    fleet.close()
    pool.close()
    directory.cleanup()
