"""The CUDA of every sketch, run on the CPU: the right results whatever order threads run in."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from tvm import te, tirx, topi
from tvm.s_tir import Schedule

from eqtune.gpu_machine import gpu_target
from eqtune.records.traces import trace_to_json
from eqtune.records.workload import as_workload
from eqtune.search.space import Decision, build_space
from eqtune.search.space.gpu.hardware import DEVICES
from eqtune.search.space.replay import replay_schedule

sys.path.insert(0, str(Path(__file__).parent))
import cuda_on_cpu
import test_gpu_space as kernels
import test_gpu_tensor_core as tensor
from gpu_on_cpu import outputs

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

H100 = DEVICES["nvidia/nvidia-h100"].hardware()
TARGET = gpu_target(H100)
TILE = {"vi": 2, "ti": 8, "ri": 2, "vj": 2, "tj": 8, "rj": 2, "bk": 8, "stages": 1, "split": 1}
FRAGMENTS = {"wi": 2, "fi": 1, "wj": 2, "fj": 2, "bk": 16, "stages": 1, "mma": 0, "split": 1}


def arguments(mod, seed=0):
    """Small integers, which sum exactly."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-3, 4, [int(e) for e in p.shape]).astype(str(p.dtype)) for p in mod["main"].params]


def check(mod, decision, directory, space=None, tolerance=0.0):
    schedule = (space or build_space(mod, H100)).apply(decision)
    expected = outputs(mod)
    for result in cuda_on_cpu.run(schedule, TARGET, arguments(mod), directory):
        np.testing.assert_allclose(result, expected, tolerance, tolerance, err_msg=str(decision))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_tiles_in_every_pipeline(stages, tmp_path):
    check(kernels.matmul(36, 40, 68), Decision("gpu_tiled", TILE | {"stages": stages}), tmp_path)


@pytest.mark.parametrize(
    ("dtype", "sums", "stages", "mma"),
    [
        ("float16", "float32", 2, 0),
        ("float16", "float32", 3, 1),
        ("bfloat16", "float32", 3, 0),
        ("bfloat16", "float32", 2, 1),
        ("int8", "int32", 2, 0),
        ("int8", "int32", 3, 1),
    ],
)
def test_fragments_in_every_pipeline(dtype, sums, stages, mma, tmp_path):
    mod = tensor.matmul(40, 56, 80, dtype, sums, transposed=stages == 3)
    knobs = FRAGMENTS | {"stages": stages, "mma": mma, "bk": 32 if mma else 16}
    check(mod, Decision("gpu_tensor_core", knobs), tmp_path)


WARPGROUPS = {"groups": 1, "height": 1, "width": 64, "stages": 3, "split": 1}


@pytest.mark.parametrize(
    ("dtype", "sums", "transposed", "knobs"),
    [
        ("float16", "float16", False, {}),
        ("bfloat16", "float32", True, {"width": 32, "stages": 4}),
        ("int8", "int32", True, {"width": 32}),
        ("float16", "float32", False, {"split": 2}),
        ("float16", "float16", True, {"split": 2}),
        ("float16", "float32", False, {"groups": 2, "height": 2, "stages": 5}),
        ("uint8", "int32", True, {"stages": 4}),
        ("float16", "float32", True, {"height": 2}),
    ],
)
def test_warpgroups_in_every_order(dtype, sums, transposed, knobs, tmp_path):
    mod = tensor.matmul(136, 88, 9 * (128 if dtype == "int8" else 64) + 8, dtype, sums, transposed)
    check(mod, Decision("gpu_warpgroup", WARPGROUPS | knobs), tmp_path)


def test_batches_of_products_by_warpgroups(tmp_path):
    a, b = te.placeholder((2, 72, 264), "float16", name="a"), te.placeholder((2, 264, 72), "float16", name="b")
    mod = as_workload(te.create_prim_func([a, b, topi.nn.relu(topi.nn.matmul(a, b))]))
    check(mod, Decision("gpu_warpgroup", WARPGROUPS), tmp_path)


def test_convolutions_by_warpgroups(tmp_path):
    check(tensor.convolution(channels=(32, 40)), Decision("gpu_warpgroup", WARPGROUPS), tmp_path)


def test_lines_shorter_than_the_widest_load(tmp_path):
    mod = tensor.matmul(40, 56, 64, "float16", "float32")
    narrow = {"vi": 2, "ti": 8, "ri": 8, "vj": 1, "tj": 4, "rj": 4, "bk": 4, "stages": 2, "split": 1}
    check(mod, Decision("gpu_tiled", narrow), tmp_path)


def test_the_reduction_is_split_over_blocks(tmp_path):
    check(kernels.matmul(20, 24, 128), Decision("gpu_tiled", TILE | {"stages": 3, "split": 2}), tmp_path)


@pytest.mark.parametrize(
    ("dtype", "sums", "knobs"),
    [
        ("float16", "float32", {"stages": 3, "mma": 0}),
        ("float16", "float16", {"stages": 1, "mma": 1}),
        ("int8", "int32", {"stages": 2, "mma": 1, "bk": 32}),
    ],
)
def test_the_reduction_of_fragments_is_split_over_blocks(dtype, sums, knobs, tmp_path):
    mod = tensor.matmul(40, 56, 300, dtype, sums)  # whose parts do not divide it
    check(mod, Decision("gpu_tensor_core", FRAGMENTS | knobs | {"split": 4}), tmp_path)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("mma", [0, 1], ids=["wmma", "mma"])
def test_convolutions_are_products_on_tensor_cores(layout, mma, tmp_path):
    check(tensor.convolution(layout), Decision("gpu_tensor_core", FRAGMENTS | {"mma": mma, "stages": 2}), tmp_path)


@pytest.mark.parametrize(
    "function",
    [
        topi.nn.softmax,
        lambda x: topi.nn.layer_norm(x, topi.full((70,), "float32", 2.0), topi.full((70,), "float32", 1.0), [1]),
    ],
    ids=["softmax", "layer_norm"],
)
@pytest.mark.parametrize(("threads", "rows"), [(32, 1), (32, 2), (64, 2)])
def test_normalisations_in_one_kernel(function, threads, rows, tmp_path):
    mod = kernels.unary((6, 70), function)
    check(mod, Decision("gpu_rows", {"threads": threads, "rows": rows}), tmp_path, tolerance=1e-5)


def test_a_block_has_rows_of_several_axes(tmp_path):
    mod = kernels.unary((2, 3, 4, 40), topi.nn.softmax)
    check(mod, Decision("gpu_rows", {"threads": 32, "rows": 2}), tmp_path, tolerance=1e-5)


@pytest.mark.parametrize("name", ["row_sums", "transpose", "center_rows"])
def test_threads_share_rows_and_tiles(name, tmp_path):
    mod = kernels.KERNELS[name]()
    space = build_space(mod, H100)
    check(mod, kernels.sample(space, 1)[0], tmp_path, space)


@pytest.mark.parametrize("sketch", ["gpu_elementwise", "gpu_tiled"])
def test_masks_are_read_byte_by_byte(sketch, tmp_path):
    mask, x = te.placeholder((16, 32), "bool", name="mask"), te.placeholder((16, 32), name="x")
    y = te.placeholder((16 if sketch == "gpu_elementwise" else 32, 32), name="y")
    chosen = y if sketch == "gpu_elementwise" else topi.nn.matmul(x, y)
    mod = as_workload(te.create_prim_func([mask, x, y, topi.where(mask, chosen, x)]))
    values = {"threads": 32, "vector": 4, "repeat": 1} if sketch == "gpu_elementwise" else TILE | {"rj": 4}
    check(mod, Decision(sketch, values), tmp_path)


def test_threads_beyond_a_ragged_edge_write_nothing(tmp_path):
    check(
        kernels.KERNELS["column_sums"](),
        Decision("gpu_reduction", {"results": 4, "across": 8, "unroll": 0}),
        tmp_path,
    )


def test_threads_beyond_the_last_of_several_axes_write_nothing(tmp_path):
    x = te.placeholder((3, 17, 5), name="x")
    mod = as_workload(te.create_prim_func([x, topi.sum(x, axis=-1)]))
    check(mod, Decision("gpu_reduction", {"results": 64, "across": 1, "unroll": 0}), tmp_path)


def test_arguments_of_one_name_are_told_apart(tmp_path):
    x, other = te.placeholder((2, 32), name="x"), te.placeholder((2, 32), name="x")
    mod = as_workload(te.create_prim_func([x, other, topi.subtract(x, other)]))
    check(mod, Decision("gpu_elementwise", {"threads": 32, "vector": 1, "repeat": 1}), tmp_path)


def test_factors_of_one_name_are_told_apart(tmp_path):
    x, other = te.placeholder((36, 68), name="x"), te.placeholder((68, 40), name="x")
    mod = as_workload(te.create_prim_func([x, other, topi.nn.matmul(x, other)]))
    check(mod, Decision("gpu_tiled", TILE), tmp_path)


def test_what_is_computed_of_a_rows_sum_is_there_for_all_of_its_threads(tmp_path):
    shape = [tirx.IntImm("int64", extent) for extent in (6, 70)]
    x, y = te.placeholder(shape, name="x"), te.placeholder(shape, name="y")
    sums = topi.sum(x, axis=-1)
    gate = te.compute(shape[:1], lambda i: tirx.exp(sums[i] * 0.01), name="gate")  # used twice: not inlined
    mod = as_workload(
        te.create_prim_func([x, y, te.compute(shape, lambda i, j: gate[i] * x[i, j] + (1.0 - gate[i]) * y[i, j])])
    )
    check(mod, Decision("gpu_rows-1", {"threads": 64, "rows": 2}), tmp_path, tolerance=1e-4)


@pytest.mark.parametrize(
    ("dtype", "reduce", "sketch"),
    [
        ("bfloat16", topi.max, "gpu_rows"),
        ("bfloat16", topi.sum, "gpu_reduction"),
        ("int8", topi.sum, "gpu_rows"),
        ("uint8", topi.min, "gpu_reduction"),
        ("bool", topi.all, "gpu_reduction"),
    ],
)
def test_narrow_values_are_reduced_in_words(dtype, reduce, sketch, tmp_path):
    x = te.placeholder([tirx.IntImm("int64", extent) for extent in (4, 40)], dtype, name="x")
    mod = as_workload(te.create_prim_func([x, reduce(x, axis=-1)]))
    knobs = {"threads": 32, "rows": 2} if sketch == "gpu_rows" else {"results": 2, "across": 32, "unroll": 0}
    schedule = build_space(mod, H100).apply(Decision(sketch, knobs))
    given = arguments(mod)
    given[0][:2] = abs(given[0][:2]) if dtype == "bfloat16" else 1  # all of a row are true
    function = getattr(np, reduce.__name__)
    expected = function(given[0] if dtype == "bool" else given[0].astype("float32"), axis=-1)
    for result in cuda_on_cpu.run(schedule, TARGET, given, tmp_path):
        np.testing.assert_array_equal(result, expected.astype(given[1].dtype))


def test_narrow_sums_of_a_row_stay_words(tmp_path):
    x = te.placeholder([tirx.IntImm("int64", extent) for extent in (2, 1024)], "bfloat16", name="x")
    mod = as_workload(te.create_prim_func([x, topi.nn.softmax(x)]))
    schedule = build_space(mod, H100).apply(Decision("gpu_rows", {"threads": 32, "rows": 1}))
    given = arguments(mod)
    given[0][...] = 0
    given[0][:, ::2] = -3
    share = 1 / 512 / (1 + np.exp(-3))
    for result in cuda_on_cpu.run(schedule, TARGET, given, tmp_path):
        np.testing.assert_allclose(result[:, 1::2].astype("float32"), share, rtol=0.008)  # of two roundings


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_narrow_values_that_a_replayed_trace_reduces_in_memory_get_words(dtype, tmp_path):
    mod = kernels.unary_of(dtype, (5, 64), lambda x: topi.sum(x, axis=1))
    given = Schedule(mod)
    block = given.get_child_blocks(given.get_sblock("root"))[0]
    rows, columns = given.get_loops(block)
    outer, row = given.split(rows, [None, 2])
    _, across = given.split(columns, [None, 32])
    for loop, thread in ((outer, "blockIdx.x"), (row, "threadIdx.y"), (across, "threadIdx.x")):
        given.bind(loop, thread)
    schedule = replay_schedule(trace_to_json(given.trace), mod)
    values = arguments(mod)
    expected = values[0].astype("float32").sum(axis=1).astype(values[1].dtype)
    for result in cuda_on_cpu.run(schedule, TARGET, values, tmp_path):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("dtype", "value", "function", "decision", "expected"),
    [
        ("float32", -np.inf, topi.max, Decision("gpu_reduction", {"results": 32, "across": 1, "unroll": 0}), -np.inf),
        ("float16", -np.inf, topi.max, Decision("gpu_reduction", {"results": 32, "across": 1, "unroll": 0}), -np.inf),
        ("uint8", 0, topi.argmax, Decision("gpu_stages", {"threads": 64}), 0),
    ],
    ids=["maximum", "maximum of halves", "position"],
)
def test_a_thread_finds_the_largest_of_the_least_there_are(dtype, value, function, decision, expected, tmp_path):
    mod = kernels.unary_of(dtype, (40, 6), lambda x: function(x, axis=1))
    given = arguments(mod)
    given[0][...] = value
    for result in cuda_on_cpu.run(build_space(mod, H100).apply(decision), TARGET, given, tmp_path):
        np.testing.assert_array_equal(result, np.full(40, expected))


@pytest.mark.slow
@pytest.mark.parametrize("name", kernels.KERNELS)
def test_every_sketch_of_every_kind_of_kernel(name, tmp_path):
    mod = kernels.KERNELS[name]()
    space = build_space(mod, H100)
    decisions = kernels.sample(space, 200, seed=2)
    for sketch in space.sketches:
        check(mod, next(d for d in decisions if d.sketch == sketch.name), tmp_path, space)


def test_a_missing_barrier_shows(tmp_path):
    mod = kernels.matmul(36, 40, 68)
    schedule = build_space(mod, H100).apply(Decision("gpu_tiled", TILE | {"stages": 3}))
    results = cuda_on_cpu.run(
        schedule, TARGET, arguments(mod), tmp_path, lambda source: source.replace("__syncthreads();", "")
    )
    expected = outputs(mod)
    assert not all(np.array_equal(result, expected) for result in results)


def test_a_missing_wait_shows(tmp_path):
    mod = kernels.matmul(36, 40, 68)
    schedule = build_space(mod, H100).apply(Decision("gpu_tiled", TILE | {"stages": 3}))
    waited = "tvm_builtin_ptx_cp_async_wait_group_async_wait_group_0();"
    results = cuda_on_cpu.run(schedule, TARGET, arguments(mod), tmp_path, lambda source: source.replace(waited, ";"))
    expected = outputs(mod)
    assert not all(np.array_equal(result, expected) for result in results)
