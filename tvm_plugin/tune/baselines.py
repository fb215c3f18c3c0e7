"""What kernels take untuned: the latency that tuning has to beat, taken from earlier runs or measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..errors import SetupError
from ..gpu_machine import is_gpu
from ..machine import target_json
from ..measure.base import Measurer, TakesPlainBaselines
from ..records import RecordDatabase
from ..tasks.task import Task
from .budget import Budget
from .kernel_search import KernelSearch
from .loop import TRIAL_S

__all__ = ["Baselines"]

UNTUNED_S_PER_OPERATION = 1e-9
"""What an operation takes untuned, roughly..."""

UNTUNED_SHARE = 0.02
"""... of all tuning, what running everything untuned once may take by this guess..."""

UNTUNED_S = 0.05
"""... but so many seconds in any case; if it takes longer, plain schedules are the baseline."""

COMPILE_S, MOST_COMPILE_S, COMPILE_SHARE = 0.15, 5.0, 0.15
"""What compiling a layer of a quantised model takes untuned, where each has a kernel of its own; and what compiling all
may take: so many seconds, or such a share of all tuning. EfficientNet-B0 takes 28 s, 5 with plain schedules."""


class Baselines:
    """Sets `KernelSearch.baseline_s`, and knows what untuned kernels take that nobody has timed.

    Parameters
    ----------
    database : RecordDatabase
        Keeps what was measured for the next run.
    measurer : Measurer
    target : tvm.target.Target
    runs : bool
        Whether the measurer runs kernels; without, there is no baseline.

    Attributes
    ----------
    plain : bool
        Whether plain schedules are the baseline (`choose`).
    s_per_operation : float
        How long kernels take that are not tuned, roughly; 0 before somebody says so.
    """

    def __init__(self, database: RecordDatabase, measurer: Measurer, target: Any, runs: bool) -> None:
        self.plain = False
        self.s_per_operation = 0.0
        self._database = database
        self._measurer = measurer
        self._target = target
        self._runs = runs
        self._any_ran = False

    def choose(self, operations: float, budget: Budget, own_kernels: int = 0) -> None:
        """Compare with plain schedules where running everything untuned once, so many `operations`, takes too long.

        Or compiling it: `own_kernels` are those that plain schedules let layers share. Call it before anything is
        measured. Plain schedules are for CPUs.
        """
        trials, time_s = budget.trials, budget.time_s
        tuning_s = min(math.inf if trials is None else TRIAL_S * trials, math.inf if time_s is None else time_s)
        too_long = UNTUNED_S_PER_OPERATION * operations > max(UNTUNED_S, UNTUNED_SHARE * tuning_s)
        too_long |= COMPILE_S * own_kernels > max(MOST_COMPILE_S, COMPILE_SHARE * tuning_s)
        if too_long and isinstance(self._measurer, TakesPlainBaselines) and not is_gpu(self._target):
            self.plain = self._measurer.plain_baselines = True

    def guess_s(self, task: Task) -> float:
        """Seconds of one untuned call, by the kernel's operations; 0 when nothing is known."""
        return self.s_per_operation * task.operations

    def take_known(self, kernels: Sequence[KernelSearch], context_key: str) -> list[KernelSearch]:
        """Set what earlier runs measured; returns the kernels that they did not."""
        missing = []
        for kernel in kernels:
            known_s = self._database.get_number(self._key(kernel, context_key), "latency_s") if self._runs else math.inf
            if known_s is None:
                missing.append(kernel)
            else:
                kernel.baseline_s = known_s
                self._any_ran = True
        return missing

    def measure(self, kernels: Sequence[KernelSearch], context_key: str) -> None:
        """Set what untuned kernels take now, and keep it.

        Raises
        ------
        SetupError
            When none of them runs, and none did before.
        """
        latencies_s = self._measurer.baseline([kernel.task for kernel in kernels])
        for kernel, latency_s in zip(kernels, latencies_s, strict=True):
            kernel.baseline_s = latency_s
            if math.isfinite(latency_s):
                self._database.put_json(self._key(kernel, context_key), {"latency_s": latency_s})
        # A default schedule that cannot be built, or is wrong, is no sign of a machine that runs nothing.
        failures = getattr(self._measurer, "baseline_failures", {})
        said = [failures.get(kernel.task.workload_hash, "") for kernel in kernels]
        self._any_ran = (
            self._any_ran
            or any(map(math.isfinite, latencies_s))
            or any(failure.startswith(("build_error", "wrong_result")) for failure in said)
        )
        if not self._any_ran:
            raise SetupError(
                f"no kernel compiled for {target_json(self._target)} runs on this machine; leave out the target to "
                "tune for this machine's CPU, or give `measure` a machine that has the target"
            )

    def _key(self, kernel: KernelSearch, context_key: str) -> str:
        plain = f":plain:{__version__}" if self.plain else ""  # another version may have other plain schedules
        return f"baseline:{kernel.task.workload_hash}:{context_key}{plain}"
