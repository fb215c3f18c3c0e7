"""TFLite models (tflite_models/make.py): what they compute, quantised or not, and each refusal."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import tvm

import eqtune
from eqtune.compile.untuned import untuned_executable
from eqtune.errors import InputError, MissingExtraError, UnsupportedModelError
from eqtune.frontends import load_model, verify_import
from eqtune.frontends.verify import compare
from eqtune.runtime import ModelRunner

tflite = pytest.importorskip("tflite")

pytestmark = pytest.mark.unoptimised
pytest.importorskip("ai_edge_litert")

MODELS = Path(__file__).parent / "tflite_models"


@pytest.mark.parametrize("name", ["image", "words", "corners", "steps", "lstm"])
def test_floats_are_what_the_interpreter_computes(name: str) -> None:
    imported = load_model(MODELS / f"{name}.tflite")
    assert imported.source == "tflite"
    assert imported.name == name
    assert verify_import(imported) < 1e-5


@pytest.mark.parametrize("name", ["image", "words", "corners"])
def test_quantised_models_are_as_near_to_floats_as_the_interpreter(name: str) -> None:
    imported, floats = load_model(MODELS / f"{name}_int8.tflite"), load_model(MODELS / f"{name}.tflite")
    run = ModelRunner(untuned_executable(imported.mod, tvm.target.Target("llvm")))
    inputs = imported.random_inputs()
    _, of_ours = compare(run(*inputs), floats.reference(*inputs))
    _, of_theirs = compare(imported.reference(*inputs), floats.reference(*inputs))
    assert 0 < of_ours < 1.5 * of_theirs < 0.2


def test_a_quantised_model_is_tuned(tmp_path: Path) -> None:
    path = MODELS / "image_int8.tflite"
    result = eqtune.tune_model(str(path), trials=1, threads=1, work_dir=tmp_path, progress=False)
    inputs = load_model(path).random_inputs(seed=1)
    _, apart = compare(result.run(*inputs), load_model(path).reference(*inputs))
    assert apart < 8 / 256


def test_a_module_of_tvms_importer_is_a_model_too(tmp_path: Path) -> None:
    """Its attribute "params" repeats what are constants."""
    from tvm.relax.frontend.tflite import from_tflite

    content = (MODELS / "image.tflite").read_bytes()
    imported = load_model(from_tflite(tflite.Model.GetRootAsModel(content, 0)))
    assert [info.shape for info in imported.inputs] == [(1, 10, 10, 3)]


def test_weights_that_alone_are_quantised_are_floats() -> None:
    """In the reference, too: as it stands LiteRT rounds activations, and is farther from the model in floats."""
    imported, floats = load_model(MODELS / "image_dynamic.tflite"), load_model(MODELS / "image.tflite")
    assert verify_import(imported) < 1e-5
    run = ModelRunner(untuned_executable(imported.mod, tvm.target.Target("llvm")))
    inputs = imported.random_inputs()
    _, apart = compare(run(*inputs), floats.reference(*inputs))
    assert 0 < apart < 0.02


def test_what_the_importer_does_not_know_is_named(tmp_path: Path) -> None:
    content = bytearray((MODELS / "steps.tflite").read_bytes())
    model = tflite.Model.GetRootAsModel(content, 0)
    codes = [model.OperatorCodes(n) for n in range(model.OperatorCodesLength())]
    (tanh,) = (code for code in codes if code.BuiltinCode() == tflite.BuiltinOperator.TANH)
    for field in (4, 10):  # the operator's number, as older and newer readers find it
        place = tanh._tab.Pos + tanh._tab.Offset(field)
        content[place] = tflite.BuiltinOperator.SKIP_GRAM
    path = tmp_path / "unknown.tflite"
    path.write_bytes(bytes(content))
    with pytest.raises(UnsupportedModelError, match="SKIP_GRAM"):
        load_model(path)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    path = tmp_path / "broken.tflite"
    path.write_bytes(b"no flatbuffer")
    with pytest.raises(InputError, match="not a TFLite model"):
        load_model(path)
    path.write_bytes((MODELS / "image.tflite").read_bytes()[:400])
    with pytest.raises(InputError, match="not a readable TFLite model"):
        load_model(path)


def test_shapes_and_params_are_the_files_own() -> None:
    with pytest.raises(InputError, match="converted with"):
        load_model(MODELS / "image.tflite", shapes={"x": (1, 20, 20, 3)})
    with pytest.raises(InputError, match="its own weights"):
        load_model(MODELS / "image.tflite", params={"w": np.zeros(3)})


def test_a_missing_reference_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    path = MODELS / "corners.tflite"
    eqtune.tune_model(str(path), trials=1, threads=1, work_dir=tmp_path, graph="off")
    assert "ai-edge-litert is not installed" in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tflite", None)
    with pytest.raises(MissingExtraError, match=r"eqtune\[tflite\]"):
        load_model(MODELS / "image.tflite")
