"""ONNX's Fourier transforms against ONNX Runtime's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eqtune.errors import UnsupportedModelError
from eqtune.frontends import load_model, verify_import

onnx = pytest.importorskip("onnx")

pytestmark = pytest.mark.unoptimised
pytest.importorskip("onnxruntime")
helper = onnx.helper

FLOAT = onnx.TensorProto.FLOAT


def model(
    name: str, shape: tuple[int, ...], constants: dict[str, Any], inputs: list[str], opset: int = 20, **attributes: Any
) -> Any:
    """One node whose first input is "x"."""
    graph = helper.make_graph(
        [helper.make_node(name, inputs, ["y"], **attributes)],
        "transform",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info("y", FLOAT, [None] * (4 if name == "STFT" else len(shape)))],
        [onnx.numpy_helper.from_array(np.asarray(value), key) for key, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


REAL = {
    "real": ("DFT", (2, 40, 1), {}, ["x"]),
    "two-factors": ("DFT", (3, 512, 1), {}, ["x"]),
    "padded": ("DFT", (2, 7, 9, 1), {"length": 12, "axis": 1}, ["x", "length", "axis"]),
}
COMPLEX = {
    "complex": ("DFT", (2, 40, 2), {"axis": 1}, ["x", "", "axis"]),
    "cut": ("DFT", (3, 512, 2), {"length": 441}, ["x", "length"]),
}


@pytest.mark.parametrize("case", [*REAL.values(), *COMPLEX.values()], ids=[*REAL, *COMPLEX])
@pytest.mark.parametrize("inverse", [0, 1])
def test_transforms(case: Any, inverse: int) -> None:
    assert verify_import(load_model(model(*case, inverse=inverse))) < 1e-5


@pytest.mark.parametrize("case", REAL.values(), ids=REAL)
def test_halves_of_the_spectra_of_real_signals(case: Any) -> None:
    assert verify_import(load_model(model(*case, onesided=1))) < 1e-5


def test_before_opset_20_the_axis_is_an_attribute() -> None:
    assert verify_import(load_model(model("DFT", (2, 6, 5, 2), {}, ["x"], 17, axis=2))) < 1e-5


@pytest.mark.parametrize(
    ("shape", "constants", "inputs"),
    [((2, 6, 2), {}, ["x"]), ((2, 5, 3, 2), {"length": 9, "axis": 1}, ["x", "length", "axis"])],
    ids=["even", "odd"],
)
def test_real_signals_of_halves_of_spectra(shape: Any, constants: Any, inputs: Any) -> None:
    assert verify_import(load_model(model("DFT", shape, constants, inputs, inverse=1, onesided=1))) < 1e-5


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize(
    ("shape", "constants", "inputs"),
    [
        ((2, 400, 1), {"step": 16, "window": np.hanning(64).astype("float32")}, ["x", "step", "window"]),
        ((1, 900, 1), {"step": 100, "length": 441}, ["x", "step", "", "length"]),
    ],
    ids=["window", "length"],
)
def test_spectrograms(shape: Any, constants: Any, inputs: Any, onesided: int) -> None:
    assert verify_import(load_model(model("STFT", shape, constants, inputs, onesided=onesided))) < 1e-5


def test_what_is_refused_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="10007 points"):
        load_model(model("DFT", (1, 10_007, 1), {}, ["x"]))
