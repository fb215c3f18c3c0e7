"""Products by tiles of AMX: in C on any machine, by the instructions where a CPU has them."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, s_tir, sym, tirx
from tvm.ir.expr import TensorLoad

from eqtune.machine import describe_machine, detect_target
from eqtune.measure.arguments import Interface
from eqtune.measure.build import split_packing
from eqtune.records.traces import replay, trace_to_json
from eqtune.records.workload import workload_hash
from eqtune.schedules.packing import pack
from eqtune.search.space import Hardware, build_space
from eqtune.search.space.amx import permit_halves
from eqtune.search.space.amx.halves import HALVES_PERMITTED, split_panels
from eqtune.search.space.expressions import binding_of, nodes_of, substitute
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.search.space.marks import AMX_TILES, SPLIT_IN_HALVES

sys.path.insert(0, str(Path(__file__).parent))
import amx_on_cpu
from test_contraction_dot import compile_all, constant, dense, inputs_of, kernel

op = relax.op
HARDWARE = Hardware(
    threads=2, l2_bytes=2 << 20, peak_flops_per_s=240e9, peak_flops_per_s_all=480e9, half_vector_rate=1.0,
    dot_products=("avx512vnni", "avx512bf16", "amx-int8", "amx-bf16"), tile_flops_per_s=3.8e12,
)  # fmt: skip
SAPPHIRE_RAPIDS = tvm.target.Target({"kind": "llvm", "mcpu": "sapphirerapids"})
HERE = describe_machine(detect_target(1), measure=False).dot_products

runs = pytest.mark.skipif("amx-bf16" not in HERE, reason="this CPU has no AMX, or the system forbids it")


def conv(size: int, channels: int, filters: int, window: int, dtype: str = "float32", **attributes: Any) -> Any:
    weight = constant((window, window, channels, filters), "int8" if dtype == "uint8" else dtype)
    sums = "int32" if dtype == "uint8" else "float32"

    def build(emit: Any, x: Any, w: Any) -> Any:
        y = emit(op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO", out_dtype=sums, **attributes))
        return op.nn.relu(y) if sums == "float32" else op.add(y, relax.const(3, "int32"))

    return permitted(kernel((1, size, size, channels), dtype, weight, build))


def permitted(mod: Any) -> Any:
    return permit_halves(mod, HARDWARE)


def product(m: int, n: int, k: int, constant_weight: bool = True) -> Any:
    return permitted(dense(m, n, k, "float32", "float32", "float32", constant_weight))


KERNELS = {
    **{f"{a}_{b}": (lambda a=a, b=b: dense(19, 37, 70, a, b)) for a in ("uint8", "int8") for b in ("uint8", "int8")},
    "whole_bytes": lambda: dense(48, 64, 128, "uint8", "int8"),
    "both_variable": lambda: dense(24, 48, 100, "uint8", "int8", constant_weight=False),
    "bytes_nhwc": lambda: conv(9, 64, 40, 3, "uint8", padding=(1, 1)),
    "bytes_nhwc_ragged": lambda: conv(9, 24, 40, 3, "uint8", padding=(1, 1)),
    "bytes_pointwise": lambda: conv(8, 64, 48, 1, "uint8"),
    "bfloat16": lambda: dense(33, 48, 64, "bfloat16", "bfloat16", "float32"),
    "bfloat16_ragged": lambda: dense(13, 37, 21, "bfloat16", "bfloat16", "float32"),
    "float32": lambda: product(40, 64, 64),
    "float32_ragged": lambda: product(13, 37, 45),
    "float32_both_variable": lambda: product(24, 48, 40, constant_weight=False),
    "float32_nhwc": lambda: conv(9, 32, 48, 3, padding=(1, 1)),
    "float32_nhwc_strides": lambda: conv(11, 40, 32, 3, padding=(1, 1), strides=(2, 2)),
    "float32_pointwise": lambda: conv(7, 48, 64, 1),
    "float32_pointwise_strides": lambda: conv(8, 32, 40, 1, strides=(2, 2)),
    "float32_dilated": lambda: conv(12, 32, 32, 3, padding=(2, 2), dilation=(2, 2)),
}


def candidates(mod: Any, count: int, hardware: Hardware = HARDWARE) -> list[Any]:
    """Random legal decisions of the sketch."""
    space = build_space(mod, hardware)
    assert space.sketches[0].name == "amx"
    rng = np.random.default_rng(0)
    points = np.zeros((20_000, 1 + space.cardinalities.shape[1]), dtype=np.int16)
    points[:, 1:] = rng.integers(0, space.cardinalities[0], (20_000, points.shape[1] - 1))
    points = np.unique(points[space.legal(points)], axis=0)
    assert len(points)
    assert np.isfinite(space.latency_s(points)).all()
    assert not np.isnan(space.features(points)[:, :3]).any()
    return [space.apply(space.decision(p)) for p in points[rng.choice(len(points), min(count, len(points)), False)]]


def check(mod: Any, functions: dict[str, Any], target: Any) -> None:
    """Candidates write what the unscheduled kernel does: integers exactly, bfloat16 as sums of its exact products."""
    library = compile_all({"reference": mod["main"], **functions}, target).jit()
    rng = np.random.default_rng(0)
    arrays = [
        tvm.runtime.tensor(rng.standard_normal(a.shape).astype(a.dtype) if a.dtype == np.float32 else a)
        for a in inputs_of(mod["main"])
    ]
    library["reference"](*arrays)
    expected = arrays[-1].numpy()
    assert len(np.unique(expected)) > 9
    for candidate in functions:
        arrays[-1] = tvm.runtime.tensor(np.full_like(expected, 77))
        library[candidate](*arrays)
        if expected.dtype == np.float32:
            np.testing.assert_allclose(arrays[-1].numpy(), expected, rtol=1e-5, atol=2e-5 * np.abs(expected).max())
        else:
            np.testing.assert_array_equal(arrays[-1].numpy(), expected)


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    amx_on_cpu.load(tmp_path_factory.mktemp("amx"))


@pytest.mark.unoptimised
@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("name", KERNELS)
def test_candidates_compute_the_kernel(name: str) -> None:
    mod = KERNELS[name]()
    # One after the other: the emulation knows one thread.
    functions = {
        f"candidate{i}": serial(amx_on_cpu.without_code(prepare_for_lowering(schedule.mod["main"])))
        for i, schedule in enumerate(candidates(mod, 6))
    }
    check(mod, functions, detect_target(1))


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("mod", [product(64, 256, 256), conv(14, 64, 64, 3, padding=(1, 1))], ids=["product", "window"])
def test_weights_behind_a_slow_cache_are_asked_for(mod: Any) -> None:
    schedules = candidates(permitted(mod), 12, replace(HARDWARE, l3_bytes=480 << 20))
    functions = {
        f"candidate{i}": serial(amx_on_cpu.without_code(prepare_for_lowering(schedule.mod["main"])))
        for i, schedule in enumerate(schedules)
    }
    asking = [name for name, function in functions.items() if "eqtune_fetch_far" in function.script()]
    assert 0 < len(asking) < len(functions)
    check(mod, functions, detect_target(1))


def serial(function: Any) -> Any:
    def plain(loop: Any) -> Any:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, plain)))


@runs
@pytest.mark.parametrize("name", KERNELS)
def test_instructions_compute_the_kernel(name: str) -> None:
    mod = KERNELS[name]()
    schedules = candidates(mod, 4)
    functions = {f"candidate{i}": prepare_for_lowering(schedule.mod["main"]) for i, schedule in enumerate(schedules)}
    check(mod, functions, detect_target(2))


@pytest.mark.parametrize(
    ("name", "instructions"),
    [
        ("whole_bytes", ["tdpbusd", "ldtilecfg", "tilerelease"]),
        ("int8_int8", ["tdpbssd"]),
        ("bfloat16", ["tdpbf16ps"]),
        ("float32", ["tdpbf16ps", "vcvtne2ps2bf16"]),
        ("float32_both_variable", ["tdpbf16ps", "vcvtneps2bf16"]),
    ],
)
def test_the_instructions_are_in_the_code(name: str, instructions: list[str]) -> None:
    functions = {
        f"candidate{i}": prepare_for_lowering(schedule.mod["main"])
        for i, schedule in enumerate(candidates(KERNELS[name](), 3))
    }
    code = compile_all(functions, SAPPHIRE_RAPIDS).mod.inspect_source("asm")
    for instruction in instructions:
        assert re.search(rf"\s{instruction}\b", code), instruction
    assert "call" not in re.findall(r"\s(\w+).*eqtune_amx", code)  # all are inlined


def test_float32_is_split_only_where_it_is_permitted_and_the_machine_has_tiles() -> None:
    exact = dense(40, 64, 64, "float32", "float32", "float32")
    assert [sketch.name for sketch in build_space(exact, HARDWARE).sketches] == ["tiled_columns"]
    assert "amx" in [sketch.name for sketch in build_space(permitted(exact), HARDWARE).sketches]
    assert workload_hash(permitted(exact)) != workload_hash(exact)  # records of one never serve the other
    without = Hardware()
    assert workload_hash(permit_halves(exact, without)) == workload_hash(exact)
    assert "amx" not in [sketch.name for sketch in build_space(permitted(exact), without).sketches]
    one_row = dense(1, 64, 64, "float32", "float32", "float32")
    assert HALVES_PERMITTED not in permitted(one_row)["main"].attrs


def test_the_roofline_of_permitted_products_is_that_of_tiles() -> None:
    mod = product(256, 256, 256)
    rate = build_space(mod, HARDWARE).product_rate
    assert rate == pytest.approx(3.8e12 / 3 / 240e9)
    assert build_space(dense(256, 256, 256, "float32", "float32", "float32"), HARDWARE).product_rate == 1.0


def test_panels_are_split_in_two_halves_of_eight_bits() -> None:
    panel = np.random.default_rng(0).standard_normal((3, 32, 48)).astype(np.float32)
    words = split_panels(panel).view(np.uint16).reshape(3, 2, 16, 48, 2)
    halves = (words.astype(np.uint32) << 16).view(np.float32)
    first, rest = (halves[:, part].transpose(0, 1, 3, 2).reshape(3, 32, 48) for part in (0, 1))
    assert np.abs(first / panel - 1).max() <= 2**-8
    assert np.abs((first + rest) / panel - 1).max() <= 2**-16


def test_tiles_of_ragged_lines_read_no_lines_behind_the_image() -> None:
    """Tiles are read whole, whatever of them is written: a 1 x 1 convolution of 7 lines, in tiles of 2 and 4."""
    lines = set()
    for schedule in candidates(conv(14, 32, 40, 1, strides=(2, 2)), 40):
        loops = nodes_of(schedule.mod["main"].body, tirx.For)
        analyzer = sym.Analyzer()
        for loop in loops:
            analyzer.bind(loop.loop_var, tvm.ir.Range.from_min_extent(loop.min, loop.extent))
        marked = next(loop for loop in loops if AMX_TILES in loop.annotations)
        (realize,) = nodes_of(marked.body, s_tir.SBlockRealize)
        store = realize.block.body
        for load in nodes_of(store.value, TensorLoad):
            if not load.source.same_as(store.buffer):
                for index, extent in zip(load.indices, load.source.shape, strict=True):
                    place = analyzer.simplify(substitute(index, binding_of(realize)))
                    assert int(analyzer.const_int_bound(place).max_value) < int(extent)
        inside = marked
        for _ in range(int(marked.annotations[AMX_TILES][1])):
            inside = inside.body
        lines.add(int(inside.extent))
    assert lines - {1}


def test_a_product_of_one_tensor_with_itself_has_other_schedules() -> None:
    """Where one operand is copied, so is the other."""
    square = kernel(
        (64, 64), "int8", None, lambda emit, x, _: op.add(emit(op.matmul(x, x, "int32")), relax.const(3, "int32"))
    )
    assert "amx" not in [sketch.name for sketch in build_space(square, HARDWARE).sketches]


def test_a_trace_replays_on_a_fresh_schedule() -> None:
    mod = conv(9, 40, 48, 3, padding=(1, 1))
    for schedule in candidates(mod, 3):
        again = replay(trace_to_json(schedule.trace), mod)
        tvm.ir.assert_structural_equal(again.mod, schedule.mod)


@pytest.mark.parametrize("name", ["whole_bytes", "bytes_nhwc_ragged", "float32_ragged", "float32_nhwc"])
def test_weights_are_packed_without_compiling(name: str) -> None:
    """Compiling the copies of Inception-v3 took 14 s of a budget of 60."""
    mod = KERNELS[name]()
    weight = next(array for array in inputs_of(mod["main"])[1:])
    weight = np.random.default_rng(0).integers(-9, 9, weight.shape).astype(weight.dtype)
    for schedule in candidates(mod, 3):
        _, packing = split_packing(schedule.mod["main"], Interface.of(mod["main"]))
        assert packing is not None
        packed = pack(packing.function, [weight])
        assert packed is not None
        spec = packing.packed[0]
        expected = tvm.runtime.tensor(np.full(spec.shape, 77, weight.dtype))
        compile_all({"main": packing.function}, detect_target(1)).jit()["main"](tvm.runtime.tensor(weight), expected)
        np.testing.assert_array_equal(packed[0], expected.numpy())


@pytest.mark.parametrize(
    ("name", "mark", "change", "says"),
    [
        ("whole_bytes", AMX_TILES, lambda marks: [*marks[:2], 17], "1 to 16 rows"),
        ("whole_bytes", AMX_TILES, lambda marks: [*marks[:2], 1], "no tiles of 1 rows"),
        ("whole_bytes", AMX_TILES, lambda marks: [5, *marks[1:]], "no tiles|not those of tdpbf16ps"),
        ("float32", AMX_TILES, lambda marks: [0, *marks[1:]], "no tiles|not those of tdpbusd"),
        ("float32", SPLIT_IN_HALVES, lambda tiles: 7, "7 tiles"),
    ],
)
def test_marks_that_do_not_fit_their_loops_are_refused(name: str, mark: str, change: Any, says: str) -> None:
    """Marks may come from records of others; tile registers would be stored anywhere."""
    (schedule,) = candidates(KERNELS[name](), 1)

    def forge(loop: Any) -> Any:
        if mark not in loop.annotations:
            return loop
        found = loop.annotations[mark]
        known = [int(value) for value in found] if mark == AMX_TILES else int(found)
        annotations = {**loop.annotations, mark: change(known)}
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, annotations=annotations)

    function = schedule.mod["main"]
    with pytest.raises(ValueError, match=says):
        prepare_for_lowering(function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, forge))))
