"""Loading Relax modules, files and zoo models: each door, and each refusal."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from eqtune.cli import main
from eqtune.compile.untuned import untuned_executable
from eqtune.errors import InputError, UnsupportedModelError
from eqtune.frontends import load_model, load_params
from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner


@I.ir_module
class Dense:
    @R.function
    def main(x: R.Tensor((2, 4), "float32"), w: R.Tensor((4, 3), "float32")) -> R.Tensor((2, 3), "float32"):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y: R.Tensor((2, 3), "float32") = R.matmul(x, w)
            R.output(y)
        return y


@I.ir_module
class Dynamic:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32")) -> R.Tensor(("n", 4), "float32"):
        n = T.int64()
        with R.dataflow():
            y: R.Tensor((n, 4), "float32") = R.nn.relu(x)
            R.output(y)
        return y


@I.ir_module
class Lookup:
    @R.function
    def main(ids: R.Tensor((1, 6), "int64"), table: R.Tensor((10, 3), "float32")) -> R.Tensor((1, 6, 3), "float32"):
        with R.dataflow():
            y: R.Tensor((1, 6, 3), "float32") = R.take(table, ids, axis=0)
            R.output(y)
        return y


WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3)


def test_params_become_constants():
    imported = load_model(Dense, params={"w": WEIGHT})
    assert [(info.name, info.shape, info.dtype) for info in imported.inputs] == [("x", (2, 4), "float32")]
    assert imported.source == "relax"
    assert imported.reference is None
    constants = []
    relax.analysis.post_order_visit(
        imported.mod["main"], lambda e: constants.append(e) if isinstance(e, tvm.ir.GenericConst) else None
    )
    assert np.array_equal(constants[0].value.numpy(), WEIGHT)
    assert len(Dense["main"].params) == 2, "the caller's module must stay as it is"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, r"1 weights as parameters \(w\).*params="),
        ({"v": WEIGHT}, r"no parameter 'v'.*x, w"),
        ({"w": WEIGHT.T}, r"parameter 'w'"),
        ({"w": WEIGHT.astype(np.float64)}, r"parameter 'w'.*float64"),
    ],
)
def test_params_that_do_not_fit(params, message):
    with pytest.raises(InputError, match=message):
        load_model(Dense, params=params)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (Dense, {"params": {"w": WEIGHT}, "example_inputs": (WEIGHT,)}, r"example_inputs are for a torch\.nn\.Module"),
        ("zoo:nasrnn", {"shapes": {"x": (1, 2)}}, "has weights and shapes; give options as in"),
        ("zoo:nasrnn", {"params": {"w": WEIGHT}}, "has weights and shapes"),
    ],
)
def test_an_argument_that_belongs_to_another_kind_of_model_is_refused(model, arguments, message):
    with pytest.raises(InputError, match=message):
        load_model(model, **arguments)


def test_symbolic_dimension_is_named_and_can_be_given():
    with pytest.raises(UnsupportedModelError, match=r"input 'x' has the dynamic dimension 0 \(n\)"):
        load_model(Dynamic)
    assert load_model(Dynamic, shapes={"x": (5, 4)}).inputs[0].shape == (5, 4)
    with pytest.raises(InputError, match=r"no input 'y'.*x"):
        load_model(Dynamic, shapes={"y": (5, 4)})
    with pytest.raises(InputError, match="does not fit"):
        load_model(Dynamic, shapes={"x": (5, 5)})


def test_inputs_that_look_up_rows_are_bounded():
    imported = load_model(Lookup)
    assert imported.inputs[0].high == 10
    ids = imported.random_inputs(seed=1)[0]
    assert ids.dtype == np.int64
    assert 2 <= ids.max() < 10


@pytest.mark.parametrize(
    ("dtype", "extremes"), [("uint8", (0, 255)), ("int8", (-128, 127)), ("int64", (0, 1)), ("bool", (0, 1))]
)
def test_random_bytes_are_of_their_whole_range(dtype, extremes):
    x = relax.Var("x", relax.TensorType((100, 100), dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.astype(x, "float32")))
    (array,) = load_model(builder.get()).random_inputs()
    assert array.dtype == dtype
    assert (array.min(), array.max()) == extremes


def test_foreign_dtype_is_named():
    x = relax.Var("x", relax.TensorType((2, 4), "float8_e4m3fn"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.nn.relu(x)))
    with pytest.raises(UnsupportedModelError, match="input 'x' has dtype float8_e4m3fn"):
        load_model(builder.get())


def test_a_module_without_relax_functions_is_refused():
    with pytest.raises(InputError, match="the module has no Relax function"):
        load_model(tvm.IRModule())


def test_saved_json_round_trip(tmp_path):
    path = tmp_path / "dense.json"
    path.write_text(tvm.ir.save_json(Dense))
    imported = load_model(str(path), params={"w": WEIGHT})
    assert imported.name == "dense"
    assert imported.inputs[0].shape == (2, 4)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"root_index": 0, "nodes": []}'])
def test_corrupt_json(tmp_path, text, capsys):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"broken\.json"):
        load_model(path)
    assert main(["kernels", str(path), "--list"]) == 2
    assert "broken.json is not a module saved with tvm.ir.save_json" in capsys.readouterr().err


def test_a_module_whose_nodes_refer_to_themselves_is_refused(tmp_path):
    """TVM follows them until its stack is full, which ended the process."""
    graph = json.loads(tvm.ir.save_json(Dense))
    place, call = next((place, node) for place, node in enumerate(graph["nodes"]) if node["type"] == "ir.Call")
    call["data"]["op"] = place
    path = tmp_path / "circle.json"
    path.write_text(json.dumps(graph))
    with pytest.raises(InputError, match=rf"circle\.json .* its node {place} refers to node {place}, which does not"):
        load_model(path)


def test_zoo_door():
    imported = load_model("zoo:nasrnn")
    assert imported.source == "zoo"
    assert imported.name == "nasrnn"
    assert len(imported.inputs) == 5
    with pytest.raises(InputError, match="squeezenet"):
        load_model("zoo:alexnet")


def test_zoo_options():
    imported = load_model("zoo:nasrnn:steps=2:hidden=32")
    assert imported.name == "nasrnn:steps=2:hidden=32"
    assert [info.shape for info in imported.inputs] == [(1, 32)] * 2
    with pytest.raises(InputError, match="OPTION=VALUE"):
        load_model("zoo:nasrnn:steps")
    with pytest.raises(InputError, match="no option 'depth'"):
        load_model("zoo:nasrnn:depth=2")


def test_relax_models_need_neither_torch_nor_onnx():
    script = """
import sys
for name in ("torch", "onnx", "onnxruntime"):
    sys.modules[name] = None
from eqtune.frontends import load_model
print(len(load_model("zoo:nasrnn:steps=1").inputs))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.stdout == "1\n", result.stderr


@pytest.mark.parametrize(
    ("call", "out_dtype"),
    [
        (lambda x, w: relax.op.matmul(x, w), "float32"),
        (lambda x, w: relax.op.matmul(x, w, out_dtype="float64"), "float64"),
    ],
)
def test_open_out_dtypes_are_written_out(call, out_dtype):
    x, w = (relax.Var(name, relax.TensorType((4, 4), "float32")) for name in "xw")
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(call(x, w)))
        builder.emit_func_output(out)
    binding = load_model(builder.get()).mod["main"].body.blocks[0].bindings[0]
    assert str(binding.value.attrs.out_dtype) == out_dtype


def test_the_only_pixels_whose_corners_are_aligned_are_the_first_ones():
    x = relax.Var("x", relax.TensorType((1, 2, 3, 4, 5), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            options = {"method": "linear", "coordinate_transformation_mode": "align_corners"}
            out = builder.emit_output(relax.op.image.resize3d(x, (3, 1, 2), layout="NCDHW", **options))
        builder.emit_func_output(out)
    run = ModelRunner(untuned_executable(load_model(builder.get()).mod, detect_target(), plain=True))
    volume = np.random.default_rng(0).random((1, 2, 3, 4, 5), "float32")
    np.testing.assert_allclose(run(volume)[0], volume[:, :, :, :1, ::4], rtol=1e-6)


@pytest.mark.parametrize("layouts", [("NWC", "WOI"), ("NCW", "OIW"), ("NCW", "IOW")], ids=str)
def test_transposed_convolutions_of_rows_in_any_layout(layouts):
    generator, sizes = np.random.default_rng(0), {"N": 2, "C": 4, "W": 5}
    plain_x, plain_w = generator.standard_normal((2, 4, 5)), generator.standard_normal((4, 3, 2))
    expected = np.zeros((2, 3, 10))
    for tap in range(2):  # steps of two
        expected[:, :, tap::2] = np.einsum("ncw,co->now", plain_x, plain_w[:, :, tap])
    x = relax.Var("x", relax.TensorType([sizes[axis] for axis in layouts[0]], "float32"))
    weights = plain_w.transpose(["IOW".index(axis) for axis in layouts[1]]).astype("float32")
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        options = {"strides": 2, "data_layout": layouts[0], "kernel_layout": layouts[1]}
        builder.emit_func_output(builder.emit(relax.op.nn.conv1d_transpose(x, relax.const(weights), **options)))
    run = ModelRunner(untuned_executable(load_model(builder.get()).mod, detect_target()))
    order = ["NCW".index(axis) for axis in layouts[0]]
    (found,) = run(np.ascontiguousarray(plain_x.transpose(order), "float32"))
    np.testing.assert_allclose(found, expected.transpose(order), rtol=1e-4, atol=1e-5)


def test_places_of_the_lowest_integers_are_in_the_row():
    x = relax.Var("x", relax.TensorType((2, 4), "uint8"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.argmax(x, axis=1))
        builder.emit_func_output(out)
    assert "R.maximum" in load_model(builder.get()).mod.script()


def test_what_is_no_model(tmp_path):
    with pytest.raises(InputError, match=r"no file .*missing\.onnx"):
        load_model(tmp_path / "missing.onnx")
    with pytest.raises(InputError, match=r'^no file squeezenet; the model of the zoo is "zoo:squeezenet"$'):
        load_model("squeezenet")
    with pytest.raises(InputError, match=r"^.* is a folder; give .*\.onnx"):
        load_model(tmp_path)
    with pytest.raises(InputError, match=r"cannot look for a file 'def main.*: File name too long; give .*\.onnx"):
        load_model("def main" * 1000)  # a text, but not of a Relay program
    weird = tmp_path / "model.pb"
    weird.touch()
    with pytest.raises(InputError, match=r"'\.pb'.*\.onnx"):
        load_model(weird)
    keras = tmp_path / "model.keras"
    keras.touch()
    for model in (keras, type("Model", (), {"__module__": "keras.src.models.model"})()):
        with pytest.raises(InputError, match=r"model\.export\("):
            load_model(model)
    pickle = tmp_path / "model.pth"
    pickle.touch()
    with pytest.raises(InputError, match=r"torch\.export\.save"):
        load_model(pickle)
    with pytest.raises(InputError, match="from int"):
        load_model(3)


def test_load_params(tmp_path):
    path = tmp_path / "weights.npz"
    np.savez(path, w=WEIGHT)
    assert np.array_equal(load_params(path)["w"], WEIGHT)
    np.savez(path, w=np.array([{}], dtype=object))
    with pytest.raises(InputError, match="plain arrays"):
        load_params(path)
    path.write_bytes(b"junk")
    with pytest.raises(InputError, match=r"weights\.npz"):
        load_params(path)
    np.savez_compressed(path, w=WEIGHT)
    damaged = bytearray(path.read_bytes())
    begin = 30 + int.from_bytes(damaged[26:28], "little") + int.from_bytes(damaged[28:30], "little")
    damaged[begin] = 0xFF  # a kind of block that there is none of
    path.write_bytes(damaged)
    with pytest.raises(InputError, match="plain arrays"):
        load_params(path)
    tvms = tmp_path / "weights.params"
    tvms.write_bytes(b"junk")
    with pytest.raises(InputError, match=r"weights\.params: "):
        load_params(tvms)
    program = path.rename(tmp_path / "make.py")
    with pytest.raises(InputError, match=r"make\.py is not .*savez\('weights\.npz'"):
        load_params(program)
    with pytest.raises(InputError, match="no file"):
        load_params(tmp_path / "none.npz")


@I.ir_module
class Two:
    @R.function
    def decode(x: R.Tensor((1, 4), "float32"), w: R.Tensor((4, 3), "float32")) -> R.Tensor((1, 3), "float32"):
        with R.dataflow():
            y: R.Tensor((1, 3), "float32") = R.matmul(x, w)
            R.output(y)
        return y

    @R.function
    def prefill(x: R.Tensor(("n", 4), "float32"), w: R.Tensor((4, 3), "float32")) -> R.Tensor(("n", 3), "float32"):
        n = T.int64()
        with R.dataflow():
            y: R.Tensor((n, 3), "float32") = R.matmul(x, w)
            R.output(y)
        return y


def test_one_function_of_several():
    for function, shapes in (("decode", {}), ("prefill", {"x": (2, 4)})):
        imported = load_model(Two, params={"w": WEIGHT}, shapes=shapes, function=function)
        assert [info.shape for info in imported.inputs] == [(2 if shapes else 1, 4)]
        assert [var.name_hint for var in imported.mod.get_global_vars()] == ["main"]
    with pytest.raises(
        InputError, match=r"its Relax functions are: decode, prefill. .*function=\"NAME\", or --function"
    ):
        load_model(Two)
    with pytest.raises(InputError, match=r"no Relax function 'encode'; its Relax functions are: decode, prefill"):
        load_model(Two, function="encode")
    with pytest.raises(InputError, match="function is for Relax modules"):
        load_model("zoo:nasrnn", function="encode")


def test_the_command_line_names_the_function(tmp_path, capsys):
    path = tmp_path / "two.json"
    path.write_text(tvm.ir.save_json(Two))
    weights = tmp_path / "w.npz"
    np.savez(weights, w=WEIGHT)
    assert main(["kernels", str(path), "--list", "--params", str(weights), "--threads", "1"]) == 2
    assert "--function NAME" in capsys.readouterr().err
    chosen = ["--function", "prefill", "--shape", "x=5,4"]
    assert main(["kernels", str(path), "--list", "--params", str(weights), "--threads", "1", *chosen]) == 0
    assert "matmul" in capsys.readouterr().out


def test_models_of_relax_nn_come_in_with_their_parameters():
    from tvm.relax.frontend import nn

    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.product = nn.Linear(4, 3)

        def forward(self, x):
            return self.product(x)

    mod, names = Dense().export_tvm({"forward": {"x": nn.spec.Tensor((2, 4), "float32")}})
    params = {name: np.ones([int(dim) for dim in parameter.shape], "float32") for name, parameter in names}
    assert [info.name for info in load_model(mod, params=params).inputs] == ["x"]
