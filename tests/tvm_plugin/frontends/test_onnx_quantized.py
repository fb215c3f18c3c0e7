"""Quantised ONNX operators give ONNX Runtime's integers, and multiply bytes."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

import eqtune
from eqtune.compile.executable import build_executable
from eqtune.frontends import load_model
from eqtune.frontends.verify import compare
from eqtune.runtime import ModelRunner
from eqtune.tasks import lower_to_kernels
from eqtune.transform import FakeQuantizationToInteger, FoldWeights, NarrowProducts

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.unoptimised
helper, P = onnx.helper, onnx.TensorProto
TYPES = {"uint8": P.UINT8, "int8": P.INT8, "int32": P.INT32}
TARGET = tvm.target.Target("llvm")


def proto(kind: str, left: str, right: str, per_channel: bool, result: str, zeros: tuple[int, int] = (5, 0)) -> Any:
    """One node. Weights of odd scale; results that fill the range of their dtype."""
    rng = np.random.default_rng(0)
    limits = np.iinfo(right)
    conv = "Conv" in kind
    shape, out = ((12, 8, 3, 3), [1, 12, 7, 7]) if conv else ((32, 20), [6, 20])
    weight = rng.integers(limits.min, limits.max, shape, right, endpoint=True)
    channels = shape[0 if conv else 1]
    w_scale = rng.uniform(0.001, 0.003, channels) if per_channel else np.array(0.002)
    tensors = {
        "w": weight,
        "x_zero": np.array(zeros[0], left),
        "w_zero": np.full(channels if per_channel else (), zeros[1], right),
        "x_scale": np.array(0.5, np.float32),
        "w_scale": w_scale.astype(np.float32),
        "y_scale": np.array(0.25, np.float32),
        "y_zero": np.array(3, result) if result != "int32" else np.array(0, np.int8),
        "bias": rng.integers(-2000, 2000, channels, np.int32),
    }
    names = {
        "QLinearConv": "x x_scale x_zero w w_scale w_zero y_scale y_zero bias",
        "QLinearMatMul": "x x_scale x_zero w w_scale w_zero y_scale y_zero",
        "ConvInteger": "x w x_zero w_zero",
        "MatMulInteger": "x w x_zero w_zero",
    }[kind].split()
    node = helper.make_node(kind, names, ["y"], **({"pads": [1, 1, 1, 1]} if conv else {}))
    graph = helper.make_graph(
        [node],
        "quantised",
        [helper.make_tensor_value_info("x", TYPES[left], [1, 8, 7, 7] if conv else [6, 32])],
        [helper.make_tensor_value_info("y", TYPES[result], out)],
        [onnx.numpy_helper.from_array(tensors[name], name) for name in names if name != "x"],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def multiplied(mod: Any) -> set[str]:
    """The dtypes of all operands of products."""
    found: set[str] = set()

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Call) and getattr(expr.op, "name", "") in ("relax.matmul", "relax.nn.conv2d"):
            found.update(str(arg.ty.dtype) for arg in expr.args)

    relax.analysis.post_order_visit(mod["main"], visit)
    return found


@pytest.mark.parametrize(
    ("kind", "left", "right", "per_channel", "result", "zeros"),
    [
        ("QLinearConv", "uint8", "int8", True, "uint8", (131, 0)),
        ("QLinearConv", "int8", "int8", True, "int8", (-7, 0)),
        ("QLinearConv", "uint8", "uint8", False, "uint8", (5, 120)),
        ("QLinearMatMul", "uint8", "int8", False, "uint8", (5, 0)),
        ("QLinearMatMul", "uint8", "uint8", False, "uint8", (131, 128)),
        ("QLinearMatMul", "int8", "int8", True, "int8", (-7, 0)),
        ("ConvInteger", "uint8", "uint8", False, "int32", (131, 128)),
        ("MatMulInteger", "uint8", "int8", False, "int32", (131, 3)),
        ("MatMulInteger", "int8", "int8", True, "int32", (-7, 0)),
    ],
)
def test_the_integers_are_those_of_onnx_runtime(
    kind: str, left: str, right: str, per_channel: bool, result: str, zeros: tuple[int, int]
) -> None:
    model = proto(kind, left, right, per_channel, result, zeros)
    limits = np.iinfo(left)
    shape = (1, 8, 7, 7) if "Conv" in kind else (6, 32)
    x = np.random.default_rng(1).integers(limits.min, limits.max, shape, left, endpoint=True)
    options = ort.SessionOptions()
    if left == "uint8":  # else sums end at 16 bits with AVX2 alone
        options.add_session_config_entry("session.x64quantprecision", "1")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    imported = tvm.transform.Sequential([FoldWeights()])(load_model(model).mod)
    narrow = NarrowProducts()(imported)
    assert multiplied(narrow) in ({"uint8"}, {"int8"}, {"uint8", "int8"})
    for mod in (imported, narrow):
        (actual,) = ModelRunner(build_executable(lower_to_kernels(mod, TARGET), TARGET))(x)
        np.testing.assert_array_equal(actual, expected)


def assert_one_node_equal(name: str, order: str, inputs: dict[str, Any], known: dict[str, Any], **options: Any) -> None:
    """That a node of ONNX Runtime's domain, with these constants, gives its integers."""
    kinds = {"bool": P.BOOL, "int8": P.INT8}
    shape = np.broadcast_shapes(*map(np.shape, (*inputs.values(), *known.values())))
    graph = helper.make_graph(
        [helper.make_node(name, order.split(), ["y"], domain="com.microsoft", **options)],
        "quantised",
        [helper.make_tensor_value_info(one, kinds[str(array.dtype)], array.shape) for one, array in inputs.items()],
        [helper.make_tensor_value_info("y", P.INT8, shape)],
        [onnx.numpy_helper.from_array(np.asarray(value), one) for one, value in known.items()],
    )
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    imported = load_model(helper.make_model(graph, opset_imports=domains, ir_version=8))
    narrow = tvm.transform.Sequential([FakeQuantizationToInteger(), FoldWeights()])(imported.mod)
    assert "quantize" not in narrow.script()
    (actual,) = ModelRunner(build_executable(lower_to_kernels(narrow, TARGET), TARGET))(*inputs.values())
    np.testing.assert_array_equal(actual, imported.reference(*inputs.values())[0])


def signed_bytes(*shape: int) -> Any:
    return np.random.default_rng(0).integers(-128, 127, shape, "int8", endpoint=True)


@pytest.mark.parametrize("kind", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize(("left", "right"), [((3, 5), (5,)), ((3, 5), ()), ((5,), (1,)), ((), ())])
def test_operands_may_be_vectors_and_numbers(kind: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    known = {"b": np.asarray(signed_bytes(*right)), "scale": np.float32(0.1), "zero": np.int8(3)}
    inputs = {"x": np.asarray(signed_bytes(*left))}
    assert_one_node_equal(kind, "x scale zero b scale zero scale zero", inputs, known)


@pytest.mark.parametrize(("opset", "axis"), [(12, 1), (12, -1), (13, 1), (13, -1)])
def test_softmax_is_along_one_axis_or_along_all_from_it_on(opset: int, axis: int) -> None:
    known = {"scale": np.float32(0.03), "zero": np.int8(7), "fine": np.float32(1 / 256), "low": np.int8(-128)}
    inputs = {"x": signed_bytes(2, 3, 5)}
    assert_one_node_equal("QLinearSoftmax", "x scale zero fine low", inputs, known, axis=axis, opset=opset)


def test_either_operand_is_chosen() -> None:
    known = {"b": signed_bytes(4, 1), "s": np.float32(0.1), "z": np.int8(3), "t": np.float32(0.07), "u": np.int8(-9)}
    inputs = {"c": np.array([True, False, True, False, False]), "x": signed_bytes(1, 5)}
    assert_one_node_equal("QLinearWhere", "c x s z b t u s u", inputs, known)


@pytest.mark.parametrize("values", [[0.0, 0.0], [0.5, 3.0], [-2.0, -0.5], [-1.0, 2.0]])
def test_the_range_is_what_there_is_and_zero(values: list[float]) -> None:
    helper = onnx.helper
    kinds = {"y": onnx.TensorProto.UINT8, "scale": onnx.TensorProto.FLOAT, "zero": onnx.TensorProto.UINT8}
    graph = helper.make_graph(
        [helper.make_node("DynamicQuantizeLinear", ["x"], list(kinds))],
        "range",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info(name, kind, [2] if name == "y" else []) for name, kind in kinds.items()],
    )
    imported = load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert imported.reference is not None
    array = np.array(values, "float32")
    results = ModelRunner(tvm.compile(imported.mod, "llvm"))(array)
    assert compare(results, imported.reference(array)) == (0, 0)


@pytest.mark.parametrize(("left", "right"), [((32,), (32, 20)), ((6, 32), (32,)), ((6, 32), (32, 20))])
def test_zero_points_of_one_element_add_no_axis(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, left, "uint8", endpoint=True)
    constants = {"w": rng.integers(-60, 60, right, "int8"), "z": np.array([131], "uint8"), "u": np.array([3], "int8")}
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w", "z", "u"], ["y"])],
        "sums",
        [helper.make_tensor_value_info("x", P.UINT8, left)],
        [helper.make_tensor_value_info("y", P.INT32, [*left[:-1], *right[1:]])],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    imported = load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert imported.reference is not None
    (actual,) = ModelRunner(tvm.compile(imported.mod, "llvm"))(x)
    np.testing.assert_array_equal(actual, imported.reference(x)[0])


def test_channels_last_is_refused_by_name() -> None:
    model = proto("QLinearConv", "uint8", "int8", False, "uint8")
    model.graph.node[0].domain = "com.microsoft"
    model.graph.node[0].attribute.append(helper.make_attribute("channels_last", 1))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(eqtune.UnsupportedModelError, match="QLinearConv with channels_last=1"):
        load_model(model)


def float_network() -> Any:
    """Convolutions (one depthwise), a residual, a concatenation, pooling and a dense layer."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (16, 3, 3, 3), "w2": (16, 1, 3, 3), "w3": (16, 16, 1, 1), "w4": (32, 10)}
    tensors = [
        onnx.numpy_helper.from_array((0.3 * rng.standard_normal(shape)).astype("float32"), name)
        for name, shape in [*shapes.items(), ("b1", (16,)), ("b2", (16,)), ("b3", (16,)), ("b4", (10,))]
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], pads=[1, 1, 1, 1], group=16),
        helper.make_node("Add", ["r1", "c2"], ["a"]),
        helper.make_node("MaxPool", ["a"], ["m"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["m", "w3", "b3"], ["c3"]),
        helper.make_node("Concat", ["m", "c3"], ["j"], axis=1),
        helper.make_node("GlobalAveragePool", ["j"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "w4", "b4"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("x", P.FLOAT, [1, 3, 16, 16])]
    outputs = [helper.make_tensor_value_info("y", P.FLOAT, [1, 10])]
    graph = helper.make_graph(nodes, "network", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module", params=["QDQ", "QOperator"])
def quantised(request: Any, tmp_path_factory: Any) -> Path:
    """The network as ONNX Runtime quantises it, in either of its formats."""
    quantization = pytest.importorskip("onnxruntime.quantization")

    class Calibration(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [{"x": image(seed)} for seed in range(4)]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    directory = tmp_path_factory.mktemp(request.param)
    onnx.save(float_network(), directory / "float.onnx")
    quantization.quantize_static(
        directory / "float.onnx",
        directory / "quantised.onnx",
        Calibration(),
        quant_format=quantization.QuantFormat[request.param],
        per_channel=True,
    )
    return Path(directory / "quantised.onnx")


def image(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((1, 3, 16, 16), np.float32)


def test_a_network_multiplies_bytes_and_gives_onnx_runtimes_results(quantised: Path) -> None:
    imported = load_model(quantised)
    narrow = tvm.transform.Sequential([FakeQuantizationToInteger(), FoldWeights(), NarrowProducts()])(imported.mod)
    # Signed activations, ONNX Runtime's default, are made unsigned where they are a QDQ model's own.
    assert multiplied(narrow) == ({"uint8", "int8"} if quantised.parent.name.startswith("QDQ") else {"int8"})
    run = ModelRunner(build_executable(lower_to_kernels(narrow, TARGET), TARGET))
    for seed in range(3):
        (expected,) = imported.reference(image(seed))
        (actual,) = run(image(seed))
        step = float(np.ptp(expected)) / 255
        assert np.abs(actual - expected).max() <= 2.1 * step


OLD = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}
"""A CPU that does not multiply bytes: products stay those of floats."""


@pytest.mark.parametrize(
    ("quantised", "target"),
    [
        ("QDQ", None),
        pytest.param("QOperator", OLD, marks=pytest.mark.skipif(platform.machine() != "x86_64", reason="not x86-64")),
    ],
    indirect=["quantised"],
)
def test_a_network_is_tuned(quantised: Path, tmp_path: Path, target: Any) -> None:
    result = eqtune.tune_model(quantised, target, trials=24, work_dir=tmp_path, graph="off", progress=False)
    assert result.latency_s <= result.baseline_latency_s
    assert result.max_rel_error <= 8 / 256
    assert sum(task.failed for task in result.tasks) == 0
    assert any("conv" in task.name and task.trials for task in result.tasks)
