"""MetaSchedule, TVM's own tuner, given a builder that stays alive.

Its LocalBuilder starts a new process pool for every batch, and each process spends some 15 seconds importing
TVM's tensor intrinsics. A comparison of wall times would measure that and nothing else, so candidates are compiled here
in threads of this process (the compiler releases the GIL). Threads cannot be killed, so that its limit of 30 s a
candidate is not kept; all else is as its users have it.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.builder.builder import BuilderResult, PyBuilder
from tvm.s_tir.meta_schedule.builder.local_builder import default_build, default_export

__all__ = ["FAILED_S", "MetaScheduleResult", "OutOfTime", "PersistentBuilder", "tune", "warm_up"]

FAILED_S = 1e9
"""MetaSchedule's latency of a candidate that failed is 1e10."""


class OutOfTime(RuntimeError):
    """The search has had its seconds."""


@derived_object
class PersistentBuilder(PyBuilder):
    """Builds in threads of this process, until a moment of `time.monotonic()`.

    Attributes
    ----------
    built, failed : int
        Candidates that were compiled, and those of them that did not compile.
    out_of_time : bool
        Whether it ended the search.
    """

    def __init__(self, workers: int, until_s: float = math.inf) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(workers)
        self.until_s = until_s
        self.built = self.failed = 0
        self.out_of_time = False

    def build(self, build_inputs: list[Any]) -> list[Any]:
        """One result for each input, in order; those not begun in time fail. Raises OutOfTime where that is all."""
        if time.monotonic() > self.until_s:
            self.out_of_time = True
            raise OutOfTime
        results = list(self.pool.map(self._build, build_inputs))
        compiled = [result for result in results if result is not None]
        self.built += len(compiled)
        self.failed += sum(result.error_msg is not None for result in compiled)
        return [BuilderResult(None, "out of time") if result is None else result for result in results]

    def _build(self, build_input: Any) -> Any:
        """None when time is over."""
        if time.monotonic() > self.until_s:
            return None
        try:
            return BuilderResult(default_export(default_build(build_input.mod, build_input.target, None)), None)
        except (ValueError, RuntimeError) as error:
            return BuilderResult(None, str(error)[:500])


@dataclass(frozen=True)
class MetaScheduleResult:
    """What it found.

    Attributes
    ----------
    latency_s : float
        As it measured it, one average for each candidate, and not comparable with a minimum of several; `inf` when no
        candidate worked.
    wall_s : float
    schedule : tvm.s_tir.Schedule or None
        Of the fastest candidate.
    """

    latency_s: float
    wall_s: float
    schedule: Any


def warm_up() -> None:
    """Do the one import that every tuning context needs, so that it is in nobody's time."""
    import tvm.s_tir.tensor_intrin  # noqa: F401


def tune(mod: Any, target: Any, trials: int, seed: int = 0) -> MetaScheduleResult:
    """Tune one kernel with MetaSchedule's defaults.

    Parameters
    ----------
    mod : IRModule
        One PrimFunc "main".
    target : tvm.target.Target
        Must say how many cores there are ("num-cores").
    trials : int
        Measurements; its default of 64 a round stays.
    """
    warm_up()
    os.environ["TVM_NUM_THREADS"] = str(int(target.attrs["num-cores"]))
    runner = ms.runner.LocalRunner()  # its process loads TVM, as eqtune's workers do, which is in nobody's time either
    with tempfile.TemporaryDirectory() as work_dir:
        started = time.monotonic()
        database = ms.tune_tir(
            mod,
            target,
            work_dir,
            max_trials_global=trials,
            builder=PersistentBuilder(os.cpu_count() or 1),
            runner=runner,
            seed=seed,
        )
        wall_s = time.monotonic() - started
        records = [record for record in database.get_all_tuning_records() if record.run_secs]
        best = min(records, key=_seconds, default=None)
        if best is None or _seconds(best) >= FAILED_S:
            return MetaScheduleResult(math.inf, wall_s, None)
        schedule = Schedule(best.workload.mod)
        best.trace.apply_to_schedule(schedule, remove_postproc=False)
    return MetaScheduleResult(_seconds(best), wall_s, schedule)


def _seconds(record: Any) -> float:
    return min(float(s) for s in record.run_secs)
