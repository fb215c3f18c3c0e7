"""ChannelsLast: the same outputs, and no transposes but at the network's ends."""

import gc

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

from eqtune import zoo
from eqtune.compile.executable import build_executable
from eqtune.compile.untuned import untuned_executable
from eqtune.relax_ir.constants import array_of, constant_of
from eqtune.runtime import ModelRunner
from eqtune.tasks import extract_tasks, lower_to_kernels
from eqtune.transform import ChannelsLast, FoldBatchNorm, FoldWeights, SimplifyShapes
from eqtune.transform.layout import _REORDERED, _reordered

pytestmark = pytest.mark.unoptimised

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


@pytest.mark.parametrize(
    "follow",
    [
        lambda y: op.nn.softmax(y, 1),
        lambda y: op.nn.log_softmax(y, -3),
        lambda y: op.nn.prelu(y, constant(8), 1),
        lambda y: op.nn.group_norm(y, constant(8), constant(8), 4, 1, [2, 3]),
        lambda y: op.nn.instance_norm(y, constant(8), constant(8), 1, [2, 3]),
        lambda y: op.nn.layer_norm(y, constant(6), constant(6), [-1]),
        lambda y: op.image.resize2d(y, (8, 9), layout="NCHW"),
        lambda y: op.strided_slice(y, axes=[1, -1], begin=[2, 0], end=[6, 6], strides=[1, 2]),
        lambda y: op.where(op.greater(y, constant(1, 8, 1, 1)), y, op.multiply(y, relax.const(0.5, "float32"))),
        lambda y: op.argmax(y, 1),
        lambda y: op.nn.pad(y, [0, 0, 1, 2, 0, 3, 1, 0]),
        lambda y: op.squeeze(op.max(y, -3, keepdims=True), [-3]),
    ],
    ids=[
        *(
            "softmax",
            "log_softmax",
            "prelu",
            "group_norm",
            "instance_norm",
            "layer_norm",
            "resize",
            "slice",
        ),
        *("where", "argmax", "pad", "squeeze"),
    ],
)
def test_operators_of_images_follow_the_layout(follow):
    before = function((1, 3, 4, 6), lambda emit, x: emit(follow(conv(emit, x, 3, 8))))
    after = ChannelsLast()(before)
    image = before["main"].ret_ty.ndim == 4
    assert operators(after).count("permute_dims") == 1 + image
    assert_same_outputs(before, after)


def shuffled_channels(emit, x):
    y = emit(op.reshape(conv(emit, x, 3, 8), (1, 2, 4, 4, 6)))
    return emit(op.reshape(emit(op.permute_dims(y, [0, 2, 1, 3, 4])), (1, 8, 4, 6)))


def shuffled_pixels(emit, x):
    y = emit(op.reshape(conv(emit, x, 3, 32), (1, 8, 2, 2, 4, 6)))
    return emit(op.reshape(emit(op.permute_dims(y, [0, 1, 4, 2, 5, 3])), (1, 8, 8, 12)))


@pytest.mark.parametrize("shuffled", [shuffled_channels, shuffled_pixels])
def test_a_shuffle_of_channels_or_pixels_is_one_transpose(shuffled):
    before = function((1, 3, 4, 6), lambda emit, x: emit(op.nn.relu(conv(emit, shuffled(emit, x), 8, 4))))
    after = ChannelsLast()(before)
    assert operators(after).count("permute_dims") == 3  # with those of the input and the output
    assert_same_outputs(before, after)


def test_the_pixels_of_an_image_are_tokens_without_a_transpose():
    def network(emit, x):
        tokens = emit(op.permute_dims(emit(op.reshape(conv(emit, x, 3, 8), (1, 8, 24))), [0, 2, 1]))
        return emit(op.matmul(tokens, constant(8, 5)))

    before = function((1, 3, 4, 6), network)
    after = ChannelsLast()(before)
    assert operators(after).count("permute_dims") == 1
    assert_same_outputs(before, after)


def test_images_that_come_from_elsewhere_are_transposed_once():
    def network(emit, x):
        skip = emit(op.cumsum(x, 3))  # has no layout of its own
        y = emit(op.add(skip, conv(emit, skip, 8, 8)))
        y = emit(op.add(y, conv(emit, y, 8, 8)))
        return emit(op.mean(emit(op.add(y, conv(emit, y, 8, 8))), [2, 3]))

    before = function((1, 8, 4, 6), network)
    after = ChannelsLast()(before)
    assert operators(after).count("permute_dims") == 1
    assert_same_outputs(before, after)


def test_a_large_image_is_not_transposed_for_a_small_one():
    def network(emit, x):
        small = conv(emit, emit(op.mean(x, [2, 3], keepdims=True)), 8, 8, 1)
        return emit(op.multiply(x, emit(op.sigmoid(small))))

    before = function((1, 8, 4, 6), network)
    after = ChannelsLast()(before)
    assert operators(after).count("permute_dims") == 0
    assert_same_outputs(before, after)


def test_stacked_images_are_fenced_off():
    def network(emit, x):
        y = conv(emit, x, 3, 8)
        y = emit(op.stack([y, emit(op.nn.relu(y))], 0))
        return emit(op.multiply(y, y))

    before = function((1, 3, 4, 6), network)
    assert_same_outputs(before, ChannelsLast()(before))


def test_branches_have_images_of_their_own():
    @tvm.script.ir_module
    class Branches:
        @R.function
        def main(
            x: R.Tensor((1, 3, 4, 6), "float32"), w: R.Tensor((3, 3, 1, 1), "float32"), which: R.Tensor((), "bool")
        ):
            first = R.nn.conv2d(x, w)
            if which:
                y = R.nn.conv2d(x, w)
            else:
                z = R.nn.conv2d(x, w)
                y = R.nn.relu(z)
            return R.add(first, y)

    after = ChannelsLast()(Branches)
    assert relax.analysis.check_well_formed(after)
    assert layouts(after) == {"NHWC"}
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in ((1, 3, 4, 6), (3, 3, 1, 1))]
    # TVM's own build of `after` ends the process: what one branch allocates is used behind the other.
    tuned = build_executable(lower_to_kernels(after, TARGET), TARGET)
    executables = [untuned_executable(Branches, TARGET), untuned_executable(after, TARGET), tuned]
    for which in (True, False):
        given = [tvm.runtime.tensor(array) for array in (*arrays, np.array(which))]
        want, *others = (relax.VirtualMachine(one, tvm.cpu())["main"](*given).numpy() for one in executables)
        for got in others:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_blocks_do_not_read_the_images_of_others():
    """What is sorted between them keeps the dataflow blocks apart."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 3, 4, 6), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            first = builder.emit_output(op.nn.conv2d(x, constant(8, 3, 3, 3), padding=1))
        middle = builder.emit(op.sort(first))
        with builder.dataflow():
            image = builder.emit(op.nn.relu(first))
            again = builder.emit(op.add(middle, builder.emit(op.nn.conv2d(x, constant(8, 3, 1, 1)))))
            result = builder.emit_output(op.add(image, again))
        builder.emit_func_output(result)
    before = builder.get()
    after = ChannelsLast()(before)
    assert layouts(after) == {"NHWC"}
    assert_same_outputs(before, after)


def test_what_another_block_transposed_is_transposed_back():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 6), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            first = builder.emit_output(op.permute_dims(builder.emit(op.nn.relu(x))))
        builder.emit_func_output(builder.emit(op.permute_dims(first)))
    before = builder.get()
    assert_same_outputs(before, SimplifyShapes()(before))


def test_a_cache_of_no_words_is_moved_as_it_is():
    """Relax takes a 0 among the extents of a reshape for the extent that was there."""

    def network(emit, x):
        none = emit(op.strided_slice(x, [2], [0], [0]))
        turned = [emit(op.permute_dims(part, [0, 2, 1, 3])) for part in (none, x)]
        flat = emit(op.expand_dims(emit(op.squeeze(none, [1])), 2))
        return emit(op.concat([flat, *turned], 1))

    mod = SimplifyShapes()(function((1, 1, 2, 8), network))
    data = np.random.default_rng(0).standard_normal((1, 1, 2, 8)).astype("float32")
    (result,) = ModelRunner(build_executable(lower_to_kernels(mod, TARGET), TARGET))(data)
    np.testing.assert_array_equal(result, data.transpose(0, 2, 1, 3))


def test_what_a_block_of_a_branch_transposed_is_transposed_back():
    @tvm.script.ir_module
    class Branches:
        @R.function
        def main(x: R.Tensor((4, 6), "float32"), which: R.Tensor((), "bool")):
            turned = R.permute_dims(x)
            if which:
                with R.dataflow():
                    positive = R.nn.relu(x)
                    y = R.permute_dims(positive)
                    R.output(y)
                z = R.permute_dims(y)
            else:
                z = R.nn.relu(x)
            return R.multiply(R.permute_dims(turned), z)

    assert relax.analysis.check_well_formed(SimplifyShapes()(Branches))


def test_one_row_of_an_image_is_taken_by_a_number():
    """Which is no tensor."""
    before = function((1, 3, 4, 6), lambda emit, x: op.take(conv(emit, x, 3, 8), relax.prim_value(1), 2))
    assert_same_outputs(before, ChannelsLast()(before))


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
    gc.collect()  # what other tests left
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
