"""Products by Hopper's wgmma: who gets them, and what becomes of them. `test_gpu_kernels_run` runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm

from eqtune.errors import RecordError
from eqtune.gpu_machine import describe_gpu, find_compiler, gpu_target
from eqtune.measure.cuda import code as cuda_code
from eqtune.measure.cuda.code import cuda_source, launch_problem, ptxas_resources
from eqtune.records.traces import trace_to_json
from eqtune.records.workload import serialize_workload
from eqtune.search.space import Decision, build_space
from eqtune.search.space.gpu.hardware import DEVICES
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.search.space.replay import replay_schedule
from eqtune.search.strategies.moves import Moves

sys.path.insert(0, str(Path(__file__).parent))
import test_gpu_tensor_core as tensor

H100 = DEVICES["nvidia/nvidia-h100"].hardware()
TARGET = gpu_target(H100)
needs_nvcc = pytest.mark.skipif(find_compiler() is None or find_compiler().kind != "nvcc", reason="needs nvcc")


def names(mod, hardware=H100):
    return {sketch.name for sketch in build_space(mod, hardware).sketches}


def test_only_hopper_gets_them_and_only_compiled_for_its_own_instructions():
    mod = tensor.matmul(256, 256, 512, "float16", "float32")
    assert "gpu_warpgroup" in names(mod)
    without = describe_gpu(tvm.target.Target({"kind": "cuda", "arch": "sm_90"}))
    others = [DEVICES[tag].hardware() for tag in ("nvidia/nvidia-a100", "nvidia/geforce-rtx-5090")]
    assert all("gpu_warpgroup" not in names(mod, hardware) for hardware in (without, *others))
    assert "sm_90a" in str(TARGET)


def test_bytes_are_multiplied_only_along_the_reduction():
    assert "gpu_warpgroup" in names(tensor.matmul(256, 256, 1024, "int8", "int32", transposed=True))
    assert "gpu_warpgroup" not in names(tensor.matmul(256, 256, 1024, "int8", "int32"))


@pytest.mark.parametrize(("dtype", "sums"), [("float16", "float32"), ("float16", "float16"), ("bfloat16", "float32")])
def test_the_estimate_prefers_them_for_large_products(dtype, sums):
    space = build_space(tensor.matmul(4096, 4096, 4096, dtype, sums), H100)
    points = Moves(space).sample(np.random.default_rng(0), 2000)
    latency_s = space.latency_s(points)
    assert space.decision(points[np.argmin(latency_s)]).sketch == "gpu_warpgroup"
    assert latency_s.min() > 2 * 4096**3 / H100.tensor_peak("float16")


def test_sampled_candidates_become_cuda_and_can_be_launched():
    space = build_space(tensor.matmul(500, 520, 1000, "float16", "float32"), H100)
    points = Moves(space).sample(np.random.default_rng(0), 400)
    found = [d for d in map(space.decision, points) if d.sketch == "gpu_warpgroup"]
    assert found
    for decision in found[:6]:
        function = prepare_for_lowering(space.apply(decision).mod["main"])
        assert launch_problem(function, H100) == "", decision
        assert "wgmma.mma_async" in cuda_source({"kernel": function}, TARGET), decision


WIDE, HIGH = {"height": 1, "width": 256}, {"height": 2, "width": 128}


@needs_nvcc
@pytest.mark.parametrize(
    ("dtype", "sums", "knobs"),
    [
        ("float16", "float32", WIDE),
        ("float16", "float32", HIGH),
        ("float16", "float16", HIGH),
        ("bfloat16", "float32", WIDE),
        ("int8", "int32", WIDE),
        ("uint8", "int32", HIGH),
    ],
)
def test_sums_stay_in_registers_and_instructions_are_not_serialized(dtype, sums, knobs, monkeypatch):
    reports, parse = [], cuda_code._parse
    monkeypatch.setattr(cuda_code, "_parse", lambda report, source: reports.append(report) or parse(report, source))
    space = build_space(tensor.matmul(1024, 1024, 1024, dtype, sums, transposed=sums == "int32"), H100)
    tile = {"groups": 2, "stages": 4, "split": 1}
    function = prepare_for_lowering(space.apply(Decision("gpu_warpgroup", tile | knobs)).mod["main"])
    source = cuda_source({"kernel": function}, TARGET)
    (resources,) = ptxas_resources(source, H100.arch, find_compiler()).values()
    assert resources.spill_bytes == resources.stack_bytes == 0
    assert resources.registers < 200  # of two groups, 255 would be all that there are
    (said,) = reports
    assert "Used" in said
    assert "serialized" not in said
    assert "injected" not in said  # no waits but ours


REPLAYED = """
import json
import os
import sys
from pathlib import Path
from eqtune.records.workload import deserialize_workload
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.search.space.replay import replay_schedule
for line in sys.stdin:
    child = os.fork()
    if not child:
        trace, kernel, written = map(Path, json.loads(line))
        schedule = replay_schedule(trace.read_text(), deserialize_workload(kernel.read_text()))
        written.write_text(prepare_for_lowering(schedule.mod["main"]).script())
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def fresh_process():
    """Replays what is written to it, each time in a process of its own; TVM is imported once for all of them."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", REPLAYED], stdin=pipe, stdout=pipe, text=True) as process:
        yield process


WARPGROUPS = {"groups": 2, "height": 1, "width": 64, "stages": 3, "split": 1}
FRAGMENTS = {"wi": 2, "fi": 2, "wj": 2, "fj": 2, "bk": 32, "stages": 3, "mma": 1, "split": 1}


@pytest.mark.parametrize(
    ("dtype", "sums", "sketch", "knobs"),
    [
        ("float16", "float16", "gpu_warpgroup", WARPGROUPS),
        ("float16", "float16", "gpu_warpgroup", WARPGROUPS | {"split": 2}),
        ("bfloat16", "float32", "gpu_warpgroup", WARPGROUPS | {"width": 192}),
        ("float16", "float32", "gpu_tensor_core", FRAGMENTS),
        ("int8", "int32", "gpu_tensor_core", FRAGMENTS | {"mma": 0, "bk": 64}),
    ],
)
def test_a_trace_is_replayed_by_a_process_that_made_no_schedule(dtype, sums, sketch, knobs, tmp_path, fresh_process):
    mod = tensor.matmul(384, 384, 1024, dtype, sums)
    schedule = build_space(mod, H100).apply(Decision(sketch, knobs))
    trace, kernel, written = (tmp_path / name for name in ("trace", "kernel", "written"))
    trace.write_text(trace_to_json(schedule.trace))
    kernel.write_text(serialize_workload(mod))
    print(json.dumps([str(trace), str(kernel), str(written)]), file=fresh_process.stdin, flush=True)
    assert fresh_process.stdout.readline() == "0\n"
    assert written.read_text() == prepare_for_lowering(schedule.mod["main"]).script()


@pytest.mark.parametrize(
    "name",
    [
        "eqtune_wgmma_float16_float32_992_10_float32",
        "eqtune_wgmma_int8_int32_64_00_int32",
        "eqtune_mma_compute_float32_float16_3",
        "eqtune_mma_load_c_float16_1",
    ],
)
def test_names_that_no_schedule_has_register_nothing(name):
    trace = json.dumps([[["Tensorize", ["b0"], [name, True], []]], []])
    with pytest.raises(RecordError, match="does not fit"):
        replay_schedule(trace, tensor.matmul(64, 64, 64, "float16", "float32"))


def test_sums_of_other_kernels_are_not_narrowed_to_float32():
    mod = tensor.matmul(64, 64, 64, "float64", "float64")
    trace = [["GetSBlock", [], ["c", "main"], ["b0"]], ["UnsafeSetDType", ["b0"], [0, "float32"], []]]
    with pytest.raises(RecordError, match="other types"):
        replay_schedule(json.dumps([trace, []]), mod)
