"""Models of today's architectures are imported and compute what PyTorch does."""

import pytest

pytest.importorskip("torch")

from benchmarks.architecture_modules import ARCHITECTURES, build
from eqtune.frontends import load_model
from eqtune.frontends.verify import verify_import
from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner
from eqtune.transform.apply_tuned import untuned_executable


def difference(module, inputs, tolerance=1e-4):
    """From PyTorch, relative, with plain schedules, which compute the same sooner than untuned ones."""
    imported = load_model(module, example_inputs=inputs)
    run = ModelRunner(untuned_executable(imported.mod, detect_target(), plain=True))
    return verify_import(imported, run, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name):
    module, inputs = build(name)
    assert difference(module, inputs) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "convnext", "text-recognizer"])
def test_architecture_in_bfloat16(name):
    module, inputs = build(name, dtype="bfloat16")
    assert difference(module, inputs, tolerance=1.0) < 8 * 2.0**-7
