"""ApplyTuned: schedules onto the kernels of a module, weights packed ahead of time."""

from __future__ import annotations

import logging
import os
from typing import Any

from tvm import ir, transform

from ..gpu_machine import current_target
from ..schedules.analytic import analytic_schedules, machine_running
from ..schedules.apply import Schedules, schedule_kernels
from ..schedules.stored import stored_decisions, stored_schedules
from ..symbolic import tile_symbolic_kernels
from ..tasks import extract_tasks

__all__ = ["ApplyTuned"]

LOGGER = logging.getLogger("eqtune")


@transform.module_pass(opt_level=0, name="ApplyTuned")
class ApplyTuned:
    """Schedule the kernels of a lowered module, and pack weights ahead of time.

    Use it after `LowerToKernels`. A kernel without a schedule is left to TVM's default, one thread and no vectors,
    which is logged as a warning; or, with `estimate`, it gets the one that the analytic model likes best. `tune_model`
    tunes the form of a model that is fastest, mostly with channels last (`ChannelsLast`): records fit its kernels.

    Parameters
    ----------
    records : path or RecordDatabase, optional
        A work directory of `eqtune.tune_model`, or its database; the best record of each kernel is used.
    context : eqtune.records.Context, optional
        Where the records must come from. Without it: from this machine, the current target and this version of TVM.
    schedules : mapping, optional
        Schedules by workload hash; they come before the records.
    estimate : bool
        Schedule kernels without a record by the analytic model, unmeasured; needs a current target.
    """

    def __init__(
        self,
        records: str | os.PathLike[str] | Any | None = None,
        context: Any = None,
        schedules: Schedules | None = None,
        estimate: bool = False,
    ) -> None:
        self._records = records
        self._context = context
        self._schedules = dict(schedules or {})
        self._estimate = estimate

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Apply and pack.

        Raises RecordError for records that cannot be read or do not fit, InputError where there are none or a target
        is missing.
        """
        stored = {} if self._records is None else stored_schedules(self._records, self._context)
        known: dict[str, Any] = {**stored, **self._schedules}
        tasks = extract_tasks(mod)
        missing = [task for task in tasks if task.workload_hash not in known]
        if missing and self._estimate:
            hardware = machine_running(mod, current_target("ApplyTuned(..., estimate=True)"))
            known |= analytic_schedules(missing, hardware)
            mod = tile_symbolic_kernels(mod, hardware, stored_decisions(stored))
        elif missing:
            LOGGER.warning(
                "%d of %d kernels have no schedule and stay as TVM compiles them, among them %s: tune this form of the "
                "model, or permit estimates with ApplyTuned(..., estimate=True)",
                len(missing),
                len(tasks),
                ", ".join(task.name for task in missing[:3]),
            )
        return schedule_kernels(mod, known)
