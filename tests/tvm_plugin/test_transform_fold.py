"""FoldBatchNorm and FoldWeights: same outputs, fewer operators, untouched signature."""

import numpy as np
import pytest
import tvm
from tvm import relax

from eqtune import zoo
from eqtune.transform import FoldBatchNorm, FoldWeights

pytestmark = pytest.mark.unoptimised

op = relax.op


def constant(*shape, low=-1.0, seed=0):
    return relax.const(np.random.default_rng(seed + sum(shape)).uniform(low, 1.0, shape).astype("float32"))


def function(inputs, make):
    """A module with one dataflow function over `inputs` (shapes)."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"input{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(inputs)]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(make(builder.emit, *params))
        builder.emit_func_output(result)
    return builder.get()


def operators(mod):
    names = []

    def visit(expr):
        if isinstance(expr, relax.Call) and hasattr(expr.op, "name"):
            names.append(expr.op.name.removeprefix("relax."))

    relax.analysis.post_order_visit(mod["main"], visit)
    return sorted(names)


def constants(mod):
    found = []
    relax.analysis.post_order_visit(
        mod["main"], lambda expr: found.append(expr) if isinstance(expr, tvm.ir.GenericConst) else None
    )
    return found


def run(mod, *arrays):
    mod = relax.transform.DecomposeOpsForInference()(mod)
    vm = relax.VirtualMachine(relax.build(mod, tvm.target.Target("llvm")), tvm.cpu())
    result = vm["main"](*[tvm.runtime.tensor(array) for array in arrays])
    return result.numpy() if hasattr(result, "numpy") else [part.numpy() for part in result]


def assert_equal(before, after):
    """The same signature, and the same outputs to 1e-5 of the largest value."""
    assert relax.analysis.check_well_formed(after)
    assert [p.name for p in after["main"].params] == [p.name for p in before["main"].params]
    tvm.ir.assert_structural_equal(after["main"].ret_ty, before["main"].ret_ty)
    rng = np.random.default_rng(7)
    arrays = []
    for param in before["main"].params:
        arrays.append(rng.standard_normal([int(extent) for extent in param.ty.shape]).astype("float32"))
    want, got = run(before, *arrays), run(after, *arrays)
    if not isinstance(want, list):
        want, got = [want], [got]
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def batch_norm(emit, x, channels, axis=1, training=False):
    statistics = [constant(channels, seed=s) for s in (1, 2, 3)] + [constant(channels, low=0.5)]
    return emit(op.nn.batch_norm(x, *statistics, axis=axis, epsilon=1e-3, training=training))[0]


def conv_bn(groups, bias):
    def make(emit, x):
        y = emit(op.nn.conv2d(x, constant(16, 8 // groups, 3, 3), padding=1, groups=groups))
        if bias:
            y = emit(op.add(y, emit(op.reshape(constant(16), (1, 16, 1, 1)))))
        return op.nn.relu(emit(batch_norm(emit, y, 16)))

    return make


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_batch_norm_goes_into_the_convolution(groups, bias):
    before = function([(1, 8, 6, 6)], conv_bn(groups, bias))
    after = FoldBatchNorm()(before)
    assert operators(after) == ["add", "nn.conv2d", "nn.relu"]
    assert_equal(before, after)


def test_batch_norm_goes_into_convolutions_of_one_and_three_dimensions_and_other_layouts():
    def make(emit, x, y, z):
        a = batch_norm(emit, emit(op.nn.conv1d(x, constant(4, 3, 3))), 4)
        b = batch_norm(emit, emit(op.nn.conv3d(y, constant(4, 3, 1, 1, 1))), 4)
        layouts = {"data_layout": "NHWC", "kernel_layout": "HWIO"}
        c = batch_norm(emit, emit(op.nn.conv2d(z, constant(1, 1, 3, 4), **layouts)), 4, axis=3)
        return relax.Tuple([emit(a), emit(b), emit(c)])

    before = function([(1, 3, 8), (1, 3, 2, 4, 4), (1, 4, 4, 3)], make)
    after = FoldBatchNorm()(before)
    assert operators(after) == ["add"] * 3 + ["nn.conv1d", "nn.conv2d", "nn.conv3d"]
    assert_equal(before, after)


def test_batch_norm_goes_into_a_linear_layer():
    def make(emit, x):
        y = emit(op.matmul(x, emit(op.permute_dims(constant(5, 8)))))
        return batch_norm(emit, emit(op.add(y, constant(5))), 5)

    before = function([(3, 8)], make)
    after = FoldBatchNorm()(before)
    assert operators(after) == ["add", "matmul"]
    assert_equal(before, after)


def test_batch_norm_alone_becomes_scale_and_shift():
    before = function([(2, 4, 5, 5)], lambda emit, x: batch_norm(emit, x, 4))
    after = FoldBatchNorm()(before)
    assert operators(after) == ["add", "multiply"]
    assert_equal(before, after)


def test_a_convolution_with_another_use_keeps_its_weights():
    def make(emit, x):
        y = emit(op.nn.conv2d(x, constant(4, 4, 1, 1)))
        return op.subtract(y, emit(batch_norm(emit, y, 4)))

    before = function([(1, 4, 5, 5)], make)
    after = FoldBatchNorm()(before)
    assert operators(after) == ["add", "multiply", "nn.conv2d", "subtract"]
    assert_equal(before, after)


def test_an_added_image_is_not_taken_for_a_bias():
    def make(emit, x):
        y = emit(op.nn.conv2d(x, constant(4, 4, 1, 1)))
        return batch_norm(emit, emit(op.add(y, constant(1, 4, 5, 5))), 4)

    before = function([(1, 4, 5, 5)], make)
    after = FoldBatchNorm()(before)
    assert operators(after) == ["add", "add", "multiply", "nn.conv2d"]
    assert_equal(before, after)


def test_a_constant_that_adds_an_axis_is_not_taken_for_a_bias():
    """The channels of the sum lie on the axis of the product's rows."""

    def make(emit, x):
        y = emit(op.matmul(x, constant(8, 4)))
        return batch_norm(emit, emit(op.add(y, constant(1, 4, 1))), 4)

    before = function([(4, 8)], make)
    after = FoldBatchNorm()(before)
    assert operators(after) == ["add", "add", "matmul", "multiply"]
    assert_equal(before, after)


def test_what_is_added_to_a_tensor_of_unknown_sizes_is_read():
    x = relax.Var("x", relax.TensorType(None, "float32", ndim=2))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(op.add(x, constant(4)))
            result = builder.emit_output(batch_norm(builder.emit, y, 4))
        builder.emit_func_output(result)
    after = FoldBatchNorm()(builder.get())
    assert relax.analysis.check_well_formed(after)
    assert operators(after) == ["add", "add", "multiply"]


def test_whole_weights_are_not_scaled():
    def make(emit, x):
        weight = relax.const(np.random.default_rng(0).integers(-9, 9, (8, 4), "int8"))
        whole = emit(op.astype(emit(op.multiply(x, relax.const(10.0))), "int8"))
        return batch_norm(emit, emit(op.matmul(whole, weight, out_dtype="float32")), 4)

    before = function([(3, 8)], make)
    assert_equal(before, FoldBatchNorm()(before))


def test_a_batch_norm_that_another_block_reads_stays():
    """What it normalises is known in its own block alone."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 4, 5, 5), "float32"))
    statistics = [constant(4, low=0.5, seed=seed) for seed in range(4)]
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(op.nn.relu(x))
            normal = builder.emit_output(op.nn.batch_norm(y, *statistics, axis=1, training=False))
        builder.emit_func_output(builder.emit(normal[0]))
    before = builder.get()
    assert_equal(before, FoldBatchNorm()(before))


def test_training_and_variable_statistics_stay():
    def training(emit, x):
        return batch_norm(emit, x, 4, training=True)

    def variable(emit, x, mean):
        ones = constant(4, low=0.5)
        return emit(op.nn.batch_norm(x, ones, ones, mean, ones, axis=1, training=False))[0]

    for before in (function([(1, 4, 5, 5)], training), function([(1, 4, 5, 5), (4,)], variable)):
        tvm.ir.assert_structural_equal(FoldBatchNorm()(before), before)


def test_weight_only_work_is_done_once():
    def make(emit, x):
        left, right = constant(3, 8), constant(5, 8)
        weight = emit(op.permute_dims(emit(op.concat([left, emit(op.multiply(right, relax.const(2.0)))], 0))))
        halves = emit(op.split(emit(op.exp(constant(16))), 2, 0))
        return emit(op.add(emit(op.matmul(x, weight)), emit(halves[1])))

    before = function([(4, 8)], make)
    after = FoldWeights()(before)
    assert operators(after) == ["add", "matmul"]
    assert_equal(before, after)


def test_a_large_weight_that_a_product_reads_transposed_is_not_copied():
    stored = constant(600, 512)

    def make(emit, x):
        return op.matmul(x, emit(op.permute_dims(stored)))

    before = function([(2, 512)], make)
    after = FoldWeights()(before)
    assert operators(after) == ["matmul", "permute_dims"]
    assert constants(after)[0].value.same_as(constants(before)[0].value)
    assert operators(FoldWeights(transposes=True)(before)) == ["matmul"]
    assert_equal(before, after)


def test_what_a_product_reads_transposed_is_folded_up_to_the_transpose():
    def make(emit, x):
        return op.matmul(x, emit(op.permute_dims(emit(op.multiply(constant(600, 512), relax.const(2.0))))))

    before = function([(2, 512)], make)
    after = FoldWeights()(before)
    assert operators(after) == ["matmul", "permute_dims"]
    assert_equal(before, after)


@pytest.mark.parametrize("reader", ["activation", "left operand", "vector", "output", "small"])
def test_transposes_that_something_else_reads_too_are_folded(reader):
    def make(emit, x):
        weight = emit(op.permute_dims(constant(6 if reader == "small" else 600, 512)))
        if reader == "vector":
            return op.matmul(emit(op.reshape(x, (512,))), weight)
        if reader == "left operand":
            return op.matmul(weight, emit(op.broadcast_to(x, (600, 512))))
        product = emit(op.matmul(x, weight))
        if reader == "activation":
            return op.add(emit(op.multiply(weight, emit(op.reshape(x, (512, 1))))), product)
        return relax.Tuple([product, weight]) if reader == "output" else product

    before = function([(1, 512)], make)
    after = FoldWeights()(before)
    assert "permute_dims" not in operators(after)
    assert_equal(before, after)


def test_outputs_that_are_weights_fold_too():
    def make(emit, x):
        return relax.Tuple([emit(op.nn.relu(x)), emit(op.negative(constant(3)))])

    before = function([(2,)], make)
    after = FoldWeights()(before)
    assert operators(after) == ["nn.relu"]
    assert_equal(before, after)


def test_a_scalar_is_not_stored_as_an_image():
    def make(emit, x):
        image = emit(op.broadcast_to(relax.const(2.0), (1, 64, 56, 56)))
        return op.add(x, emit(op.multiply(image, relax.const(3.0))))

    before = function([(1, 64, 56, 56)], make)
    after = FoldWeights()(before)
    assert max(int(np.prod(c.value.shape)) for c in constants(after)) == 1
    assert_equal(before, after)


def test_a_choice_that_weights_make_for_all_elements_is_none():
    def make(emit, x, y):
        rows = op.greater(constant(4, 1, low=0.5), relax.const(0.0))
        some = relax.const(np.eye(4, dtype="bool"))
        kept = emit(op.where(emit(rows), emit(op.nn.relu(x)), y))
        again = emit(op.where(emit(rows), kept, y))
        return op.where(some, again, y)

    before = function([(4, 4), (4, 4)], make)
    after = FoldWeights()(before)
    assert operators(after) == ["nn.relu", "where"]
    assert_equal(before, after)


def test_what_changes_nothing_is_left_out():
    def make(emit, x):
        one, ones, zeros = (
            relax.const(1.0),
            relax.const(np.ones((1, 4), "float32")),
            relax.const(np.zeros(4, "float32")),
        )
        y = emit(op.divide(emit(op.sigmoid(x)), emit(op.add(one, zeros))))
        y = emit(op.subtract(emit(op.multiply(ones, emit(op.add(zeros, y)))), relax.const(0.0)))
        z = emit(op.subtract(zeros, emit(op.multiply(y, relax.const(2.0)))))
        return op.add(z, emit(op.divide(one, emit(op.multiply(y, relax.const(np.ones((3, 1, 4), "float32")))))))

    before = function([(4, 4)], make)
    after = FoldWeights()(before)
    assert operators(after) == ["add", "divide", "multiply", "multiply", "sigmoid", "subtract"]
    assert_equal(before, after)


def test_operators_that_numpy_lacks_stay():
    def make(emit, x):
        weight = emit(op.nn.log_softmax(emit(op.negative(constant(6, 6)))))
        return op.matmul(x, weight)

    before = function([(2, 6)], make)
    after = FoldWeights()(before)
    assert operators(after) == ["matmul", "nn.log_softmax"]
    assert_equal(before, after)


def test_branches_and_other_functions_survive():
    builder = relax.BlockBuilder()
    flag = relax.Var("flag", relax.TensorType((), "bool"))
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    with builder.function("main", [flag, x]):
        weight = builder.emit(op.exp(constant(3)))
        yes = relax.SeqExpr([], x)
        branch = relax.If(flag, relax.SeqExpr([], weight), yes)
        builder.emit_func_output(builder.emit(branch))
    with builder.function("other", [x.copy() if hasattr(x, "copy") else relax.Var("y", x.ty)]):
        builder.emit_func_output(builder.emit(op.negative(constant(3))))
    after = FoldWeights()(builder.get())
    assert relax.analysis.check_well_formed(after)
    vm = relax.VirtualMachine(relax.build(after, tvm.target.Target("llvm")), tvm.cpu())
    data = np.ones(3, "float32")
    got = vm["main"](tvm.runtime.tensor(np.array(True)), tvm.runtime.tensor(data)).numpy()
    np.testing.assert_allclose(got, np.exp(constant(3).value.numpy()), rtol=1e-6)
    np.testing.assert_allclose(vm["other"](tvm.runtime.tensor(data)).numpy(), -constant(3).value.numpy())


def test_both_work_in_a_sequential_and_show_their_names():
    seen = []

    @tvm.ir.instrument.pass_instrument
    class Names:
        def run_before_pass(self, _mod, info):
            seen.append(info.name)

    mod = function([(1, 8, 6, 6)], conv_bn(1, True))
    with tvm.transform.PassContext(instruments=[Names()]):
        tvm.transform.Sequential([FoldBatchNorm(), FoldWeights()])(mod)
    assert {"FoldBatchNorm", "FoldWeights"} <= set(seen)


def test_the_input_module_is_not_changed():
    mod = function([(1, 8, 6, 6)], conv_bn(1, True))
    text = mod.script()
    FoldWeights()(FoldBatchNorm()(mod))
    assert mod.script() == text


@pytest.mark.slow
@pytest.mark.parametrize("model", zoo.names())
def test_every_model_loses_its_batch_norms(model):
    after = FoldWeights()(FoldBatchNorm()(zoo.relax(model)))
    left = set(operators(after))
    assert "nn.batch_norm" not in left
    assert relax.analysis.check_well_formed(after)
