"""Schedules that LLVM would compile for minutes are refused."""

from __future__ import annotations

import pytest
import tvm
from tvm.s_tir import Schedule, ScheduleError
from tvm.script import tirx as T

from eqtune.search.space.base import Decision, Space
from eqtune.search.space.code_size import unrolled_statements
from eqtune.search.space.memory_bound.stages import UntouchedSketch


@T.prim_func(private=True, s_tir=True)
def double(x: T.Buffer((112, 112), "float32"), y: T.Buffer((112, 112), "float32")):
    T.func_attr({"tirx.noalias": True})
    for i, j in T.grid(112, 112):
        with T.sblock("double"):
            vi, vj = T.axis.remap("SS", [i, j])
            y[vi, vj] = x[vi, vj] * T.float32(2)


class Unrolled(UntouchedSketch):
    """So many of the two loops are unrolled."""

    def apply(self, values):
        schedule = Schedule(self.mod)
        for loop in schedule.get_loops(schedule.get_sblock("double"))[2 - values["loops"] :]:
            schedule.unroll(loop)
        return schedule


def test_a_whole_image_unrolled_is_refused_and_a_row_is_not() -> None:
    space = Space((Unrolled(tvm.IRModule({"main": double})),))
    row = space.apply(Decision("untouched", {"loops": 1}))
    assert unrolled_statements(row.mod["main"].body) == 112
    with pytest.raises(ScheduleError, match="12544 statements"):
        space.apply(Decision("untouched", {"loops": 2}))
