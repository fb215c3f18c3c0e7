"""The tiled contraction computes what the kernel computes, whatever is chosen; and its constraints hold."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, s_tir, te
from tvm.script import tirx as T
from tvm.tirx import ForKind

from eqtune.records.traces import replay, trace_to_json
from eqtune.search.space import Decision, Hardware, Space, build_space
from eqtune.search.space.contraction.copies import (
    AHEAD,
    AT_CHUNK,
    AT_ROOT,
    PAD_AT_OUTER,
    PAD_AT_ROOT,
    PAD_INLINE,
)
from eqtune.search.space.contraction.tile_counts import tiles
from eqtune.search.space.expressions import is_conditional
from eqtune.search.space.features import FEATURES
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.search.space.marks import JOIN_VECTORS, OVERLAPPING_TAIL, PARTITION
from eqtune.tasks import extract_tasks, lower_to_kernels

sys.path.insert(0, str(Path(__file__).parent))
from guard_pages import stays_inside

op = relax.op
HARDWARE = Hardware(threads=2, peak_flops_per_s=100e9, peak_flops_per_s_all=200e9)
TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})


def kernel(
    shapes: Sequence[tuple[int, ...]], weights: set[int], build: Callable[..., Any], dtype: str = "float32"
) -> Any:
    """A fused kernel as the plugin sees it: Relax operators on inputs and constant weights, legalised and fused."""
    builder = relax.BlockBuilder()
    values: list[Any] = []
    for number, shape in enumerate(shapes):
        if number in weights:
            values.append(relax.const(np.zeros(shape, dtype)))
        else:
            values.append(relax.Var(f"x{number}", relax.TensorType(shape, dtype)))
    with builder.function("main", [v for v in values if isinstance(v, relax.Var)]):
        with builder.dataflow():
            result = builder.emit_output(build(builder.emit, *values))
        builder.emit_func_output(result)
    passes = [
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.AttachAttrLayoutFreeBuffers(),
    ]
    with tvm.target.Target("llvm"):
        mod = tvm.transform.Sequential(passes)(builder.get())
    functions = [f for var, f in mod.functions.items() if isinstance(f, tvm.tirx.PrimFunc)]
    assert len(functions) == 1, "the test's operators must fuse into one kernel"
    return tvm.IRModule({"main": functions[0]})


def matmul(*shapes: tuple[int, ...], weights: Sequence[int] = (), dtype: str = "float32") -> Any:
    return kernel(shapes, set(weights), lambda emit, a, b: op.matmul(a, b), dtype)


def dense(rows: int, columns: int, depth: int) -> Any:
    def build(emit: Any, x: Any, w: Any, bias: Any, skip: Any) -> Any:
        return op.nn.relu(emit(op.add(emit(op.add(emit(op.matmul(x, w)), bias)), skip)))

    return kernel([(1, rows, depth), (depth, columns), (columns,), (1, rows, columns)], {1, 2}, build)


def conv(
    channels: int,
    size: int,
    filters: int,
    window: int,
    layout: str = "NCHW",
    weights: str = "OIHW",
    dtype: str = "float32",
    **attributes: Any,
) -> Any:
    groups = attributes.get("groups", 1)
    extents = {"O": filters, "I": channels // groups, "H": window, "W": window}
    data = {"N": 1, "C": channels, "H": size, "W": size + 1}
    bias = {"N": 1, "C": filters, "H": 1, "W": 1}
    shapes = [tuple(data[a] for a in layout), tuple(extents[a] for a in weights), tuple(bias[a] for a in layout)]

    def build(emit: Any, x: Any, w: Any, b: Any) -> Any:
        y = op.nn.conv2d(x, w, data_layout=layout, kernel_layout=weights, **attributes)
        if "out_dtype" in attributes:
            return y
        return op.nn.relu(emit(op.add(emit(y), b)))

    return kernel(shapes, {1, 2}, build, dtype)


def pointwise_with_residual(channels: int, size: int, filters: int) -> Any:
    shapes = [(1, channels, size, size), (filters, channels, 1, 1), (1, filters, 1, 1), (1, filters, size, size)]

    def build(emit: Any, x: Any, w: Any, b: Any, skip: Any) -> Any:
        return op.nn.relu(emit(op.add(emit(op.add(emit(op.nn.conv2d(x, w)), b)), skip)))

    return kernel(shapes, {1, 2}, build)


def written_by_heads() -> Any:
    """A product whose columns are split and moved outwards, as attention heads are."""

    @T.prim_func(private=True, s_tir=True)
    def main(x: T.Buffer((12, 18), "float32"), w: T.Buffer((18, 20), "float32"), out: T.Buffer((2, 12, 10), "float32")):
        T.func_attr({"tirx.noalias": True, "layout_free_buffers": [1]})
        product = T.sblock_alloc_buffer((12, 20))
        for i, j, k in T.grid(12, 20, 18):
            with T.sblock("product"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    product[vi, vj] = T.float32(0)
                product[vi, vj] = product[vi, vj] + x[vi, vk] * w[vk, vj]
        for h, i, j in T.grid(2, 12, 10):
            with T.sblock("heads"):
                vh, vi, vj = T.axis.remap("SSS", [h, i, j])
                out[vh, vi, vj] = product[vi, vh * 10 + vj]

    return tvm.IRModule({"main": main})


def between_heads(rows: int, columns: int, depth: int, heads: int = 3) -> Any:
    """A product of attention, which reads heads from between each other and writes them there."""
    builder = relax.BlockBuilder()
    shapes = [(1, rows, heads, depth), (1, depth, heads, columns)]
    x, y = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in zip("xy", shapes, strict=True))
    apart = [0, 2, 1, 3]
    with builder.function("main", [x, y]):
        with builder.dataflow():
            operands = [builder.emit(op.permute_dims(operand, apart)) for operand in (x, y)]
            together = builder.emit(op.permute_dims(builder.emit(op.matmul(*operands)), apart))
            result = builder.emit_output(op.nn.relu(together))
        builder.emit_func_output(result)
    (task,) = extract_tasks(lower_to_kernels(builder.get(), TARGET))
    return task.mod


def into_a_concatenation(layout: str, window: int, filters: int = 32) -> Any:
    """The second of two convolutions that write their channels into one buffer."""
    builder = relax.BlockBuilder()
    axis = layout.index("C")
    x = relax.Var("x", relax.TensorType([{"N": 1, "C": 6, "H": 7, "W": 5}[a] for a in layout], "float32"))
    weights = {"NHWC": "OHWI", "NCHW": "OIHW"}[layout]

    def branch(filters: int, window: int) -> Any:
        shape = [{"O": filters, "I": 6, "H": window, "W": window}[a] for a in weights]
        filter_ = relax.const(np.zeros(shape, "float32"))
        y = op.nn.conv2d(x, filter_, padding=window // 2, data_layout=layout, kernel_layout=weights)
        return builder.emit(op.nn.relu(builder.emit(y)))

    with builder.function("main", [x]):
        with builder.dataflow():
            parts = [branch(5, 1), branch(filters, window), branch(3, 1)]
            result = builder.emit_output(op.nn.softmax(builder.emit(op.concat(parts, axis)), axis))
        builder.emit_func_output(result)
    tasks = extract_tasks(lower_to_kernels(builder.get(), TARGET))
    return max((task for task in tasks if "concat" in task.name), key=lambda task: task.flops).mod


def without_last_rows(groups: int) -> Any:
    """A convolution over time whose last outputs are cut off, as by models that look back only."""
    builder = relax.BlockBuilder()
    x, skip = (relax.Var(name, relax.TensorType((1, 32, 13), "float32")) for name in ("x", "skip"))
    w = relax.const(np.zeros((32, 32 // groups, 8), "float32"))
    with builder.function("main", [x, skip]):
        with builder.dataflow():
            y = builder.emit(op.nn.conv1d(x, w, padding=4, groups=groups))
            y = builder.emit(op.strided_slice(y, axes=[2], begin=[0], end=[13]))
            result = builder.emit_output(op.add(y, skip))
        builder.emit_func_output(result)
    (task,) = extract_tasks(lower_to_kernels(builder.get(), TARGET))
    return task.mod


def first_row_beside_others() -> Any:
    """Of a product, one row, which is added to each row of something else."""

    def build(emit: Any, x: Any, w: Any, skip: Any) -> Any:
        first = emit(op.strided_slice(emit(op.matmul(x, w)), axes=[1], begin=[0], end=[1]))
        return op.add(first, skip)

    return kernel([(2, 9, 16), (16, 20), (2, 7, 20)], {1}, build)


def chosen_by_row() -> Any:
    """A product whose left operand is selected from two tensors, row by row."""

    @T.prim_func(private=True, s_tir=True)
    def main(
        x: T.Buffer((12, 18), "float32"),
        y: T.Buffer((12, 18), "float32"),
        w: T.Buffer((18, 20), "float32"),
        out: T.Buffer((12, 20), "float32"),
    ):
        T.func_attr({"tirx.noalias": True, "layout_free_buffers": [2]})
        chosen = T.sblock_alloc_buffer((12, 18))
        for i, k in T.grid(12, 18):
            with T.sblock("chosen"):
                vi, vk = T.axis.remap("SS", [i, k])
                chosen[vi, vk] = T.Select(vi % 2 == 0, x[vi, vk], y[vi, vk])
        for i, j, k in T.grid(12, 20, 18):
            with T.sblock("product"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    out[vi, vj] = T.float32(0)
                out[vi, vj] = out[vi, vj] + chosen[vi, vk] * w[vk, vj]

    return tvm.IRModule({"main": main})


def integers() -> Any:
    return kernel([(10, 12), (12, 32)], {1}, lambda emit, a, b: op.matmul(a, b, out_dtype="int32"), "int8")


KERNELS: dict[str, Callable[[], Any]] = {
    "matmul_ragged": lambda: matmul((13, 21), (21, 37)),
    "dense_with_epilogue": lambda: dense(19, 40, 24),
    "matrix_vector": lambda: matmul((1, 64), (64, 72), weights=(1,)),
    "one_column": lambda: matmul((30, 17), (17, 1)),
    "few_outputs": lambda: matmul((3, 512), (512, 20)),
    "few_outputs_with_epilogue": lambda: dense(2, 24, 256),
    "one_row": lambda: matmul((1, 256), (256, 72), weights=(1,)),
    "one_output": lambda: matmul((1, 640), (640, 1)),
    "few_outputs_of_images": lambda: conv(256, 3, 8, 3, padding=(1, 1)),
    "few_outputs_of_pixels": lambda: conv(512, 3, 8, 1),
    "batched": lambda: matmul((3, 9, 16), (3, 16, 20)),
    "float64": lambda: matmul((12, 10), (10, 24), dtype="float64"),
    "float16": lambda: matmul((12, 10), (10, 48), dtype="float16"),
    "int8": integers,
    "first_row_beside_others": first_row_beside_others,
    "chosen_by_row": chosen_by_row,
    "written_by_heads": written_by_heads,
    "between_heads": lambda: between_heads(9, 32, 16),
    "between_ragged_heads": lambda: between_heads(19, 21, 19),
    "nchw": lambda: conv(5, 9, 18, 3, padding=(1, 1)),
    "nchw_pointwise": lambda: conv(12, 6, 20, 1),
    "nchw_pointwise_residual": lambda: pointwise_with_residual(12, 7, 20),
    "nchw_pointwise_strided": lambda: conv(12, 7, 20, 1, strides=(2, 2)),
    "nchw_pointwise_padded": lambda: conv(12, 6, 20, 1, padding=(1, 1)),
    "nchw_strided_dilated": lambda: conv(3, 15, 8, 3, strides=(2, 2), dilation=(2, 2), padding=(2, 2)),
    "nhwc_hwio": lambda: conv(6, 7, 24, 3, "NHWC", "HWIO", padding=(1, 1)),
    "nhwc_ohwi": lambda: conv(6, 7, 17, 3, "NHWC", "OHWI", padding=(1, 1)),
    "nhwc_pointwise": lambda: conv(6, 5, 16, 1, "NHWC", "HWIO"),
    "into_nhwc_slice": lambda: into_a_concatenation("NHWC", 1),
    "into_nhwc_slice_padded": lambda: into_a_concatenation("NHWC", 3),
    "into_nchw_slice": lambda: into_a_concatenation("NCHW", 3),
    "grouped": lambda: conv(8, 7, 32, 3, groups=2, padding=(1, 1)),
    "grouped_nhwc": lambda: conv(16, 7, 32, 3, "NHWC", "OHWI", groups=2, padding=(1, 1)),
    "ragged_groups": lambda: conv(6, 7, 26, 1, groups=2),
    "ragged_groups_nhwc": lambda: conv(6, 7, 26, 1, "NHWC", "OHWI", groups=2),
    "long_groups_nhwc": lambda: conv(6, 5, 26, 3, "NHWC", "HWIO", groups=2, padding=(1, 1)),
    "transposed": lambda: kernel(
        [(1, 17, 13), (17, 3, 4)], set(), lambda emit, x, w: op.nn.conv1d_transpose(x, w, padding=1)
    ),
    "depthwise_nchw": lambda: conv(6, 10, 6, 3, groups=6, padding=(1, 1)),
    "groups_of_4_nhwc": lambda: conv(32, 6, 32, 3, "NHWC", "OHWI", groups=8, padding=(1, 1)),
    "groups_of_8_nhwc": lambda: conv(48, 5, 48, 3, "NHWC", "HWIO", groups=6, padding=(2, 1)),
    "groups_of_2_nhwc_strided": lambda: conv(32, 9, 32, 3, "NHWC", "OHWI", groups=16, strides=(2, 2), padding=(1, 1)),
    "groups_of_4_nhwc_dilated": lambda: conv(16, 9, 16, 3, "NHWC", "HWIO", groups=4, dilation=(2, 2)),
    "groups_of_4_nhwc_pointwise": lambda: conv(32, 5, 32, 1, "NHWC", "HWIO", groups=8),
    "groups_of_4_nhwc_float16": lambda: conv(32, 5, 32, 3, "NHWC", "HWIO", groups=8, padding=(1, 1), dtype="float16"),
    "groups_of_4_nhwc_int8": lambda: conv(
        16, 5, 16, 3, "NHWC", "HWIO", groups=4, padding=(1, 1), dtype="int8", out_dtype="int32"
    ),
    "depthwise_nhwc": lambda: conv(32, 6, 32, 3, "NHWC", "OHWI", groups=32, padding=(1, 1)),
}


TOLERANCES = {"float16": 5e-2, "groups_of_4_nhwc_float16": 0.3, "few_outputs": 1e-3}
"""Of sums in float16, up to 100, the last places depend on the order; so do those of long sums."""


def random_points(space: Space, count: int, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    sketches = rng.integers(0, len(space.sketches), 20_000)
    points = np.zeros((sketches.size, 1 + space.cardinalities.shape[1]), dtype=np.int16)
    points[:, 0] = sketches
    points[:, 1:] = rng.integers(0, space.cardinalities[sketches])
    points = points[space.legal(points)]
    assert len(points), "no legal point among 20,000"
    return points[rng.choice(len(points), min(count, len(points)), replace=False)]


def inputs_of(function: Any) -> list[Any]:
    rng = np.random.default_rng(0)
    return [(4 * rng.standard_normal([int(n) for n in p.shape])).astype(str(p.dtype)) for p in function.params]


def build(functions: dict[str, Any]) -> Any:
    mod = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    with tvm.transform.PassContext(config={"tirx.disable_assert": True, "tirx.disable_cse_tir": True}):
        return tvm.compile(mod, TARGET).jit()


@pytest.mark.unoptimised
@pytest.mark.parametrize("name", KERNELS)
def test_random_candidates_compute_the_kernel(name: str) -> None:
    mod = KERNELS[name]()
    space = build_space(mod, HARDWARE)
    families = ("tiled", "split", "masked_windows", "rolling_windows")
    assert all(sketch.name.startswith(families) for sketch in space.sketches)
    points = random_points(space, 6)
    tolerance = TOLERANCES.get(name, 1e-4)
    check(mod, space, [space.decision(point) for point in points], tolerance)


@pytest.mark.parametrize("name", ["ragged_groups", "ragged_groups_nhwc"])
def test_tiles_do_not_reach_into_the_next_group(name: str) -> None:
    """A tile of its channels would be stored beside those another thread computes: wrong now and then."""
    space = build_space(KERNELS[name](), HARDWARE)
    knob = "mr" if name == "ragged_groups" else "nr"
    form = "pixels" if knob == "mr" else "columns"
    sketch = next(sketch for sketch in space.sketches if sketch.name == f"tiled_{form}")
    generator = np.random.default_rng(1)
    values = np.stack([generator.choice(k.values, 20_000) for k in sketch.knobs], axis=1)
    legal = values[sketch.legal(values)]
    tile = legal[:, [k.name for k in sketch.knobs].index(knob)]
    assert len(tile)
    assert (13 % tile == 0).all()


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("nchw_pointwise", "pixels"),
        ("nchw_pointwise_residual", "pixels"),
        ("nchw_pointwise_padded", "rows"),
        ("nchw", "rows"),
    ],
)
def test_vectors_run_over_all_pixels_where_these_lie_side_by_side(name: str, form: str) -> None:
    names = {sketch.name for sketch in build_space(KERNELS[name](), HARDWARE).sketches}
    assert names & {"tiled_rows", "tiled_pixels"} == {f"tiled_{form}"}


def test_vectors_across_rows_of_pixels_are_loaded_whole() -> None:
    """Lane by lane, an image of 56 x 56 would be read at a sixteenth of the speed."""
    mod = conv(24, 13, 16, 1)
    space = build_space(mod, HARDWARE)
    values = {"mr": 2, "m2": 1, "nr": 32, "ku": 1, "chunk": 1, "order": 0, "depth": 1, "pack": 0, "pad": 0}
    schedule = space.apply(Decision("tiled_pixels", values))
    source = build({"main": prepare_for_lowering(schedule.mod["main"])}).inspect_source("ll")
    assert "load <16 x float>" in source
    assert source.count("load float") < 32


@pytest.mark.unoptimised
@pytest.mark.parametrize("name", [name for name in KERNELS if name.startswith("groups_of")])
def test_vectors_span_groups_smaller_than_themselves(name: str) -> None:
    mod = KERNELS[name]()
    space = build_space(mod, HARDWARE)
    decisions = [space.decision(point) for point in random_points(space, 3000)]
    spanning = [decision for decision in decisions if decision.sketch == "tiled_groups"]
    chosen = list({decision.values["pad"]: decision for decision in spanning}.values())
    padded = not name.endswith(("dilated", "pointwise"))
    assert {decision.values["pad"] for decision in chosen} == ({0, 1, 2, 3} if padded else {0})
    for decision in chosen:
        assert "T.Shuffle" in str(prepare_for_lowering(space.apply(decision).mod["main"]))
    check(mod, space, chosen, TOLERANCES.get(name, 1e-4))


@pytest.mark.unoptimised
@pytest.mark.parametrize(("group", "widths"), [(24, [16, 8]), (40, [16, 16, 8]), (28, [16, 8, 4])])
def test_columns_of_a_group_are_full_vectors_and_a_rest(group: int, widths: list[int]) -> None:
    mod = conv(6, 7, 2 * group, 3, "NHWC", "HWIO", groups=2, padding=(1, 1))
    space = build_space(mod, HARDWARE)
    decisions = [space.decision(point) for point in random_points(space, 5000)]
    joined = [d for d in decisions if d.sketch == "tiled_columns" and d.values["nr"] == group]
    found: list[int] = []

    def visit(loop: Any) -> None:
        if loop.kind == ForKind.VECTORIZED and loop.body.block.name_hint.endswith("_update"):
            found.append(int(loop.extent))

    function = prepare_for_lowering(space.apply(joined[0]).mod["main"])
    tvm_ffi.structural_walk(function.body, (tvm.tirx.For, visit))
    assert found == widths
    check(mod, space, joined[:6], 1e-4)


def test_marks_that_join_no_vectors_are_refused() -> None:
    for lanes, inner, message in ((16, 0, "to join vectors"), (0, 1, "a power of two"), (12, 1, "a power of two")):
        schedule = s_tir.Schedule(matmul((8, 8), (8, 8)))
        row, column, _ = schedule.get_loops(schedule.get_sblock("matmul"))
        if inner:
            schedule.reorder(schedule.get_loops(schedule.get_sblock("matmul"))[2], row, column)
            schedule.vectorize(column)
        schedule.annotate(row, JOIN_VECTORS, lanes)
        with pytest.raises(ValueError, match=message):
            prepare_for_lowering(schedule.mod["main"])


@pytest.mark.unoptimised
@pytest.mark.parametrize("pad", [0, 1, 3])
def test_ragged_rows_of_groups_end_in_whole_tiles(pad: int) -> None:
    mod = conv(32, 10, 32, 3, "NHWC", "HWIO", groups=8, padding=(1, 1))  # rows of 11
    space = build_space(mod, HARDWARE)
    decisions = [space.decision(point) for point in random_points(space, 5000)]
    ragged = [d for d in decisions if d.values["pad"] == pad and 11 % d.values["mr"] and d.values["m2"] < 3]
    assert ragged
    check(mod, space, ragged[:6], 1e-4)


@pytest.mark.unoptimised
@pytest.mark.parametrize("groups", [2, 32])
def test_rows_that_an_epilogue_cuts_off_end_in_whole_tiles(groups: int) -> None:
    mod = without_last_rows(groups)
    space = build_space(mod, HARDWARE)
    decisions = [space.decision(point) for point in random_points(space, 100)]
    overlapping = [d for d in decisions if OVERLAPPING_TAIL in str(space.apply(d).mod["main"])]
    assert len(overlapping) >= 8
    check(mod, space, overlapping[:8], 1e-4)


def test_padding_other_than_zero_is_multiplied() -> None:
    def with_ones(call: Any) -> Any:
        condition, value, zero = call.args
        return tvm.tirx.if_then_else(condition, value, zero + 1.0)

    function = KERNELS["groups_of_4_nhwc"]()["main"]
    conditional = (tvm.ir.Call, lambda call: with_ones(call) if is_conditional(call) else call)
    mod = tvm.IRModule({"main": function.with_body(tvm_ffi.structural_map(function.body, conditional))})
    assert not tvm_ffi.structural_equal(mod["main"], function)
    space = build_space(mod, HARDWARE)
    decisions = [space.decision(point) for point in random_points(space, 5000)]
    inline = [d for d in decisions if d.values["pad"] == PAD_INLINE and d.values["mr"] == 6]
    assert inline
    check(mod, space, inline[:4], 1e-4)


def test_groups_that_fill_vectors_are_not_spanned() -> None:
    space = build_space(conv(64, 5, 64, 3, "NHWC", "OHWI", groups=4), HARDWARE)
    assert {sketch.name for sketch in space.sketches} == {"tiled_columns"}


def test_vectors_of_several_groups_read_no_channel_beyond_the_image() -> None:
    mod = conv(32, 6, 32, 3, "NHWC", "OHWI", groups=8, padding=(1, 1))
    space = build_space(mod, HARDWARE)
    decisions = [space.decision(point) for point in random_points(space, 3000)]
    inline = [d for d in decisions if d.sketch == "tiled_groups" and d.values["pad"] == 3 and d.values["depth"] == 0]
    assert inline
    for decision in inline[:3]:
        library = build({"main": prepare_for_lowering(space.apply(decision).mod["main"])})
        shapes = [tuple(int(n) for n in p.shape) for p in mod["main"].params]
        assert stays_inside(library["main"], shapes), str(decision)


@pytest.mark.unoptimised
@pytest.mark.parametrize(
    ("layout", "weights", "attributes"),
    [
        ("NHWC", "OHWI", {"padding": (1, 1)}),
        ("NHWC", "HWIO", {"padding": (2, 1)}),
        ("NHWC", "OHWI", {"padding": (1, 1), "strides": (2, 2)}),
        ("NHWC", "OHWI", {"padding": (1, 1), "groups": 2}),
        ("NCHW", "OIHW", {"padding": (1, 1)}),
        ("NHWC", "OHWI", {"padding": (4, 4), "dilation": (4, 4)}),
        ("NHWC", "OHWI", {"padding": (3, 2), "dilation": (3, 2), "strides": (2, 1)}),
        ("NCHW", "OIHW", {"padding": (2, 2), "dilation": (2, 2)}),
    ],
)
def test_rows_of_zeros_around_an_image_are_not_multiplied(layout: str, weights: str, attributes: Any) -> None:
    mod = conv(6, 5, 32, 3, layout, weights, **attributes)
    space = build_space(mod, HARDWARE)
    decisions = [space.decision(point) for point in random_points(space, 3000)]
    one_row = [d for d in decisions if d.sketch == "tiled_columns" and d.values["m2"] == 1]
    chosen = list({(d.values["pad"], d.values["order"]): d for d in one_row}.values())
    for decision in chosen:
        assert "T.max(0, T.min(3, " in str(prepare_for_lowering(space.apply(decision).mod["main"]))
    assert {decision.values["pad"] for decision in chosen} == {0, 1, 2}
    check(mod, space, chosen, 1e-4)


@pytest.mark.unoptimised
@pytest.mark.parametrize(
    ("layout", "weights", "dilation", "looped"),
    [("NHWC", "OHWI", 6, 2), ("NHWC", "HWIO", 5, 2), ("NCHW", "OIHW", 6, 1)],
)
def test_tiles_beside_a_dilated_image_are_not_multiplied(layout: str, weights: str, dilation: int, looped: int) -> None:
    """Of a window of 3 x 3, rows and, where columns of the window have a loop, columns of zeros are left out."""
    mod = conv(6, 13, 32, 3, layout, weights, padding=(dilation, dilation), dilation=(dilation, dilation))
    space = build_space(mod, HARDWARE)

    def inside(size: int) -> float:
        return sum(0 <= y + tap < size for y in range(size) for tap in (-dilation, 0, dilation)) / (3 * size)

    kept = inside(13) * (inside(14) if looped == 2 else 1.0)
    assert space.skipped_share == pytest.approx(1 - kept)
    decisions = [space.decision(point) for point in random_points(space, 3000)]
    one_row = [d for d in decisions if d.sketch == "tiled_columns" and d.values["m2"] == 1 and d.values["pad"] < 3]
    chosen = list({(d.values["pad"], d.values["order"], d.values["mr"] > 6): d for d in one_row}.values())
    assert chosen
    for decision in chosen:
        text = str(prepare_for_lowering(space.apply(decision).mod["main"]))
        assert text.count("T.max(0, T.min(3, ") == looped
    check(mod, space, chosen, 1e-4)


def test_sums_that_leave_out_padding_are_kept_by_the_tile() -> None:
    """In a buffer of all tiles, threads would write the ragged columns of one over those of the next."""
    mod = conv(5, 6, 19, 3, "NHWC", "OHWI", padding=(1, 1))
    space = build_space(mod, HARDWARE)
    decisions = [space.decision(point) for point in random_points(space, 3000)]
    one_row = [d for d in decisions if d.sketch == "tiled_columns" and d.values["m2"] == 1 and d.values["pad"] < 3]
    assert one_row
    for decision in {d.values["order"]: d for d in one_row}.values():
        function = prepare_for_lowering(space.apply(decision).mod["main"])
        assert "T.max(0, T.min(3, " in str(function)
        planned = s_tir.transform.PlanAndUpdateBufferAllocationLocation()(tvm.IRModule({"main": function}))
        kept = [buffer.name for buffer in planned["main"].body.block.alloc_buffers]
        assert not [name for name in kept if "conv2d" in name or "relu" in name], decision


def one_of_each_padding(space: Space) -> list[Decision]:
    """A candidate for each place where the image may be padded, in the form that vectorises columns."""
    decisions = [space.decision(point) for point in random_points(space, 3000)]
    chosen = {d.values["pad"]: d for d in decisions if d.sketch == "tiled_columns"}
    assert chosen.keys() == {0, 1, 2}
    return list(chosen.values())


def test_the_padded_channels_of_a_group_are_copied_by_vectors() -> None:
    mod = conv(16, 7, 32, 3, "NHWC", "OHWI", groups=2, padding=(1, 1))
    space = build_space(mod, HARDWARE)
    chosen = one_of_each_padding(space)
    for decision in chosen:
        sch = space.apply(decision)
        copy = sch.get_sblock(space.sketches[0].plan.staged)
        lanes = sch.get(sch.get_loops(copy)[-1])
        assert (int(lanes.extent), lanes.kind) == (16 if decision.values["pad"] == 0 else 8, ForKind.VECTORIZED)


@pytest.mark.parametrize(("channels", "partitioned"), [(64, False), (7, True)])
def test_only_short_runs_of_padded_channels_are_copied_by_partitioned_loops(channels: int, partitioned: bool) -> None:
    mod = conv(channels, 7, 32, 3, "NHWC", "OHWI", padding=(1, 1))
    space = build_space(mod, HARDWARE)
    chosen = one_of_each_padding(space)
    for decision in chosen:
        sch = space.apply(decision)
        loops = [sch.get(loop) for loop in sch.get_loops(sch.get_sblock(space.sketches[0].plan.staged))]
        assert any(PARTITION in loop.annotations for loop in loops[-3:]) == partitioned
    check(mod, space, chosen, 1e-4)


def test_copies_that_may_lie_beside_the_image_are_not_partitioned() -> None:
    """TVM's part behind the image would begin in front of the copy, and write there."""
    mod = conv(7, 7, 32, 3, "NHWC", "OHWI", padding=(4, 1))
    space = build_space(mod, HARDWARE)
    decisions = [space.decision(point) for point in random_points(space, 3000)]
    chosen = {}
    for decision in (d for d in decisions if d.sketch == "tiled_columns" and d.values["pad"] in (1, 2)):
        sch = space.apply(decision)
        rows, *inner = (sch.get(e) for e in sch.get_loops(sch.get_sblock(space.sketches[0].plan.staged))[-4:][1:])
        if int(rows.extent) < 7 + 2 * 4:
            assert not any(PARTITION in loop.annotations for loop in (rows, *inner))
            chosen[decision.values["pad"]] = decision
        if len(chosen) == 2:
            break
    assert chosen.keys() == {1, 2}
    check(mod, space, list(chosen.values()), 1e-4)


@pytest.mark.parametrize("pack", [AHEAD, AT_CHUNK, AT_ROOT])
def test_parameters_of_one_name_are_told_apart(pack: int) -> None:
    """As where a model's input has the name that TVM gives to a constant: the input would be packed ahead of time."""
    x, w = (te.placeholder(shape, name="B") for shape in ((24, 40), (40, 64)))
    k = te.reduce_axis((0, 40), "k")
    product = te.compute((24, 64), lambda i, j: te.sum(x[i, k] * w[k, j], axis=k), name="product")
    main = te.create_prim_func([x, w, product])
    mod = tvm.IRModule({"main": main.with_attr("layout_free_buffers", [1]) if pack == AHEAD else main})
    space = build_space(mod, HARDWARE)
    decisions = [space.decision(point) for point in random_points(space, 2000)]
    decision = next(d for d in decisions if d.values.get("pack") == pack)
    sch = space.apply(decision)
    params = sch.mod["main"].params
    reads = [sch.get(block).reads for block in sch.get_child_blocks(sch.get_sblock("root"))]
    copied = [of_block[0].source for of_block in reads if len(of_block) == 1]
    assert any(source.same_as(params[1]) for source in copied) or pack == AT_CHUNK
    assert not any(source.same_as(params[0]) for source in copied)
    check(mod, space, [decision], 1e-4)


SPLIT = (
    "few_outputs",
    "few_outputs_with_epilogue",
    "one_row",
    "one_output",
    "few_outputs_of_images",
    "few_outputs_of_pixels",
)


@pytest.mark.parametrize("name", SPLIT)
def test_long_sums_of_few_outputs_are_cut_in_parts(name: str) -> None:
    mod = KERNELS[name]()
    space = build_space(mod, HARDWARE)
    decisions = [space.decision(point) for point in random_points(space, 2000)]
    split = {d.sketch: d for d in decisions if d.sketch.startswith("split")}
    assert len(split) > 1
    check(mod, space, list(split.values()), 1e-3)


def test_a_matrix_in_memory_is_expected_to_be_read_fastest_as_several_streams() -> None:
    mod = matmul((1, 512), (512, 1024), weights=(1,))
    space = build_space(mod, Hardware(threads=1, l2_bytes=2**17, l3_bytes=2**20))
    points = random_points(space, 5000)
    best = space.decision(points[np.argmin(space.latency_s(points))])
    assert best.sketch.startswith("split")
    assert best.values["mr"] > 2


def test_sums_of_many_outputs_stay_whole() -> None:
    space = build_space(matmul((64, 512), (512, 64)), HARDWARE)
    assert not [sketch.name for sketch in space.sketches if sketch.name.startswith("split")]


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_ragged_columns_are_computed_whole_where_the_panel_is_padded(layout: str) -> None:
    mod = into_a_concatenation(layout, 3, filters=40)
    space = build_space(mod, HARDWARE)
    points = random_points(space, 5000)
    padded = []
    for sketch, rows, values in space._by_sketch(points):
        columns = {knob.name: values[:, i] for i, knob in enumerate(sketch.knobs)}
        whole = np.array([sketch.plan.pads_columns(int(nr), 16) for nr in columns["nr"]])
        padded += [space.decision(points[row]) for row in rows[whole & (columns["pack"] != 0)]]
    chosen = list({(d.values["nr"], d.values["order"], d.values["depth"]): d for d in padded}.values())[:8]
    assert len(chosen) > 3
    check(mod, space, chosen, 1e-4)


def test_ragged_channels_of_an_image_are_not_read_beyond_its_end() -> None:
    mod = conv(40, 4, 40, 3, "NHWC", "OHWI", groups=40)
    space = build_space(mod, Hardware(threads=1))
    decisions = [space.decision(point) for point in random_points(space, 5000)]
    wanted = {"nr": 32, "mr": 2, "pack": 3}
    decisions = [d for d in decisions if d.sketch == "tiled_channels"]
    chosen = [d for d in decisions if {name: d.values[name] for name in wanted} == wanted][:3]
    assert len(chosen) == 3
    library = build({f"c{i}": prepare_for_lowering(space.apply(d).mod["main"]) for i, d in enumerate(chosen)})
    shapes = [tuple(int(n) for n in p.shape) for p in mod["main"].params]
    for number, decision in enumerate(chosen):
        assert stays_inside(library[f"c{number}"], shapes), str(decision)
    check(mod, space, chosen, 1e-4)


@pytest.mark.parametrize("mr", [4, 7, 8])
def test_ragged_tiles_are_whole_and_transposed_in_registers(mr: int) -> None:
    mod = conv(6, 9, 16, 3, padding=(1, 1))
    space = build_space(mod, HARDWARE)
    points = random_points(space, 20_000)
    wanted = {"mr": mr, "nr": 8, "m2": 1, "pad": 0}
    decisions = [space.decision(point) for point in points]
    decisions = [d for d in decisions if d.sketch == "tiled_columns"]
    chosen = [d for d in decisions if {name: d.values[name] for name in wanted} == wanted][:4]
    shuffles = [str(prepare_for_lowering(space.apply(d).mod["main"])).count("Shuffle") for d in chosen]
    assert len(chosen) == 4
    assert min(shuffles) > 0
    check(mod, space, chosen, 1e-4)


def test_ragged_columns_of_unpacked_operands_keep_whole_vectors() -> None:
    mod = matmul((13, 21), (21, 37))
    space = build_space(mod, HARDWARE)
    values = {"mr": 6, "m2": 1, "nr": 16, "ku": 1, "chunk": 1, "order": 1, "depth": 1, "pack": 0, "pad": 0}
    decision = Decision("tiled_columns", values)
    text = str(prepare_for_lowering(space.apply(decision).mod["main"]))
    assert "T.min(" in text
    assert "< 37" not in text
    check(mod, space, [decision], 1e-4)


def check(mod: Any, space: Space, decisions: Sequence[Any], tolerance: float) -> None:
    """Candidates, replayed from their traces, compute what the unscheduled kernel does, and write nothing else."""
    functions = {"reference": mod["main"]}
    for number, decision in enumerate(decisions):
        schedule = replay(trace_to_json(space.apply(decision).trace), mod)
        functions[f"candidate{number}"] = prepare_for_lowering(schedule.mod["main"])
    library = build(functions)
    *inputs, output = inputs_of(mod["main"])
    unwritten = np.full_like(output, 77)
    arrays = [tvm.runtime.tensor(value) for value in (*inputs, unwritten)]
    library["reference"](*arrays)
    expected = arrays[-1].numpy()
    for number, decision in enumerate(decisions):
        arrays[-1] = tvm.runtime.tensor(unwritten)
        library[f"candidate{number}"](*arrays)
        np.testing.assert_allclose(arrays[-1].numpy(), expected, rtol=tolerance, atol=tolerance, err_msg=str(decision))


@pytest.mark.parametrize(
    "hardware",
    [
        Hardware(threads=1),
        Hardware(threads=8, vector_bytes=32, vector_registers=16),
        Hardware(threads=4, vector_bytes=16, vector_registers=32),
    ],
    ids=["avx512", "avx2", "neon"],
)
def test_tiles_fit_the_registers_of_the_machine(hardware: Hardware) -> None:
    space = build_space(dense(64, 96, 64), hardware)
    points = random_points(space, 500)
    for sketch, _, values in space._by_sketch(points):
        columns = {k.name: values[:, i].astype(float) for i, k in enumerate(sketch.knobs)}
        assert tiles(sketch.plan, hardware.lanes(4), columns).registers.max() <= hardware.vector_registers
    widest = [space.decision(point).values["nr"] for point in points]
    assert max(widest) >= 2 * hardware.lanes(4)


def test_a_spilling_tile_is_not_legal() -> None:
    space = build_space(dense(64, 96, 64), HARDWARE)
    sketch = space.sketches[0]
    values = {knob.name: knob.values[0] for knob in sketch.knobs} | {"nr": 32, "pack": 3}
    fits, spills = ([values[k.name] if k.name != "mr" else mr for k in sketch.knobs] for mr in (8, 16))
    assert sketch.legal(np.array([fits, spills])).tolist() == [True, False]


def test_points_are_named_and_found_again() -> None:
    space = build_space(KERNELS["nchw"](), HARDWARE)
    for point in random_points(space, 50):
        assert np.array_equal(space.point(space.decision(point)), point)


def test_estimates_rank_a_register_tile_above_a_single_sum() -> None:
    space = build_space(dense(64, 96, 64), Hardware(threads=1))
    sketch = space.sketches[0]
    common = {knob.name: knob.values[0] for knob in sketch.knobs} | {"pack": 3}
    rows = [[{**common, **tile}[k.name] for k in sketch.knobs] for tile in ({"mr": 8, "nr": 32}, {"mr": 1, "nr": 16})]
    tiled, plain = sketch.latency_s(np.array(rows))
    assert tiled < 0.5 * plain


def test_copies_of_tall_windows_for_every_line_come_late() -> None:
    """Of 3 rows, most have just been copied for the line above; of 31, copying takes longer than multiplying."""

    def slower(window: int) -> float:
        mod = conv(32, 40, 32, window, "NHWC", "HWIO", padding=window // 2, groups=32)
        sketch = build_space(mod, Hardware(threads=2)).sketches[0]
        common = {knob.name: knob.values[0] for knob in sketch.knobs} | {"mr": 6, "nr": 32, "pack": 3}
        lines = {**common, "order": 1, "depth": 2, "pad": PAD_AT_OUTER}
        rows = [[choice[k.name] for k in sketch.knobs] for choice in (lines, {**lines, "pad": PAD_AT_ROOT})]
        at_lines, whole = sketch.latency_s(np.array(rows))
        return float(at_lines / whole)

    assert slower(3) < 1.0
    assert slower(31) > 1.05


def test_features_are_finite_and_complete() -> None:
    space = build_space(KERNELS["nhwc_hwio"](), HARDWARE)
    features = space.features(random_points(space, 200))
    assert features.shape[1] == len(FEATURES)
    of_processors = FEATURES.index("variant") + 1  # those that follow are for GPUs
    assert np.isfinite(features[:, :of_processors]).all()
