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
