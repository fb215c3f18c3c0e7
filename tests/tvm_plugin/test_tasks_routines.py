"""Routines that are written anew for CPUs compute what numpy and PyTorch do."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from eqtune.tasks.lower import lower_to_kernels
from eqtune.tasks.routines import write_routines

THREADS = 2
TARGET = tvm.target.Target({"kind": "llvm", "num-cores": THREADS})


def _module(call, *arrays):
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"x{i}", relax.TensorType(a.shape, str(a.dtype))) for i, a in enumerate(arrays)]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(call(*inputs)))
        builder.emit_func_output(result)
    return builder.get()


def _run(call, *arrays):
    kernels = lower_to_kernels(_module(call, *arrays), TARGET)
    machine = relax.VirtualMachine(relax.build(kernels, TARGET), tvm.cpu())
    result = machine["main"](*map(tvm.runtime.tensor, arrays))
    return result.numpy() if hasattr(result, "numpy") else [part.numpy() for part in result]


def _normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


@pytest.mark.parametrize(
    ("reduction", "ufunc"), [("add", np.add), ("mul", np.multiply), ("min", np.minimum), ("max", np.maximum)]
)
@pytest.mark.parametrize("shape", [(300, 130), (200, 128), (9, 50, 3), (40, 7, 9), (5000,)], ids=str)
def test_scattered_updates_meet_in_any_number(reduction, ufunc, shape):
    depth = 2 if len(shape) == 3 else 1
    generator = np.random.default_rng(1)
    places = np.stack([generator.integers(0, extent, (30, 11)) for extent in shape[:depth]], -1)
    data, updates = _normal(*shape), _normal(30, 11, *shape[depth:])
    expected = data.copy()
    ufunc.at(expected, tuple(np.moveaxis(places, -1, 0)), updates)
    result = _run(lambda x, i, u: op.scatter_nd(x, i, u, reduction), data, places, updates)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_the_last_of_several_updates_stays_and_places_outside_are_left_out():
    data, updates = _normal(100, 200), _normal(5, 200)
    places = np.array([[3], [7], [3], [100], [-1]], "int32")
    expected = data.copy()
    expected[7], expected[3] = updates[1], updates[2]
    np.testing.assert_array_equal(
        _run(lambda x, i, u: op.scatter_nd(x, i, u, "update"), data, places, updates), expected
    )


def test_a_place_is_outside_along_any_axis():
    data, updates = _normal(4, 5, 9), _normal(5, 9)
    places = np.array([[0, 6], [1, -1], [3, 4], [4, 0], [-1, 7]])
    expected = data.copy()
    expected[3, 4] += updates[2]
    np.testing.assert_allclose(_run(lambda x, i, u: op.scatter_nd(x, i, u, "add"), data, places, updates), expected)


@pytest.mark.parametrize(("shape", "axis"), [((200, 200), 0), ((3, 5, 100), 1), ((4, 9, 70, 3), -3)], ids=str)
def test_sums_along_an_axis(shape, axis):
    x = _normal(*shape)
    np.testing.assert_allclose(_run(lambda v: op.cumsum(v, axis), x), x.cumsum(axis), rtol=1e-4, atol=1e-4)
    whole = (9 * x).astype("int32")
    summed = _run(lambda v: op.cumsum(v, axis, "int64"), whole)
    np.testing.assert_array_equal(summed, whole.cumsum(axis, dtype="int64"))
    assert summed.dtype == np.int64


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("shape", "k"), [((40, 500), 10), ((3, 4, 6), 6), ((70,), 1), ((2, 33), 32)], ids=str)
def test_the_first_of_rows_with_equal_elements(shape, k, largest):
    x = np.random.default_rng(2).integers(0, 50, shape).astype("float32")
    values, places = _run(lambda v: op.topk(v, k, -1, "both", largest, "int64"), x)
    order = np.argsort(-x if largest else x, -1, kind="stable")[..., :k]
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, -1))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("largest", [True, False])
def test_nan_is_the_largest(largest, dtype):
    torch = pytest.importorskip("torch")
    x = _normal(6, 80).astype(dtype)
    x[np.random.default_rng(3).random(x.shape) < 0.2] = np.nan
    x[0], x[1] = np.nan, -np.inf
    values, places = _run(lambda v: op.topk(v, 20, -1, "both", largest, "int32"), x)
    expected, _ = torch.from_numpy(x).topk(20, -1, largest=largest)
    np.testing.assert_array_equal(values, expected.numpy())
    np.testing.assert_array_equal(np.take_along_axis(x, places.astype("int64"), -1), values)


@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.parametrize("padding", ["zeros", "border"])
@pytest.mark.parametrize(("image", "places"), [((2, 8, 9, 7), (5, 6)), ((1, 35, 16, 33), (40, 17))], ids=str)
def test_images_are_sampled(image, places, padding, corners):
    torch = pytest.importorskip("torch")
    x, grid = _normal(*image), 0.8 * _normal(image[0], 2, *places)
    grid[0, 0, 0, :4] = -1, 1, -1e30, 1e30  # at the edges, and far out
    x[0, :, 0, 0] = np.inf  # counts where it is looked at only
    options = {"padding_mode": padding, "align_corners": corners}
    result = _run(lambda v, g: op.image.grid_sample(v, g, "bilinear", "NCHW", **options), x, grid)
    where = torch.from_numpy(grid).permute(0, 2, 3, 1)
    expected = torch.nn.functional.grid_sample(torch.from_numpy(x), where, **options).numpy()
    finite = np.isfinite(expected)
    np.testing.assert_allclose(result[finite], expected[finite], rtol=1e-4, atol=1e-4)
    assert not np.isfinite(result[~finite]).any()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: op.topk(x, 2, axis=0),
        lambda x: op.topk(x, 2, ret_type="values"),
        lambda x: op.topk(op.reshape(x, (4096,)), 200),
        lambda x: op.cumsum(x, 1),
        lambda x: op.cumsum(x),
        lambda x: op.cumsum(x, 0, exclusive=True),
    ],
)
def test_what_tvm_does_well_or_alone_stays(call):
    mod = _module(call, _normal(64, 64))
    assert write_routines(mod, THREADS) is mod
