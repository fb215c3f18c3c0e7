"""Models become few fused kernels, with nothing silly left, and the same outputs."""

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx, topi

from eqtune import zoo
from eqtune.compile.executable import build_executable
from eqtune.compile.untuned import untuned_executable
from eqtune.gpu_machine import resolve_target
from eqtune.relax_ir.kernels import is_scheduled
from eqtune.runtime import ModelRunner
from eqtune.search.space.expressions import nodes_of
from eqtune.tasks import count_bytes, count_flops, count_integer_operations, extract_tasks, lower_to_kernels
from eqtune.tasks.concat import _parts
from eqtune.transform import FoldBatchNorm, FoldWeights

pytestmark = pytest.mark.unoptimised

op = relax.op
TARGET = tvm.target.Target("llvm")


def constant(*shape, seed=0):
    return relax.const(np.random.default_rng(sum(shape) + seed).standard_normal(shape).astype("float32"))


def function(shape, make):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(make(builder.emit, x))
        builder.emit_func_output(result)
    return builder.get()


def lower(mod):
    mod = tvm.transform.Sequential([FoldBatchNorm(), FoldWeights()])(mod)
    return mod, lower_to_kernels(mod, TARGET)


def names(kernels):
    return sorted(task.name for task in extract_tasks(kernels) for _ in range(task.calls))


def assert_same_outputs(mod, kernels):
    shape = [int(extent) for extent in mod["main"].params[0].ty.shape]
    data = np.random.default_rng(0).standard_normal(shape).astype("float32")
    want = ModelRunner(untuned_executable(mod, TARGET))(data)
    got = ModelRunner(build_executable(kernels, TARGET))(data)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def attention(emit, x):
    def linear(y, width, columns, seed=0):
        product = emit(op.matmul(y, emit(op.permute_dims(constant(columns, width, seed=seed)))))
        return emit(op.add(product, constant(columns, seed=seed)))

    def heads(y):
        return emit(op.permute_dims(emit(op.reshape(y, (1, 16, 2, 16))), [0, 2, 1, 3]))

    q, k, v = (heads(linear(x, 32, 32, seed)) for seed in range(1, 4))
    scores = emit(op.multiply(emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2])))), relax.const(0.25)))
    mixed = emit(op.matmul(emit(op.nn.softmax(scores, -1)), v))
    joined = emit(op.reshape(emit(op.permute_dims(mixed, [0, 2, 1, 3])), (1, 16, 32)))
    y = emit(op.add(x, linear(joined, 32, 32)))
    y = emit(op.nn.layer_norm(y, constant(32), constant(32), [-1], 1e-5))
    return linear(emit(op.nn.gelu(linear(y, 32, 64))), 64, 32)


def test_transformer_block():
    mod, kernels = lower(function((1, 16, 32), attention))
    plain = sorted(name.rstrip("0123456789") for name in names(kernels))
    assert plain == sorted(
        [
            *["matmul_add"] * 4,  # Q, K, V, and the last layer
            *["matmul_add_gelu", "matmul_multiply", "matmul", "matmul_add_add", "softmax", "layer_norm"],
            "reshape_transpose",  # of K, whose rows become columns
        ]
    )
    assert_same_outputs(mod, kernels)


def swap(emit, y, order):
    return emit(op.permute_dims(y, order))


def square(emit, x):
    heads = swap(emit, x, [0, 2, 1, 3])
    return op.matmul(heads, heads)


def transposed_rows(emit, x):
    return op.matmul(swap(emit, x, [0, 2, 1]), x)


def one_place_for_all(emit, x):
    return op.matmul(swap(emit, x, [2, 1, 0, 3]), constant(2, 1, 5, 6))


def fewer_axes(emit, x):
    return op.matmul(swap(emit, x, [1, 0, 2]), constant(4, 1, 5, 6))


def permuted_result(emit, x):
    return op.nn.relu(swap(emit, emit(op.matmul(swap(emit, x, [1, 0, 2]), constant(5, 7))), [1, 0, 2]))


def operand_read_by_others(emit, x):
    y = swap(emit, x, [1, 0, 2])
    return op.add(emit(op.matmul(y, constant(2, 5, 5))), y)


def result_read_by_others(emit, x):
    y = emit(op.matmul(x, constant(3, 5, 5)))
    return op.add(y, swap(emit, y, [1, 0, 2]))


@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        (square, (2, 5, 3, 5), ["matmul"]),
        (one_place_for_all, (4, 3, 1, 5), ["matmul"]),
        (fewer_axes, (3, 2, 5), ["matmul"]),
        (permuted_result, (2, 6, 5), ["matmul_relu"]),
        (transposed_rows, (2, 6, 5), ["matmul", "transpose"]),
        (operand_read_by_others, (3, 2, 5), ["matmul_add", "transpose"]),
        (result_read_by_others, (3, 3, 5), ["matmul", "transpose_add"]),
    ],
)
def test_products_read_and_write_permuted_tensors(make, shape, expected):
    mod, kernels = lower(function(shape, make))
    assert names(kernels) == expected
    assert_same_outputs(mod, kernels)


def test_a_batch_of_none_times_one_is_none():
    def make(emit, x):
        return op.matmul(swap(emit, x, [2, 1, 0, 3]), constant(0, 3, 4, 5))

    _, kernels = lower(function((2, 3, 1, 4), make))
    assert [int(extent) for extent in kernels["matmul"].params[-1].shape] == [0, 3, 2, 5]


def test_attention_of_a_single_vector_is_no_attention_of_rows():
    def weighted(emit, x):
        scores = emit(op.matmul(x, constant(8, 40)))
        return op.matmul(emit(op.nn.softmax(scores)), constant(40, 16))

    assert_same_outputs(*lower(function((8,), weighted)))


def test_attention_of_no_rows_is_products():
    def weighted(emit, x):
        scores = emit(op.matmul(x, constant(8, 40)))
        return op.matmul(emit(op.nn.softmax(scores)), constant(40, 16))

    _, kernels = lower(function((0, 8), weighted))
    assert not any("attention" in variable.name_hint for variable in kernels.functions)


def test_a_permuted_product_over_an_open_size_stays_apart():
    n = tirx.Var("n", "int64")
    x, y = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in (("x", (2, 4, n)), ("y", (2, n, 3))))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y]):
        with builder.dataflow():
            result = builder.emit_output(op.permute_dims(builder.emit(op.matmul(x, y)), [1, 0, 2]))
        builder.emit_func_output(result)
    kernels = lower_to_kernels(builder.get(), TARGET)
    assert {variable.name_hint for variable in kernels.functions} == {"main", "matmul", "transpose"}


def test_products_do_not_read_what_another_block_permuted():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 5, 3, 5), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            heads = builder.emit_output(op.permute_dims(builder.emit(op.nn.relu(x)), [0, 2, 1, 3]))
        builder.emit_func_output(builder.emit(op.matmul(heads, heads)))
    mod, kernels = lower(builder.get())
    assert relax.analysis.check_well_formed(kernels)
    assert_same_outputs(mod, kernels)


def residual(emit, x):
    def conv_bn(y, channels, size, groups=1):
        width = int(y.ty.shape[1])
        y = emit(op.nn.conv2d(y, constant(channels, width // groups, size, size), padding=size // 2, groups=groups))
        norm = (relax.const(np.linspace(a, a + 1, channels, dtype="float32")) for a in (0.5, -1, 2, 3))
        return emit(emit(op.nn.batch_norm(y, *norm, 1, training=False))[0])

    y = emit(op.nn.relu(conv_bn(x, 8, 3)))
    y = emit(op.clip(conv_bn(y, 8, 3, groups=8), 0, 6))
    y = emit(op.nn.relu(emit(op.add(conv_bn(y, 8, 1), x))))
    y = emit(op.nn.adaptive_avg_pool2d(y, (1, 1)))
    return emit(op.reshape(y, (1, 8)))


def test_residual_block_has_one_kernel_a_convolution_and_reshapes_for_free():
    mod, kernels = lower(function((1, 8, 6, 6), residual))
    assert names(kernels) == ["adaptive_avg_pool2d", "conv2d_add_add_relu", "conv2d_add_clip", "conv2d_add_relu"]
    assert_same_outputs(mod, kernels)


def test_slices_of_a_split_fuse_into_what_reads_them():
    def gate(emit, x):
        parts = emit(op.split(x, 2, 1))
        return op.multiply(emit(op.sigmoid(emit(parts[0]))), emit(op.tanh(emit(parts[1]))))

    mod, kernels = lower(function((4, 8), gate))
    assert len(names(kernels)) == 1
    assert_same_outputs(mod, kernels)


def steps_of_a_row(count, width):
    """Products of the rows of x, one after another: each reads a row, and what the last one gave."""

    def make(emit, x):
        y = constant(1, width)
        for t in range(count):
            row = emit(op.squeeze(emit(op.strided_slice(x, [0], [t], [t + 1])), [0]))
            y = emit(op.add(emit(op.matmul(y, constant(width, width))), row))
        return y

    return function((count, 1, width), make)


@pytest.mark.parametrize(("count", "joined"), [(3, 0), (8, 1), (67, 1), (70, 2)])
def test_small_slices_of_one_tensor_are_made_together(count, joined):
    mod, kernels = lower(steps_of_a_row(count, 16))
    assert sum(name.startswith("slices") for name in names(kernels)) == joined
    assert len(extract_tasks(kernels)) <= (3 if joined == 0 else 1) + joined + 3
    assert_same_outputs(mod, kernels)


def test_slices_are_joined_within_their_dataflow_block():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((8, 1, 16), "float32"))
    with builder.function("main", [x]):
        sums = []
        for begin in (0, 4):
            with builder.dataflow():
                rows = [builder.emit(op.strided_slice(x, [0], [t], [t + 1])) for t in range(begin, begin + 4)]
                products = [builder.emit(op.matmul(row, constant(16, 16))) for row in rows]
                sums.append(builder.emit_output(op.concat(products, axis=0)))
            sums[-1] = builder.emit(op.sort(sums[-1]))  # between the blocks, which are one otherwise
        builder.emit_func_output(relax.Tuple(sums))
    mod, kernels = lower(builder.get())
    assert sum(name.startswith("slices") for name in names(kernels)) == 2
    assert_same_outputs(mod, kernels)


def stacked_rows(count, width, axis=0, join=op.stack):
    """The steps of a chain, stacked or concatenated, as a recurrent layer returns them."""

    def make(emit, x):
        values = [x]
        for _ in range(count - 1):
            values.append(emit(op.tanh(emit(op.matmul(values[-1], constant(width, width))))))
        return emit(join(values, axis))

    return function((2, width), make)


@pytest.mark.parametrize(
    ("join", "count", "axis", "copying"),
    [
        *((op.stack, 3, 0, 0), (op.stack, 8, 1, 1), (op.stack, 64, 0, 1), (op.stack, 65, 0, 1), (op.stack, 130, 2, 2)),
        *((op.concat, 31, 1, 0), (op.concat, 32, 0, 1), (op.concat, 130, 1, 2)),
    ],
)
def test_many_small_tensors_are_joined_by_copies(join, count, axis, copying):
    mod, kernels = lower(stacked_rows(count, 16, axis, join))
    assert sum('"stack_0"' in str(kernels[task.name]) for task in extract_tasks(kernels)) == copying
    assert max(len(kernels[task.name].params) for task in extract_tasks(kernels)) <= 65
    assert_same_outputs(mod, kernels)


def test_statements_of_a_stack_grow_with_its_parts_not_with_their_square():
    """TVM's stack of 300 parts is a choice of 300 for each element, inlined into whatever reads it."""

    def most_nested(count):
        _, kernels = lower(stacked_rows(count, 16))
        return max(str(kernels[task.name]).count("if_then_else") for task in extract_tasks(kernels))

    assert most_nested(40) == 0
    assert most_nested(200) <= 4


def test_large_tensors_are_stacked_as_tvm_does():
    def stack(emit, x):
        return emit(op.stack([emit(op.tanh(x)), x, x, emit(op.exp(x))], 0))

    mod, kernels = lower(function((4, 20_000), stack))
    assert "stack" not in names(kernels)
    assert_same_outputs(mod, kernels)


def test_the_untuned_model_stacks_hundreds_of_tensors_by_copies():
    """LLVM took most of 20 s for the kernel of an LSTM of 200 steps; an ordinary stack stays TVM's."""
    for count in (8, 80):
        mod = stacked_rows(count, 16)
        x = np.random.default_rng(0).standard_normal((2, 16)).astype("float32")
        executable = untuned_executable(mod, TARGET)
        (got,) = ModelRunner(executable)(x)
        assert got.shape == (count, 2, 16)
        np.testing.assert_array_equal(got[0], x)
        weights = constant(16, 16).value.numpy()
        np.testing.assert_allclose(got[1:], np.tanh(got[:-1] @ weights), rtol=1e-4, atol=1e-5)


def test_large_slices_stay_apart():
    def products(emit, x):
        rows = [emit(op.strided_slice(x, [0], [t], [t + 1])) for t in range(4)]
        return emit(op.concat([emit(op.matmul(row, constant(20_000, 2))) for row in rows], axis=0))

    mod, kernels = lower(function((4, 20_000), products))
    assert "slices" not in names(kernels)
    assert_same_outputs(mod, kernels)


def test_the_gate_of_an_image_is_computed_apart():
    """Squeeze and excitation: one kernel of both would have tiles as large as the image."""

    def gated(emit, x):
        mean = emit(op.mean(x, [2, 3], keepdims=True))
        gate = emit(op.sigmoid(emit(op.add(emit(op.nn.conv2d(mean, constant(16, 16, 1, 1))), constant(1, 16, 1, 1)))))
        return emit(op.multiply(x, gate))

    mod, kernels = lower(function((1, 16, 12, 12), gated))
    assert names(kernels) == ["conv2d_add_sigmoid", "mean", "multiply"]
    assert_same_outputs(mod, kernels)


def test_copies_that_change_nothing_disappear():
    def roundabout(emit, x):
        y = emit(op.permute_dims(emit(op.permute_dims(x, [0, 2, 3, 1])), [0, 3, 1, 2]))
        y = emit(op.reshape(emit(op.reshape(y, (2, 12))), (1, 2, 3, 4)))
        y = emit(op.nn.relu(y))
        y = emit(op.permute_dims(emit(op.reshape(y, (1, 24, 1, 1))), [0, 2, 3, 1]))
        return emit(op.reshape(y, (24,)))

    mod, kernels = lower(function((1, 2, 3, 4), roundabout))
    assert names(kernels) in (["relu"], ["relu_reshape"])
    assert_same_outputs(mod, kernels)


def test_only_weights_of_a_reduction_are_free_to_change_layout():
    def linear(emit, x):
        return op.add(emit(op.matmul(x, constant(8, 8))), constant(8))

    _, kernels = lower(function((4, 8), linear))
    (task,) = extract_tasks(kernels)
    assert [int(i) for i in task.mod["main"].attrs["layout_free_buffers"]] == [1]


def test_a_transposed_weight_and_its_product_are_one_kernel():
    def linear(emit, x):
        product = emit(op.matmul(x, emit(op.permute_dims(constant(600, 512)))))
        return emit(op.nn.relu(emit(op.add(product, constant(600)))))

    mod, kernels = lower(function((2, 3, 512), linear))
    (task,) = extract_tasks(kernels)
    assert task.name == "matmul_add_relu"
    kernel = task.mod["main"]
    assert [int(extent) for extent in kernel.params[1].shape] == [600, 512]
    assert [int(i) for i in kernel.attrs["layout_free_buffers"]] == [1]
    assert_same_outputs(mod, kernels)


def test_kernels_of_the_users_own_stay_beside_a_transposed_weight():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 512), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            own = builder.emit_te(lambda a: te.compute(a.shape, lambda i, j: a(i, j) * 2.0, name="twice"), x)
            product = builder.emit(op.matmul(own, builder.emit(op.permute_dims(constant(600, 512)))))
            result = builder.emit_output(product)
        builder.emit_func_output(result)
    mod, kernels = lower(builder.get())
    assert "matmul" in " ".join(names(kernels))
    assert_same_outputs(mod, kernels)


def test_kernels_of_the_users_own_stay_where_nothing_calls_them():
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    builder = relax.BlockBuilder()
    data = te.placeholder((4,), "float32")
    for name, compute in (("for_others", topi.exp), ("private", topi.tanh)):
        kernel = te.create_prim_func([data, compute(data)])
        kernel = kernel.without_attr("global_symbol")
        builder.add_func(kernel.with_attr("global_symbol", name) if name == "for_others" else kernel, name)
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(op.nn.relu(x)))
    names = {variable.name_hint for variable in lower_to_kernels(builder.get(), TARGET).functions}
    assert names == {"main", "relu", "for_others"}


def test_kernels_that_others_may_call_keep_their_names():
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    builder = relax.BlockBuilder()
    data = te.placeholder((4, 8), "float32")
    for name, compute in (("relu", topi.exp), ("scale2", topi.tanh)):
        kernel = te.create_prim_func([data, compute(data)])
        builder.add_func(kernel.with_attr("global_symbol", name), name)
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(op.nn.relu(x)))
    kernels = lower_to_kernels(builder.get(), TARGET)
    public = {
        variable.name_hint: kernel.attrs["global_symbol"]
        for variable, kernel in kernels.functions_items()
        if isinstance(kernel, tirx.PrimFunc) and "global_symbol" in kernel.attrs
    }
    assert public == {"relu": "relu", "scale2": "scale2"}


def test_kernels_do_not_take_the_names_of_functions():
    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType((4, 8), "float32")) for name in "xy")
    with builder.function("relu", [y], private=True):
        builder.emit_func_output(builder.emit(op.exp(y)))
    with builder.function("main", [x]):
        own = builder.emit(relax.Call(builder.get().get_global_var("relu"), [x]))
        builder.emit_func_output(builder.emit(op.nn.relu(builder.emit(op.add(own, x)))))
    mod, kernels = lower(builder.get())
    assert isinstance(kernels["relu"], relax.Function)
    assert_same_outputs(mod, kernels)


def own_copy(first):
    """A user's kernel with a schedule, which copies a row of a matrix."""
    four, eight, one = (tirx.IntImm("int64", extent) for extent in (4, 8, 1))
    data = te.placeholder((four, eight), "float32")
    row = te.compute((one, eight), lambda i, j: data[i + first, j], name="row")
    return te.create_prim_func([data, row]).without_attr("global_symbol").with_attr("tirx.is_scheduled", True)


def test_scheduled_kernels_of_the_users_own_are_not_changed():
    """Neither to write their part of a concatenation in its place, nor to be one kernel."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    own = [builder.add_func(own_copy(first), f"own_{name}") for first, name in enumerate("abcd")]
    with builder.function("main", [x]):
        with builder.dataflow():
            row = relax.TensorType((1, 8), "float32")
            rows = [builder.emit(relax.call_tir(kernel, [x], row)) for kernel in own]
            whole = builder.emit(op.concat([*rows, builder.emit(op.matmul(x, constant(8, 8)))], 0))
            result = builder.emit_output(op.nn.softmax(whole))
        builder.emit_func_output(result)
    mod, kernels = lower(builder.get())
    found = {variable.name_hint for variable, kernel in kernels.functions_items() if is_scheduled(kernel)}
    assert found == {"own_a", "own_b", "own_c", "own_d"}
    assert_same_outputs(mod, kernels)


def test_kernels_of_the_users_own_in_plain_loops_are_no_tasks():
    index = [tirx.Var(name, "int64") for name in "ij"]
    x, y = (tirx.decl_buffer((4, 8), "float32", name) for name in "xy")
    loops = tirx.BufferStore(y, tirx.BufferLoad(x, index) * tirx.const(2.0, "float32"), index)
    for var, extent in zip(reversed(index), (8, 4), strict=True):
        loops = tirx.For(var, tirx.const(0, "int64"), tirx.const(extent, "int64"), tirx.ForKind.SERIAL, loops)
    builder = relax.BlockBuilder()
    twice = builder.add_func(tirx.PrimFunc([x, y], loops), "twice")
    data = relax.Var("data", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [data]):
        own = builder.emit(relax.call_tir(twice, [data], relax.TensorType((4, 8), "float32")))
        builder.emit_func_output(builder.emit(op.nn.relu(own)))
    mod, kernels = lower(builder.get())
    assert names(kernels) == ["relu"]
    assert_same_outputs(mod, kernels)


def test_tables_of_the_users_own_in_plain_loops_are_not_joined_with_what_follows():
    i, j = (tirx.Var(name, "int64") for name in "ij")
    x, table, y = (
        tirx.decl_buffer(shape, "uint8", name) for shape, name in (((4, 8), "x"), ((256,), "table"), ((4, 8), "y"))
    )
    found = tirx.BufferLoad(table, [tirx.Cast("int32", tirx.BufferLoad(x, [i, j]))])
    place = [i, tirx.Add(j, tirx.const(0, "int64"))]  # two stores to places that are written in two ways: opaque
    loops = tirx.SeqStmt(
        [
            tirx.BufferStore(y, found, [i, j]),
            tirx.BufferStore(y, tirx.BufferLoad(y, [i, j]) + tirx.const(1, "uint8"), place),
        ]
    )
    for var, extent in ((j, 8), (i, 4)):
        loops = tirx.For(var, tirx.const(0, "int64"), tirx.const(extent, "int64"), tirx.ForKind.SERIAL, loops)
    builder = relax.BlockBuilder()
    own = builder.add_func(tirx.PrimFunc([x, table, y], loops), "own")
    ty, values = relax.TensorType((4, 8), "uint8"), np.random.default_rng(0).integers(0, 256, 256, "uint8")
    data = relax.Var("data", ty)
    with builder.function("main", [data]):
        with builder.dataflow():
            looked_up = builder.emit(relax.call_tir(own, [data, relax.const(values)], ty))
            result = builder.emit_output(op.add(looked_up, relax.const(1, "uint8")))
        builder.emit_func_output(result)
    _, kernels = lower(builder.get())
    assert names(kernels) == ["add"]
    given = np.arange(32, dtype="uint8").reshape(4, 8) * np.uint8(8)
    (result,) = ModelRunner(build_executable(kernels, TARGET))(given)
    np.testing.assert_array_equal(result, values[given] + np.uint8(2))


def test_transposed_weights_keep_the_dtype_that_they_are_summed_in():
    def linear(emit, x):
        weight = relax.const(np.random.default_rng(0).standard_normal((1200, 512)).astype("float16"))
        half = emit(op.astype(x, "float16"))
        return emit(op.matmul(half, emit(op.permute_dims(weight)), out_dtype="float32"))

    mod, kernels = lower(function((2, 512), linear))
    assert "permute_dims" in mod.script()
    assert not any(task.name.startswith("transpose") for task in extract_tasks(kernels))
    assert_same_outputs(mod, kernels)


def test_weights_that_are_parameters_are_not_free():
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType((8, 8), "float32")) for name in ("x", "w"))
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            result = builder.emit_output(op.matmul(x, w))
        builder.emit_func_output(result)
    kernels = lower_to_kernels(builder.get(), TARGET)
    (task,) = extract_tasks(kernels)
    assert "layout_free_buffers" not in task.mod["main"].attrs
    assert kernels["main"].attrs["num_input"] == 1


def test_equal_kernels_are_one_task_with_their_calls():
    def chain(emit, x):
        for seed in range(3):
            weight = relax.const(np.random.default_rng(seed).standard_normal((8, 8)).astype("float32"))
            x = emit(op.tanh(emit(op.matmul(x, weight))))
        return x

    _, kernels = lower(function((4, 8), chain))
    (task,) = extract_tasks(kernels)
    assert task.calls == 3
    assert task.functions == (task.name,)
    assert task.flops == 2 * 4 * 8 * 8 + 4 * 8
    assert task.bytes_moved == 4 * (4 * 8 + 8 * 8 + 4 * 8)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: op.nn.layer_norm(x, constant(8), constant(8), [-1]),
        lambda x: op.nn.instance_norm(x, constant(4), constant(4), 1, [2]),
        lambda x: op.variance(x, [-1]),
        lambda x: op.mean(x, [1]),
    ],
    ids=["layer_norm", "instance_norm", "variance", "mean"],
)
def test_kernels_are_the_same_whatever_the_model_calls_its_variables(make):
    hashes = set()
    for name in ("x", "T", "hidden_mean", "x_var"):
        builder = relax.BlockBuilder()
        x = relax.Var(name, relax.TensorType((2, 4, 8), "float32"))
        with builder.function("main", [x]):
            with builder.dataflow():
                result = builder.emit_output(make(x))
            builder.emit_func_output(result)
        mod, kernels = lower(builder.get())
        (task,) = extract_tasks(kernels)
        hashes.add(task.workload_hash)
        assert_same_outputs(mod, kernels)
    assert len(hashes) == 1


def test_flops_count_arithmetic_on_floats_alone():
    x = te.placeholder((1, 4, 8, 8), "float32", name="x")
    w = te.placeholder((16, 4, 3, 3), "float32", name="w")
    convolution = te.create_prim_func([x, w, tvm.topi.nn.conv2d(x, w, 1, 1, 1)])
    assert count_flops(convolution) == 2 * 16 * 8 * 8 * 4 * 9
    pooling = te.create_prim_func(
        [x, tvm.topi.nn.pool2d(x, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), "avg", count_include_pad=False)]
    )
    assert count_flops(pooling) == 4 * 8 * 8 * (9 + 1)
    assert count_bytes(pooling) == 2 * 4 * 4 * 8 * 8
    half = te.placeholder((10,), "float16", name="half")
    doubled = te.create_prim_func([half, te.compute((10,), lambda i: half[i] + half[i])])
    assert (count_flops(doubled), count_bytes(doubled)) == (10, 40)


def test_of_an_input_no_more_bytes_count_than_are_read():
    table = te.placeholder((1000, 8), "float32", name="table")
    rows = te.placeholder((5,), "int32", name="rows")
    picked = te.create_prim_func([table, rows, te.compute((5, 8), lambda i, j: table[rows[i], j])])
    assert count_bytes(picked) == 4 * (5 * 8 + 5 + 5 * 8)
    part = te.create_prim_func([table, te.compute((10, 8), lambda i, j: table[i + 3, j])])
    assert count_bytes(part) == 4 * 2 * 10 * 8


def test_integer_operations_are_those_of_the_data_not_of_indices():
    x = te.placeholder((1, 4, 8, 8), "uint8", name="x")
    w = te.placeholder((16, 4, 3, 3), "int8", name="w")
    sums = te.create_prim_func([x, w, tvm.topi.nn.conv2d(x, w, 1, 1, 1, out_dtype="int32")])
    assert count_integer_operations(sums) == 2 * 16 * 8 * 8 * 4 * 9
    assert count_flops(sums) == 0
    y = te.placeholder((8, 8), "float32", name="y")
    moved = te.create_prim_func([y, te.compute((64,), lambda i: y[i // 8, i % 8] + 1.0)])
    assert (count_integer_operations(moved), count_flops(moved)) == (0, 64)


def test_the_input_module_is_not_changed():
    mod = function((1, 8, 6, 6), residual)
    text = mod.script()
    lower_to_kernels(mod, TARGET)
    assert mod.script() == text


@pytest.mark.slow
@pytest.mark.parametrize("model", zoo.names())
def test_zoo(model):
    """Every model is kernels and views, and its work is the published one."""
    _, kernels = lower(zoo.relax(model))
    tasks = extract_tasks(kernels)
    assert not any(
        task.name.startswith(("reshape", "split", "strided_slice")) and "transpose" not in task.name for task in tasks
    )
    assert all(isinstance(kernels[name], tirx.PrimFunc) for task in tasks for name in task.functions)
    flops = sum(task.flops * task.calls for task in tasks)
    multiply_adds = zoo.MODELS[model].multiply_adds
    assert 0.9 * 2 * multiply_adds <= flops <= 1.3 * 2 * multiply_adds


def inception(emit, x):
    """Parts: two convolutions, a pooling, one that is read elsewhere too, one that is a constant; concat of concat."""

    def branch(y, channels):
        width = int(y.ty.shape[1])
        return emit(op.nn.relu(emit(op.nn.conv2d(y, constant(channels, width, 1, 1)))))

    shared = branch(x, 4)
    inner = emit(op.concat([branch(shared, 3), emit(op.nn.max_pool2d(x, (3, 3), padding=1))], 1))
    whole = emit(op.concat([shared, inner, branch(x, 5), constant(1, 2, 6, 6)], 1))
    again = emit(op.concat([branch(whole, 4), branch(whole, 3)], -3))
    return emit(op.nn.softmax(again, 1))


def test_parts_of_a_concatenation_are_written_in_place():
    mod = function((1, 8, 6, 6), inception)
    plain, kernels = (lower_to_kernels(mod, TARGET, concat_in_place=flag) for flag in (False, True))
    assert relax.analysis.check_well_formed(kernels)
    assert sum(name.startswith("concatenate") for name in names(plain)) == 2
    assert not any(name.startswith("concatenate") for name in names(kernels))
    plain_names = [name.rstrip("0123456789") for name in names(kernels)]
    assert plain_names.count("conv2d_relu_concat") == 4
    assert plain_names.count("max_pool2d_concat") == 1
    assert plain_names.count("copy_concat") == 2  # the shared part and the constant
    assert_same_outputs(mod, kernels)
    # What a run writes, the next one does not disturb.
    run = ModelRunner(build_executable(kernels, TARGET))
    first = run(np.ones((1, 8, 6, 6), "float32"))[0]
    run(np.zeros((1, 8, 6, 6), "float32"))
    np.testing.assert_array_equal(first, run(np.ones((1, 8, 6, 6), "float32"))[0])


def test_bytes_of_a_slice_count_the_slice():
    kernels = lower_to_kernels(function((1, 8, 6, 6), inception), TARGET, concat_in_place=True)
    task = next(task for task in extract_tasks(kernels) if task.name == "max_pool2d_concat")
    assert task.bytes_moved == 2 * 4 * 8 * 6 * 6


def test_a_concatenation_of_inputs_stays_one_kernel():
    def pair(emit, x):
        return op.concat([x, constant(4, 3)], 1)

    _, kernels = lower(function((4, 8), pair))
    in_place = lower_to_kernels(function((4, 8), pair), TARGET, concat_in_place=True)
    assert names(in_place) == names(kernels) == ["concatenate"]
    (task,) = extract_tasks(in_place)
    assert "eqtune" not in str(task.mod["main"].attrs)


def test_the_results_of_a_split_may_be_concatenated_as_they_are():
    mod = function((4, 8), lambda emit, x: emit(op.concat(emit(op.split(x, 2, axis=0)), axis=1)))
    _, kernels = lower(mod)
    assert not any("relax.concat" in str(f) for f in kernels.functions.values() if isinstance(f, relax.Function))
    assert_same_outputs(mod, kernels)


@pytest.mark.parametrize("axis", [1, 3])
def test_a_batch_norm_in_training_mode_normalises_by_its_batch(axis):
    """Relax's default, which TVM's decomposition for inference takes for the other mode."""
    gamma, beta, mean, variance = (relax.const(np.linspace(a, a + 1, 8, dtype="float32")) for a in (0.5, -1, 2, 3))

    def three_outputs(emit, x):
        return emit(op.nn.batch_norm(emit(op.nn.relu(x)), gamma, beta, mean, variance, axis=axis, momentum=0.3))

    mod = function((3, 8, 5, 8), three_outputs)
    x = np.random.default_rng(0).standard_normal((3, 8, 5, 8)).astype("float32")
    expected = ModelRunner(untuned_executable(mod, TARGET))(x)
    actual = ModelRunner(build_executable(lower(mod)[1], TARGET))(x)
    assert len(actual) == 3
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_binds_a_part_is_noted_once_for_all_concatenations(monkeypatch):
    """Not once for each binding: of the thousands of an unrolled layer that took seven seconds."""
    noted = set()

    def parts(binding, bound, *rest):
        noted.add(id(bound))
        return _parts(binding, bound, *rest)

    monkeypatch.setattr("eqtune.tasks.concat._parts", parts)
    lower(steps_of_a_row(8, 16))
    assert len(noted) == 1


def rotated(emit, x):
    """Rotary embedding: halves change places, and each is multiplied by a table."""
    halves = [emit(op.strided_slice(x, [2], [begin], [begin + 8])) for begin in (0, 8)]
    swapped = emit(op.concat([emit(op.negative(halves[1])), halves[0]], axis=-1))
    return emit(op.add(emit(op.multiply(x, constant(5, 16))), emit(op.multiply(swapped, constant(1, 5, 16)))))


def resized(emit, x, method):
    return emit(op.image.resize2d(emit(op.expand_dims(x, 0)), (8, 9), layout="NCHW", method=method))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda emit, x: op.permute_dims(rotated(emit, x), [0, 2, 1]), 2),  # columns of what is computed of parts
        (lambda emit, x: op.permute_dims(rotated(emit, x), [1, 0, 2]), 1),  # rows stay rows
        (lambda emit, x: op.permute_dims(emit(op.nn.relu(x)), [0, 2, 1]), 1),  # one tensor, read in tiles
        (lambda emit, x: op.permute_dims(emit(op.concat([x, x], axis=1)), [0, 2, 1]), 1),  # parts that only move
        (lambda emit, x: op.permute_dims(resized(emit, x, "linear"), [0, 2, 3, 1]), 2),  # what lies between pixels
        (lambda emit, x: op.permute_dims(resized(emit, x, "nearest_neighbor"), [0, 2, 3, 1]), 1),
    ],
)
def test_what_is_computed_of_parts_or_sampled_is_turned_by_a_kernel_of_its_own(make, expected):
    mod, kernels = lower(function((3, 5, 16), make))
    found = names(kernels)
    assert len(found) == expected
    assert ("transpose" in found) == (expected == 2)
    assert_same_outputs(mod, kernels)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_functions_that_cuda_lacks_are_of_float32(dtype):
    functions = (op.acos, op.acosh, op.asin, op.asinh, op.atanh, op.cosh, op.round, op.sinh)

    def chain(emit, x):
        y = emit(op.astype(x, dtype))
        for function in functions:
            y = emit(function(y))
        return op.add(emit(op.mod(y, y)), emit(op.atan2(y, y)))

    (task,) = extract_tasks(lower_to_kernels(function((3, 40), chain), resolve_target("nvidia/nvidia-h100")))
    calls = nodes_of(task.mod["main"].body, tvm.ir.Call)
    assert len(calls) >= len(functions)
    assert {str(call.ty.dtype) for call in calls} == {"float32"}


@pytest.mark.parametrize(
    ("times", "size", "expected"), [(2, 3, ["conv2d", "repeat"]), (1, 3, ["conv2d"]), (3, 1, None)]
)
def test_several_outputs_of_a_channel_are_a_depthwise_convolution_of_copies(times, size, expected):
    def convolution(emit, x):
        layouts = {"data_layout": "NHWC", "kernel_layout": "HWIO"}
        return op.nn.conv2d(x, constant(size, size, 1, 4 * times), [2, 2], [size // 2] * 2, groups=4, **layouts)

    mod, kernels = lower(function((1, 7, 7, 4), convolution))
    found = [name.rstrip("0123456789") for name in names(kernels)]
    assert found == expected or (expected is None and "repeat" not in found)
    assert_same_outputs(mod, kernels)
