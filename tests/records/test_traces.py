import json

import pytest
import tvm
from tvm.s_tir import Schedule

from eqtune.errors import RecordError
from eqtune.records.traces import apply_trace, replay, trace_to_json
from eqtune.records.workload import as_workload, deserialize_workload, serialize_workload

from .kernels import factored_sum, matmul_add, row_sum, tiled_matmul


@pytest.mark.parametrize(
    ("kernel", "schedule"),
    [(matmul_add(), tiled_matmul), (matmul_add(layout_free=True), tiled_matmul), (row_sum(), factored_sum)],
    ids=["tiled", "layout-free", "rfactor"],
)
def test_replay_gives_the_same_program(kernel, schedule):
    original = schedule(kernel)
    text = trace_to_json(original.trace)
    stored = deserialize_workload(serialize_workload(kernel))
    again = replay(text, stored)
    tvm.ir.assert_structural_equal(again.mod, original.mod)
    assert trace_to_json(again.trace) == text


def test_text_holds_the_instructions_that_were_hard_to_write():
    text = trace_to_json(tiled_matmul(matmul_add()).trace)
    kinds = {instruction[0] for instruction in json.loads(text)[0]}
    assert kinds >= {
        "TransformLayout",
        "Annotate",
        "CacheRead",
        "DecomposeReduction",
        "SetScope",
        "ReverseComputeAt",
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "not a pair"),
        ('[[["GetLoops"]],[]]', "malformed instruction"),
        ("[[],[[99,1]]]", "malformed decision"),
        ("[[],[[-1,1]]]", "malformed decision"),
        ('[[["Nope",[],[],[]]],[]]', "does not fit"),
        ('[[["GetSBlock",[],["missing","main"],["b0"]]],[]]', "does not fit"),
        ('[[["GetLoops",["b7"],[],["l0"]]],[]]', "does not fit"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_one_clear_error(text, complaint):
    schedule = Schedule(as_workload(matmul_add()), error_render_level="none")
    with pytest.raises(RecordError, match=complaint) as raised:
        apply_trace(text, schedule)
    assert "\n" not in str(raised.value)
