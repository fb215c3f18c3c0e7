"""Packed weights are asked for ahead where the last-level cache is as slow as memory, and the next tile's rows."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te, tirx

from eqtune.search.space import Decision, Hardware, build_space
from eqtune.search.space.contraction import tiled
from eqtune.search.space.contraction.prefetch import FAR, NEAR, prefetch_operands
from eqtune.search.space.expressions import evaluate
from eqtune.search.space.hardware import with_weights
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.search.space.marks import FETCH_AHEAD, NEXT_PANEL, NEXT_TILE
from eqtune.search.strategies.moves import Moves

sys.path.insert(0, str(Path(__file__).parent))
from test_space_contraction import conv, matmul

WIDE = tvm.target.Target({"kind": "llvm", "mcpu": "znver4"})
"""Nothing runs on it."""

SLOW_CACHE = Hardware(threads=2, l2_bytes=2 * 1024**2, l3_bytes=480 * 1024**2)
FAST_CACHE = replace(SLOW_CACHE, l3_bytes=32 * 1024**2)
MANY_WEIGHTS, FEW_WEIGHTS = with_weights(FAST_CACHE, 33 * 1024**2), with_weights(FAST_CACHE, 32 * 1024**2)

FEW_REGISTERS = Hardware(
    threads=2,
    vector_registers=16,
    vector_bytes=32,
    l2_bytes=512 * 1024,
    peak_flops_per_s=95e9,
    peak_flops_per_s_all=190e9,
    bandwidth_bytes_per_s=22e9,
    weights_in_memory=True,
)
"""A machine with AVX2."""

VALUES = {"mr": 7, "m2": 1, "nr": 32, "ku": 2, "chunk": 1, "order": 0, "depth": 1, "pack": 3, "pad": 0}
PRODUCT = (35, 128, 512)
IMAGE = (700, 64, 128)


def product(rows: int, columns: int, depth: int) -> Any:
    return matmul((rows, depth), (depth, columns), weights=[1])


def convolution(size: int, channels: int, filters: int, window: int = 3, stride: int = 1) -> Any:
    """The image is one wider than high."""
    return conv(channels, size, filters, window, "NHWC", "HWIO", padding=window // 2, strides=stride)


def scheduled(mod: Any, hardware: Hardware, **values: int) -> Any:
    decision = Decision("tiled_columns", VALUES | {"far_weights": int(hardware.weights_are_far)} | values)
    return build_space(mod, hardware).apply(decision).mod["main"]


def fetches(function: Any, level: str) -> list[tuple[int, Any]]:
    """How many lines are fetched into that level, and from where: loads of the first element."""
    found: list[Any] = []

    def visit(call: Any) -> None:
        if str(getattr(call.op, "name", "")).endswith("call_extern"):
            name, _, lines = str(call.args[0].value).rpartition("_")
            if name == level:
                found.append((int(lines), call.args[1].args[0]))

    tvm_ffi.structural_walk(function.body, (tvm.ir.Call, visit))
    return found


def run(function: Any, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    shapes = [tuple(int(extent) for extent in parameter.ty.shape) for parameter in function.params]
    arrays = [tvm.runtime.tensor(rng.standard_normal(shape).astype("float32")) for shape in shapes]
    mod = tvm.IRModule({"main": prepare_for_lowering(function).with_attr("global_symbol", "main")})
    tvm.compile(mod, tvm.target.Target("llvm"))["main"](*arrays)
    return arrays[-1].numpy()


@pytest.mark.parametrize(
    ("hardware", "far"),
    [(SLOW_CACHE, True), (FAST_CACHE, False), (MANY_WEIGHTS, True), (FEW_WEIGHTS, False)],
    ids=["slow", "fast", "many weights", "few weights"],
)
def test_only_weights_that_are_far_are_asked_for(hardware: Hardware, far: bool) -> None:
    function = prepare_for_lowering(scheduled(product(*PRODUCT), hardware))
    assert len(fetches(function, NEAR)) == far * VALUES["ku"] * VALUES["nr"] // 16
    assert len(fetches(function, FAR)) == far
    assert not fetches(prepare_for_lowering(scheduled(product(*PRODUCT), hardware, pack=0)), NEAR)
    assert not fetches(prepare_for_lowering(scheduled(product(35, 64, 64), hardware)), FAR), "16 KiB of weights"


def far_weights(mod: Any, hardware: Hardware) -> set[int]:
    knobs = [knob for sketch in build_space(mod, hardware).sketches for knob in sketch.knobs]
    return {value for knob in knobs if knob.name == "far_weights" for value in knob.values}


@pytest.mark.parametrize(
    ("mod", "asked"),
    [
        (product(1, 1024, 1024), 0),
        (product(8, 1024, 1024), 1),
        (product(100, 1024, 1024), 1),
        (product(400, 1024, 1024), 0),
        (convolution(7, 64, 64), 1),
        (convolution(14, 64, 64), 0),
    ],
    ids=["one row", "8 rows", "100 rows", "400 rows", "7 x 7", "14 x 14"],
)
def test_with_few_registers_only_weights_that_products_wait_for_are_asked_for(mod: Any, asked: int) -> None:
    assert far_weights(mod, FEW_REGISTERS) == {asked}
    assert far_weights(mod, replace(FEW_REGISTERS, vector_registers=32, vector_bytes=64)) == {1}
    assert far_weights(mod, replace(FEW_REGISTERS, weights_in_memory=False)) == {0}


@pytest.mark.parametrize("groups", [32, 64])
def test_weights_of_groups_are_never_asked_for(groups: int) -> None:
    """The next panel would be the group's own again; where vectors span groups, requests would be in their way."""
    grouped = conv(512, 14, 512, 3, "NHWC", "HWIO", padding=1, groups=groups)
    for hardware in (SLOW_CACHE, MANY_WEIGHTS):
        space = build_space(grouped, hardware)
        decision = space.decision(Moves(space).sample(np.random.default_rng(0), 1)[0])
        prepare_for_lowering(space.apply(decision).mod["main"])
        assert far_weights(grouped, hardware) == {0}


@pytest.mark.parametrize(("nr", "lines"), [(8, 2), (16, 4), (24, 6), (32, 8)])
def test_no_line_is_asked_for_twice(nr: int, lines: int) -> None:
    """Vectors of 32 bytes lie two in a line."""
    function = scheduled(product(*PRODUCT), FEW_REGISTERS, mr=2, nr=nr, ku=4)
    assert len(fetches(prefetch_operands(function), NEAR)) == (lines if nr > 8 else 0), "8 columns fit the cache"


@pytest.mark.parametrize(("l1_bytes", "ahead"), [(32 * 1024, 2048), (48 * 1024, 8192)])
def test_a_small_first_cache_is_asked_for_less_ahead(l1_bytes: int, ahead: int) -> None:
    function = scheduled(product(*PRODUCT), replace(SLOW_CACHE, l1_bytes=l1_bytes))
    loops: list[Any] = []
    tvm_ffi.structural_walk(function.body, (tirx.For, loops.append))
    (steps,) = {int(loop.annotations[FETCH_AHEAD]) for loop in loops if FETCH_AHEAD in loop.annotations}
    assert steps * VALUES["ku"] * VALUES["nr"] * 4 == ahead


@pytest.mark.parametrize(
    ("mod", "values"),
    [
        (product(*PRODUCT), {}),
        (product(*PRODUCT), {"depth": 2}),
        (product(*PRODUCT), {"order": 1, "depth": 1, "chunk": 5}),
        (product(*PRODUCT), {"order": 1, "depth": 2, "chunk": 1}),
        (product(*PRODUCT), {"mr": 3, "nr": 48}),
        (convolution(14, 64, 64), {"mr": 5, "m2": 2}),
        (convolution(14, 64, 64), {"mr": 15, "nr": 16, "order": 1, "depth": 2, "pad": 1}),
    ],
)
def test_asking_changes_no_result(mod: Any, values: Mapping[str, int]) -> None:
    slow, fast = (scheduled(mod, hardware, **values) for hardware in (SLOW_CACHE, FAST_CACHE))
    assert fetches(prepare_for_lowering(slow), FAR)
    np.testing.assert_array_equal(run(slow), run(fast))


def places(function: Any, load: Any) -> list[Any]:
    """The indices of a load in all iterations of the loops around it, each of shape [iterations]."""
    loops: list[Any] = []
    tvm_ffi.structural_walk(function.body, (tirx.For, loops.append))
    used: list[Any] = []
    for index in load.indices:
        tvm_ffi.structural_walk(index, (tvm.ir.Var, used.append))
    around = [loop for loop in loops if any(variable.same_as(loop.loop_var) for variable in used)]
    values_of = np.array(list(itertools.product(*(range(int(loop.extent)) for loop in around)))).T
    known = {loop.loop_var: row for loop, row in zip(around, values_of, strict=True)}
    return [np.broadcast_to(evaluate(index, known), values_of.shape[1:]) for index in load.indices]


@pytest.mark.parametrize("values", [{}, {"depth": 2}, {"order": 1, "depth": 1, "chunk": 5}, {"ku": 1, "nr": 48}])
def test_all_tiles_of_a_panel_ask_for_all_of_the_next(values: dict[str, int]) -> None:
    function = prefetch_operands(scheduled(product(*PRODUCT), SLOW_CACHE, **values))
    ((count, asked),) = fetches(function, FAR)
    panel, _, place = places(function, asked)
    panels, depth, columns = (int(extent) for extent in asked.source.shape)
    assert set(panel) == set(range(panels))
    for one in range(panels):
        first = place[panel == one] * 4 // 64
        lines = set((first[:, None] + np.arange(count)).flat)
        assert set(range(depth * columns * 4 // 64)) <= lines


@pytest.mark.parametrize(
    ("mod", "asked"),
    [
        (product(*IMAGE), True),
        (convolution(14, 128, 64, window=1), True),
        (product(35, 64, 128), False),
        (product(700, 64, 32), False),
        (convolution(14, 128, 64, window=1, stride=2), False),
        (convolution(14, 64, 64), False),
        (matmul((700, 128), (128, 64)), False),
        (matmul((4, 700, 128), (4, 128, 64)), False),
    ],
    ids=["rows", "pixels", "more weights", "short rows", "strides", "windows", "no weights", "batches"],
)
def test_rows_are_asked_for_where_they_are_more_than_the_weights_and_lie_one_behind_the_other(
    mod: Any, asked: bool
) -> None:
    wide, narrow = (scheduled(mod, FAST_CACHE, mr=7, nr=nr, pack=3 if asked else 0) for nr in (32, 16))
    assert len(fetches(prefetch_operands(wide), FAR)) == asked
    assert not fetches(prefetch_operands(narrow), FAR), "tiles of one vector are busy loading"


def test_rows_of_what_is_transposed_on_the_way_are_not_asked_for() -> None:
    """They lie apart."""
    x, w = te.placeholder((128, 700), "float32", "x"), te.placeholder((128, 64), "float32", "w")
    rows = te.compute((700, 128), lambda i, k: x[k, i], "rows")
    k = te.reduce_axis((0, 128), "k")
    y = te.compute((700, 64), lambda i, j: te.sum(rows[i, k] * w[k, j], axis=k), "y")
    function = te.create_prim_func([x, w, y]).with_attr("layout_free_buffers", [1])
    mod = tvm.IRModule({"main": function})
    assert not fetches(prefetch_operands(scheduled(mod, FAST_CACHE, nr=32)), FAR)


def test_rows_at_the_end_of_32_bits_are_not_asked_for() -> None:
    """What lies behind the last tile has no index there."""
    function = prefetch_operands(scheduled(product(2**21 - 8, 48, 1024), FAST_CACHE, mr=8, nr=48, depth=0))
    assert not fetches(function, FAR)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"mr": 5, "nr": 64},
        {"order": 1, "depth": 1},
        {"order": 1, "depth": 2},
        {"order": 1, "depth": 1, "chunk": 10},
        {"pack": 0, "ku": 4},
    ],
)
def test_a_tile_asks_for_the_rows_of_the_next(values: dict[str, int]) -> None:
    function = prefetch_operands(scheduled(product(*IMAGE), FAST_CACHE, **values))
    ((count, asked),) = fetches(function, FAR)
    row, place = places(function, asked)
    rows, _, depth = IMAGE
    height = (VALUES | values)["mr"]
    for tile in range(0, rows, height):
        first = (tile * depth + place[row == tile]) * 4 // 64
        lines = set((first[:, None] + np.arange(count)).flat)
        behind = np.arange((tile + height) * depth, (tile + 2 * height) * depth) * 4 // 64
        assert set(behind) <= lines
        assert len(lines) <= 2 * len(set(behind)), "and for little else"


@pytest.mark.parametrize("values", [{}, {"order": 1, "depth": 1}, {"mr": 6, "order": 1}])
def test_asking_for_rows_changes_no_result(values: Mapping[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    asking = scheduled(product(*IMAGE), FAST_CACHE, **values)
    assert fetches(prepare_for_lowering(asking), FAR)
    monkeypatch.setattr(tiled, "asks_for_rows", lambda plan: False)
    silent = scheduled(product(*IMAGE), FAST_CACHE, **values)
    assert not fetches(prepare_for_lowering(silent), FAR)
    np.testing.assert_array_equal(run(asking), run(silent))


def test_sums_stay_in_registers() -> None:
    def stores(hardware: Hardware) -> tuple[int, str]:
        function = prepare_for_lowering(scheduled(product(*PRODUCT), hardware))
        mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
        source = tvm.compile(mod, WIDE).mod.inspect_source("s")
        return len(re.findall(r"vmovups\s+%zmm\d+, .*\(", source)), source

    (many, source), (few, _) = stores(SLOW_CACHE), stores(FAST_CACHE)
    assert "prefetcht0" in source
    assert "prefetcht2" in source
    assert many <= few


@pytest.mark.parametrize("mark", [{FETCH_AHEAD: 8}, {NEXT_PANEL: [0, 1, 0]}, {NEXT_TILE: [0, 896]}])
def test_a_forged_mark_is_refused(mark: dict[str, Any]) -> None:
    variable = tirx.Var("i", "int32")
    buffer = tirx.decl_buffer((8,), "float32", "a")
    store = tirx.BufferStore(buffer, tirx.FloatImm("float32", 0.0), [variable])
    loop = tirx.For(variable, 0, 8, tirx.ForKind.SERIAL, store, annotations=mark)
    function = tirx.PrimFunc([buffer], loop)
    with pytest.raises(ValueError, match="multiplies none"):
        prefetch_operands(function)


@pytest.mark.parametrize("mark", [[0, 1, 2], [0, 1, -1], [0, 0, 0]])
def test_a_forged_panel_is_refused(mark: list[int]) -> None:
    function = scheduled(product(*PRODUCT), SLOW_CACHE)

    def forge(loop: Any) -> Any:
        if NEXT_PANEL not in loop.annotations:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, annotations={NEXT_PANEL: mark})

    with pytest.raises(ValueError, match="counts panels"):
        prefetch_operands(function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, forge))))


@pytest.mark.parametrize("elements", [0, -896])
def test_a_forged_tile_is_refused(elements: int) -> None:
    function = scheduled(product(*IMAGE), FAST_CACHE)

    def forge(loop: Any) -> Any:
        if NEXT_TILE not in loop.annotations:
            return loop
        mark = {NEXT_TILE: [0, elements]}
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, annotations=mark)

    with pytest.raises(ValueError, match="elements"):
        prefetch_operands(function.with_body(tvm_ffi.structural_map(function.body, (tirx.For, forge))))


def test_threads_share_the_rows_of_an_image_that_outweighs_the_weights() -> None:
    def orders(hardware: Hardware, *sizes: int) -> set[int]:
        (sketch,) = build_space(product(*sizes), hardware).sketches
        grid = np.array(list(itertools.product(*(knob.values for knob in sketch.knobs))))
        column = {knob.name: position for position, knob in enumerate(sketch.knobs)}
        legal = grid[sketch.legal(grid)]
        return set(legal[legal[:, column["depth"]] > 0][:, column["order"]])

    assert orders(SLOW_CACHE, 784, 256, 64) == {1}
    assert orders(SLOW_CACHE, 256, 784, 64) == orders(FAST_CACHE, 784, 256, 64) == {0, 1}
