"""ChannelsLast: the same outputs, and no transposes but at the network's ends."""

import gc

import numpy as np
import pytest
import tvm
from tvm import relax

from eqtune import zoo
from eqtune.runtime import ModelRunner
from eqtune.tasks import extract_tasks, lower_to_kernels
from eqtune.transform import ChannelsLast, FoldBatchNorm, FoldWeights
from eqtune.transform.apply_tuned import build_executable, untuned_executable
from eqtune.transform.constants import array_of, constant_of
from eqtune.transform.layout import _REORDERED, _reordered

op = relax.op
TARGET = tvm.target.Target("llvm")


def constant(*shape):
    return relax.const(np.random.default_rng(sum(shape)).standard_normal(shape).astype("float32"))


def function(shape, make):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(make(builder.emit, x))
        builder.emit_func_output(result)
    return builder.get()


def operators(mod):
    found = []
    relax.analysis.post_order_visit(
        mod["main"], lambda e: found.append(e) if isinstance(e, relax.Call) and hasattr(e.op, "name") else None
    )
    return [call.op.name.removeprefix("relax.") for call in found]


def layouts(mod):
    found = []
    relax.analysis.post_order_visit(
        mod["main"],
        lambda e: (
            found.append(str(e.attrs.data_layout))
            if "conv2d" in str(getattr(getattr(e, "op", ""), "name", ""))
            else None
        ),
    )
    return set(found)


def assert_same_outputs(before, after):
    assert relax.analysis.check_well_formed(after)
    tvm.ir.assert_structural_equal(after["main"].ret_ty, before["main"].ret_ty)
    shape = [int(extent) for extent in before["main"].params[0].ty.shape]
    data = np.random.default_rng(0).standard_normal(shape).astype("float32")
    want = ModelRunner(untuned_executable(before, TARGET))(data)
    got = ModelRunner(build_executable(lower_to_kernels(after, TARGET), TARGET))(data)
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def conv(emit, x, inputs, outputs, size=3, **options):
    y = emit(
        op.nn.conv2d(x, constant(outputs, inputs // options.get("groups", 1), size, size), padding=size // 2, **options)
    )
    return emit(op.add(y, constant(1, outputs, 1, 1)))


def classifier(emit, x):
    y = emit(op.clip(conv(emit, x, 3, 8, strides=2), 0, 6))
    y = emit(op.clip(conv(emit, y, 8, 8, groups=8), 0, 6))
    y = emit(op.nn.max_pool2d(y, (3, 3), strides=2, padding=1))
    left, right = conv(emit, y, 8, 4, 1), emit(op.nn.gelu_tanh(conv(emit, y, 8, 4)))
    y = emit(op.clip(emit(op.concat([left, right], 1)), 0, 6))
    y = emit(op.nn.adaptive_avg_pool2d(emit(op.nn.avg_pool2d(y, (2, 2))), (1, 1)))
    return emit(op.matmul(emit(op.reshape(y, (1, 8))), constant(8, 5)))


def test_a_classifier_keeps_one_transpose():
    before = function((1, 3, 16, 16), classifier)
    after = ChannelsLast()(before)
    assert layouts(after) == {"NHWC"}
    assert operators(after).count("permute_dims") == 1
    assert_same_outputs(before, after)


def test_flattening_before_a_linear_layer_costs_no_transpose():
    def network(emit, x):
        y = emit(op.nn.relu(conv(emit, x, 3, 8)))
        return emit(op.matmul(emit(op.reshape(y, (1, -1))), constant(8 * 4 * 6, 5)))

    before = function((1, 3, 4, 6), network)
    after = ChannelsLast()(before)
    assert operators(after).count("permute_dims") == 1
    assert_same_outputs(before, after)


def test_flattening_before_a_large_transposed_weight_costs_no_transpose_of_activations():
    def network(emit, x):
        y = emit(op.nn.relu(conv(emit, x, 3, 8)))
        return emit(op.matmul(emit(op.reshape(y, (1, -1))), emit(op.permute_dims(constant(1400, 8 * 4 * 6)))))

    before = function((1, 3, 4, 6), network)
    after = ChannelsLast()(before)
    assert operators(after).count("permute_dims") == 2  # of the image, and of the weight
    tasks = extract_tasks(lower_to_kernels(after, TARGET))
    assert sum("transpose" in task.name for task in tasks) == 1
    assert_same_outputs(before, after)


@pytest.mark.parametrize("keepdims", [True, False])
def test_reductions_follow_the_layout(keepdims):
    def network(emit, x):
        y = emit(op.clip(conv(emit, x, 3, 8), 0, 6))
        return emit(op.mean(y, [2, 3], keepdims=keepdims))

    before = function((1, 3, 4, 6), network)
    after = ChannelsLast()(before)
    assert operators(after).count("permute_dims") == 1
    assert_same_outputs(before, after)


def test_an_image_at_the_output_is_transposed_back():
    before = function((1, 3, 4, 6), lambda emit, x: emit(op.clip(conv(emit, x, 3, 8), 0, 6)))
    after = ChannelsLast()(before)
    assert operators(after).count("permute_dims") == 2
    assert_same_outputs(before, after)


def test_operators_without_a_layout_are_fenced_off():
    def network(emit, x):
        y = conv(emit, x, 3, 8)
        y = emit(op.cumsum(y, 3))
        return conv(emit, y, 8, 4)

    before = function((1, 3, 4, 6), network)
    after = ChannelsLast()(before)
    assert operators(after).count("permute_dims") <= 4
    assert_same_outputs(before, after)


def test_the_results_of_a_split_may_be_joined_as_they_are():
    def network(emit, x):
        y = emit(op.concat(emit(op.split(conv(emit, x, 3, 8), 2, axis=1)), axis=2))
        return conv(emit, emit(op.nn.relu(y)), 4, 4)

    before = function((1, 3, 4, 6), network)
    assert_same_outputs(before, ChannelsLast()(before))


def test_a_module_without_convolutions_is_returned_as_it_is():
    mod = function((4, 8), lambda emit, x: emit(op.matmul(x, constant(8, 8))))
    assert ChannelsLast()(mod).same_as(mod)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["squeezenet", "mobilenetv2", "resnet50", "resnext50", "inceptionv3", "vgg19", "nasneta"]
)
def test_zoo_transposes(model):
    mod = tvm.transform.Sequential([FoldBatchNorm(), FoldWeights(), ChannelsLast()])(zoo.relax(model))
    tasks = extract_tasks(lower_to_kernels(mod, TARGET))
    transposes = sum(task.calls for task in tasks if "transpose" in task.name)
    assert transposes == (2 if model == "nasneta" else 1)  # NasNet-A ends in an image
    assert layouts(mod) == {"NHWC"}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["squeezenet", "mobilenetv2"])
def test_zoo_outputs(model):
    before = tvm.transform.Sequential([FoldBatchNorm(), FoldWeights()])(zoo.relax(model))
    assert_same_outputs(before, ChannelsLast()(before))


def test_large_weights_are_reordered_once_while_they_are_in_use() -> None:
    first = constant_of(np.arange(2**18, dtype="float32").reshape(512, 512))
    second = constant_of(np.ones((512, 512), "float32"))
    order = (0, [8, 8, 8], [2, 0, 1])
    known = len(_REORDERED)
    once, again, other = (_reordered(weight, *order) for weight in (first, first, second))
    assert array_of(once).ctypes.data == array_of(again).ctypes.data
    expected = array_of(first).reshape(8, 8, 8, 512).transpose(2, 0, 1, 3).reshape(512, 512)
    np.testing.assert_array_equal(array_of(again), expected)
    np.testing.assert_array_equal(array_of(other), np.ones((512, 512)))
    assert len(_REORDERED) == known + 2
    del once, again, other
    gc.collect()
    assert len(_REORDERED) == known
