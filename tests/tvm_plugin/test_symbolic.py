"""Modules with symbolic sizes through the pipeline "eqtune": right for every size, and scheduled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import ir, relax, s_tir, te, tirx
from tvm.relax import op

import eqtune  # noqa: F401  registers the pipeline
from eqtune import pipeline
from eqtune.machine import describe_machine, detect_target
from eqtune.repairs.open_slices import open_slice
from eqtune.search.space import build_space
from eqtune.search.space.expressions import substitute
from eqtune.search.space.hardware import Hardware
from eqtune.symbolic import TILED, tile_symbolic_kernels, tiled_kernels
from eqtune.symbolic.kernel import grouped, read_kernel
from eqtune.symbolic.named_sizes import with_sizes_named
from eqtune.tasks import lower_to_kernels
from eqtune.transform import ApplyTuned, LowerToKernels

pytestmark = pytest.mark.unoptimised

SIZES = (0, 1, 2, 5, 17, 63, 64, 65, 130, 200)
"""Around lengths of tiles: some that rests cover twice, some that two threads share."""

N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")
RNG = np.random.default_rng(0)

Shapes = Sequence[tuple[Any, ...]]


def module(
    compute: Callable[..., Any], *shapes: tuple[Any, ...], dtype: str | Sequence[str] = "float32"
) -> tvm.IRModule:
    """A module of one function over tensors of these shapes; of one dtype, or each of its own."""
    builder = relax.BlockBuilder()
    dtypes = [dtype] * len(shapes) if isinstance(dtype, str) else dtype
    inputs = [
        relax.Var(f"x{place}", relax.TensorType(*each)) for place, each in enumerate(zip(shapes, dtypes, strict=True))
    ]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(compute(builder.emit, *inputs))
        builder.emit_func_output(result)
    return builder.get()


def compiled(mod: tvm.IRModule, **options: Any) -> Callable[..., Any]:
    """The module through the pipeline, as a function of arrays."""
    target = detect_target()
    executable = tvm.compile(mod, target=target, relax_pipeline=relax.get_pipeline("eqtune", **options))
    machine = relax.VirtualMachine(executable, tvm.cpu())

    def run(*arrays: np.ndarray) -> Any:
        result = machine["main"](*map(tvm.runtime.tensor, arrays))
        return result.numpy() if hasattr(result, "numpy") else [one.numpy() for one in result]

    return run


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    """As float32 rounds, in the order of its largest values."""
    assert found.shape == wanted.shape
    if wanted.size:
        assert np.abs(found - wanted).max() <= 2e-5 * max(1.0, np.abs(wanted).max())


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max(-1, keepdims=True, initial=-np.inf))
    return exponentials / exponentials.sum(-1, keepdims=True)


def test_rows_times_constant_weights_with_what_follows() -> None:
    weights, bias = normal(96, 80), normal(80)

    def compute(emit: Any, x: Any) -> Any:
        product = emit(op.matmul(x, relax.const(weights)))
        return emit(op.nn.relu(emit(op.add(product, relax.const(bias)))))

    mod = module(compute, (N, 96))
    run = compiled(mod)
    for size in SIZES:
        x = normal(size, 96)
        close(run(x), np.maximum(x @ weights + bias, 0))
    target = detect_target()
    tiled = tile_symbolic_kernels(lower_to_kernels(mod, target), describe_machine(target, measure=False))
    (kernel,) = (function for function in tiled.functions.values() if isinstance(function, tirx.PrimFunc))
    assert TILED in kernel.attrs
    packed = kernel.params[1]
    assert len(packed.shape) == 3, "weights are packed once, not in every call"


def test_products_beside_64_bit_integers() -> None:
    """Their loops have 64 bits, too, also the last tile of rows that do not fill it."""
    weights = normal(48, 40)

    def compute(emit: Any, x: Any, mask: Any) -> Any:
        product = emit(op.matmul(x, relax.const(weights)))
        return emit(op.where(emit(op.greater(mask, relax.const(0, "int64"))), product, relax.const(-9.0, "float32")))

    mod = module(compute, (N, 48), (N, 40), dtype=("float32", "int64"))
    run = compiled(mod)
    for size in SIZES:
        x, mask = normal(size, 48), RNG.integers(-1, 2, (size, 40))
        close(run(x, mask), np.where(mask > 0, x @ weights, np.float32(-9)))


def test_few_rows_of_large_weights() -> None:
    """Filled up to a power of two; the residual is an argument, too."""
    weights = normal(512, 640)

    def compute(emit: Any, x: Any, y: Any) -> Any:
        return emit(op.add(y, emit(op.nn.relu(emit(op.matmul(x, relax.const(weights)))))))

    run = compiled(module(compute, (M, N, 512), (M, N, 640)))
    for size in (0, *range(1, 19), 31, 33, 49, 64, 65, 113, 130):
        for batch in (1, 2):
            x, y = normal(batch, size, 512), normal(batch, size, 640)
            close(run(x, y), y + np.maximum(x @ weights, 0))


def test_the_pass_with_estimates_does_the_same() -> None:
    weights, target = normal(24, 32), detect_target()
    mod = module(lambda emit, x: emit(op.matmul(x, relax.const(weights))), (N, 24))
    with target:
        mod = tvm.transform.Sequential([LowerToKernels(target), ApplyTuned(estimate=True)])(mod)
    machine = relax.VirtualMachine(tvm.compile(mod, target), tvm.cpu())
    (kernel,) = (function for function in mod.functions.values() if isinstance(function, tirx.PrimFunc))
    assert TILED in kernel.attrs
    for size in SIZES[1:]:
        x = normal(size, 24)
        close(machine["main"](tvm.runtime.tensor(x)).numpy(), x @ weights)


def test_several_heads_of_attention_over_any_number_of_places() -> None:
    def compute(emit: Any, query: Any, key: Any, value: Any) -> Any:
        scores = emit(op.matmul(query, emit(op.permute_dims(key, (0, 2, 1)))))
        return emit(op.matmul(emit(op.nn.softmax(emit(op.multiply(scores, relax.const(0.25))))), value))

    run = compiled(module(compute, (4, N, 16), (4, M, 16), (4, M, 16)))
    for size in SIZES[1:]:
        for places in {1, size, 70}:
            query, key, value = normal(4, size, 16), normal(4, places, 16), normal(4, places, 16)
            close(run(query, key, value), softmax(query @ key.transpose(0, 2, 1) * 0.25) @ value)


def test_what_depends_on_the_place_is_computed_as_written() -> None:
    """A causal mask, made of numbered places: stages in between must not be computed twice."""

    def compute(emit: Any, query: Any, key: Any) -> Any:
        scores = emit(op.matmul(query, emit(op.permute_dims(key, (0, 2, 1)))))
        scaled = emit(op.multiply(scores, relax.const(0.25)))
        places = emit(op.arange(0, N, 1, "int64"))
        row, column = (emit(op.expand_dims(places, axis)) for axis in (1, 0))
        return emit(op.where(emit(op.less_equal(column, row)), scaled, relax.const(-9.0, "float32")))

    run = compiled(module(compute, (2, N, 16), (2, N, 16)))
    for size in SIZES:
        query, key = normal(2, size, 16), normal(2, size, 16)
        seen = np.tril(np.ones((size, size), bool))
        close(run(query, key), np.where(seen, query @ key.transpose(0, 2, 1) * 0.25, np.float32(-9)))


def test_sums_over_symbolic_sizes() -> None:
    def compute(emit: Any, x: Any) -> Any:
        columns = emit(op.mean(x, axis=0))
        return relax.Tuple([columns, emit(op.sum(x, axis=1)), emit(op.max(x, axis=0)), emit(op.variance(x, axis=1))])

    run = compiled(module(compute, (N, M)))
    for size in SIZES[1:]:
        for other in (1, 33, 100):
            x = normal(size, other)
            for found, wanted in zip(run(x), (x.mean(0), x.sum(1), x.max(0), x.var(1)), strict=True):
                close(found, wanted)


@pytest.mark.parametrize("columns", [9, 12, 36])
def test_sums_over_symbolic_sizes_of_columns_that_fill_no_vector(columns: int) -> None:
    def compute(emit: Any, x: Any, y: Any) -> Any:
        return op.matmul(emit(op.permute_dims(x, [0, 2, 1])), y)

    run = compiled(module(compute, (2, N, columns), (2, N, columns)))
    for size in SIZES:
        x, y = normal(2, size, columns), normal(2, size, columns)
        close(run(x, y), x.transpose(0, 2, 1) @ y)


@pytest.mark.parametrize("reduce", [op.sum, op.max])
def test_sums_over_rows_that_lie_apart(reduce: Callable[..., Any]) -> None:
    """Of a tile, rows of few places would fill vectors together, if they were side by side."""
    run = compiled(module(lambda emit, x: reduce(x, axis=[2, 3]), (2, 4, 9, N)))
    for size in SIZES[1:]:
        x = normal(2, 4, 9, size)
        close(run(x), x.sum((2, 3)) if reduce is op.sum else x.max((2, 3)))


def test_sums_that_begin_with_a_number_begin_with_it_once() -> None:
    x = te.placeholder((te.var("n", "int64"), tirx.IntImm("int64", 32)), "float32", name="X")
    k = te.reduce_axis((tirx.IntImm("int64", 0), x.shape[0]), name="k")
    kernel = te.create_prim_func([x, te.compute(x.shape[1:], lambda c: te.sum(x[k, c], axis=k), name="sums")])

    def with_five(store: Any) -> Any:
        begins = isinstance(store.value, tirx.FloatImm)
        return tirx.BufferStore(store.buffer, tirx.const(5.0, "float32"), store.indices) if begins else store

    body = tvm_ffi.structural_map(kernel.body, (tirx.BufferStore, with_five))
    kernel = kernel.with_body(body).without_attr("global_symbol")
    run = compiled(calling(kernel, in_place=False, rows=False))
    for size in SIZES[1:]:
        given = normal(size, 32)
        close(run(given), 5 + given.sum(0))


def test_a_product_of_one_tensor_with_itself() -> None:
    """Both axes of the result run along the same size: tiles of it would be those of its diagonal."""
    run = compiled(module(lambda emit, x: emit(op.matmul(x, emit(op.permute_dims(x)))), (N, 16)))
    for size in SIZES:
        x = normal(size, 16)
        close(run(x), x @ x.T)


@pytest.mark.parametrize(
    ("compute", "wanted"),
    [
        (lambda emit, x: emit(op.add(x, emit(op.permute_dims(x)))), lambda x: x + x.T),
        (lambda emit, x: emit(op.flip(x, axis=0)), lambda x: x[::-1]),
        (lambda emit, x: emit(op.concat([x, emit(op.negative(x))], axis=0)), lambda x: np.concatenate([x, -x])),
        (lambda emit, x: emit(op.cumsum(x, axis=1)), lambda x: x.cumsum(1)),
    ],
    ids=["transposed", "flipped", "joined", "summed up"],
)
def test_places_that_read_others(compute: Callable[..., Any], wanted: Callable[..., Any]) -> None:
    run = compiled(module(compute, (N, N)))
    for size in SIZES[1:]:
        x = normal(size, size)
        close(run(x), wanted(x))


def test_a_batch_of_images() -> None:
    filters = normal(12, 6, 3, 3)

    def compute(emit: Any, x: Any) -> Any:
        return emit(op.nn.relu(emit(op.nn.conv2d(x, relax.const(filters), padding=(1, 1)))))

    run = compiled(module(compute, (N, 6, 9, 9)))
    for size in (1, 3, 66):
        x = normal(size, 6, 9, 9)
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        close(run(x), np.maximum(np.einsum("nchwij,ocij->nohw", windows, filters), 0))


def windows_of(x: np.ndarray, reach: int, stride: int, filled: float = 0.0) -> np.ndarray:
    """Of padded images, channels first: [batch, channels, rows, columns, reach, reach]."""
    widths = ((0, 0), (0, 0), (reach // 2, reach // 2), (reach // 2, reach // 2))
    padded = np.pad(x, widths, constant_values=filled)
    return np.lib.stride_tricks.sliding_window_view(padded, (reach, reach), axis=(2, 3))[:, :, ::stride, ::stride]


@pytest.mark.parametrize("channels", [48, 384], ids=["light", "heavy"])
def test_a_batch_of_images_that_take_long(channels: int) -> None:
    """Threads have an image each, and share what is left; the heavy weights (5 MB) come in blocks of channels."""
    filters, bias = normal(channels, channels, 3, 3) / 30, normal(1, channels, 1, 1)

    def compute(emit: Any, x: Any) -> Any:
        sums = emit(op.nn.conv2d(x, relax.const(filters), padding=(1, 1)))
        return emit(op.nn.relu(emit(op.add(emit(op.add(sums, relax.const(bias))), x))))

    run = compiled(module(compute, (N, channels, 10, 11)))
    for size in (3, 1, 2, 0, 5):
        x = normal(size, channels, 10, 11)
        sums = np.einsum("nchwij,ocij->nohw", windows_of(x, 3, 1), filters, optimize=True)
        close(run(x), np.maximum(sums + bias + x, 0))


IMAGES = ((1, 1), (2, 3), (7, 16), (9, 40), (33, 5), (20, 67))
"""Smaller than a window, and than a tile; some windows inside of the image, all of them, none."""


@pytest.mark.parametrize(("reach", "stride"), [(3, 1), (3, 2), (5, 1)])
def test_channels_of_images_of_any_size_alone(reach: int, stride: int) -> None:
    """Depthwise convolutions and pooling, whose windows tiles pad for themselves where they leave the image."""
    filters = normal(16, 1, reach, reach)

    def compute(emit: Any, x: Any) -> Any:
        settings = {"padding": (reach // 2,) * 2, "strides": (stride,) * 2}
        alone = emit(op.nn.conv2d(x, relax.const(filters), groups=16, **settings))
        largest = emit(op.nn.max_pool2d(x, (reach, reach), **settings))
        return relax.Tuple([emit(op.nn.relu(alone)), largest])

    run = compiled(module(compute, (1, 16, N, M)))
    for size in IMAGES:
        x = normal(1, 16, *size)
        alone, largest = run(x)
        close(alone, np.maximum(np.einsum("nchwij,cij->nchw", windows_of(x, reach, stride), filters[:, 0]), 0))
        np.testing.assert_array_equal(largest, windows_of(x, reach, stride, -np.inf).max((4, 5)))


def test_windows_inside_of_an_image_are_read_there() -> None:
    """Those that leave it are padded, in a buffer of the tile's; nothing pads the whole image."""
    filters, target = normal(16, 1, 3, 3), detect_target()
    mod = module(lambda emit, x: emit(op.nn.conv2d(x, relax.const(filters), padding=(1, 1), groups=16)), (1, 16, N, M))
    form = pipeline.cheapest_form(mod, target, {}, graph=False)
    tiled = tile_symbolic_kernels(form.kernels, describe_machine(target, measure=False))
    (kernel,) = (f for f in tiled.functions.values() if isinstance(f, tirx.PrimFunc) and len(f.params) == 3)
    blocks: list[Any] = []
    tvm_ffi.structural_walk(kernel.body, (s_tir.SBlock, blocks.append))
    in_image = [one for one in blocks if one.name_hint == "tile" and one.reads[0].source.same_as(kernel.params[0])]
    padded = [buffer for one in blocks for buffer in one.alloc_buffers if str(buffer.name) == "pad_temp"]
    assert len(in_image) == 1
    assert padded
    assert all(isinstance(extent, tirx.IntImm) for buffer in padded for extent in buffer.shape)


def rows_kernel(compute: Callable[[Any, Any], Any]) -> tirx.PrimFunc:
    """A kernel over padded rows: `compute(padded, sum_of)`, where sum_of(k) adds up k neighbours."""
    n, columns, two = te.var("n", "int64"), tirx.IntImm("int64", 32), tirx.IntImm("int64", 2)
    x = te.placeholder((n, columns), "float32", name="X")

    def inside(i: Any, c: Any) -> Any:
        return tirx.if_then_else(tirx.And(i >= two, i < n + two), x[i - two, c], tirx.const(0.0, "float32"))

    padded = te.compute((n + 4, columns), inside, name="padded")

    def sum_of(reach: int) -> Any:
        r = te.reduce_axis((tirx.IntImm("int64", 0), tirx.IntImm("int64", reach)), name="r")
        return te.compute((n, columns), lambda i, c: te.sum(padded[i + r, c], axis=r), name=f"sum{reach}")

    return te.create_prim_func([x, compute((n, columns), sum_of)]).without_attr("global_symbol")


def of_rows(x: np.ndarray, reach: int) -> np.ndarray:
    padded = np.pad(x, ((2, 2), (0, 0)))
    return sum(padded[i : i + len(x)] for i in range(reach))


@pytest.mark.parametrize("reaches", [(5, 3), (3, 5), (5, 5)])
def test_windows_of_several_lengths(reaches: tuple[int, int]) -> None:
    def compute(shape: Any, sum_of: Callable[[int], Any]) -> Any:
        one, other = map(sum_of, reaches)
        return te.compute(shape, lambda i, c: one[i, c] * tirx.const(2.0, "float32") + other[i, c], name="both")

    run = compiled(calling(rows_kernel(compute), in_place=False))
    for size in SIZES[1:]:
        x = normal(size, 32)
        close(run(x), 2 * of_rows(x, reaches[0]) + of_rows(x, reaches[1]))


def test_rows_that_are_overwritten_by_sums_of_them() -> None:
    kernel = rows_kernel(lambda shape, sum_of: sum_of(5))
    given, result = kernel.params
    body = substitute(kernel.body, [(result, given)])
    kernel = tirx.PrimFunc([given], body).with_attr({"tirx.noalias": True, "s_tir": True})
    run = compiled(calling(kernel, in_place=True))
    for size in SIZES[1:]:
        x = normal(size, 32)
        close(run(x), of_rows(x + 1, 5))


def calling(kernel: tirx.PrimFunc, in_place: bool, rows: bool = True) -> tvm.IRModule:
    """A module that calls a kernel over [n, 32], with a result of as many rows, or of one; `in_place` of x + 1."""
    builder = relax.BlockBuilder()
    shape = relax.TensorType((N, 32), "float32")
    x = relax.Var("x", shape)
    with builder.function("main", [x]):
        variable = builder.add_func(kernel, "kernel")
        with builder.dataflow():
            if in_place:
                more = builder.emit(op.add(x, relax.const(np.float32(1))))
                result = builder.emit_output(op.call_tir_inplace(variable, [more], [0], shape))
            else:
                result = builder.emit_output(
                    relax.call_tir(variable, [x], shape if rows else relax.TensorType((32,), "float32"))
                )
        builder.emit_func_output(result)
    return builder.get()


def test_largest_of_nothing_but_infinities() -> None:
    run = compiled(module(lambda emit, x: emit(op.max(x, axis=[0, 1])), (N, M, 24)))
    found = run(np.full((5, 70, 24), -np.inf, np.float32))
    np.testing.assert_array_equal(found, np.full(24, -np.inf, np.float32))


def test_pixels_are_one_size() -> None:
    """Of images of any size, rows and columns: for what is computed of each pixel alone, and for sums over all."""
    weights = normal(24, 40)

    def compute(emit: Any, x: Any, y: Any) -> Any:
        product = emit(op.add(emit(op.matmul(x, relax.const(weights))), y))
        return relax.Tuple([product, emit(op.mean(product, axis=[1, 2])), emit(op.max(x, axis=[1, 2], keepdims=True))])

    mod = module(compute, (2, N, M, 24), (2, N, M, 40))
    run = compiled(mod)
    for size in IMAGES:
        x, y = normal(2, *size, 24), normal(2, *size, 40)
        product, mean, largest = run(x, y)
        close(product, x @ weights + y)
        close(mean, (x @ weights + y).mean((1, 2)))
        close(largest, x.max((1, 2), keepdims=True))


def test_planes_of_images_are_one_size() -> None:
    """Threads start once for an image, not once for each of its rows."""

    def compute(emit: Any, x: Any) -> Any:
        return relax.Tuple([emit(op.permute_dims(x, [0, 2, 3, 1])), emit(op.nn.relu(x))])

    mod = module(compute, (2, 3, N, M))
    target = detect_target(threads=2)
    with target:
        kernels = tile_symbolic_kernels(lower_to_kernels(mod, target), describe_machine(target, measure=False))
    for kernel in (function for function in kernels.functions.values() if isinstance(function, tirx.PrimFunc)):
        loops = _loops(kernel.body)
        assert _starts_threads(kernel.body)
        assert all(isinstance(loop.extent, tirx.IntImm) for loop in loops if _starts_threads(loop.body))
    run = compiled(mod)
    for size in IMAGES:
        x = normal(2, 3, *size)
        last, positive = run(x)
        np.testing.assert_array_equal(last, x.transpose(0, 2, 3, 1))
        np.testing.assert_array_equal(positive, np.maximum(x, 0))


def _loops(statement: Any) -> list[Any]:
    loops: list[Any] = []
    tvm_ffi.structural_walk(statement, (tirx.For, loops.append))
    return loops


def _starts_threads(statement: Any) -> bool:
    return any(loop.kind == tirx.ForKind.PARALLEL for loop in _loops(statement))


def test_pixels_whose_rows_differ_are_two_sizes() -> None:
    """Each row has an offset of its own, or the other tensor has rows and columns the other way round."""

    def compute(emit: Any, x: Any, offsets: Any, y: Any) -> Any:
        shifted = emit(op.add(x, offsets))
        return relax.Tuple([emit(op.exp(shifted)), emit(op.add(x, emit(op.permute_dims(y, [1, 0, 2]))))])

    run = compiled(module(compute, (N, M, 24), (N, 1, 24), (M, N, 24)))
    for size in IMAGES:
        x, offsets, y = normal(*size, 24), normal(size[0], 1, 24), normal(*size[::-1], 24)
        exponentials, sums = run(x, offsets, y)
        close(exponentials, np.exp(x + offsets))
        close(sums, x + y.transpose(1, 0, 2))


def test_results_stay_while_others_are_computed() -> None:
    """Memory is used again for other sizes, once nobody has it."""
    run = compiled(module(lambda emit, x: emit(op.exp(emit(op.cumsum(x, axis=0)))), (N, 33)))
    inputs = [normal(rows, 33) / 10 for rows in (5, 64, 0, 6, 1000, 5, 63, 1)]
    for x, found in [(x, run(x)) for x in inputs]:
        close(found, np.exp(x.cumsum(0)))


def test_rows_of_a_large_table() -> None:
    """Large, but no weights of a product: nothing is filled up."""
    table = normal(2048, 512)
    mod = module(lambda emit, x: emit(op.take(relax.const(table), x, axis=0, mode="clip")), (N,), dtype="int32")
    run = compiled(mod)
    for size in (*range(0, 18), 33, 64, 70):
        places = RNG.integers(0, 2048, size).astype(np.int32)
        close(run(places), table[places])


@pytest.mark.parametrize("mode", ["fast", "clip"])
def test_rows_of_a_table_for_a_batch(mode: str) -> None:
    """Of words whose number is open in two ways, which are one: with what is computed of each row."""
    table = normal(50, 24)

    def compute(emit: Any, places: Any) -> Any:
        rows = emit(op.take(relax.const(table), places, axis=0, mode=mode))
        return relax.Tuple([rows, emit(op.nn.relu(rows)), emit(op.add(places, relax.const(1, "int64")))])

    run = compiled(module(compute, (N, M), dtype="int64"))
    for size in IMAGES:
        places = RNG.integers(0, 50, size).astype(np.int64)
        rows, positive, next_ones = run(places)
        np.testing.assert_array_equal(rows, table[places])
        np.testing.assert_array_equal(positive, np.maximum(table[places], 0))
        np.testing.assert_array_equal(next_ones, places + 1)


def test_rows_of_a_table_and_norms() -> None:
    table, scale, shift = normal(50, 24), normal(24), normal(24)

    def compute(emit: Any, places: Any) -> Any:
        rows = emit(op.take(relax.const(table), places, axis=0))
        return emit(op.nn.layer_norm(rows, relax.const(scale), relax.const(shift), axes=[-1]))

    run = compiled(module(compute, (N,), dtype="int64"))
    for size in SIZES:
        places = RNG.integers(0, 50, size)
        rows = table[places]
        normalized = (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) + 1e-5)
        close(run(places), normalized * scale + shift)


def test_each_head_has_its_own_weights() -> None:
    weights = normal(4, 16, 24)
    run = compiled(module(lambda emit, x: emit(op.matmul(x, relax.const(weights))), (M, 4, N, 16)))
    for size in SIZES[1:]:
        x = normal(2, 4, size, 16)
        close(run(x), x @ weights)


def test_batches_of_rows() -> None:
    """Two sizes in front of the rows' elements, of which either may be one; also as one size, the product of both."""
    weights = normal(48, 40)

    def compute(emit: Any, x: Any) -> Any:
        rows = emit(op.reshape(x, (N * M, 48)))
        return relax.Tuple([emit(op.matmul(x, relax.const(weights))), emit(op.nn.relu(emit(op.exp(rows))))])

    run = compiled(module(compute, (N, M, 48)))
    for sizes in ((1, 1), (1, 70), (70, 1), (3, 65), (66, 5)):
        x = normal(*sizes, 48)
        product, rows = run(x)
        close(product, x @ weights)
        close(rows, np.exp(x.reshape(-1, 48)))


@pytest.mark.parametrize(
    ("compute", "wanted"),
    [
        (lambda emit, x, y: emit(op.sum(x)), lambda x, y: x.sum()),
        (lambda emit, x, y: emit(op.max(x)), lambda x, y: x.max()),
        (lambda emit, x, y: emit(op.matmul(x, y)), lambda x, y: x @ y),
    ],
    ids=["sum", "largest", "product"],
)
def test_single_numbers_of_any_number_of_places(compute: Callable[..., Any], wanted: Callable[..., Any]) -> None:
    run = compiled(module(compute, (N,), (N,)))
    for size in SIZES[1:]:
        x, y = normal(size), normal(size)
        close(run(x, y), np.asarray(wanted(x, y)))


def test_places_of_rows_that_tensors_tell() -> None:
    """No axis runs along what is picked from."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((N, M), "float32"))
    places = relax.Var("places", relax.TensorType((N, 5), "int64"))
    with builder.function("main", [x, places]):
        with builder.dataflow():
            picked = builder.emit(op.gather_elements(x, places, axis=1))
            result = builder.emit_output(builder.emit(op.nn.relu(picked)))
        builder.emit_func_output(result)
    run = compiled(builder.get())
    for size in SIZES[1:]:
        rows, indices = normal(size, 33), RNG.integers(0, 33, (size, 5))
        close(run(rows, indices), np.maximum(np.take_along_axis(rows, indices, 1), 0))


def test_sums_over_the_size_that_places_are_of() -> None:
    """Each row less all rows: one axis is of places, the other of the sum."""
    n, columns = te.var("n", "int64"), tirx.IntImm("int64", 32)
    x = te.placeholder((n, columns), "float32", name="X")
    k = te.reduce_axis((tirx.IntImm("int64", 0), n), name="k")
    distances = te.compute((n, columns), lambda i, c: te.sum(te.abs(x[i, c] - x[k, c]), axis=k), name="distances")
    run = compiled(calling(te.create_prim_func([x, distances]).without_attr("global_symbol"), in_place=False))
    for size in SIZES:
        rows = normal(size, 32)
        close(run(rows), np.abs(rows[:, None] - rows).sum(1))


def test_a_slice_of_known_length() -> None:
    """Every second of the first rows, of which no axis is open."""
    run = compiled(module(lambda emit, x: op.strided_slice(x, [0], [0], [8], [2], assume_inbound=True), (N,)))
    for size in (8, 13):
        x = normal(size)
        np.testing.assert_array_equal(run(x), x[0:8:2])


def test_stages_stay_in_front_of_what_overwrites_their_operands() -> None:
    n, columns = te.var("n", "int64"), tirx.IntImm("int64", 32)
    x = te.placeholder((n, columns), "float32", name="X")
    more = te.compute((n, columns), lambda i, c: x[i, c] + tirx.const(1.0, "float32"), name="more")
    numbered = te.compute((n, columns), lambda i, c: x[i, c] * tirx.Cast("float32", i) + more[i, c], name="numbered")
    twice = te.compute((n, columns), lambda i, c: more[i, c] * tirx.const(2.0, "float32"), name="twice")
    kernel = te.create_prim_func([x, numbered, twice])
    given, _, result = kernel.params
    body = substitute(kernel.body, [(result, given)])
    found = read_kernel(tirx.PrimFunc(list(kernel.params)[:2], body))
    assert found is not None
    stages = {str(stage.block.name_hint): stage for stage in found.stages}
    groups = grouped([stages[name] for name in ("more", "numbered", "twice")])
    assert [[str(stage.block.name_hint) for stage in group] for group in groups] == [["more"], ["numbered"], ["twice"]]


def test_a_kernel_of_ones_own_whose_places_come_in_order() -> None:
    """Each place adds to the one before, which is said to be its order: no thread may begin in the middle."""
    x, y = (tirx.decl_buffer((N,), "float32", name) for name in "xy")
    loop, place, zero = tirx.Var("i", "int64"), tirx.Var("v", "int64"), tirx.IntImm("int64", 0)
    everything = ir.Range.from_min_extent(zero, N)
    before = tirx.BufferLoad(y, [tirx.max(place - 1, zero)])
    here = tirx.BufferLoad(x, [place])
    value = tirx.if_then_else(tirx.EQ(place, zero), here, before + here)
    axis = tirx.IterVar(everything, place, tirx.IterVar.Ordered)
    regions = [[tirx.BufferRegion(buffer, [everything])] for buffer in (x, y)]
    block = s_tir.SBlock([axis], [*regions[0], *regions[1]], regions[1], "scan", tirx.BufferStore(y, value, [place]))
    body = tirx.For(loop, zero, N, tirx.ForKind.SERIAL, s_tir.SBlockRealize([loop], True, block))
    root = s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "root", body))
    kernel = tirx.PrimFunc([x, y], root).with_attr({"tirx.noalias": True, "s_tir": True})
    builder = relax.BlockBuilder()
    given = relax.Var("x", relax.TensorType((N,), "float32"))
    with builder.function("main", [given]):
        variable = builder.add_func(kernel, "scan")
        with builder.dataflow():
            result = builder.emit_output(relax.call_tir(variable, [given], relax.TensorType((N,), "float32")))
        builder.emit_func_output(result)
    run = compiled(builder.get())
    values = normal(5000)
    close(run(values), np.cumsum(values, dtype=np.float64).astype(np.float32))


def test_a_tensor_that_is_overwritten() -> None:
    """Each place once: a second time would add to what is there by then."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((N, 24), "float32"))
    with builder.function("main", [x]):
        kernel = builder.add_func(_adding(), "adding")
        with builder.dataflow():
            call = relax.op.call_tir_inplace(kernel, [x], [0], relax.TensorType((N, 24), "float32"))
            result = builder.emit_output(builder.emit(call))
        builder.emit_func_output(result)
    run = compiled(builder.get())
    for size in SIZES[1:]:
        rows = normal(size, 24)
        close(run(rows), rows + 1)


def _adding() -> tirx.PrimFunc:
    x = te.placeholder((N, 24), "float32", "x")
    kernel = te.create_prim_func([x, te.compute((N, 24), lambda i, j: x[i, j] + 1, "added")])
    source, target = kernel.params
    return tirx.PrimFunc([source], substitute(kernel.body, [(target, source)])).with_attr("tirx.noalias", True)


def test_a_table_of_which_a_symbolic_part_is_read() -> None:
    """As many places as the bounds of the symbol permit: TVM would not know how long the slice is."""
    table = normal(1, 64, 12)

    def compute(emit: Any, x: Any) -> Any:
        axes, begins, ends, steps = (relax.Tuple([relax.prim_value(value)]) for value in (1, 0, N, 1))
        part = emit(op.strided_slice(relax.const(table), axes, begins, ends, steps))
        return emit(op.add(emit(op.exp(x)), part))

    mod = module(compute, (1, N, 12))
    bounds = {"tir_var_lower_bound": {"n": 2}, "tir_var_upper_bound": {"n": 64}}
    mod.update_func(mod.get_global_var("main"), mod["main"].with_attr(bounds))
    run = compiled(mod)
    for size in (2, 17, 63, 64):
        x = normal(1, size, 12)
        close(run(x), np.exp(x) + table[:, :size])


@pytest.mark.parametrize("columns", [512, 4096])
def test_threads_share_blocks_of_columns(columns: int) -> None:
    """Weights that are packed block by block, read once by all rows: few, in the middle of a tile, many."""
    weights, bias = normal(256, columns), normal(columns)

    def compute(emit: Any, x: Any) -> Any:
        return emit(op.nn.relu(emit(op.add(emit(op.matmul(x, relax.const(weights))), relax.const(bias)))))

    mod = module(compute, (N, 256))
    target = detect_target(threads=2)
    with target:
        kernels = tile_symbolic_kernels(lower_to_kernels(mod, target), describe_machine(target, measure=False))
    (packed,) = (call for call in calls(kernels) if call.args[0].name_hint.endswith("_packed"))
    blocks, *block = packed.args[1].fields[1].ty.shape
    assert blocks > 1
    assert np.prod([int(extent) for extent in (blocks, *block)]) == weights.size
    run = compiled(mod)
    for size in (0, 1, 3, 11, 16, 33, 64, 130):
        x = normal(size, 256)
        close(run(x), np.maximum(x @ weights + bias, 0))


def calls(mod: tvm.IRModule) -> list[Any]:
    values = (binding.value for block in mod["main"].body.blocks for binding in block.bindings)
    return [value for value in values if getattr(value.op, "name", "") == "relax.call_tir"]


def test_tile_registers_read_no_rows_that_lie_apart() -> None:
    """They take a row after the other by the distance in a tile: in a part of each row, that is not where rows lie."""
    target = detect_target(threads=1)
    hardware = Hardware(dot_products=("amx-int8",), tile_flops_per_s=4e12)

    def are_read_in_place(*shapes: tuple[Any, ...]) -> bool:
        mod = module(lambda emit, x, y: op.matmul(x, y, out_dtype="int32"), *shapes, dtype="int8")
        with target:
            tiled = tiled_kernels(lower_to_kernels(mod, target), hardware)
        used = [tile for tiles in tiled.tiles.values() for tile in tiles]
        sketches = [sketch for tile in used for sketch in build_space(tile.workload, hardware).sketches]
        assert sketches
        return any(sketch.name == "amx" and sketch.plan.whole_rows for sketch in sketches)

    assert are_read_in_place((N, 128), (128, 64))
    assert not are_read_in_place((32, M), (M, 64))


def test_masks_are_computed_where_they_are_used() -> None:
    """No buffers of places and booleans between the steps, which no tile could compute together."""

    def compute(emit: Any, x: Any) -> Any:
        place = emit(op.arange(0, N, 1, "int64"))
        row, column = (emit(op.expand_dims(place, axis)) for axis in (1, 0))
        seen = emit(
            op.logical_and(emit(op.less_equal(column, row)), emit(op.greater_equal(row, relax.const(0, "int64"))))
        )
        return emit(op.where(seen, x, relax.const(-1.0)))

    mod = module(compute, (N, N))
    run = compiled(mod)
    for size in (1, 5, 70):
        x = normal(size, size)
        close(run(x), np.where(np.tri(size, dtype=bool), x, np.float32(-1)))


def test_what_is_read_twice_again_and_again() -> None:
    """As one expression, sixteen steps of a hash would be 2 ** 16 shifts."""

    def compute(emit: Any, x: Any) -> Any:
        for _ in range(16):
            x = emit(op.bitwise_xor(x, emit(op.right_shift(x, relax.const(3, "int64")))))
        return x

    run = compiled(module(compute, (N, 8), dtype="int64"))
    for size in SIZES:
        x = wanted = RNG.integers(0, 1 << 40, (size, 8))
        for _ in range(16):
            wanted = wanted ^ (wanted >> 3)
        np.testing.assert_array_equal(run(x), wanted)


def test_a_size_as_a_number() -> None:
    """A kernel that takes a size, not a tensor of it."""

    def compute(emit: Any, x: Any) -> Any:
        count = emit(op.reshape(emit(op.shape_to_tensor(relax.ShapeExpr([N * 2]))), []))
        return emit(op.multiply(x, emit(op.astype(count, "float32"))))

    run = compiled(module(compute, (N, 24)))
    for size in (1, 17):
        x = normal(size, 24)
        close(run(x), x * (2 * size))


def test_sizes_in_two_spellings_are_one() -> None:
    """n + 1 and 1 + n: the join of two kernels would take them for two tensors."""

    def compute(emit: Any, x: Any, y: Any) -> Any:
        both = emit(op.concat([x, y], 0))
        part = emit(op.strided_slice(both, [0], [1], [N + 1], assume_inbound=True))
        return emit(op.subtract(part, y))

    run = compiled(module(compute, (1, 4), (N, 4)))
    x, y = normal(1, 4), normal(9, 4)
    close(run(x, y), np.concatenate([x, y])[1:10] - y)


def test_the_last_rows_of_an_open_tensor() -> None:
    weight = relax.const(normal(8, 8))

    def last(emit: Callable[[Any], Any], x: Any) -> Any:
        ends = [N - behind for behind in range(4)]
        rows = [emit(op.strided_slice(x, [0], [end - 1], [end], assume_inbound=True)) for end in ends]
        return op.concat([emit(op.matmul(row, weight)) for row in rows], 0)

    run = compiled(module(last, (N, 8)))
    for size in (4, 9):
        x = normal(size, 8)
        close(run(x), x[::-1][:4] @ weight.value.numpy())


def test_a_slice_beyond_a_table_is_its_last_row() -> None:
    table = normal(8, 4)
    run = compiled(module(lambda emit, x: emit(op.add(x, open_slice(emit, relax.const(table), 0, 0, N))), (N, 4)))
    x = np.zeros((11, 4), np.float32)
    close(run(x), table[[*range(8), 7, 7, 7]])


@pytest.mark.parametrize(
    ("first", "last", "winner"),
    [
        ((24, 20, 1.0), (25, 21, 0.9), "last"),
        ((24, 0, 1.0), (25, 21, 0.9), "first"),
        ((9, 9, 1.0), (9, 9, 2.0), "first"),
    ],
    ids=["little was measured of both", "one was measured", "nothing was"],
)
def test_the_form_that_runs_fastest(monkeypatch: Any, first: Any, last: Any, winner: str) -> None:
    """Of forms with channels first and last: calls, how many of them were never measured, seconds."""

    def form(name: str, *_arguments: Any) -> pipeline.EstimatedForm:
        calls, missing, seconds = last if name.endswith("channels last") else first
        return pipeline.EstimatedForm(name, None, Hardware(), ir.IRModule(), {}, {}, calls, missing, seconds)

    monkeypatch.setattr(pipeline, "_scheduled_form", form)
    filters = relax.const(normal(8, 8, 3, 3))
    mod = module(lambda emit, x: emit(op.nn.conv2d(x, filters)), (N, 8, 9, 9))
    found = pipeline.cheapest_form(mod, detect_target(), {}, graph=False)
    assert found.name.endswith("channels last") == (winner == "last")


def branches(n: Any, h: Any, w: Any) -> tvm.IRModule:
    """A convolution that halves an image, of whose result four parts are concatenated, among them itself."""
    rng = np.random.default_rng(2)

    def layer(emit: Any, x: Any, outputs: int, kernel: int, stride: int = 1) -> Any:
        shape = outputs, int(x.ty.shape[1]), kernel, kernel
        weight = rng.standard_normal(shape).astype(np.float32) / np.float32((shape[1] * kernel * kernel) ** 0.5)
        padding = (kernel // 2, kernel // 2)
        return emit(op.nn.relu(emit(op.nn.conv2d(x, relax.const(weight), (stride, stride), padding))))

    def compute(emit: Any, x: Any) -> Any:
        half = layer(emit, x, 16, 3, stride=2)
        parts = [
            layer(emit, half, 16, 1),
            layer(emit, half, 32, 3),
            emit(op.nn.max_pool2d(half, (3, 3), padding=(1, 1))),
        ]
        return layer(emit, emit(op.concat([*parts, half], 1)), 16, 1)

    return module(compute, (n, 8, h, w))


@pytest.mark.parametrize("sizes", [(N, tirx.Var("h", "int64"), M), (N, 12, 10)])
def test_parts_of_concatenations_are_written_in_place(sizes: tuple[Any, ...]) -> None:
    mod, target = branches(*sizes), detect_target()
    names = {variable.name_hint for variable in lower_to_kernels(mod, target).functions}
    assert {"conv2d_relu_concat", "conv2d_relu_concat1", "max_pool2d_concat", "copy_concat"} <= names
    assert not any(name.startswith("concatenate") for name in names), "nothing calls it any more"
    plain = relax.VirtualMachine(tvm.compile(mod, target=target), tvm.cpu())["main"]
    for fast_math in (False, True):
        run = compiled(mod, fast_math=fast_math)
        for given in ((1, 12, 10), (3, 12, 10), (2, 5, 9), (1, 33, 40)):
            shape = [size if isinstance(size, int) else known for size, known in zip(sizes, given, strict=True)]
            x = normal(shape[0], 8, *shape[1:])
            close(run(x), plain(tvm.runtime.tensor(x)).numpy())


def test_sizes_that_are_expressions_get_names() -> None:
    """Behind each stride, sizes are quotients of quotients: kernels ask their tensors instead."""
    lowered = lower_to_kernels(branches(N, tirx.Var("h", "int64"), M), detect_target())
    for function in lowered.functions.values():
        if not isinstance(function, tirx.PrimFunc):
            continue
        named, sizes = with_sizes_named(function)
        extents = [extent for parameter in named.params for extent in getattr(parameter.ty, "shape", ())]
        assert all(isinstance(extent, ir.Var | tirx.IntImm) for extent in extents)
        text = "".join(str(buffer.shape) for buffer in named.body.block.alloc_buffers)
        assert "//" not in text
        assert all(not isinstance(expression, ir.Var) for _, expression in sizes)


@pytest.mark.parametrize("height", [tirx.Var("h", "int64"), 4])
@pytest.mark.parametrize(("outputs", "kept"), [(7, 3), (12, 4), (7, 6), (32, 16)])
def test_a_slice_of_what_is_computed(height: Any, outputs: int, kept: int) -> None:
    """Of fewer columns than a tile has: its tail would begin before the result does."""
    weight = normal(3, 3, 16, outputs)

    def compute(emit: Any, x: Any) -> Any:
        layouts = {"data_layout": "NHWC", "kernel_layout": "HWIO"}
        return op.strided_slice(emit(op.nn.conv2d(x, relax.const(weight), padding=(1, 1), **layouts)), [3], [0], [kept])

    mod = module(compute, (1, height, 8, 16))
    x = normal(1, 4, 8, 16)
    plain = relax.VirtualMachine(tvm.compile(mod, target=detect_target()), tvm.cpu())["main"]
    close(compiled(mod)(x), plain(tvm.runtime.tensor(x)).numpy())
