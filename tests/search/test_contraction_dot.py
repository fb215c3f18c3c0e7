"""Products of 8- and 16-bit integers and of bfloat16 use the CPU's instructions for them, and stay exact."""

from __future__ import annotations

import platform
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.s_tir import SBlock

from eqtune.machine import describe_machine, detect_target
from eqtune.records.traces import replay, trace_to_json
from eqtune.search import strategies
from eqtune.search.space import Decision, Hardware, build_space
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.tasks import extract_tasks, lower_to_kernels

op = relax.op
FEATURES = ("avx512vnni", "avx512bf16")
HARDWARE = Hardware(threads=2, peak_flops_per_s=100e9, peak_flops_per_s_all=200e9, dot_products=FEATURES)
ZNVER4 = tvm.target.Target({"kind": "llvm", "mcpu": "znver4"})

ALDERLAKE = tvm.target.Target({"kind": "llvm", "mcpu": "alderlake"})
AVX_VNNI = Hardware(threads=2, vector_bytes=32, vector_registers=16, dot_products=("avxvnni",))
PAIRS = {
    "avx512bw": (Hardware(threads=2, dot_products=("avx512bw",)), "skylake-avx512"),
    "avx2": (Hardware(threads=2, vector_bytes=32, vector_registers=16, dot_products=("avx2",)), "haswell"),
    "sse2": (Hardware(threads=2, vector_bytes=16, vector_registers=16, dot_products=("sse2",)), "x86-64"),
}
HERE = describe_machine(detect_target(1), measure=False).dot_products

runs = pytest.mark.skipif(set(FEATURES) - set(HERE), reason="this CPU has no dot products of bytes and bfloat16")
runs_avx_vnni = pytest.mark.skipif("avxvnni" not in HERE, reason="this CPU has no AVX-VNNI")


def constant(shape: tuple[int, ...], dtype: str) -> Any:
    return relax.const(np.zeros(shape, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype), dtype)


def kernel(shape: tuple[int, ...], dtype: str, weight: Any, build: Any) -> Any:
    """`build(emit, x, weight)` as the one fused kernel that the plugin sees."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, dtype))
    parameters = [x, weight] if isinstance(weight, relax.Var) else [x]
    with builder.function("main", parameters):
        with builder.dataflow():
            result = builder.emit_output(build(builder.emit, x, weight))
        builder.emit_func_output(result)
    (task,) = extract_tasks(lower_to_kernels(builder.get(), ZNVER4))
    return task.mod


def dense(m: int, n: int, k: int, left: str, right: str, sums: str = "int32", constant_weight: bool = True) -> Any:
    weight = constant((k, n), right) if constant_weight else relax.Var("w", relax.TensorType((k, n), right))
    return kernel((m, k), left, weight, lambda emit, x, w: op.matmul(x, w, out_dtype=sums))


def conv(
    channels: int, size: int, filters: int, window: int, layout: str, data: str = "uint8", **attributes: Any
) -> Any:
    kernel_layout = "HWIO" if layout == "NHWC" else "OIHW"
    extents = {"H": window, "W": window, "I": channels, "O": filters}
    shape = (1, size, size, channels) if layout == "NHWC" else (1, channels, size, size)

    def build(emit: Any, x: Any, w: Any) -> Any:
        return op.nn.conv2d(x, w, data_layout=layout, kernel_layout=kernel_layout, out_dtype="int32", **attributes)

    weight = constant(tuple(extents[c] for c in kernel_layout), "int16" if data == "int16" else "int8")
    return kernel(shape, data, weight, build)


def requantized() -> Any:
    def build(emit: Any, x: Any, w: Any) -> Any:
        real = emit(
            op.multiply(emit(op.astype(emit(op.matmul(x, w, out_dtype="int32")), "float32")), relax.const(0.01))
        )
        return op.astype(emit(op.clip(emit(op.round(real)), 0.0, 255.0)), "uint8")

    return kernel((20, 32), "uint8", constant((32, 48), "int8"), build)


KERNELS = {
    **{f"{a}_{b}": (lambda a=a, b=b: dense(13, 37, 21, a, b)) for a in ("uint8", "int8") for b in ("uint8", "int8")},
    "one_row": lambda: dense(1, 64, 32, "uint8", "int8"),
    "one_row_ragged": lambda: dense(1, 37, 32, "uint8", "int8"),
    "few_columns": lambda: dense(6, 10, 64, "uint8", "int8"),
    "few_channels": lambda: conv(16, 9, 5, 3, "NCHW", padding=(1, 1)),
    "bfloat16_few_columns": lambda: dense(6, 10, 64, "bfloat16", "bfloat16", "float32"),
    "whole_tiles": lambda: dense(24, 64, 32, "int8", "int8"),
    "both_variable": lambda: dense(24, 48, 30, "uint8", "int8", constant_weight=False),
    "bfloat16": lambda: dense(24, 64, 32, "bfloat16", "bfloat16", "float32"),
    "bfloat16_ragged": lambda: dense(13, 37, 21, "bfloat16", "bfloat16", "float32"),
    "bfloat16_one_pair": lambda: dense(16, 32, 2, "bfloat16", "bfloat16", "float32"),
    "nhwc": lambda: conv(16, 9, 40, 3, "NHWC", padding=(1, 1)),
    "nhwc_pointwise": lambda: conv(16, 6, 40, 1, "NHWC"),
    "nhwc_three_channels": lambda: conv(3, 9, 40, 3, "NHWC", padding=(1, 1), strides=(2, 2)),
    "nchw": lambda: conv(16, 9, 40, 3, "NCHW", padding=(1, 1)),
    "requantized": requantized,
}


def candidates(mod: Any, hardware: Hardware, count: int) -> list[Any]:
    """Random legal decisions."""
    space = build_space(mod, hardware)
    assert all(sketch.name.startswith("dot_") for sketch in space.sketches)
    rng = np.random.default_rng(0)
    points = np.zeros((20_000, 1 + space.cardinalities.shape[1]), dtype=np.int16)
    points[:, 1:] = rng.integers(0, space.cardinalities[0], (20_000, points.shape[1] - 1))
    points = points[space.legal(points)]
    assert len(points)
    return [space.apply(space.decision(p)) for p in points[rng.choice(len(points), count)]]


def inputs_of(function: Any) -> list[Any]:
    """Integers over the whole range of their dtypes."""
    rng = np.random.default_rng(0)
    arrays = []
    for parameter in function.params:
        shape, dtype = [int(extent) for extent in parameter.shape], str(parameter.dtype)
        if dtype == "bfloat16":
            arrays.append(rng.standard_normal(shape).astype(ml_dtypes.bfloat16))
        elif dtype == "float32":
            arrays.append(np.zeros(shape, np.float32))
        else:
            limits = np.iinfo(dtype) if dtype != "int16" else np.iinfo("int8")  # 16 bits would overflow the sums
            arrays.append(rng.integers(limits.min, limits.max, shape, dtype, endpoint=True))
    return arrays


def compile_all(functions: dict[str, Any], target: Any = ZNVER4) -> Any:
    mod = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    with tvm.transform.PassContext(config={"tirx.disable_assert": True, "tirx.disable_cse_tir": True}):
        return tvm.compile(mod, target)


@runs
@pytest.mark.unoptimised
@pytest.mark.parametrize("name", KERNELS)
def test_candidates_compute_the_kernel(name: str) -> None:
    check(KERNELS[name](), HARDWARE, ZNVER4)


@runs_avx_vnni
@pytest.mark.unoptimised
@pytest.mark.parametrize("name", [name for name in KERNELS if "bfloat16" not in name])
def test_candidates_of_half_the_lanes_compute_the_kernel(name: str) -> None:
    check(KERNELS[name](), AVX_VNNI, ALDERLAKE)


SIXTEEN = {
    "plain": lambda: dense(24, 64, 32, "int16", "int16"),
    "ragged": lambda: dense(13, 37, 21, "int16", "int16"),
    "one_row": lambda: dense(1, 64, 32, "int16", "int16"),
    "both_variable": lambda: dense(24, 48, 30, "int16", "int16", constant_weight=False),
    "nhwc": lambda: conv(16, 9, 40, 3, "NHWC", "int16", padding=(1, 1)),
    "nchw": lambda: conv(16, 9, 40, 3, "NCHW", "int16", padding=(1, 1)),
    "nhwc_three_channels": lambda: conv(3, 9, 40, 3, "NHWC", "int16", padding=(1, 1), strides=(2, 2)),
}


@pytest.mark.unoptimised
@pytest.mark.skipif(platform.machine() != "x86_64", reason="pairs of 16 bits are multiplied on x86")
@pytest.mark.parametrize("name", SIXTEEN)
@pytest.mark.parametrize("feature", PAIRS)
def test_candidates_of_pairs_compute_the_kernel(name: str, feature: str) -> None:
    if feature not in HERE:
        pytest.skip(f"this CPU has no {feature}")
    hardware, cpu = PAIRS[feature]
    check(SIXTEEN[name](), hardware, tvm.target.Target({"kind": "llvm", "mcpu": cpu}))


def check(mod: Any, hardware: Hardware, target: Any) -> None:
    """Random candidates write what the unscheduled kernel does."""
    schedules = candidates(mod, hardware, 4)
    functions = {f"candidate{i}": prepare_for_lowering(s.mod["main"]) for i, s in enumerate(schedules)}
    library = compile_all({"reference": mod["main"], **functions}, target).jit()
    arrays = [tvm.runtime.tensor(array) for array in inputs_of(mod["main"])]
    library["reference"](*arrays)
    expected = arrays[-1].numpy()
    for candidate in functions:
        arrays[-1] = tvm.runtime.tensor(np.full_like(expected, 77))
        library[candidate](*arrays)
        if expected.dtype == np.float32:
            # Both sum exact products in float32; only the order differs.
            np.testing.assert_allclose(arrays[-1].numpy(), expected, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(arrays[-1].numpy(), expected)


@runs
def test_bfloat16_is_as_exact_as_float32_sums_of_its_products() -> None:
    mod = dense(16, 48, 256, "bfloat16", "bfloat16", "float32")
    (schedule,) = candidates(mod, HARDWARE, 1)
    library = compile_all({"main": prepare_for_lowering(schedule.mod["main"])}).jit()
    x, w, out = inputs_of(mod["main"])
    result = tvm.runtime.tensor(out)
    library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w), result)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    # 256 roundings of 2^-24, with room for the instruction's own order.
    assert np.abs(result.numpy() - exact).max() < 256 * 2.0**-24 * np.abs(x.astype(float)).sum(axis=1).max()


@pytest.mark.parametrize(("rows", "columns"), [(6, 10), (1, 10), (1, 37)])
def test_sums_of_tiles_wider_than_the_columns_have_room_for_whole_vectors(rows: int, columns: int) -> None:
    space = build_space(dense(rows, columns, 64, "uint8", "int8"), HARDWARE)
    (sketch,) = space.sketches
    first = {knob.name: knob.values[0] for knob in sketch.knobs}
    for nr in next(knob.values for knob in sketch.knobs if knob.name == "nr"):
        sums: list[Any] = []
        function = sketch.apply(first | {"nr": nr}).mod["main"]
        tvm_ffi.structural_walk(function.body, (SBlock, lambda block, found=sums: found.extend(block.alloc_buffers)))
        assert [int(buffer.shape[-1]) >= nr for buffer in sums if buffer.scope() == "local"] == [True]


@runs
def test_a_row_that_is_not_finite_leaves_the_next_one_alone() -> None:
    mod = dense(6, 10, 64, "bfloat16", "bfloat16", "float32")
    schedules = candidates(mod, HARDWARE, 4)
    library = compile_all({f"candidate{i}": prepare_for_lowering(s.mod["main"]) for i, s in enumerate(schedules)}).jit()
    x, w, out = inputs_of(mod["main"])
    x[2] = np.nan
    for i in range(len(schedules)):
        result = tvm.runtime.tensor(out)
        library[f"candidate{i}"](tvm.runtime.tensor(x), tvm.runtime.tensor(w), result)
        assert np.isnan(result.numpy()).any(axis=1).tolist() == [row == 2 for row in range(6)]


@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
def test_every_candidate_of_a_padded_window_compiles(strides: tuple[int, int]) -> None:
    """A third of the strided ones did not: their copies inside have 32 bits, and 64."""
    schedules = candidates(conv(16, 14, 32, 3, "NHWC", padding=(1, 1), strides=strides), HARDWARE, 12)
    compile_all({f"candidate{i}": prepare_for_lowering(s.mod["main"]) for i, s in enumerate(schedules)})


@pytest.mark.parametrize(
    ("build", "hardware", "target", "instruction"),
    [
        (KERNELS["uint8_int8"], HARDWARE, ZNVER4, r"vpdpbusd\s.*%zmm"),
        (KERNELS["uint8_int8"], AVX_VNNI, ALDERLAKE, r"\{vex\}\s+vpdpbusd\s.*%ymm"),
        (SIXTEEN["ragged"], PAIRS["avx2"][0], ALDERLAKE, r"vpmaddwd\s.*%ymm"),
        (KERNELS["bfloat16"], HARDWARE, ZNVER4, r"vdpbf16ps\s.*%zmm"),
    ],
    ids=["bytes", "bytes-avx-vnni", "pairs", "bfloat16"],
)
def test_the_instruction_is_in_the_code(build: Any, hardware: Hardware, target: Any, instruction: str) -> None:
    (schedule,) = candidates(build(), hardware, 1)
    library = compile_all({"main": prepare_for_lowering(schedule.mod["main"])}, target)
    assert re.search(instruction, library.mod.inspect_source("asm"))


def test_a_trace_replays_on_a_fresh_schedule() -> None:
    mod = dense(13, 37, 21, "bfloat16", "bfloat16", "float32")
    (schedule,) = candidates(mod, HARDWARE, 1)
    again = replay(trace_to_json(schedule.trace), mod)
    tvm.ir.assert_structural_equal(again.mod, schedule.mod)


@pytest.mark.parametrize(
    ("hardware", "mod"),
    [
        (Hardware(), dense(16, 32, 16, "uint8", "int8")),
        (Hardware(vector_bytes=32, dot_products=FEATURES), dense(16, 32, 16, "uint8", "int8")),
        (Hardware(dot_products=("avx512vnni",)), dense(16, 32, 16, "bfloat16", "bfloat16", "float32")),
        (HARDWARE, dense(16, 32, 16, "float32", "float32", "float32")),
    ],
)
def test_without_an_instruction_the_plain_sketch_is_used(hardware: Hardware, mod: Any) -> None:
    assert {sketch.name for sketch in build_space(mod, hardware).sketches} <= {"tiled_columns", "tiled_rows"}


def test_a_product_of_one_tensor_with_itself_has_no_operand_to_pack() -> None:
    """Where one operand is copied, so is the other."""
    square = kernel(
        (22, 22), "int8", None, lambda emit, x, _: op.add(emit(op.matmul(x, x, "int32")), relax.const(3, "int32"))
    )
    names = [sketch.name for sketch in build_space(square, HARDWARE).sketches]
    assert names
    assert not any(name.startswith("dot_") for name in names)


def test_the_estimate_knows_that_four_products_are_one_instruction() -> None:
    def best_s(hardware: Hardware) -> float:
        space = build_space(dense(256, 256, 256, "uint8", "int8"), hardware)
        rng = np.random.default_rng(0)
        points = np.zeros((20_000, 1 + space.cardinalities.shape[1]), dtype=np.int16)
        points[:, 1:] = rng.integers(0, space.cardinalities[0], (20_000, points.shape[1] - 1))
        return float(space.latency_s(points[space.legal(points)]).min())

    assert 3 < best_s(Hardware()) / best_s(Hardware(dot_products=FEATURES)) < 5


@pytest.mark.parametrize(
    ("dtypes", "narrowest"),
    [(("int8", "int8", "int32"), 3), (("uint8", "uint8", "int32"), 3), (("bfloat16", "bfloat16", "float32"), 2)],
)
def test_first_candidates_share_what_a_row_costs_among_vectors(dtypes: tuple[str, str, str], narrowest: int) -> None:
    """A sign is corrected, and a pair of bfloat16 is spread, once a row: 334 against 300 GOPS, 233 against 160."""
    space = build_space(dense(512, 512, 512, *dtypes), Hardware(threads=1, dot_products=FEATURES))
    first = strategies.create("annealed-evolution").begin(space, 0).ask(8, lambda points: -space.latency_s(points))
    assert min(space.decision(point).values["nr"] for point in first) >= 16 * narrowest


def test_rows_of_bytes_lie_in_other_sets_of_the_cache_than_rows_of_floats() -> None:
    def best_s(rows: int) -> float:
        space = build_space(dense(960, 512, 1024, "uint8", "int8"), Hardware(threads=1, dot_products=FEATURES))
        knobs = {"m2": 1, "nr": 16, "ku": 1, "chunk": 1, "order": 0, "depth": 0, "pack": 3, "pad": 0, "far_weights": 0}
        point = space.point(Decision("dot_4", {"mr": rows, **knobs}))
        assert point is not None
        return float(space.latency_s(point[None])[0])

    assert best_s(16) < 1.05 * best_s(8)


def test_an_operand_that_is_copied_has_its_price() -> None:
    def best_s(layout: str) -> float:
        space = build_space(conv(64, 28, 64, 1, layout), Hardware(threads=1, dot_products=FEATURES))
        first = strategies.create("annealed-evolution").begin(space, 0).ask(1, lambda points: -space.latency_s(points))
        return float(space.latency_s(first)[0])

    assert best_s("NCHW") > 1.2 * best_s("NHWC")


def test_a_ragged_last_tile_does_not_spill() -> None:
    space = build_space(dense(64, 512, 512, "uint8", "int8"), Hardware(threads=1, dot_products=FEATURES))
    values = {"mr": 12, "m2": 1, "nr": 32, "ku": 2, "chunk": 1, "order": 0, "depth": 0, "pack": 3, "pad": 0}
    function = prepare_for_lowering(space.apply(Decision("dot_4", values)).mod["main"])
    assert not re.findall(r"zmm\d+, -?\d*\(%rsp\)", compile_all({"main": function}).mod.inspect_source("asm"))


def test_hardware_keeps_its_instructions_as_json() -> None:
    assert Hardware.from_json(HARDWARE.to_json()) == HARDWARE
    assert set(FEATURES) < set(describe_machine(ZNVER4, threads=1, measure=False).dot_products)
    assert describe_machine(ALDERLAKE, threads=1, measure=False).dot_products == ("avxvnni", "avx2", "sse2")
    haswell = tvm.target.Target({"kind": "llvm", "mcpu": "haswell"})
    assert describe_machine(haswell, threads=1, measure=False).dot_products == ("avx2", "sse2")
