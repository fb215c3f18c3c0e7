"""ONNX models: each door, what TVM's importer gets wrong, and each refusal."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from tvm import relax

from eqtune import zoo
from eqtune.errors import InputError, MissingExtraError, UnsupportedModelError
from eqtune.frontends import load_model, verify_import

onnx = pytest.importorskip("onnx")

pytestmark = pytest.mark.unoptimised
pytest.importorskip("onnxruntime")
helper = onnx.helper
FLOAT = onnx.TensorProto.FLOAT


def constant(name, values, dtype=np.float32):
    return onnx.numpy_helper.from_array(np.asarray(values, dtype), name)


def model(nodes, inputs, outputs, initializers=(), opset=18, functions=()):
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in outputs.items()],
        list(initializers),
    )
    opsets = [helper.make_opsetid("", opset)] + [helper.make_opsetid(f.domain, 1) for f in functions]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=list(functions))


def convolution(batch=1):
    """Convolution, ReLU6, a reshape to a computed shape, and a matrix product."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Clip", ["c", "low", "high"], ["r"]),
        helper.make_node("Shape", ["r"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["n"], axis=0),
        helper.make_node("Unsqueeze", ["n", "axes"], ["n1"]),
        helper.make_node("Concat", ["n1", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["r", "target"], ["flat"]),
        helper.make_node("MatMul", ["flat", "m"], ["y"]),
    ]
    initializers = [
        constant("w", rng.standard_normal((4, 3, 3, 3))),
        constant("b", rng.standard_normal(4)),
        constant("low", 0.0),
        constant("high", 6.0),
        constant("zero", 0, np.int64),
        constant("axes", [0], np.int64),
        constant("rest", [-1], np.int64),
        constant("m", rng.standard_normal((64, 5))),
    ]
    return model(nodes, {"x": [batch, 3, 4, 4]}, {"y": [batch, 5]}, initializers)


def operators(mod):
    bindings = [binding for block in mod["main"].body.blocks for binding in block.bindings]
    return [b.value.op.name for b in bindings if isinstance(b.value, relax.Call)]


def test_proto_and_file(tmp_path):
    proto = convolution()
    imported = load_model(proto)
    assert imported.source == "onnx"
    assert imported.name == "tiny"
    assert [(info.name, info.shape) for info in imported.inputs] == [("x", (1, 3, 4, 4))]
    assert verify_import(imported) < 1e-5
    path = tmp_path / "net.onnx"
    onnx.save(proto, path)
    assert load_model(str(path)).name == "net"
    assert verify_import(load_model(path)) < 1e-5


def test_maxima_of_what_is_padded_by_zeros():
    """ONNX Runtime's optimiser would let the pooling pad, as if by -inf."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Neg", ["r"], ["n"]),
        helper.make_node("Pad", ["n", "pads", "zero"], ["p"]),
        helper.make_node("MaxPool", ["p"], ["y"], kernel_shape=[3, 3], strides=[2, 2]),
    ]
    initializers = [constant("pads", [0, 0, 1, 1, 0, 0, 1, 1], np.int64), constant("zero", 0.0)]
    imported = load_model(model(nodes, {"x": [1, 2, 4, 4]}, {"y": [1, 2, 2, 2]}, initializers))
    below = np.full((1, 2, 4, 4), 2, np.float32)
    np.testing.assert_array_equal(imported.reference(below)[0][0, 0], [[0, 0], [0, -2]])
    assert verify_import(imported) < 1e-6


def test_shapes_are_folded_and_clips_stay_clips():
    found = operators(load_model(convolution()).mod)
    assert "relax.clip" in found
    assert not {"relax.call_tir", "relax.shape_of", "relax.shape_to_tensor", "relax.take"} & set(found)


@pytest.mark.parametrize(
    ("low", "high", "operator"),
    [
        (0.0, None, "relax.nn.relu"),
        (None, 1.0, "relax.minimum"),
        (-1.0, None, "relax.maximum"),
        (-1.0, 1.0, "relax.clip"),
    ],
)
def test_clips_with_one_bound(low, high, operator):
    names = ["x", "low" if low is not None else "", "high" if high is not None else ""]
    bounds = [constant(name, value) for name, value in (("low", low), ("high", high)) if value is not None]
    imported = load_model(model([helper.make_node("Clip", names, ["y"])], {"x": [2, 8]}, {"y": [2, 8]}, bounds))
    assert operators(imported.mod) == [operator]
    assert verify_import(imported) == 0


def test_clips_whose_bounds_cross_or_bound_nothing():
    crossed = [helper.make_node("Clip", ["x", "one", "zero"], ["c"]), helper.make_node("Add", ["c", "x"], ["y"])]
    proto = model(crossed, {"x": [2, 8]}, {"y": [2, 8]}, [constant("one", 1), constant("zero", 0)])
    assert verify_import(load_model(proto)) == 0
    limits = [constant("some", np.arange(-4, 4), np.int64), constant("most", 2**63 - 1, np.int64)]
    limits += [constant("zero", 0, np.int64)]
    nodes = [helper.make_node("Sub", ["x", "some"], ["s"]), helper.make_node("Clip", ["s", "zero", "most"], ["y"])]
    proto = model(nodes, {"x": [2, 8]}, {"y": [2, 8]}, limits)
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.type.tensor_type.elem_type = onnx.TensorProto.INT64
    assert verify_import(load_model(proto)) == 0


def test_old_clip_with_attributes():
    node = helper.make_node("Clip", ["x"], ["y"], min=-0.5, max=0.5)
    imported = load_model(model([node], {"x": [2, 8]}, {"y": [2, 8]}, opset=9))
    assert operators(imported.mod) == ["relax.clip"]
    assert verify_import(imported) == 0


@pytest.mark.parametrize("index", [1, -1, [0, -1], [[2, -3], [1, 1]]])
def test_gather_of_constant_indices(index):
    node = helper.make_node("Gather", ["x", "i"], ["y"], axis=1)
    shape = [4, *np.shape(index), 5]
    imported = load_model(model([node], {"x": [4, 3, 5]}, {"y": shape}, [constant("i", index, np.int64)]))
    assert set(operators(imported.mod)) <= {"relax.strided_slice", "relax.squeeze", "relax.take"}
    assert verify_import(imported) == 0


def test_gather_of_computed_indices_wraps_negative_ones():
    table = constant("table", np.arange(12).reshape(6, 2))
    nodes = [
        helper.make_node("Sub", ["ids", "three"], ["shifted"]),
        helper.make_node("Gather", ["table", "shifted"], ["y"]),
    ]
    proto = model(nodes, {"ids": [2, 4]}, {"y": [2, 4, 2]}, [table, constant("three", 3, np.int64)])
    proto.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    assert verify_import(load_model(proto)) == 0


@pytest.mark.parametrize("computed", [True, False])
def test_an_index_that_is_the_same_along_rows_is_of_rows(computed):
    """As graph networks spell it: indices counted from the end, too."""
    nodes = [
        helper.make_node("Expand", ["i", "shape"], ["repeated"]),
        helper.make_node("GatherElements", ["x", "repeated"], ["some"], axis=0),
        helper.make_node("ScatterElements", ["x", "repeated", "some"], ["y"], axis=0, reduction="add"),
    ]
    index = [constant("i", [[2], [-4], [2]], np.int64), constant("shape", [3, 6], np.int64)]
    if not computed:
        nodes, index = nodes[1:], [constant("repeated", np.repeat([[2], [-4], [2]], 6, 1), np.int64)]
    imported = load_model(model(nodes, {"x": [5, 6]}, {"y": [5, 6]}, index))
    assert verify_import(imported) < 1e-6
    assert {"relax.take", "relax.scatter_nd"} <= set(operators(imported.mod))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_elements_are_scattered_into_a_part(axis):
    """Also of the axes before and behind the one along which they are; TVM counts those as if they were whole."""
    index = np.argsort(np.sin(np.arange(16)).reshape(2, 2, 4), axis)[..., :2]
    index[0] -= 4 if axis else 0
    node = helper.make_node("ScatterElements", ["x", "i", "u"], ["y"], axis=axis)
    initializers = [constant("i", index, np.int64), constant("u", np.arange(8).reshape(2, 2, 2))]
    proto = model([node], {"x": [4, 4, 4]}, {"y": [4, 4, 4]}, initializers)
    assert verify_import(load_model(proto)) == 0


def test_a_new_axis_may_be_a_number():
    nodes = [helper.make_node("Unsqueeze", ["x", "axis"], ["y"])]
    imported = load_model(model(nodes, {"x": [2, 3]}, {"y": [2, 1, 3]}, [constant("axis", 1, np.int64)]))
    assert verify_import(imported) == 0


def test_embeddings_bound_their_indices():
    proto = model(
        [helper.make_node("Gather", ["table", "ids"], ["y"])],
        {"ids": [1, 4]},
        {"y": [1, 4, 2]},
        [constant("table", np.arange(12).reshape(6, 2))],
    )
    proto.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    assert load_model(proto).inputs[0].high == 6


def test_symbolic_batch_is_named_and_can_be_given():
    proto = convolution("N")
    with pytest.raises(UnsupportedModelError, match=r"input 'x' has the dynamic dimension 0 \(N\).*--shape x=1,3,4,4"):
        load_model(proto)
    imported = load_model(proto, shapes={"x": (3, 3, 4, 4)})
    assert imported.inputs[0].shape == (3, 3, 4, 4)
    assert verify_import(imported) < 1e-5
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N", "the caller's proto must stay as it is"


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": (1,)}, r"no input 'z'.*x"),
        ({"x": (1, 3, 4)}, r"has shape \(N, 3, 4, 4\)"),
        ({"x": (1, 2, 4, 4)}, "does not fit"),
        ({"x": (0, 3, 4, 4)}, "extent below 1"),
        ({"x": "1,3,4,4"}, "the shape of input 'x' is a sequence of whole numbers, not '1,3,4,4'"),
        ({"x": 3}, "a sequence of whole numbers, not 3"),
        ([(1, 3, 4, 4)], "shapes is a mapping by name, not list"),
    ],
)
def test_shapes_that_do_not_fit(shapes, message):
    with pytest.raises(InputError, match=message):
        load_model(convolution("N"), shapes=shapes)


@pytest.mark.parametrize("kind", ["INT4", "FLOAT8E4M3FN", "UINT16"])
def test_inputs_that_are_not_tuned_are_named(kind):
    proto = model([onnx.helper.make_node("DequantizeLinear", ["x", "scale"], ["y"])], {"x": [4, 3]}, {"y": [4, 3]})
    proto.graph.input[0].type.tensor_type.elem_type = getattr(onnx.TensorProto, kind)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "scale"))
    proto.opset_import[0].version, proto.ir_version = 21, 10
    with pytest.raises(UnsupportedModelError, match=f"input 'x' has dtype {kind.lower()}; allowed here: float16, "):
        load_model(proto)


@pytest.mark.parametrize("with_size", [False, True])
def test_what_onnx_runtime_does_not_compute_in_is_named(with_size):
    """Where sizes are folded, too, by ONNX Runtime itself."""
    make = onnx.helper.make_node
    nodes = [
        make("Cast", ["x"], ["narrow"], to=onnx.TensorProto.BFLOAT16),
        make("Shape", ["x"], ["size"]),
        make("Add", ["narrow", "narrow"], ["twice"]),
        make("Cast", ["twice"], ["wide"], to=onnx.TensorProto.FLOAT),
        make("Reshape", ["wide", "size"], ["y"]),
    ]
    nodes = nodes if with_size else [*nodes[:1], *nodes[2:3], make("Cast", ["twice"], ["y"], to=onnx.TensorProto.FLOAT)]
    with pytest.raises(UnsupportedModelError, match=r"result of .* has dtype bfloat16; .* in float16 or"):
        load_model(model(nodes, {"x": [4, 3]}, {"y": [4, 3]}))


def test_sizes_of_data_are_no_open_sizes_of_inputs():
    proto = model([onnx.helper.make_node("NonZero", ["x"], ["y"])], {"x": [4, 3]}, {"y": [2, "n"]})
    proto.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    with pytest.raises(UnsupportedModelError, match=r"result of relax\.nonzero .* has a shape that depends on data"):
        load_model(proto)


@pytest.mark.parametrize("batch", [0, -1])
def test_an_extent_below_one_is_symbolic(batch):
    proto = convolution(batch)
    with pytest.raises(UnsupportedModelError, match=r"dynamic dimension 0 \(unnamed\).*--shape x=1,3,4,4"):
        load_model(proto)
    with pytest.raises(InputError, match=r"has shape \(\?, 3, 4, 4\)"):
        load_model(proto, shapes={"x": (2, 3, 4, 5)})
    imported = load_model(proto, shapes={"x": (2, 3, 4, 4)})
    assert imported.inputs[0].shape == (2, 3, 4, 4)
    assert verify_import(imported) < 1e-5


@pytest.mark.parametrize("shape", [(2, 3), ()])
def test_an_input_without_a_shape_gets_the_one_that_is_given(shape):
    proto = model([helper.make_node("Exp", ["x"], ["y"])], {"x": None}, {"y": shape})
    with pytest.raises(UnsupportedModelError, match=r"input 'x' has no shape.*--shape x="):
        load_model(proto)
    imported = load_model(proto, shapes={"x": shape})
    assert imported.inputs[0].shape == shape
    assert verify_import(imported) < 1e-5


def test_one_symbol_has_one_extent():
    node = helper.make_node("Add", ["a", "b"], ["y"])
    proto = model([node], {"a": ["N", 2], "b": ["N", 2]}, {"y": ["N", 2]})
    with pytest.raises(InputError, match=r"'N' would be both 2 and 3"):
        load_model(proto, shapes={"a": (2, 2), "b": (3, 2)})
    assert load_model(proto, shapes={"a": (2, 2), "b": (2, 2)}).inputs[1].shape == (2, 2)


def test_a_question_mark_is_no_symbol():
    proto = model([helper.make_node("Exp", ["x"], ["y"])], {"x": ["?", "?"]}, {"y": [None, None]})
    assert load_model(proto, shapes={"x": (2, 3)}).inputs[0].shape == (2, 3)


@pytest.mark.parametrize("sizes", [(None, None), (-1, 0), ("?", "?"), ("batch-size", "length/2")])
def test_open_sizes_are_told_apart(sizes):
    """All without a name were the same one, -1 was a number, and "batch-size" a difference."""
    proto = model([helper.make_node("Exp", ["x"], ["y"])], {"x": [*sizes, 3]}, {"y": [None, None, 3]})
    imported = load_model(proto, any_size=True)
    first, second, _ = imported.inputs[0].shape
    assert first != second
    assert set(imported.open_sizes) == {first, second}
    known = imported.at({first: 2, second: 5})
    assert known.inputs[0].shape == (2, 5, 3)
    assert verify_import(known) < 1e-6


def test_open_sizes_may_be_computed_of_others():
    node = helper.make_node("Concat", ["a", "b"], ["y"], axis=0)
    imported = load_model(model([node], {"a": ["n", 2], "b": ["n + 1", 2]}, {"y": [None, 2]}), any_size=True)
    assert set(imported.open_sizes) == {"n"}
    known = imported.at({"n": 3})
    assert [info.shape for info in known.inputs] == [(3, 2), (4, 2)]
    assert verify_import(known) == 0


def test_awkward_names_are_fed_in_order():
    node = helper.make_node("Sub", ["input.2", "0"], ["y"])
    imported = load_model(model([node], {"0": [2, 2], "input.2": [2, 2]}, {"y": [2, 2]}))
    assert len(imported.inputs) == 2
    assert verify_import(imported) == 0


def test_local_functions_are_inlined():
    double = helper.make_function(
        "local", "Double", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 18)]
    )
    node = helper.make_node("Double", ["x"], ["y"], domain="local")
    imported = load_model(model([node], {"x": [2, 2]}, {"y": [2, 2]}, functions=[double]))
    assert verify_import(imported) == 0


def leaky(version=18):
    """LeakyRelu, whose slope is 0.5 where the caller leaves it out."""
    node = helper.make_node("LeakyRelu", ["a"], ["b"])
    node.attribute.append(onnx.AttributeProto(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope"))
    opsets, slopes = [helper.make_opsetid("", version)], [helper.make_attribute("slope", 0.5)]
    return helper.make_function("local", "Leaky", ["a"], ["b"], [node], opsets, attribute_protos=slopes)


@pytest.mark.parametrize("version", [17, 18])
@pytest.mark.parametrize("nested", [False, True])
def test_attributes_of_functions_have_defaults(version, nested):
    """Also of those that another function calls, or that declare another version of the same operators."""
    call = helper.make_node("Leaky", ["x"], ["y"], domain="local")
    functions = [leaky(version)]
    if nested:
        opsets = [helper.make_opsetid("local", 1)]
        functions.append(helper.make_function("local", "Outer", ["x"], ["y"], [call], opsets))
        call = helper.make_node("Outer", ["x"], ["y"], domain="local")
    proto = model([call], {"x": [2, 8]}, {"y": [2, 8]}, functions=functions[-1:])
    del proto.functions[:]
    proto.functions.extend(functions)
    proto.ir_version = 9
    imported = load_model(proto)
    assert verify_import(imported) < 1e-6
    (x,) = imported.random_inputs(0)
    np.testing.assert_allclose(imported.reference(x)[0], np.where(x < 0, x / 2, x), rtol=1e-6)


def test_functions_alone_declare_the_version_of_operators():
    softmax = helper.make_node("Softmax", ["a"], ["b"])  # of all axes but the first, before version 13
    function = helper.make_function("local", "Shares", ["a"], ["b"], [softmax], [helper.make_opsetid("", 12)])
    proto = model([helper.make_node("Shares", ["x"], ["y"], domain="local")], {"x": [2, 3, 4]}, {"y": [2, 3, 4]})
    proto.functions.append(function)
    del proto.opset_import[:]
    proto.opset_import.append(helper.make_opsetid("local", 1))
    imported = load_model(proto)
    assert verify_import(imported) < 1e-6
    np.testing.assert_allclose(imported.reference(*imported.random_inputs(0))[0].sum(axis=(1, 2)), [1, 1], rtol=1e-5)


def test_functions_of_versions_that_onnx_runtime_does_not_know_yet():
    latest = onnx.defs.onnx_opset_version()
    call = helper.make_node("Leaky", ["x"], ["y"], domain="local", slope=0.25)
    proto = model([call], {"x": [2, 8]}, {"y": [2, 8]}, opset=latest, functions=[leaky(latest)])
    proto.ir_version = 9
    assert verify_import(load_model(proto)) < 1e-6


@pytest.mark.parametrize("by_axis", [False, True])
def test_weights_with_few_elements(by_axis):
    places = [[0, 1], [2, 0], [3, 2]] if by_axis else [1, 6, 11]
    values, indices = constant("w", [1.5, -2, 3]), constant("", places, np.int64)
    proto = model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [2, 4]}, {"y": [2, 3]})
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4, 3]))
    imported = load_model(proto)
    assert verify_import(imported) < 1e-6
    weights = np.array([[0, 1.5, 0], [0, 0, 0], [-2, 0, 0], [0, 0, 3]], np.float32)
    (x,) = imported.random_inputs(0)
    np.testing.assert_allclose(imported.reference(x)[0], x @ weights, rtol=1e-6)
    assert proto.graph.sparse_initializer, "the caller's proto must stay as it is"


def test_weights_with_few_elements_in_a_branch():
    def branch(weights, result):
        node = helper.make_node("MatMul", ["x", weights], [result])
        return helper.make_graph([node], result, [], [helper.make_tensor_value_info(result, FLOAT, [2, 3])])

    few = branch("w", "a")
    indices = constant("", [1, 6, 11], np.int64)
    few.sparse_initializer.append(helper.make_sparse_tensor(constant("w", [1.5, -2, 3]), indices, [4, 3]))
    nodes = [
        helper.make_node("ReduceSumSquare", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["is_any"]),
        helper.make_node("If", ["is_any"], ["y"], then_branch=few, else_branch=branch("ones", "b")),
    ]
    initializers = [constant("zero", 0), constant("ones", np.ones((4, 3)))]
    imported = load_model(model(nodes, {"x": [2, 4]}, {"y": [2, 3]}, initializers))
    assert verify_import(imported) < 1e-6
    (x,) = imported.random_inputs(0)
    weights = np.array([[0, 1.5, 0], [0, 0, 0], [-2, 0, 0], [0, 0, 3]], np.float32)
    np.testing.assert_allclose(imported.reference(x)[0], x @ weights, rtol=1e-6)


def test_external_data(tmp_path):
    path = tmp_path / "big.onnx"
    onnx.save(convolution(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert verify_import(load_model(path)) < 1e-5
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(InputError, match=r"big\.onnx.*weights\.bin"):
        load_model(path)


def test_versions_that_onnx_runtime_does_not_know_yet():
    """onnx stamps models with its own latest ones."""
    tiny = model([helper.make_node("Relu", ["x"], ["y"])], {"x": [2, 3]}, {"y": [2, 3]})
    tiny.opset_import[0].version = onnx.defs.onnx_opset_version()
    tiny.ir_version = onnx.IR_VERSION
    assert verify_import(load_model(tiny)) == 0
    assert tiny.ir_version == onnx.IR_VERSION


def test_operators_of_versions_that_onnx_runtime_does_not_know_yet():
    nodes = [helper.make_node("SpaceToDepth", ["x"], ["y"], blocksize=2, mode="CRD")]
    with pytest.raises(UnsupportedModelError, match="tiny is of opset 28; ONNX Runtime"):
        load_model(model(nodes, {"x": [1, 1, 2, 2]}, {"y": [1, 4, 1, 1]}, opset=28))


@pytest.mark.parametrize("content", [b"", b"junk that is no protobuf", bytes(range(256))])
def test_corrupt_file(tmp_path, content):
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(InputError, match="broken"):
        load_model(path)


def test_cut_file(tmp_path):
    path = tmp_path / "cut.onnx"
    whole = convolution().SerializeToString()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cut"):
        load_model(path)


def test_refused_graphs():
    unknown = model([helper.make_node("Frobnicate", ["x"], ["y"], domain="com.example")], {"x": [2]}, {"y": [2]})
    unknown.opset_import.append(helper.make_opsetid("com.example", 1))
    with pytest.raises(UnsupportedModelError, match="Frobnicate"):
        load_model(unknown)
    invalid = model([helper.make_node("Relu", ["nowhere"], ["y"])], {"x": [2]}, {"y": [2]})
    with pytest.raises(InputError, match="not valid ONNX"):
        load_model(invalid)
    data_dependent = model([helper.make_node("Unique", ["x"], ["y"])], {"x": [4]}, {"y": [None]})
    with pytest.raises(UnsupportedModelError):
        load_model(data_dependent)


def test_foreign_dtype():
    proto = model([helper.make_node("Relu", ["x"], ["y"])], {"x": [2]}, {"y": [2]})
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    with pytest.raises(UnsupportedModelError, match="bfloat16"):
        load_model(proto)


def test_squeezenet_from_onnx_agrees():
    assert verify_import(load_model(zoo.onnx("squeezenet"))) < 1e-5


def test_missing_onnx_is_named(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "eqtune.frontends.onnx.model", raising=False)
    monkeypatch.setattr("eqtune.frontends.onnx.model", None, raising=False)
    monkeypatch.delattr("eqtune.frontends.onnx.model", raising=False)
    monkeypatch.setitem(sys.modules, "onnx", None)
    path = tmp_path / "any.onnx"
    path.touch()
    with pytest.raises(MissingExtraError, match=r"eqtune\[onnx\]"):
        load_model(path)
