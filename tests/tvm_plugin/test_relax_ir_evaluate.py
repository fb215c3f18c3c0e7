"""Every operator that numpy folds gives what TVM computes."""

import numpy as np
import pytest
import tvm
from tvm import relax

from eqtune.dtypes import numpy_dtype
from eqtune.relax_ir.constants import array_of, constant_of
from eqtune.relax_ir.evaluate import EVALUATORS, evaluate

op = relax.op


def floats(*shape, low=-2.0):
    return np.random.default_rng(0).uniform(low, 2.0, shape).astype("float32")


X = floats(4, 6)
CUBE = floats(2, 3, 4)
POSITIVE = floats(4, 6, low=0.1)
ROW = floats(6)
COUNTS = np.arange(-4, 8, dtype="int32").reshape(3, 4)
FLAGS = X > 0

# Name, how to call it, and the tensors it takes.
CASES = [
    ("reshape", lambda x: op.reshape(x, (3, -1)), [X]),
    ("flatten", op.flatten, [CUBE]),
    ("nn.batch_flatten", op.nn.batch_flatten, [CUBE]),
    ("squeeze", lambda x: op.squeeze(x, [1]), [floats(4, 1, 6)]),
    ("permute_dims", lambda x: op.permute_dims(x, [2, 0, 1]), [CUBE]),
    ("permute_dims", op.permute_dims, [X]),
    ("expand_dims", lambda x: op.expand_dims(x, [0, -1]), [X]),
    ("broadcast_to", lambda x: op.broadcast_to(x, (3, 4, 6)), [X]),
    ("concat", lambda a, b: op.concat([a, b], 1), [X, POSITIVE]),
    ("stack", lambda a, b: op.stack([a, b], 1), [X, POSITIVE]),
    ("split", lambda x: op.split(x, 4, 1), [floats(2, 10)]),
    ("split", lambda x: op.split(x, 4, 1), [X]),
    ("split", lambda x: op.split(x, [1, 4], 1), [X]),
    ("strided_slice", lambda x: op.strided_slice(x, [0, 1], [1, -5], [4, 6], [2, 1]), [X]),
    ("take", lambda x: op.take(x, relax.const([2, 0], "int64"), 1), [X]),
    ("flip", lambda x: op.flip(x, 1), [X]),
    ("tile", lambda x: op.tile(x, (2, 1, 3)), [X]),
    ("repeat", lambda x: op.repeat(x, 2, 1), [X]),
    ("nn.pad", lambda x: op.nn.pad(x, [0, 1, 2, 0], pad_value=3.0), [X]),
    ("nn.pad", lambda x: op.nn.pad(x, [0, 1, 2, 0], "reflect"), [X]),
    ("tril", lambda x: op.tril(x, 1), [X]),
    ("triu", lambda x: op.triu(x, -1), [X]),
    ("full", lambda x: op.full((2, 3), x), [floats()]),
    ("full_like", op.full_like, [X, floats()]),
    ("zeros", lambda: op.zeros((2, 3), "float32"), []),
    ("zeros_like", op.zeros_like, [X]),
    ("ones", lambda: op.ones((2, 3), "int32"), []),
    ("ones_like", op.ones_like, [X]),
    ("arange", lambda: op.arange(1, 9, 3, "float32"), []),
    (
        "one_hot",
        lambda x: op.one_hot(x, relax.prim_value(1.0, "float32"), relax.prim_value(0.0, "float32"), 5, -1),
        [np.array([0, 3], "int64")],
    ),
    ("add", op.add, [X, ROW]),
    ("subtract", op.subtract, [X, ROW]),
    ("multiply", op.multiply, [X, ROW]),
    ("divide", op.divide, [X, POSITIVE]),
    ("floor_divide", op.floor_divide, [X, POSITIVE]),
    ("floor_divide", op.floor_divide, [np.array([1, -1, 3], "float32"), np.array([0.1], "float32")]),
    ("power", op.power, [POSITIVE, X]),
    ("maximum", op.maximum, [X, ROW]),
    ("minimum", op.minimum, [X, ROW]),
    ("negative", op.negative, [X]),
    ("abs", op.abs, [X]),
    ("sign", op.sign, [X]),
    ("square", op.square, [X]),
    ("floor", op.floor, [X]),
    ("ceil", op.ceil, [X]),
    ("trunc", op.trunc, [X]),
    ("round", op.round, [np.arange(-9, 9, dtype="float32").reshape(3, 6) / 2]),
    ("clip", lambda x: op.clip(x, 0, 1.5), [X]),
    ("clip", lambda x: op.clip(x, 1, 0), [X]),
    ("astype", lambda x: op.astype(x, "int32"), [X]),
    ("astype", lambda x: op.astype(x, "float16"), [X]),
    ("sqrt", op.sqrt, [POSITIVE]),
    ("rsqrt", op.rsqrt, [POSITIVE]),
    ("exp", op.exp, [X]),
    ("log", op.log, [POSITIVE]),
    ("sin", op.sin, [X]),
    ("cos", op.cos, [X]),
    ("tanh", op.tanh, [X]),
    ("erf", op.erf, [X]),
    ("sigmoid", op.sigmoid, [X]),
    ("nn.relu", op.nn.relu, [X]),
    ("nn.silu", op.nn.silu, [X]),
    ("nn.gelu", op.nn.gelu, [X]),
    ("nn.softmax", lambda x: op.nn.softmax(x, 0), [X]),
    ("nn.layer_norm", lambda x, g, b: op.nn.layer_norm(x, g, b, [-1]), [X, ROW, -ROW]),
    ("nn.layer_norm", lambda x, g, b: op.nn.layer_norm(x, g, b, [1, 2]), [CUBE, CUBE[0], CUBE[1]]),
    ("nn.instance_norm", lambda x, g, b: op.nn.instance_norm(x, g, b, 1, [2]), [CUBE, ROW[:3], ROW[3:]]),
    ("nn.rms_norm", lambda x, g: op.nn.rms_norm(x, g, [-1]), [X, ROW]),
    ("equal", op.equal, [COUNTS, np.abs(COUNTS)]),
    ("not_equal", op.not_equal, [COUNTS, np.abs(COUNTS)]),
    ("greater", op.greater, [X, ROW]),
    ("greater_equal", op.greater_equal, [X, ROW]),
    ("less", op.less, [X, ROW]),
    ("less_equal", op.less_equal, [X, ROW]),
    ("logical_and", op.logical_and, [FLAGS, ~FLAGS[:1]]),
    ("logical_or", op.logical_or, [FLAGS, ~FLAGS[:1]]),
    ("logical_not", op.logical_not, [FLAGS]),
    ("where", op.where, [FLAGS, X, ROW]),
    ("sum", lambda x: op.sum(x, [0, 2]), [CUBE]),
    ("mean", lambda x: op.mean(x, [-1], keepdims=True), [CUBE]),
    ("prod", lambda x: op.prod(x, [1]), [CUBE]),
    ("max", op.max, [CUBE]),
    ("min", lambda x: op.min(x, [0]), [CUBE]),
    ("variance", lambda x: op.variance(x, [1]), [CUBE]),
    ("std", lambda x: op.std(x, [1]), [CUBE]),
    ("isnan", op.isnan, [np.where(FLAGS, np.float32(np.nan), X)]),
    ("cumsum", lambda x: op.cumsum(x, 1), [X]),
    ("cumprod", lambda x: op.cumprod(x, 0), [X]),
    ("matmul", op.matmul, [floats(3, 4, 6), floats(6, 5)]),
    ("einsum", lambda a, b: op.einsum((a, b), "ij,kj->ik"), [X, floats(3, 6)]),
]


def test_every_operator_of_the_table_is_compared_with_tvm():
    assert {f"relax.{name}" for name, _, _ in CASES} == set(EVALUATORS)


def test_numpy_and_tvm_agree():
    builder = relax.BlockBuilder()
    for number, (_, make, arrays) in enumerate(CASES):
        params = [relax.Var(f"x{i}", relax.TensorType(a.shape, str(a.dtype))) for i, a in enumerate(arrays)]
        with builder.function(f"case{number}", params):
            builder.emit_func_output(builder.emit(make(*params)))
    mod = builder.get()
    vm = relax.VirtualMachine(relax.build(mod, tvm.target.Target("llvm")), tvm.cpu())
    for number, (name, _, arrays) in enumerate(CASES):
        call = mod[f"case{number}"].body.blocks[0].bindings[0].value
        constants = [leaf for leaf in call.args if isinstance(leaf, tvm.ir.GenericConst)]
        got = evaluate(call, [*arrays, *(np.from_dlpack(c.value) for c in constants)])
        want = vm[f"case{number}"](*[tvm.runtime.tensor(a) for a in arrays])
        got, want = (list(value) if isinstance(call.ty, relax.TupleType) else [value] for value in (got, want))
        assert len(got) == len(want), name
        for ours, theirs in zip(got, want, strict=True):
            assert str(ours.dtype) == str(theirs.dtype), name
            np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


def test_what_means_something_else_in_tvm_is_refused():
    x = relax.const(COUNTS)
    normalize = relax.BlockBuilder().normalize
    assert evaluate(normalize(op.divide(x, x)), [COUNTS, COUNTS]) is None
    outside = np.array([7], "int64")
    assert evaluate(normalize(op.take(x, relax.const(outside), 1)), [COUNTS, outside]) is None
    assert evaluate(normalize(op.nn.log_softmax(relax.const(X))), [X]) is None
    turned = relax.const(CUBE[0].T.copy())
    assert (
        evaluate(normalize(op.nn.layer_norm(relax.const(CUBE), turned, turned, [2, 1])), [CUBE, *[CUBE[0].T] * 2])
        is None
    )
    row = relax.const(ROW)
    assert evaluate(normalize(op.nn.layer_norm(relax.const(X), row, row, [1], center=False)), [X, ROW, ROW]) is None
    assert evaluate(normalize(op.nn.pad(relax.const(X), [-1, 0, 0, 0])), [X]) is None


@pytest.mark.parametrize("moment", [op.mean, op.variance, op.std])
def test_moments_of_integers_are_left_to_tvm(moment):
    """The mean of 100 and 100 is -28 of int8, in which they are added."""
    values = np.array([100, 100], "int8")
    assert evaluate(relax.BlockBuilder().normalize(moment(constant_of(values))), [values]) is None


def test_numbers_that_are_no_tensors_are_left_to_tvm():
    x, number, normalize = relax.const(X), relax.prim_value(2.0, "float32"), relax.BlockBuilder().normalize
    for operator in (op.add, op.divide, op.maximum, op.less):
        assert evaluate(normalize(operator(x, number)), [X]) is None
    assert evaluate(normalize(op.take(x, relax.prim_value(1), 0)), [X]) is None


@pytest.mark.parametrize("extremum", [op.max, op.min])
def test_the_extremum_of_nothing_is_left_to_tvm(extremum):
    empty = floats(0, 3)
    assert evaluate(relax.BlockBuilder().normalize(extremum(constant_of(empty), [0])), [empty]) is None


@pytest.mark.parametrize("array", [X.T, np.broadcast_to(ROW, (512, 6)), floats(600, 700).T, floats(0, 3), floats()])
def test_constants_hold_any_array_in_aligned_memory(array):
    constant = constant_of(array)
    stored = np.from_dlpack(constant.value)
    np.testing.assert_array_equal(stored, array)
    assert stored.size == 0 or stored.ctypes.data % 64 == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "bool"])
def test_constants_are_arrays_of_any_dtype(dtype):
    array = X.astype(numpy_dtype(dtype))
    found = array_of(constant_of(array))
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)
