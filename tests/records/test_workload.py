import json
import subprocess
import sys

import pytest
import tvm

from eqtune.errors import InputError, RecordError
from eqtune.records.traces import replay, trace_to_json
from eqtune.records.workload import as_workload, deserialize_workload, serialize_workload, workload_hash

from .kernels import factored_sum, matmul_add, row_sum, tiled_matmul


def test_hash_counts_structure_and_ignores_the_functions_name():
    base = workload_hash(matmul_add())
    assert len(base) == 16
    assert int(base, 16) >= 0
    assert workload_hash(matmul_add().with_attr("global_symbol", "kernel_7")) == base
    assert workload_hash(tvm.IRModule({"anything": matmul_add()})) == base
    assert workload_hash(matmul_add(m=48)) != base
    assert workload_hash(matmul_add(layout_free=True)) != base


def test_buffer_names_do_not_count_and_block_names_do():
    # Traces find blocks by name: kernels with one hash must be able to share them.
    assert workload_hash(matmul_add(names=("x", "y"))) == workload_hash(matmul_add(names=("a", "b")))
    assert workload_hash(matmul_add(block="other")) != workload_hash(matmul_add())
    trace = trace_to_json(tiled_matmul(matmul_add(names=("x", "y"))).trace)
    tvm.ir.assert_structural_equal(replay(trace, as_workload(matmul_add())).mod, tiled_matmul(matmul_add()).mod)


def test_hash_is_the_same_in_another_process(tmp_path):
    text = tmp_path / "kernel.json"
    text.write_text(serialize_workload(matmul_add()))
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from eqtune.records.workload import deserialize_workload, workload_hash\n"
        "print(workload_hash(deserialize_workload(open(sys.argv[1]).read())))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(text)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == workload_hash(matmul_add())


def test_text_round_trip_keeps_the_kernel():
    mod = deserialize_workload(serialize_workload(matmul_add(layout_free=True)))
    tvm.ir.assert_structural_equal(mod, as_workload(matmul_add(layout_free=True)))
    assert [var.name_hint for var in mod.get_global_vars()] == ["main"]
    assert "global_symbol" not in mod["main"].attrs


def nested(depth):
    """Arrays in arrays, as a graph of objects."""
    nodes = [{"type": "ffi.Array", "data": [index - 1] if index else []} for index in range(depth)]
    return json.dumps({"root_index": depth - 1, "nodes": nodes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "not json",
        '{"root_index":0,"nodes":[{"type":"int","data":3}]}',
        '{"root_index":0,"nodes":[{"type":5,"data":3}]}',
        '{"root_index":0,"nodes":[{"type":"ffi.Array","data":[0]}]}',  # in itself
        '{"root_index":0,"nodes":[{"type":"ffi.Array","data":[true]}, {"type":"ffi.Array","data":[0]}]}',
        '{"root_index":0,"nodes":[{"type":"ir.TupleType","data":{"fields":0,"span":0}}]}',
        '{"root_index":0,"nodes":[{"type":"ffi.Module","data":"AAAA"}]}',
        nested(200_000),
        nested(1000),
    ],
    ids=lambda text: text[:60],
)
def test_broken_text_is_one_clear_error(text):
    with pytest.raises(RecordError, match="stored workload") as raised:
        deserialize_workload(text)
    assert "\n" not in str(raised.value)


def test_what_is_no_kernel_is_refused():
    with pytest.raises(InputError, match="one PrimFunc"):
        workload_hash(tvm.IRModule({"a": matmul_add(), "b": matmul_add()}))
    with pytest.raises(InputError, match="not int"):
        workload_hash(3)


def test_scheduling_a_workload_leaves_the_callers_kernel_alone():
    kernel = row_sum()
    before = tvm.ir.save_json(kernel)
    factored_sum(kernel)
    assert tvm.ir.save_json(kernel) == before
