"""Models of today's architectures are imported and compute what PyTorch does."""

import pytest

pytest.importorskip("torch")

from benchmarks.architecture_modules import ARCHITECTURES, build
from eqtune.frontends import load_model
from eqtune.frontends.verify import verify_import


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name):
    module, inputs = build(name)
    assert verify_import(load_model(module, example_inputs=inputs)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "convnext", "text-recognizer"])
def test_architecture_in_bfloat16(name):
    module, inputs = build(name, dtype="bfloat16")
    assert verify_import(load_model(module, example_inputs=inputs), tolerance=1.0) < 8 * 2.0**-7
