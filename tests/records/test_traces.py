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
        ('[[["GetSBlock",[],["c",null],["b0"]]],[]]', "a null"),
        ('[[["TransformLayout",["b0"],[null,0,null,0],[]]],[]]', "a null"),
        ('[[["Annotate",["b0",1],["eqtune.a","b"],[]]],[]]', "malformed annotation"),
        ('[[["UnsafeSetDType",["b0"],[0,"int8"],[]]],[]]', "instruction 'UnsafeSetDType'"),
        ('[[["GetSBlock",[],["c","main"],["b0"]],["GetLoops",["b0"],[],["l0"]]],[[0,{}]]]', "does not fit"),
        ('[[["GetSBlock",[],["missing","main"],["b0"]]],[]]', "does not fit"),
        ('[[["GetLoops",["b7"],[],["l0"]]],[]]', "does not fit"),
        ('[[["SamplePerfectTile",["l0"],[2,0],["v0","v1"]]],[]]', "without its decision"),
        ('[[["SamplePerfectTile",["l0"],[2,16],["v0","v1"]]],[[0,null]]]', "without its decision"),
        ('[[["SamplePerfectTile",["l0"],[0,16],[]]],[[0,[4,4]]]]', "malformed choice of tiles"),
        ('[[["SamplePartitionedTile",["l0"],[2,2,4],["v0","v1"]]],[[0,[4,4]]]]', "malformed choice of tiles"),
        ('[[["SamplePartitionedTile",["l0"],[2,1,0],["v0","v1"]]],[[0,[4,4]]]]', "malformed choice of tiles"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_one_clear_error(text, complaint):
    schedule = Schedule(as_workload(matmul_add()), error_render_level="none")
    with pytest.raises(RecordError, match=complaint) as raised:
        apply_trace(text, schedule)
    assert "\n" not in str(raised.value)


def with_annotation(key, value):
    return json.dumps(
        [[["GetSBlock", [], ["c", "main"], ["b0"]], ["Annotate", ["b0", json.dumps(value)], [key], []]], []]
    )


@pytest.mark.parametrize("key", ["pragma_import_llvm", "pragma_import_c", "pragma_debug_skip_region", "extern_scope"])
def test_an_annotation_that_could_link_code_is_refused(key):
    with pytest.raises(RecordError, match=f"annotation '{key}'"):
        replay(with_annotation(key, "define void @f() { ret void }"), as_workload(matmul_add()))
    replay(with_annotation("meta_schedule.tiling_structure", "SSRSRS"), as_workload(matmul_add()))


def edited_map(edit):
    """The trace of `tiled_matmul` with the nodes of its index map edited."""
    instructions, decisions = json.loads(trace_to_json(tiled_matmul(matmul_add()).trace))
    for instruction in instructions:
        if instruction[0] == "TransformLayout":
            graph = json.loads(instruction[1][1])
            edit(graph["nodes"])
            instruction[1][1] = json.dumps(graph)
    return json.dumps([instructions, decisions])


def make_circle(nodes):
    index = next(i for i, node in enumerate(nodes) if node["type"] == "ffi.Array")
    nodes[index]["data"][0] = index


def make_call(nodes):
    next(node for node in nodes if node["type"] == "prim.FloorDiv")["type"] = "ir.Call"


def make_module(nodes):
    nodes[0] = {"type": "ffi.Module", "data": ""}


@pytest.mark.parametrize("edit", [make_circle, make_call, make_module])
def test_an_index_map_that_is_no_arithmetic_is_refused(edit):
    tvm.ir.assert_structural_equal(
        replay(edited_map(lambda nodes: None), as_workload(matmul_add())).mod, tiled_matmul(matmul_add()).mod
    )
    with pytest.raises(RecordError, match="damaged index map"):
        replay(edited_map(edit), as_workload(matmul_add()))


def test_a_tile_of_no_elements_is_refused():
    """TVM divides by it, which ends the process."""
    instructions, ((index, tiles),) = json.loads(trace_to_json(factored_sum(row_sum()).trace))
    for wrong in ([tiles[0], 0], [tiles[0], None]):
        with pytest.raises(RecordError, match="malformed decision"):
            replay(json.dumps([instructions, [[index, wrong]]]), as_workload(row_sum()))
