"""The model zoo: published sizes, seeded weights, and the Relax it emits."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import tvm
from tvm import relax

from eqtune import zoo
from eqtune.errors import InputError, MissingExtraError
from eqtune.zoo import weights


@pytest.mark.parametrize("name", zoo.names())
def test_sizes_are_the_published_ones(name):
    spec = zoo.MODELS[name]
    network = spec.describe()
    assert network.parameters == spec.parameters
    assert network.multiply_adds == pytest.approx(spec.multiply_adds, rel=0.01)


def test_unknown_names_and_options_are_listed():
    with pytest.raises(InputError, match=r"'alexnet'.*squeezenet.*nasrnn"):
        zoo.relax("alexnet")
    for options, message in (
        ({"sequence_length": -3}, "bert_base: sequence_length is a whole number, at least 1, not -3"),
        ({"sequence_length": "64"}, "sequence_length is a whole number, at least 1, not '64'"),
        ({"token_ids": 1}, "bert_base: token_ids is True or False, not 1"),
    ):
        with pytest.raises(InputError, match=message):
            zoo.check("bert_base", **options)
    with pytest.raises(InputError, match=r"no option 'depth'.*steps, hidden"):
        zoo.relax("nasrnn", depth=3)


def test_weights_are_the_same_in_another_process():
    script = "from eqtune.zoo import weights;print(weights.fan_in_scaled(3, 'model/layer', (4, 5), 5).tobytes().hex())"
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    here = weights.fan_in_scaled(3, "model/layer", (4, 5), 5)
    assert here.tobytes().hex() == there
    assert not np.array_equal(here, weights.fan_in_scaled(4, "model/layer", (4, 5), 5))
    assert not np.array_equal(here, weights.fan_in_scaled(3, "model/other", (4, 5), 5))


def test_inputs_match_the_function_and_follow_the_seed():
    mod = zoo.relax("nasrnn")
    arrays = zoo.inputs("nasrnn")
    assert [param.name for param in mod["main"].params] == list(arrays)
    assert all(array.shape == (1, 512) and array.dtype == np.float32 for array in arrays.values())
    assert np.array_equal(arrays["x0"], zoo.inputs("nasrnn")["x0"])
    assert not np.array_equal(arrays["x0"], zoo.inputs("nasrnn", seed=1)["x0"])
    assert not np.array_equal(arrays["x0"], arrays["x1"])


def test_options_change_the_model():
    mod = zoo.relax("nasrnn", steps=2, hidden=32)
    assert len(mod["main"].params) == 2
    assert tuple(mod["main"].params[0].ty.shape) == (1, 32)


def test_bert_with_token_ids_is_the_published_model():
    network = zoo.MODELS["bert_base"].describe(token_ids=True, sequence_length=128)
    assert network.parameters == 109_482_240
    assert [(spec.name, spec.shape) for spec in network.inputs] == [
        ("input_ids", (1, 128)),
        ("token_type_ids", (1, 128)),
    ]
    # 22.5 GFLOPs at sequence length 128 in Jiao et al., "TinyBERT", Findings of EMNLP 2020, table 1.
    assert 2 * network.multiply_adds == pytest.approx(22.5e9, rel=0.01)


def test_bert_has_positions_for_512_tokens():
    assert zoo.MODELS["bert_base"].describe(token_ids=True, sequence_length=512).inputs[0].shape == (1, 512)
    with pytest.raises(InputError, match=r"sequence_length=513.* 512"):
        zoo.MODELS["bert_base"].describe(token_ids=True, sequence_length=513)


def test_token_ids_stay_within_their_tables():
    arrays = zoo.inputs("bert_base", token_ids=True)
    assert arrays["input_ids"].dtype == np.int64
    assert 2 < arrays["input_ids"].max() < 30522
    assert set(np.unique(arrays["token_type_ids"])) == {0, 1}


def run_relax(mod, arrays):
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    outputs = machine["main"](*[tvm.runtime.tensor(array) for array in arrays])
    return [tensor.numpy() for tensor in ([outputs] if hasattr(outputs, "numpy") else outputs)]


def run_torch(module, tensors):
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        outputs = module(*tensors)
    return [tensor.numpy() for tensor in ([outputs] if torch.is_tensor(outputs) else outputs)]


def run_onnx(proto, arrays):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, arrays)


def assert_close(outputs, expected):
    assert len(outputs) == len(expected)
    for got, want in zip(outputs, expected, strict=True):
        assert got.shape == want.shape
        assert np.max(np.abs(got - want)) <= 1e-5 * np.max(np.abs(want))


SLOW = {"vgg19", "bert_base", "nasneta", "inceptionv3", "resnet50", "resnext50"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in zoo.names()])
def test_torch_and_onnx_agree(name):
    pytest.importorskip("onnx")
    pytest.importorskip("torch")
    expected = run_torch(*zoo.torch(name))
    assert_close(run_onnx(zoo.onnx(name), zoo.inputs(name)), expected)
    for output in expected:
        # Neither vanished nor exploded, and not constant: comparisons of outputs mean something.
        assert 1e-2 < np.std(output) < 1e2


@pytest.mark.parametrize("name", ["squeezenet", "nasrnn"])
def test_relax_agrees_with_torch(name):
    pytest.importorskip("torch")
    assert_close(run_relax(zoo.relax(name), zoo.inputs(name).values()), run_torch(*zoo.torch(name)))


@pytest.mark.slow
def test_token_ids_agree_on_all_back_ends():
    pytest.importorskip("torch")
    pytest.importorskip("onnx")
    options = {"token_ids": True, "sequence_length": 8}
    arrays = zoo.inputs("bert_base", **options)
    expected = run_torch(*zoo.torch("bert_base", **options))
    assert_close(run_onnx(zoo.onnx("bert_base", **options), arrays), expected)
    assert_close(run_relax(zoo.relax("bert_base", **options), arrays.values()), expected)


@pytest.mark.parametrize(("door", "package"), [("torch", "torch"), ("onnx", "onnx")])
def test_a_missing_extra_is_named(monkeypatch, door, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"eqtune.zoo.{door}_builder", raising=False)
    with pytest.raises(MissingExtraError, match=rf"eqtune\[{door}\]"):
        getattr(zoo, door)("nasrnn")
