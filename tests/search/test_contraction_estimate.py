"""The analytic estimate knows which register tiles the first-level cache cannot feed, so first candidates are good."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from eqtune.search import strategies
from eqtune.search.space import Decision, Hardware, Space, build_space
from eqtune.tasks import extract_tasks, lower_to_kernels

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})


def product(
    rows: int, columns: int, depth: int, half_vector_rate: float = 2.0, weights: str = "right", **hardware: float
) -> Space:
    """Of an input and weights on one side, or of two inputs ("")."""
    builder = relax.BlockBuilder()
    shapes = {"left": (rows, depth), "right": (depth, columns)}
    inputs = {n: relax.Var(n, relax.TensorType(s, "float32")) for n, s in shapes.items() if n != weights}
    with builder.function("main", list(inputs.values())):
        with builder.dataflow():
            left, right = (inputs.get(n, relax.const(np.zeros(s, "float32"))) for n, s in shapes.items())
            result = builder.emit_output(relax.op.matmul(left, right))
        builder.emit_func_output(result)
    (task,) = extract_tasks(lower_to_kernels(builder.get(), TARGET))
    fields = {"threads": 1, "half_vector_rate": half_vector_rate, **hardware}
    return build_space(task.mod, Hardware(**fields))  # type: ignore[arg-type]


def convolution(
    size: int, channels: int, groups: int = 1, window: int = 3, stride: int = 1, **hardware: float
) -> Space:
    """Channels last, padded."""
    builder = relax.BlockBuilder()
    image = relax.Var("image", relax.TensorType((1, size, size, channels), "float32"))
    with builder.function("main", [image]):
        with builder.dataflow():
            weights = relax.const(np.zeros((window, window, channels // groups, channels), "float32"))
            options = {"data_layout": "NHWC", "kernel_layout": "HWIO", "strides": stride, "padding": window // 2}
            result = builder.emit_output(relax.op.nn.conv2d(image, weights, groups=groups, **options))
        builder.emit_func_output(result)
    (task,) = extract_tasks(lower_to_kernels(builder.get(), TARGET))
    return build_space(task.mod, Hardware(**hardware))  # type: ignore[arg-type]


def point_of(space: Space, **values: int) -> Any:
    """One row of points: packed ahead of time, serial, columns outermost, or what `values` say."""
    common = {"m2": 1, "ku": 1, "chunk": 1, "order": 0, "depth": 0, "pack": 3, "pad": 0}
    (sketch,) = (sketch for sketch in space.sketches if sketch.name == "tiled_columns")
    common |= {knob.name: knob.values[0] for knob in sketch.knobs if knob.name == "far_weights"}
    point = space.point(Decision("tiled_columns", common | values))
    assert point is not None
    return point[None]


def estimate_s(space: Space, mr: int, nr: int) -> float:
    return float(space.latency_s(point_of(space, mr=mr, nr=nr))[0])


def first_candidate(space: Space, knob: str) -> int:
    def score(points: Any) -> Any:
        return -space.latency_s(points)

    (point,) = strategies.create("annealed-evolution").begin(space, 0).ask(1, score)
    return space.decision(point).values[knob]


def test_tall_tiles_are_slow_where_rows_share_a_set_of_the_cache() -> None:
    apart, aliased = product(64, 768, 768), product(64, 768, 3072)
    assert estimate_s(apart, 16, 16) < 1.1 * estimate_s(apart, 8, 32)
    assert estimate_s(aliased, 16, 16) > 1.5 * estimate_s(aliased, 8, 32)


def test_two_sets_hold_twice_the_rows() -> None:
    space = product(64, 256, 512)
    assert estimate_s(space, 16, 16) < 1.1 * estimate_s(space, 8, 32) < estimate_s(space, 28, 16)


@pytest.mark.parametrize("depth", [1024, 3072])
def test_the_first_candidate_does_not_alias(depth: int) -> None:
    assert first_candidate(product(64, 768, depth), "mr") <= 8


@pytest.mark.parametrize(("columns", "width"), [(72, 24), (40, 40), (24, 24)])
def test_the_first_candidate_has_three_half_vectors_or_more_not_one(columns: int, width: int) -> None:
    """Which loads its row for each multiply-add: 136 us instead of 106 (columns 72)."""
    assert first_candidate(product(196, columns, 432), "nr") == width


def test_half_vectors_gain_nothing_where_whole_ones_take_no_longer() -> None:
    assert first_candidate(product(196, 40, 432, half_vector_rate=1.0), "nr") % 16 == 0


@pytest.mark.parametrize("half_vector_rate", [1.0, 2.0], ids=["whole", "halves"])
def test_loads_beside_multiply_adds_cost_what_they_do(half_vector_rate: float) -> None:
    """28 sums want 29 loads where they are one vector wide, 16 where they are two."""
    space = product(196, 256, 64, half_vector_rate)
    ratio = estimate_s(space, 28, 16) / estimate_s(space, 14, 32)
    assert ratio > 1.05 if half_vector_rate == 1.0 else ratio < 1.02


def test_tiles_are_wide_where_loads_are_slow() -> None:
    """An Ice Lake Xeon: tiles of 28 x 16 run at half of the peak, of 14 x 32 at 96 %, of 8 x 48 at all of it."""
    fast, slow = (product(196, 768, 64, half_vector_rate=1.0, fmas_per_load=f) for f in (1.0, 1.8))
    assert estimate_s(fast, 28, 16) < 1.3 * estimate_s(fast, 14, 32)
    assert estimate_s(slow, 28, 16) > 1.6 * estimate_s(slow, 14, 32)
    assert estimate_s(slow, 8, 48) < estimate_s(slow, 14, 32)


def test_vectors_across_two_lines_take_two_loads() -> None:
    """Rows of 197 elements, read where they lie, beside rows of 208, which are whole lines."""
    aligned, split = (
        product(192, columns, 64, half_vector_rate=1.0, weights="", fmas_per_load=1.8) for columns in (208, 197)
    )

    def tile_s(space: Space) -> float:
        return float(space.latency_s(point_of(space, mr=4, nr=32, pack=0))[0])

    assert tile_s(split) > 1.2 * tile_s(aligned)


FAR = {"threads": 2, "l2_bytes": 2 * 1024**2, "l3_bytes": 480 * 1024**2}
"""A last-level cache as slow as memory."""


def test_threads_share_no_columns_of_a_large_image_in_either_order() -> None:
    """One chunk of all rows, in a parallel loop over columns, is no better for being the outer one: 311 us, not 244."""
    space = product(3136, 256, 64, **FAR)
    by_columns = point_of(space, mr=7, nr=32, chunk=448, order=1, depth=2)
    by_rows = point_of(space, mr=7, nr=32, chunk=14, order=1, depth=2)
    assert space.legal(np.concatenate([by_columns, by_rows])).tolist() == [False, True]


def test_threads_share_no_image_that_vectors_run_over() -> None:
    """Parallel over weights, both read all of it: 64 x 3136 x 256 takes 373 us, 257 where each has its own columns."""
    far = product(64, 3136, 256, weights="left", **FAR)
    near = product(64, 3136, 256, weights="left", **(FAR | {"l3_bytes": 32 * 2**20}))
    common = {"mr": 8, "m2": 1, "nr": 32, "ku": 2, "chunk": 1, "pack": 0, "pad": 0, "far_weights": 0}
    by_weights, by_image = (
        far.point(Decision("tiled_rows", common | loops))[None]
        for loops in ({"order": 1, "depth": 2}, {"order": 0, "depth": 1})
    )
    both = np.concatenate([by_weights, by_image])
    assert [space.legal(both).tolist() for space in (far, near)] == [[False, True], [True, True]]
    assert near.latency_s(by_image)[0] < 1.1 * near.latency_s(by_weights)[0]


def test_more_threads_than_parts_of_an_image_share_its_weights() -> None:
    """196 pixels are seven tiles of 32: sixteen threads take these, and chunks of weights beside them."""
    space = product(64, 196, 512, weights="left", **(FAR | {"threads": 16}))
    common = {"mr": 8, "m2": 1, "nr": 32, "ku": 2, "chunk": 1, "pack": 0, "pad": 0, "far_weights": 0}
    point = space.point(Decision("tiled_rows", common | {"order": 0, "depth": 1}))[None]
    assert space.legal(point).all()


AVX2 = {"threads": 2, "vector_bytes": 32, "vector_registers": 16, "l2_bytes": 512 * 1024, "half_vector_rate": 1.0}
AVX2 |= {"peak_flops_per_s": 95e9, "peak_flops_per_s_all": 190e9, "bandwidth_bytes_per_s": 22e9}


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_threads_share_columns_of_weights_that_come_from_memory(rows: int) -> None:
    """Where they share rows, both wait for all of them: 64 rows 1.17 ms instead of 0.90 (1024 x 1024, Zen 3)."""
    in_memory, cached = (product(rows, 1024, 1024, **AVX2, weights_in_memory=far) for far in (True, False))
    by_rows, by_columns = (
        {"mr": 4, "nr": 24, "ku": 4, "order": 1, "depth": 1, "chunk": 2},
        {"mr": 4, "nr": 24, "ku": 4, "order": 0, "depth": 1},
    )
    slower, less = (
        float(space.latency_s(point_of(space, **by_rows))[0] / space.latency_s(point_of(space, **by_columns))[0])
        for space in (in_memory, cached)
    )
    assert slower > 1.1 > less


def test_weights_are_not_read_again_for_each_row_of_an_image() -> None:
    """14 x 14 x 256, 3 x 3, 2.4 MB of weights from the last cache: 1.37 ms instead of 1.29 (Zen 3)."""
    space = convolution(14, 256, **AVX2)
    common = {"mr": 5, "nr": 16, "ku": 4, "pad": 0}
    again, once = (
        float(space.latency_s(point_of(space, **common, **loops))[0])
        for loops in ({"order": 1, "depth": 2}, {"order": 0, "depth": 1})
    )
    assert again > 1.02 * once


def test_a_window_of_channels_reads_rows_as_they_lie() -> None:
    """Several tiles before the next channels: 174 us instead of 126 (NASNet-A on Zen 3, in the model)."""
    space = convolution(56, 128, groups=128, **AVX2, weights_in_memory=True)
    (channels,) = (sketch for sketch in space.sketches if sketch.name == "tiled_channels")
    names = [knob.name for knob in channels.knobs]
    chosen = {"mr": 2, "m2": 4, "nr": 8, "ku": 3, "depth": 2, "pack": 0, "pad": 3, "far_weights": 0}

    def latency_s(**loops: int) -> float:
        return float(channels.latency_s(np.array([[(chosen | loops)[name] for name in names]]))[0])

    together = latency_s(order=1, chunk=1)
    assert latency_s(order=1, chunk=2) > 1.02 * together
    assert latency_s(order=0, chunk=1) > 1.02 * together


@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(1, 1000, 2048), (1, 512, 512), (4, 4096, 4096), (8, 1024, 1024)]
)
@pytest.mark.parametrize("registers", [16, 32])
def test_what_waits_for_weights_is_still_computed_fast(rows: int, columns: int, depth: int, registers: int) -> None:
    """By all threads, in wide tiles."""
    machine = AVX2 | {"vector_registers": registers, "vector_bytes": 2 * registers}
    space = product(rows, columns, depth, **machine, weights_in_memory=True)
    assert first_candidate(space, "depth") > 0
    assert first_candidate(space, "nr") >= registers


def test_weights_beyond_the_near_caches_come_at_the_speed_of_memory() -> None:
    """64 MB of them; of 1 MB, the second-level caches of two cores hold all."""
    for columns, slower in ((4096, True), (64, False)):
        near, far = (
            product(8, columns, 4096, **(FAR | {"l3_bytes": size, "bandwidth_bytes_per_s": 10**10}))
            for size in (100 * 2**20, 480 * 2**20)
        )
        assert (estimate_s(far, 8, 32) > 2.0 * estimate_s(near, 8, 32)) == slower


@pytest.mark.parametrize(
    ("image", "slower", "faster"),
    [
        ({"size": 56, "channels": 256, "window": 7, "stride": 2}, (2, 4, 8), (2, 1, 32)),
        ({"size": 28, "channels": 512, "window": 7, "stride": 2}, (2, 4, 8), (2, 1, 32)),
        ({"size": 56, "channels": 128}, (6, 1, 16), (1, 2, 32)),
        ({"size": 28, "channels": 256}, (4, 2, 8), (1, 2, 32)),
    ],
)
def test_windows_of_channels_are_read_in_few_wide_pieces(
    image: dict[str, int], slower: tuple[int, int, int], faster: tuple[int, int, int]
) -> None:
    """Pixels a power of two apart share few sets of a cache: 997 us, and 584; 952 and 334; 302 and 142; 196 and 78 in
    NASNet-A on Zen 3."""
    space = convolution(**image, groups=image["channels"], threads=2, vector_bytes=32, vector_registers=16)
    (channels,) = (sketch for sketch in space.sketches if sketch.name == "tiled_channels")

    def seconds(tile: tuple[int, int, int]) -> float:
        chosen = dict(zip(("mr", "m2", "nr"), tile, strict=True)) | {"order": 1, "chunk": 1, "depth": 2, "pad": 3}
        point = [chosen.get(knob.name, knob.values[-1]) for knob in channels.knobs]
        return float(channels.latency_s(np.array([point]))[0])

    assert seconds(faster) < 0.95 * seconds(slower)


def test_panels_of_rows_far_apart_want_packing() -> None:
    """Not such as the first-level cache holds: 363 us in two threads, 191 packed (64 x 256, 2048 steps)."""
    for depth, packed_first in ((2048, True), (64, False)):
        space = product(64, 256, depth, half_vector_rate=1.0, weights="")
        plain, packed = (
            float(space.latency_s(point_of(space, mr=12, nr=32, order=0, pack=pack))[0]) for pack in (0, 2)
        )
        assert (packed < plain) == packed_first
