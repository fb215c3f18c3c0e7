"""The model zoo: published sizes, seeded weights, and the Relax it emits."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from eqtune import zoo
from eqtune.errors import InputError
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
