"""GPU sketches: what they compute, what they ask the device for, and that TVM turns them into CUDA."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tvm import te, tirx, topi

from eqtune.gpu_machine import gpu_target
from eqtune.measure.cuda.code import cuda_source, launch_problem
from eqtune.records.traces import replay, trace_to_json
from eqtune.records.workload import as_workload
from eqtune.search.space import Decision, Hardware, build_space
from eqtune.search.space.analysis import analyze
from eqtune.search.space.expressions import nodes_of
from eqtune.search.space.features import FEATURES
from eqtune.search.space.gpu.hardware import DEVICES, GpuHardware
from eqtune.search.space.gpu.matrix import matrix_form
from eqtune.search.space.hardware import known_hardware
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.search.strategies.moves import Moves
from eqtune.tasks.concat import _slice_kernel

sys.path.insert(0, str(Path(__file__).parent))
from gpu_on_cpu import outputs, serial

H100 = DEVICES["nvidia/nvidia-h100"].hardware()
A100 = DEVICES["nvidia/nvidia-a100"].hardware()
T4 = DEVICES["nvidia/nvidia-t4"].hardware()


def workload(*tensors):
    return as_workload(te.create_prim_func(list(tensors)))


def matmul(m, n, k, batch=None):
    lead = () if batch is None else (batch,)
    a, b = te.placeholder((*lead, m, k), name="a"), te.placeholder((*lead, k, n), name="b")
    r = te.reduce_axis((0, k), name="k")
    c = te.compute((*lead, m, n), lambda *i: te.sum(a[(*i[:-1], r)] * b[(*i[:-2], r, i[-1])], axis=r), name="c")
    return workload(a, b, te.compute(c.shape, lambda *i: c(*i) + 1.0, name="d"))


def convolution(layout, groups=1, stride=1):
    data = te.placeholder((1, 9, 9, 8) if layout == "NHWC" else (1, 8, 9, 9), name="data")
    if layout == "NHWC":
        weight = te.placeholder((3, 3, 8, 12), name="weight")
        return workload(data, weight, topi.nn.relu(topi.nn.conv2d_nhwc(data, weight, stride, 1, 1)))
    weight = te.placeholder((12 if groups < 8 else 8, 8 // groups, 3, 3), name="weight")
    made = topi.nn.group_conv2d_nchw(data, weight, stride, 1, 1, groups)
    return workload(data, weight, topi.nn.relu(made))


def depthwise_nhwc():
    data, weight = te.placeholder((1, 9, 9, 12), name="data"), te.placeholder((3, 3, 12, 1), name="weight")
    return workload(data, weight, topi.nn.relu(topi.nn.depthwise_conv2d_nhwc(data, weight, 1, 1, 1)))


def unary(shape, function):
    x = te.placeholder([tirx.IntImm("int64", extent) for extent in shape], name="x")  # as Relax's kernels have them
    return workload(x, function(x))


KERNELS = {
    "matmul_ragged": lambda: matmul(20, 36, 52),
    "matmul_batched": lambda: matmul(16, 24, 32, batch=3),
    "matrix_vector": lambda: matmul(1, 40, 64),
    "convolution_nhwc": lambda: convolution("NHWC"),
    "convolution_nchw_strided": lambda: convolution("NCHW", stride=2),
    "convolution_grouped": lambda: convolution("NCHW", groups=2),
    "depthwise": lambda: convolution("NCHW", groups=8),
    "depthwise_nhwc": depthwise_nhwc,
    "transpose": lambda: unary((2, 20, 24), lambda x: topi.transpose(x, (0, 2, 1))),
    "relu": lambda: unary((3, 5, 8), topi.nn.relu),
    "row_sums": lambda: unary((6, 40), lambda x: topi.sum(x, axis=-1)),
    "column_sums": lambda: unary((40, 6), lambda x: topi.sum(x, axis=0)),
    "max_pool": lambda: unary((1, 4, 9, 9), lambda x: topi.nn.pool2d(x, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), "max")),
    "mixed_indices": lambda: unary((1, 8, 7, 7), lambda x: topi.nn.adaptive_pool(x, (1, 1), "max")),
    "mean_of_one": lambda: unary((1, 56, 1, 1), lambda x: topi.nn.relu(topi.sum(x, (2, 3)))),
    "center_rows": lambda: unary((4, 32), lambda x: topi.subtract(x, topi.sum(x, axis=-1, keepdims=True))),
}


def rows_of(dtype, function):
    """A kernel of two arguments, [64, 32] and [64, 1]."""
    rows, columns, one = (tirx.IntImm("int64", extent) for extent in (64, 32, 1))  # as Relax's kernels have them
    x, y = te.placeholder((rows, columns), dtype, name="x"), te.placeholder((rows, one), dtype, name="y")
    return workload(x, y, function(x, y))


VECTORS = {
    "float32_to_int8": (lambda: rows_of("float32", lambda x, y: topi.cast(x, "int8")), 4),
    "float32_to_float16": (lambda: rows_of("float32", lambda x, y: topi.cast(x, "float16")), 4),
    "bfloat16_to_float16": (lambda: rows_of("bfloat16", lambda x, y: topi.cast(x, "float16")), 4),
    "float16": (lambda: rows_of("float16", lambda x, y: topi.add(x, x)), 8),
    "backwards": (lambda: rows_of("float16", lambda x, y: topi.flip(x, 1)), 4),
    "bytes": (lambda: rows_of("int8", lambda x, y: topi.add(x, tirx.const(1, "int8"))), 4),
    "scalar_bytes": (lambda: rows_of("int8", lambda x, y: topi.multiply(x, y)), 2),
    "long_condition": (
        lambda: rows_of("float16", lambda x, y: topi.where(topi.cast(topi.less(y, x), "int64"), x, y)),
        2,
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_are_as_wide_as_compiles(name):
    make, widest = VECTORS[name]
    sketch = next(s for s in build_space(make(), H100).sketches if s.name == "gpu_elementwise")
    assert max(next(knob.values for knob in sketch.knobs if knob.name == "vector")) == widest
    function = prepare_for_lowering(sketch.apply({"threads": 32, "vector": widest, "repeat": 1}).mod["main"])
    assert launch_problem(function, H100) == ""
    assert "__global__" in cuda_source({"kernel": function}, gpu_target(H100))


@pytest.mark.parametrize(("dtype", "sums"), [("float16", "float32"), ("bfloat16", "float32"), ("int8", "int32")])
def test_products_are_narrowed_in_vectors_that_compile(dtype, sums):
    a, b = te.placeholder((32, 64), dtype, name="a"), te.placeholder((64, 32), dtype, name="b")
    r = te.reduce_axis((0, 64), name="r")
    c = te.compute((32, 32), lambda i, j: te.sum(a[i, r].astype(sums) * b[r, j].astype(sums), axis=r), name="c")
    tile = {"vi": 1, "ti": 8, "ri": 2, "vj": 1, "tj": 4, "rj": 8, "bk": 8, "stages": 1, "split": 1}
    schedule = build_space(workload(a, b, topi.cast(c, dtype)), H100).apply(Decision("gpu_tiled", tile))
    assert launch_problem(prepare_for_lowering(schedule.mod["main"]), H100) == ""


def sample(space, count, seed=0):
    points = Moves(space).sample(np.random.default_rng(seed), count)
    return [space.decision(point) for point in points]


@pytest.mark.parametrize("name", KERNELS)
def test_candidates_compute_the_kernel_and_become_cuda(name):
    mod = KERNELS[name]()
    space = build_space(mod, H100)
    expected = outputs(mod)
    sampled = sample(space, 200)
    for sketch in space.sketches:
        decisions = [d for d in sampled if d.sketch == sketch.name][:2]
        assert decisions, f"no legal candidate of {sketch.name}"
        for decision in decisions:
            schedule = replay(trace_to_json(space.apply(decision).trace), mod)
            np.testing.assert_array_equal(outputs(serial(schedule.mod)), expected, err_msg=str(decision))
            function = prepare_for_lowering(schedule.mod["main"])
            assert launch_problem(function, H100) == ""
            assert "__global__" in cuda_source({"kernel": function}, gpu_target(H100))


def test_contractions_get_tiles_and_normalisations_one_kernel():
    assert next(s.name for s in build_space(KERNELS["matmul_ragged"](), H100).sketches) == "gpu_tiled"
    softmax = build_space(unary((64, 128), topi.nn.softmax), H100)
    assert "gpu_rows" in [s.name for s in softmax.sketches]
    decision = next(d for d in sample(softmax, 50) if d.sketch == "gpu_rows")
    source = cuda_source({"k": prepare_for_lowering(softmax.apply(decision).mod["main"])}, gpu_target(H100))
    assert source.count("__global__") == 2  # declared, defined: one kernel
    assert "__shfl" in source
    assert "expf(" in source  # in hardware, not the polynomial that CPUs get


@pytest.mark.slow
@pytest.mark.parametrize("hardware", [H100, T4], ids=["h100", "t4"])
def test_nearly_all_sampled_candidates_can_be_launched(hardware):
    mod = matmul(256, 384, 512)
    space = build_space(mod, hardware)
    problems = []
    for decision in sample(space, 40, seed=1):
        problem = launch_problem(prepare_for_lowering(space.apply(decision).mod["main"]), hardware)
        problems += [problem] if problem else []
    assert len(problems) <= 2, problems


def test_constraints_follow_the_device():
    mod = matmul(512, 512, 512)
    wide, narrow = build_space(mod, H100).sketches[0], build_space(mod, T4).sketches[0]
    names = [knob.name for knob in wide.knobs]
    tile = {"vi": 1, "ti": 16, "ri": 4, "vj": 1, "tj": 32, "rj": 8, "bk": 64, "stages": 1, "split": 1}
    values = np.array([[tile[name] for name in names]])
    assert wide.legal(values)[0]
    assert not narrow.legal(values)[0]  # 80 KiB of shared memory, where a T4 has 64
    too_many = np.array([[(tile | {"ti": 32, "tj": 32, "ri": 8, "rj": 8})[name] for name in names]])
    assert not wide.legal(too_many)[0]  # 1024 threads with 256 sums each


def test_the_estimate_prefers_reuse_and_respects_the_roofline():
    space = build_space(matmul(2048, 2048, 2048), H100)
    points = Moves(space).sample(np.random.default_rng(0), 500)
    points = points[points[:, 0] == 0]
    latency_s = space.latency_s(points)
    best, worst = (space.decision(points[i]).values for i in (np.argmin(latency_s), np.argmax(latency_s)))
    sums = [v["vi"] * v["ri"] * v["vj"] * v["rj"] for v in (best, worst)]
    assert sums[0] >= 32 > sums[1]
    assert latency_s.min() > 2 * 2048**3 / H100.peak_flops_per_s_all


def test_features_are_finite_where_they_apply():
    space = build_space(matmul(128, 128, 128), H100)
    points = Moves(space).sample(np.random.default_rng(0), 64)
    table = space.features(points)
    assert table.shape == (len(points), len(FEATURES))
    for name in ("occupancy", "coalescing", "log_threads", "waves", "log_latency"):
        assert np.isfinite(table[:, FEATURES.index(name)]).all(), name
    assert (table[:, FEATURES.index("occupancy")] <= 1).all()


def test_a_description_survives_json():
    restored = Hardware.from_json(H100.to_json())
    assert isinstance(restored, GpuHardware)
    assert restored == H100


@pytest.mark.parametrize("hardware", [H100, T4, Hardware(), Hardware(dot_products=("avx512vnni",))])
def test_a_description_from_a_file_is_whole_or_none(hardware):
    fields = json.loads(json.dumps(hardware.to_json()))
    assert known_hardware(fields) == hardware
    assert known_hardware({}) is None
    for name in fields:
        for wrong in (None, [None], {}, True, -1, 10**400, float("nan")):
            assert known_hardware(fields | {name: wrong}) is None, (name, wrong)
        assert known_hardware({other: fields[other] for other in fields if other != name}) is None
    assert known_hardware(fields | {"peak_flops_per_s": 0.0}) is None
    assert known_hardware(fields | {"parallel_overhead_s": 0.0}) is not None


def test_peaks_of_tensor_cores_by_dtype():
    assert H100.tensor_peak("float16") == pytest.approx(989e12)
    assert T4.tensor_peak("bfloat16") == 0.0


def test_dynamic_shared_memory_may_exceed_what_a_kernel_declares():
    space = build_space(matmul(256, 256, 512), H100)
    tile = {"vi": 2, "ti": 16, "ri": 4, "vj": 2, "tj": 16, "rj": 4, "bk": 64, "stages": 1, "split": 1}
    function = prepare_for_lowering(space.apply(Decision("gpu_tiled", tile)).mod["main"])
    assert launch_problem(function, H100) == ""  # 65 KiB
    assert launch_problem(function, T4)  # which has 64


def test_splitting_the_reduction_of_a_convolution_can_be_launched():
    data, weight = te.placeholder((1, 13, 13, 64), name="data"), te.placeholder((3, 3, 64, 256), name="weight")
    mod = workload(data, weight, topi.nn.relu(topi.nn.conv2d_nhwc(data, weight, 1, 1, 1)))
    tile = {"vi": 2, "ti": 4, "ri": 2, "vj": 2, "tj": 32, "rj": 2, "bk": 8, "stages": 1, "split": 2}
    schedule = build_space(mod, H100).apply(Decision("gpu_tiled", tile))
    assert launch_problem(prepare_for_lowering(schedule.mod["main"]), H100) == ""


def test_rows_too_long_for_what_a_kernel_may_declare_are_not_kept():
    space = build_space(unary((4, 50257), topi.nn.softmax), H100)
    assert [sketch.name for sketch in space.sketches] == ["gpu_rows"]  # not the one that keeps a row's exponentials
    shorter = build_space(unary((4, 12000), topi.nn.softmax), H100)
    kept = [decision for decision in sample(shorter, 50) if decision.sketch == "gpu_rows-1"]
    assert {decision.values["rows"] for decision in kept} == {1}
    assert launch_problem(prepare_for_lowering(shorter.apply(kept[0]).mod["main"]), H100) == ""


def convolution_without_padding(window):
    data, weight = te.placeholder((1, 8, 10, 10), name="data"), te.placeholder((12, 8, window, window), name="weight")
    return workload(data, weight, topi.nn.conv2d_nchw(data, weight, 1, 0, 1))


def convolution_transposed():
    data, weight = te.placeholder((1, 8, 6, 6), name="data"), te.placeholder((8, 12, 4, 4), name="weight")
    return workload(data, weight, topi.nn.conv2d_transpose_nchw(data, weight, (2, 2), (1, 1), "float32", (0, 0)))


def matmul_padded():
    x, y = te.placeholder((14, 32), name="x"), te.placeholder((32, 24), name="y")
    return workload(x, y, topi.nn.matmul(topi.nn.pad(x, (1, 0), (1, 0)), y))


def matmul_of(rows, columns, value):
    """x of `rows` by `columns`; the product reads what `value` makes of it, [32, 32]."""
    x, y = te.placeholder((rows, columns), name="x"), te.placeholder((32, 24), name="y")
    return workload(x, y, topi.nn.matmul(value(x), y))


def shifted(x):
    return te.compute((32, 32), lambda i, k: tirx.if_then_else(k > 0, x[i, k - 1], 0.0), name="shifted")


def columns_behind_the_first(x):
    return topi.nn.relu(te.compute((32, 32), lambda i, k: x[i, k + 1], name="slice"))


def repeated(x):
    column = te.compute((32,), lambda i: x[i, 0], name="column")
    return te.compute((32, 32), lambda i, k: column[i], name="repeated")


def product_of_a_slice():
    x, y = te.placeholder((16, 36), name="x"), te.placeholder((32, 24), name="y")
    r = te.reduce_axis((0, 32), name="r")
    return workload(x, y, te.compute((16, 24), lambda i, j: te.sum(x[i, r + 1] * y[r, j], axis=r), name="c"))


@pytest.mark.parametrize(
    ("make", "operand", "run"),
    [
        (lambda: convolution_without_padding(3), "b", 1),  # three pixels side by side begin at any address
        (lambda: convolution_without_padding(1), "b", 100),
        (convolution_transposed, "a", 1),  # weights that are read backwards
        (matmul_padded, "a", 32),
        (lambda: matmul_of(32, 32, shifted), "a", 1),
        (lambda: matmul_of(32, 36, columns_behind_the_first), "a", 1),
        (lambda: matmul_of(32, 1, repeated), "a", 1),
        (product_of_a_slice, "a", 1),
    ],
    ids=["window", "pixel", "turned", "padded", "shifted", "slice", "repeated", "product_of_a_slice"],
)
def test_vectors_are_runs_in_memory_at_aligned_addresses(make, operand, run):
    """Asynchronous copies are not checked by TVM: others would be of the wrong elements, or stop the device."""
    assert getattr(matrix_form(analyze(make())), operand).run == run


def part_of_a_concatenation(mod, extent, begin):
    """The kernel, whose last axis goes to the places from `begin` of a result that is `extent` wide."""
    return as_workload(_slice_kernel(mod["main"], None, extent, 1, begin))


@pytest.mark.parametrize(
    ("extent", "begin", "widest"), [(10, 2, 2), (9, 0, 1), (12, 3, 1), (12, 4, 4)], ids=["even", "row", "odd", "whole"]
)
def test_parts_of_a_concatenation_are_written_in_vectors_at_aligned_addresses(extent, begin, widest):
    mod = part_of_a_concatenation(unary((6, 8), topi.nn.relu), extent, begin)
    sketch = next(s for s in build_space(mod, H100).sketches if s.name == "gpu_elementwise")
    assert max(next(knob.values for knob in sketch.knobs if knob.name == "vector")) == widest


def vectors_written(mod, name):
    loops = [loop for loop in nodes_of(mod["main"].body, tirx.For) if loop.kind == tirx.ForKind.VECTORIZED]
    return {
        int(loop.extent)
        for loop in loops
        if any(str(store.buffer.name) == name for store in nodes_of(loop.body, tirx.BufferStore))
    }


def matmul_of_long_indices(m, n, k, dtype="float32"):
    a, b = (unary_placeholder(shape, dtype, name) for shape, name in (((m, k), "a"), ((k, n), "b")))
    return workload(a, b, topi.nn.matmul(a, b))


def unary_placeholder(shape, dtype, name):
    return te.placeholder([tirx.IntImm("int64", extent) for extent in shape], dtype, name=name)


@pytest.mark.parametrize(
    ("sketch", "dtype", "knobs", "widest"),
    [
        ("gpu_tiled", "float32", {"rj": 4, "ti": 8, "tj": 8, "ri": 2, "vi": 1, "vj": 1, "bk": 8}, 4),
        ("gpu_warpgroup", "float16", {"groups": 1, "height": 1, "width": 64}, 2),
    ],
)
@pytest.mark.parametrize(("extent", "begin", "aligned"), [(68, 4, True), (67, 3, False)])
def test_products_that_are_parts_of_a_concatenation_too(sketch, dtype, knobs, widest, extent, begin, aligned):
    mod = part_of_a_concatenation(matmul_of_long_indices(64, 64, 320, dtype), extent, begin)
    stages = 3 if sketch == "gpu_warpgroup" else 1
    schedule = build_space(mod, H100).apply(Decision(sketch, knobs | {"stages": stages, "split": 1}))
    assert vectors_written(schedule.mod, "T_concat") == ({widest} if aligned else set())


def test_an_axis_of_one_factor_alone_is_not_padded():
    """Zeros behind its end would be multiplied by infinities of the other factor."""
    a, b = te.placeholder((16, 21), name="a"), te.placeholder((24,), name="b")
    r = te.reduce_axis((0, 21), name="r")
    mod = workload(a, b, te.compute((16, 24), lambda i, j: te.sum(a[i, r] * b[j], axis=r), name="c"))
    assert matrix_form(analyze(mod)) is None
    assert build_space(mod, H100).sketches


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16"])
def test_narrow_values_are_reduced_to_one(dtype):
    mod = unary_of(dtype, (4, 40), topi.all if dtype == "bool" else topi.max)
    space = build_space(mod, H100)
    assert "gpu_rows" in [sketch.name for sketch in space.sketches]
    decision = Decision("gpu_rows", {"threads": 32, "rows": 1})
    assert launch_problem(prepare_for_lowering(space.apply(decision).mod["main"]), H100) == ""


def unary_of(dtype, shape, function):
    x = unary_placeholder(shape, dtype, "x")
    return workload(x, function(x))


def test_lines_that_are_padded_to_whole_banks_count_as_such():
    space = build_space(matmul(512, 512, 512), A100)
    (sketch,) = (sketch for sketch in space.sketches if sketch.name == "gpu_tiled")
    tile = {"vi": 1, "ti": 8, "ri": 2, "vj": 2, "tj": 16, "rj": 4, "bk": 64, "stages": 4, "split": 1}
    points = [tile, tile | {"stages": 3}]  # 144 bytes a line of 16 numbers; 164 KiB in all, and 123
    problems = [launch_problem(prepare_for_lowering(sketch.apply(point).mod["main"]), A100) for point in points]
    assert [bool(problem) for problem in problems] == [True, False]
    values = np.array([[point[knob.name] for knob in sketch.knobs] for point in points])
    assert sketch.legal(values).tolist() == [False, True]


@pytest.mark.parametrize(("columns", "reached"), [(2**17, True), (2**18, False)])
def test_tiles_are_copied_asynchronously_only_where_the_copies_reach(columns, reached):
    """TVM counts the bytes to where a copy begins in 32 bits; the weight has somewhat more than 1 or 2 GiB."""
    mod = matmul_of_long_indices(64, columns, 4104, "float16")
    sketches = build_space(mod, H100).sketches
    stages = {stage for sketch in sketches for knob in sketch.knobs if knob.name == "stages" for stage in knob.values}
    assert (max(stages) > 2) == reached
    assert ("gpu_warpgroup" in [sketch.name for sketch in sketches]) == reached
