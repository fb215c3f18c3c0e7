"""Tensor-core sketches: what they compute, and that the compiled code has the instructions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tvm import te, tirx, topi

from eqtune.gpu_machine import find_compiler, gpu_target
from eqtune.measure.cuda.code import cuda_source, launch_problem, ptxas_resources
from eqtune.records.workload import as_workload
from eqtune.search.space import Decision, build_space
from eqtune.search.space.gpu.hardware import DEVICES
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.search.space.schedule import schedule_of
from eqtune.search.strategies.moves import Moves

sys.path.insert(0, str(Path(__file__).parent))
from gpu_on_cpu import outputs, serial

H100 = DEVICES["nvidia/nvidia-h100"].hardware()
A100 = DEVICES["nvidia/nvidia-a100"].hardware()
T4 = DEVICES["nvidia/nvidia-t4"].hardware()
RTX_5090 = DEVICES["nvidia/geforce-rtx-5090"].hardware()

TILE = {"vi": 2, "ti": 16, "ri": 4, "vj": 2, "tj": 16, "rj": 4, "bk": 16, "stages": 4, "split": 1}

DTYPES = [("float16", "float16"), ("float16", "float32"), ("int8", "int32")]


def matmul(m, n, k, dtype, sums, transposed=False):
    m, n, k = (tirx.IntImm("int64", extent) for extent in (m, n, k))  # as Relax's kernels have them
    a, b = te.placeholder((m, k), dtype, name="a"), te.placeholder((n, k) if transposed else (k, n), dtype, name="b")
    r = te.reduce_axis((0, k), name="k")

    def product(i, j):
        left, right = a[i, r], b[j, r] if transposed else b[r, j]
        return te.sum(left * right if dtype == sums else left.astype(sums) * right.astype(sums), axis=r)

    c = te.compute((m, n), product, name="c")
    d = te.compute((m, n), lambda i, j: tirx.max(c[i, j], tirx.const(0, sums)), name="d")
    return as_workload(te.create_prim_func([a, b, d]))


def convolution(layout="NHWC", channels=(16, 24)):
    read, written = channels
    if layout == "NHWC":
        shapes, made = ((1, 9, 9, read), (3, 3, read, written)), topi.nn.conv2d_nhwc
    else:
        shapes, made = ((1, read, 9, 9), (written, read, 3, 3)), topi.nn.conv2d_nchw
    data, weight = (
        te.placeholder(shape, "float16", name) for shape, name in zip(shapes, ("data", "weight"), strict=True)
    )
    return as_workload(te.create_prim_func([data, weight, topi.nn.relu(made(data, weight, 1, 1, 1))]))


def tensor_decisions(space, count, seed=0):
    points = Moves(space).sample(np.random.default_rng(seed), 400)
    found = [d for d in map(space.decision, points) if d.sketch == "gpu_tensor_core"]
    assert found, "no candidate on tensor cores"
    return found[:count]


@pytest.mark.parametrize(
    "mod",
    [
        *[pytest.param(lambda d=d, s=s: matmul(40, 56, 52, d, s), id=f"{d}-{s}") for d, s in DTYPES],
        pytest.param(lambda: matmul(40, 56, 52, "float16", "float32", transposed=True), id="transposed"),
        pytest.param(convolution, id="convolution"),
        pytest.param(lambda: convolution("NCHW"), id="convolution_nchw"),
    ],
)
def test_tiles_that_do_not_divide_compute_the_kernel(mod, monkeypatch):
    mod = mod()
    space = build_space(mod, H100)
    decisions = tensor_decisions(space, 2)
    # What an intrinsic replaces means the same as the intrinsic, and runs on a CPU.
    monkeypatch.setattr(type(schedule_of(mod)), "tensorize", lambda *_: None)
    expected = outputs(mod)
    for decision in decisions:
        np.testing.assert_array_equal(outputs(serial(space.apply(decision).mod)), expected, err_msg=str(decision))


def test_only_devices_and_dtypes_with_fragments_get_the_sketch():
    def names(mod, hardware):
        return {sketch.name for sketch in build_space(mod, hardware).sketches}

    assert "gpu_tensor_core" in names(matmul(64, 64, 64, "float16", "float32"), T4)
    assert "gpu_tensor_core" in names(matmul(64, 64, 64, "bfloat16", "float32"), A100)
    assert "gpu_tensor_core" not in names(matmul(64, 64, 64, "bfloat16", "float32"), T4)
    assert "gpu_tensor_core" not in names(matmul(64, 64, 64, "float32", "float32"), H100)


def test_the_estimate_prefers_tensor_cores_for_large_products():
    space = build_space(matmul(2048, 2048, 2048, "float16", "float32"), A100)
    points = Moves(space).sample(np.random.default_rng(0), 1000)
    latency_s = space.latency_s(points)
    assert space.decision(points[np.argmin(latency_s)]).sketch == "gpu_tensor_core"
    assert latency_s.min() > 2 * 2048**3 / A100.tensor_peak("float16")


def test_few_tiles_of_a_long_reduction_are_split_over_blocks_and_many_are_not():
    def best(m, n, k):
        space = build_space(matmul(m, n, k, "float16", "float32"), A100)
        points = Moves(space).sample(np.random.default_rng(0), 2000)
        return space.decision(points[np.argmin(space.latency_s(points))])

    few, many = best(64, 64, 16384), best(2048, 2048, 2048)
    assert few.sketch == many.sketch == "gpu_tensor_core"
    assert few.values["split"] > 4
    assert many.values["split"] == 1


@pytest.mark.parametrize(("dtype", "sums"), [*DTYPES, ("bfloat16", "float32")])
def test_sampled_candidates_become_cuda_and_can_be_launched(dtype, sums):
    space = build_space(matmul(512, 512, 512, dtype, sums), H100)
    for decision in tensor_decisions(space, 6):
        function = prepare_for_lowering(space.apply(decision).mod["main"])
        assert launch_problem(function, H100) == "", decision
        expected = "mma.sync" if decision.values["mma"] else "mma_sync"
        assert expected in cuda_source({"kernel": function}, gpu_target(H100)), decision


def columns(sketch, points):
    return np.array([[point[knob.name] for knob in sketch.knobs] for point in points])


NOT_LAUNCHED = {"wi": 4, "fi": 1, "wj": 4, "fj": 2, "bk": 64, "stages": 1, "mma": 0, "split": 1}
ONE_PLACE = {"wi": 4, "fi": 4, "wj": 2, "fj": 1, "bk": 32, "stages": 4, "mma": 0, "split": 1}


def test_what_tvm_does_not_ask_memory_for_is_not_sampled():
    space = build_space(matmul(200, 136, 520, "float16", "float32"), H100)
    (sketch,) = (sketch for sketch in space.sketches if sketch.name == "gpu_tensor_core")
    neighbours = [NOT_LAUNCHED, NOT_LAUNCHED | {"bk": 32}, NOT_LAUNCHED | {"stages": 3}]
    functions = [prepare_for_lowering(sketch.apply(point).mod["main"]) for point in neighbours]
    problems = [launch_problem(function, H100) for function in functions]
    assert problems[0].startswith("32768 bytes of static and 26624 of dynamic shared memory: TVM asks for more")
    assert problems[1:] == ["", ""]
    assert sketch.legal(columns(sketch, neighbours)).tolist() == [False, True, True]


@pytest.mark.parametrize(("dtype", "sums"), [("int8", "int32"), ("float16", "float32")])
def test_sums_that_tvm_would_put_in_the_place_of_an_operand_are_not_sampled(dtype, sums):
    space = build_space(matmul(200, 136, 520, dtype, sums), H100)
    (sketch,) = (sketch for sketch in space.sketches if sketch.name == "gpu_tensor_core")
    refused = ONE_PLACE if dtype == "int8" else ONE_PLACE | {"stages": 3}
    with pytest.raises(Exception, match="element type must match"):
        cuda_source({"kernel": prepare_for_lowering(sketch.apply(refused).mod["main"])}, gpu_target(H100))
    neighbours = [refused, refused | {"stages": 1}, refused | {"mma": 1}]
    assert sketch.legal(columns(sketch, neighbours)).tolist() == [False, True, True]
    for point in neighbours[1:]:
        cuda_source({"kernel": prepare_for_lowering(sketch.apply(point).mod["main"])}, gpu_target(H100))


@pytest.mark.skipif(find_compiler() is None or find_compiler().kind != "nvcc", reason="needs nvcc")
@pytest.mark.parametrize(
    ("dtype", "sums", "mma", "hardware"),
    [
        ("float16", "float16", 0, A100),
        ("float16", "float32", 0, H100),
        ("int8", "int32", 0, H100),
        ("float16", "float16", 1, RTX_5090),
        ("float16", "float32", 1, A100),
        ("int8", "int32", 1, RTX_5090),
    ],
)
def test_compiled_code_uses_tensor_cores_and_keeps_its_sums_in_registers(dtype, sums, mma, hardware, tmp_path):
    space = build_space(matmul(1000, 1000, 520, dtype, sums), hardware)
    steps = 16 if sums == "float16" else 32  # small sums are static, and leave less to the operands
    tile = {"wi": 2, "fi": 4, "wj": 2, "fj": 4, "bk": steps, "stages": 2, "mma": mma, "split": 1}
    function = prepare_for_lowering(space.apply(Decision("gpu_tensor_core", tile)).mod["main"])
    assert launch_problem(function, hardware) == ""
    source = cuda_source({"kernel": function}, gpu_target(hardware))
    compiler = find_compiler()
    (resources,) = ptxas_resources(source, hardware.arch, compiler).values()
    assert resources.spill_bytes < 64  # of 16 fragments of 32 bytes or more; an address or two may go
    (tmp_path / "k.cu").write_text(source)
    command = [compiler.path, "-ptx", f"-arch={hardware.arch}", "-o", str(tmp_path / "k.ptx"), str(tmp_path / "k.cu")]
    subprocess.run(command, check=True, capture_output=True)
    ptx = (tmp_path / "k.ptx").read_text()
    assert ("mma.sync.aligned.m16n8" if mma else "wmma.mma.sync") in ptx
    assert not mma or ("ldmatrix" in ptx and ".local" not in ptx)


@pytest.mark.skipif(find_compiler() is None or find_compiler().kind != "nvcc", reason="needs nvcc")
def test_loads_that_go_over_several_axes_of_a_window_are_cuda_that_compiles():
    tile = {"wi": 1, "fi": 2, "wj": 2, "fj": 2, "bk": 32, "stages": 2, "mma": 0, "split": 2}
    schedule = build_space(convolution("NCHW"), H100).apply(Decision("gpu_tensor_core", tile))
    source = cuda_source({"kernel": prepare_for_lowering(schedule.mod["main"])}, gpu_target(H100))
    assert len(ptxas_resources(source, H100.arch, find_compiler())) == 2  # the parts, and their sum


@pytest.mark.skipif(find_compiler() is None or find_compiler().kind != "nvcc", reason="needs nvcc")
@pytest.mark.parametrize(
    ("dtype", "sketch", "tile"),
    [
        (
            "float16",
            "gpu_tensor_core",
            {"wi": 2, "fi": 4, "wj": 2, "fj": 4, "bk": 32, "stages": 3, "mma": 0, "split": 1},
        ),
        ("float32", "gpu_tiled", TILE),
    ],
)
def test_tiles_are_copied_asynchronously_from_sm_80_on(dtype, sketch, tile):
    mod = matmul(1024, 1024, 1024, dtype, "float32")
    space = build_space(mod, A100)
    function = prepare_for_lowering(space.apply(Decision(sketch, tile)).mod["main"])
    assert launch_problem(function, A100) == ""
    source = cuda_source({"kernel": function}, gpu_target(A100))
    assert "cp.async.cg.shared.global" in source
    (resources,) = ptxas_resources(source, A100.arch, find_compiler()).values()
    assert resources.spill_bytes == 0
    for sketch in build_space(mod, T4).sketches[:1]:
        assert {knob.name: knob.values for knob in sketch.knobs}["stages"] == (1, 2)
