"""Weights that ONNX models store in blocks of 8 bits or fewer: what is imported computes what ONNX Runtime does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
ml_dtypes = pytest.importorskip("ml_dtypes")

from onnx import TensorProto as P  # noqa: E402
from onnx import helper  # noqa: E402

import eqtune  # noqa: E402
from eqtune.compile.executable import build_executable  # noqa: E402
from eqtune.frontends import load_model  # noqa: E402
from eqtune.machine import detect_target  # noqa: E402
from eqtune.runtime import ModelRunner  # noqa: E402
from eqtune.tasks import extract_tasks, lower_to_kernels  # noqa: E402
from eqtune.transform import KeepNarrowWeights  # noqa: E402
from eqtune.transform.simplify import simplify  # noqa: E402

pytestmark = pytest.mark.unoptimised

DOMAIN = "com.microsoft"
TARGET = detect_target(1)
PLACES, COLUMNS = 256, 160


def drawn(high: int, *shape: int) -> Any:
    return np.random.default_rng(sum(shape)).integers(0, high, shape, np.uint8)


def factors(*shape: int, dtype: str = "float32") -> Any:
    return ((np.random.default_rng(len(shape)).random(shape, np.float32) + 0.5) * 0.02).astype(dtype)


def model(nodes: list[Any], constants: dict[str, Any], shape: tuple[int, ...], dtype: int = P.FLOAT) -> Any:
    """Of x, of that shape, y."""
    graph = helper.make_graph(
        nodes,
        "narrow",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", P.FLOAT if dtype == P.INT64 else dtype, [None] * 2)],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def nbits(bits: int, size: int, rows: int = 1, places: int = PLACES, **also: Any) -> Any:
    blocks = -(-places // size)
    constants = {"w": drawn(256, COLUMNS, blocks, size * bits // 8), "s": factors(COLUMNS * blocks), **also}
    names = ["x", "w", "s", *(name if name in also else "" for name in ("z", "order", "bias"))]
    while not names[-1]:
        names.pop()
    sizes = {"K": places, "N": COLUMNS, "bits": bits, "block_size": size}
    node = helper.make_node("MatMulNBits", names, ["y"], domain=DOMAIN, accuracy_level=4, **sizes)
    return model([node], constants, (rows, places))


def in_blocks(dtype: Any, zeros: bool = True) -> Any:
    """Without zeros, bytes have their whole range: those ONNX Runtime would make unsigned."""
    codes = drawn(16 if zeros else 256, PLACES, COLUMNS).astype(np.int32) - 8 * (np.dtype(dtype).name == "int4")
    constants = {"q": codes.astype(dtype), "s": factors(PLACES // 32, COLUMNS)}
    if zeros:
        constants["z"] = np.full((PLACES // 32, COLUMNS), 3, np.int32).astype(dtype)
    nodes = [
        helper.make_node("DequantizeLinear", list(constants), ["w"], axis=0, block_size=32),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    return model(nodes, constants, (1, PLACES))


def cast() -> Any:
    """What a PyTorch model whose linear layers dequantise their weights is exported as."""
    constants = {"q": drawn(256, PLACES, COLUMNS).view(np.int8), "z": np.float32(2), "s": factors(COLUMNS)}
    nodes = [
        helper.make_node("Cast", ["q"], ["f"], to=P.FLOAT),
        helper.make_node("Sub", ["f", "z"], ["c"]),
        helper.make_node("Mul", ["c", "s"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    return model(nodes, constants, (1, PLACES))


NARROW = {
    "4 bits": lambda: nbits(4, 32),
    "4 bits, zeros, bias": lambda: nbits(4, 32, z=drawn(256, COLUMNS, PLACES // 64), bias=factors(COLUMNS)),
    "4 bits, an odd number of zeros": lambda: nbits(4, 128, 2, 384, z=drawn(256, COLUMNS, 2)),
    "4 bits, zeros in floats": lambda: nbits(4, 64, z=factors(COLUMNS, PLACES // 64) * 400),
    "8 bits": lambda: nbits(8, 64, 3, z=drawn(256, COLUMNS, PLACES // 64)),
    "2 bits": lambda: nbits(2, 16),
    "blocks of int4": lambda: in_blocks(ml_dtypes.int4),
    "blocks of uint4": lambda: in_blocks(ml_dtypes.uint4),
    "blocks of int8": lambda: in_blocks(np.int8),
    "blocks of int8 without zeros": lambda: in_blocks(np.int8, zeros=False),
    "cast": cast,
}


def assert_equal(given: Any, tolerance: float = 2e-6) -> list[str]:
    """That what is imported computes what ONNX Runtime does; the kernels."""
    imported = load_model(given)
    (x,) = imported.random_inputs(0)
    kernels = lower_to_kernels(simplify(KeepNarrowWeights(1)(imported.mod), TARGET), TARGET)
    actual = ModelRunner(build_executable(kernels, TARGET))(x)[0]
    expected = imported.reference(x)[0]
    np.testing.assert_allclose(actual, expected, atol=tolerance * np.abs(expected).max())
    return [task.name for task in extract_tasks(kernels)]


@pytest.mark.parametrize("case", NARROW)
def test_products_read_weights_as_stored(case: str) -> None:
    assert any("narrow_product" in name for name in assert_equal(NARROW[case]()))


def test_many_rows_and_ragged_blocks_become_floats() -> None:
    assert not any("narrow" in name for name in assert_equal(nbits(4, 32, rows=40)))
    assert not any("narrow" in name for name in assert_equal(nbits(4, 64, 1, 250)))


def test_products_in_float16_are_summed_in_float32() -> None:
    constants = {"w": drawn(256, COLUMNS, PLACES // 32, 16), "s": factors(COLUMNS * PLACES // 32, dtype="float16")}
    sizes = {"K": PLACES, "N": COLUMNS, "bits": 4, "block_size": 32}
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain=DOMAIN, **sizes)
    names = assert_equal(model([node], constants, (1, PLACES), P.FLOAT16), 2e-3)
    assert any("narrow_product" in name for name in names)


@pytest.mark.parametrize(("scales", "kind"), [("float16", "float32"), ("float32", "float16")])
def test_blocks_of_another_type_than_their_scales(scales: str, kind: str) -> None:
    constants = {"q": drawn(256, 8, 6).view(np.int8), "s": factors(2, 6, dtype=scales)}
    to = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=0, block_size=4, output_dtype=to),
        helper.make_node("Add", ["x", "w"], ["y"]),
    ]
    given = model(nodes, constants, (8, 6), to)
    given.opset_import[0].version, given.ir_version = 23, 11
    (result,) = ModelRunner(build_executable(lower_to_kernels(load_model(given).mod, TARGET), TARGET))(
        np.zeros((8, 6), kind)
    )
    wide = constants["q"] * np.repeat(constants["s"].astype("float32"), 4, axis=0)
    np.testing.assert_array_equal(result, wide.astype(kind))


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_a_table_are_gathered(bits: int) -> None:
    constants = {
        "table": drawn(256, 50, 64 * bits // 8),
        "s": factors(50, 2),
        "z": drawn(256, 50, 2 * bits // 8),
    }
    attributes = {"bits": bits, "block_size": 32, "gather_axis": 0, "quantize_axis": 1}
    node = helper.make_node("GatherBlockQuantized", ["table", "x", "s", "z"], ["y"], domain=DOMAIN, **attributes)
    assert_equal(model([node], constants, (3,), P.INT64))


def test_constants_that_index_are_still_computed_once() -> None:
    """Buckets of places, as T5 has them, which are no weights."""
    constants = {"q": np.arange(128 * 128, dtype="int64").reshape(128, 128), "two": np.array(2, "int64")}
    constants["table"] = factors(20, 16)
    nodes = [
        helper.make_node("Mul", ["q", "two"], ["w"]),
        helper.make_node("Mod", ["w", "two"], ["m"]),
        helper.make_node("Gather", ["table", "m"], ["g"]),
        helper.make_node("Add", ["g", "x"], ["y"]),
    ]
    given = model(nodes, constants, (1, 16))
    del given.graph.output[0].type.tensor_type.shape.dim[:]
    given.graph.output[0].type.tensor_type.shape.dim.extend([onnx.TensorShapeProto.Dimension() for _ in range(3)])
    assert not any("mod" in name for name in assert_equal(given))


def test_four_bits_may_move_before_they_are_dequantised() -> None:
    given = in_blocks(ml_dtypes.int4)
    (first,) = (node for node in given.graph.node if node.op_type == "DequantizeLinear")
    (codes,) = (tensor for tensor in given.graph.initializer if tensor.name == "q")
    turned = onnx.numpy_helper.to_array(codes).T
    codes.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(turned), "stored"))
    given.graph.node.insert(0, helper.make_node("Transpose", ["stored"], ["q"], perm=[1, 0]))
    assert first.input[0] == "q"
    assert any("narrow_product" in name for name in assert_equal(given))


def test_what_is_not_imported_is_named() -> None:
    given = in_blocks(ml_dtypes.int4)
    given.graph.node.insert(0, helper.make_node("Relu", ["q"], ["r"]))
    with pytest.raises(eqtune.errors.EqtuneError, match=r"Relu|tensor\(int4\)"):
        load_model(given)
    with pytest.raises(eqtune.errors.UnsupportedModelError, match=r"MatMulNBits .* another order \(g_idx\)"):
        load_model(nbits(4, 32, order=np.zeros(PLACES, np.int32)))
    node = helper.make_node("MatMulNBits", ["x", "x", "s"], ["y"], domain=DOMAIN, K=4, N=4, bits=4, block_size=16)
    with pytest.raises(eqtune.errors.UnsupportedModelError, match="MatMulNBits needs constant weights"):
        load_model(model([node], {"s": factors(4)}, (4, 4)))


@pytest.mark.skipif(not hasattr(P, "INT2"), reason="onnx knows no numbers of two bits")
@pytest.mark.parametrize("name", ["INT2", "UINT2"])
def test_weights_of_two_bits_are_those_of_onnx_runtime(name: str) -> None:
    numbers = [number % 4 - 2 * (name == "INT2") for number in range(32)]
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["weights"], axis=1),
        helper.make_node("MatMul", ["x", "weights"], ["y"]),
    ]
    proto = model(nodes, {"s": factors(4)}, (3, 8))
    kind = getattr(P, name)
    proto.graph.initializer.extend([helper.make_tensor("w", kind, [8, 4], numbers)])
    proto.graph.initializer.extend([helper.make_tensor("z", kind, [4], [1, 0, 1, 1])])
    proto.opset_import[0].version, proto.ir_version = 25, 13
    x = np.random.default_rng(0).standard_normal((3, 8)).astype("float32")
    imported = load_model(proto)
    assert imported.reference is not None
    (expected,) = imported.reference(x)  # ONNX Runtime itself rounds x to bytes, unless it is told not to
    (result,) = ModelRunner(build_executable(lower_to_kernels(imported.mod, TARGET), TARGET))(x)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
