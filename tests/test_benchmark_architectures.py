"""Models of today's architectures are imported and compute what PyTorch does."""

import argparse

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.architecture_modules import ARCHITECTURES, build
from eqtune.compile.untuned import untuned_executable
from eqtune.errors import MismatchError
from eqtune.frontends import load_model
from eqtune.frontends.verify import verify_import
from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner


def difference(module, inputs, tolerance=1e-4):
    """From PyTorch, relative, with plain schedules, which compute the same sooner than untuned ones.

    On one thread: TVM's scatter_nd starts all of them for each index, and beside another test they wait for each other.
    """
    imported = load_model(module, example_inputs=inputs)
    run = ModelRunner(untuned_executable(imported.mod, detect_target(1), plain=True), threads=1)
    return verify_import(imported, run, tolerance=tolerance)


@pytest.mark.unoptimised
@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name):
    module, inputs = build(name)
    assert difference(module, inputs) < 1e-4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_outputs_depend_on_inputs(name):
    """By far more than the tolerance of `test_architecture`, which would say nothing otherwise."""
    import torch
    from torch.utils import _pytree as pytree

    module, inputs = build(name)
    others = pytree.tree_map(lambda leaf: leaf.flip(-1), inputs)
    with torch.no_grad():
        for output, other in zip(pytree.tree_leaves(module(*inputs)), pytree.tree_leaves(module(*others)), strict=True):
            assert (output - other).abs().max() > 0.003 * output.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "convnext", "text-recognizer"])
def test_architecture_in_bfloat16(name):
    module, inputs = build(name, dtype="bfloat16")
    assert difference(module, inputs, tolerance=1.0) < 8 * 2.0**-7


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.onnx uses what torch deprecates
def test_the_next_word_of_a_decoder(tmp_path):
    """What `benchmarks.decoding` gives to both runtimes."""
    pytest.importorskip("onnxruntime")
    from benchmarks.decoding import export

    sizes = {"bits": 4, "block": 32, "zeros": True, "width": 256, "hidden": 512, "layers": 1, "words": 64, "places": 9}
    paths, arrays = export(tmp_path, argparse.Namespace(**sizes, seed=0))
    for path in paths.values():
        imported = load_model(path)
        run = ModelRunner(untuned_executable(imported.mod, detect_target(), plain=True))
        for actual, expected in zip(run(*arrays), imported.reference(*arrays), strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


def test_a_batch_repeats_the_inputs():
    module, (image,) = build("convnext", batch=3)
    _, (one,) = build("convnext")
    assert image.shape == (3, *one.shape[1:])
    outputs = module(image)
    assert len(outputs) == 3
    np.testing.assert_allclose(outputs[2].detach(), module(one)[0].detach(), rtol=1e-4, atol=1e-5)


def test_the_benchmark_goes_on_after_a_model_that_is_refused(monkeypatch, capsys):
    from benchmarks import architectures

    def measure(name, _args):
        if name == "encoder":
            raise MismatchError("outputs differ")
        return {"model": name, "eqtune_ms": 1.0}

    monkeypatch.setattr(architectures, "measure", measure)
    monkeypatch.setattr("sys.argv", ["architectures", "--architectures", "encoder,convnext"])
    with pytest.raises(SystemExit) as end:
        architectures.main()
    assert end.value.code == 1
    out, err = capsys.readouterr()
    assert "convnext" in out
    assert "encoder: outputs differ" in err
    monkeypatch.setattr("sys.argv", ["architectures", "--architectures", "encoder"])
    with pytest.raises(SystemExit):
        architectures.main()
