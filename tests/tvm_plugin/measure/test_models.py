"""Whole models run where their kernels are measured: on servers elsewhere, on a GPU, or in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from numpy.typing import NDArray
from tvm import relax

from eqtune.compile.untuned import untuned_executable
from eqtune.errors import InputError, SetupError
from eqtune.machine import detect_target
from eqtune.measure.elsewhere.far_models import FarModel, FarModels
from eqtune.measure.elsewhere.fleet import DeviceLost, Fleet
from eqtune.measure.elsewhere.model_bench import ModelBench, digest_of, read_arrays, write_arrays
from eqtune.runtime import LocalModels

X = np.arange(6, dtype="float32").reshape(2, 3)


def executable(offset: float) -> Any:
    """Of a model with two outputs: x + offset, and the pair of it and its double."""
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.add(x, relax.const(offset, "float32")))
            both = builder.emit_output(relax.Tuple([y, relax.Tuple([relax.op.multiply(y, relax.const(2.0))])]))
        builder.emit_func_output(both)
    return untuned_executable(builder.get(), detect_target(1))


class Shelf:
    """A device that runs models in this process; `faults` come first: "lost", or an answer; `refusals` before them."""

    def __init__(self, *faults: Any, refusals: Sequence[Exception] = ()) -> None:
        self.faults = list(faults)
        self.refusals = list(refusals)
        self.loaded: list[str] = []
        self.bench: ModelBench

    def open(self) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.bench = ModelBench(tvm.cpu(), self._load)

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self.faults:
            fault = self.faults.pop(0)
            if fault == "lost":
                raise DeviceLost("crash", "gone")
            return dict(fault)
        self.bench.load(request)
        return self.bench.run(request)

    def close(self) -> None: ...

    def release(self) -> None: ...

    def _load(self, path: str) -> Any:
        self.loaded.append(path)
        return tvm.runtime.load_module(path)


def far(device: Shelf, directory: Path, patience_s: float = 10.0) -> FarModels:
    fleet = Fleet(patience_s, "there is no shelf")
    fleet.add(device)
    return FarModels(fleet, directory, "so")


def test_a_model_elsewhere_gives_its_outputs_in_order(tmp_path: Path) -> None:
    device = Shelf()
    model = far(device, tmp_path).load(executable(1.0))
    for inputs in (X, X + 10, X):
        first, second = model(inputs)
        np.testing.assert_array_equal(first, inputs + 1)
        np.testing.assert_array_equal(second, 2 * inputs + 2)
    assert len(device.loaded) == 1, "it is sent once"
    assert not list(tmp_path.glob("outputs-*"))


def test_models_elsewhere_are_timed_in_turn_on_one_device(tmp_path: Path) -> None:
    device = Shelf()
    models = far(device, tmp_path)
    pair = [models.load(executable(1.0)), models.load(executable(2.0))]
    assert all(0 < seconds < 1 for seconds in models.time_s(pair, [X], budget_s=0.05))
    assert len(device.loaded) == 2, "both stay there"
    outputs, seconds = models.run_once(pair[1], [X])
    np.testing.assert_array_equal(outputs[0], X + 2)
    assert 0 < seconds < 1


def test_each_model_elsewhere_has_its_own_time_and_as_much_of_the_budget(tmp_path: Path) -> None:
    seconds, asked = {"slow": 0.4, "fast": 0.1}, []

    class Stopwatch(Shelf):
        def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
            name = Path(request["model"]).name
            asked.append((name, request["repeat"]))
            return {"latencies_s": [seconds[name]] * request["repeat"]}

    models = far(Stopwatch(), tmp_path)
    pair = [FarModel(models, tmp_path / name) for name in seconds]
    assert models.time_s(pair, [X], budget_s=3.0) == [0.4, 0.1]
    assert asked == [("slow", 1), ("fast", 1), ("slow", 1), ("fast", 5), ("slow", 1), ("fast", 5)]
    asked.clear()
    assert models.time_s(pair, [X], budget_s=0.5, at_least=1) == [0.4, 0.1]
    assert asked == [("slow", 1), ("fast", 1)], "the budget is spent"


def test_a_lost_device_loses_no_model(tmp_path: Path) -> None:
    device = Shelf("lost")
    model = far(device, tmp_path).load(executable(1.0))
    np.testing.assert_array_equal(model(X)[0], X + 1)


def test_a_model_that_loses_every_device_is_one_error_and_the_device_goes_on(tmp_path: Path) -> None:
    device = Shelf("lost", "lost")
    model = far(device, tmp_path).load(executable(1.0))
    with pytest.raises(SetupError, match="does not run on the device: crash: gone"):
        model(X)
    np.testing.assert_array_equal(model(X)[0], X + 1)


def test_a_device_that_could_not_be_opened_is_tried_again(tmp_path: Path) -> None:
    device = Shelf(refusals=[OSError("too many open files")])
    model = far(device, tmp_path).load(executable(1.0))
    np.testing.assert_array_equal(model(X)[0], X + 1)


def test_without_a_device_that_opens_the_error_says_why(tmp_path: Path) -> None:
    device = Shelf(refusals=[OSError("too many open files")] * 9)
    model = far(device, tmp_path, patience_s=0.1).load(executable(1.0))
    with pytest.raises(SetupError, match=r"no device to measure on for 0.1 s .*too many open files"):
        model(X)


def test_a_model_that_does_not_run_elsewhere_is_one_error(tmp_path: Path) -> None:
    device = Shelf({"error": "out_of_memory", "detail": "1 GB wanted"})
    model = far(device, tmp_path).load(executable(1.0))
    with pytest.raises(SetupError, match="does not run on the device: out_of_memory: 1 GB wanted"):
        model(X)


def test_a_model_that_cannot_be_linked_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot be linked"):
        far(Shelf(), tmp_path / "missing").load(executable(1.0))


def test_devices_keep_two_models(tmp_path: Path) -> None:
    device = Shelf()
    models = far(device, tmp_path)
    three = [models.load(executable(offset)) for offset in (1.0, 2.0, 3.0)]
    for offset, model in enumerate([*three, three[0]], start=1):
        np.testing.assert_array_equal(model(X)[0], X + (offset if offset < 4 else 1))
    assert len(device.loaded) == 4, "the first made room for the third, and was sent again"


@pytest.mark.parametrize(
    "arrays",
    [
        [],
        [np.zeros((2, 0), "int8"), np.array(3.0)],
        [np.ones((3, 2), ml_dtypes.bfloat16), np.array([True, False])],
        [np.arange(12).reshape(3, 4).T],
    ],
)
def test_arrays_of_every_dtype_travel(tmp_path: Path, arrays: list[NDArray[Any]]) -> None:
    specs = write_arrays(tmp_path / "arrays.npz", arrays)
    read = read_arrays(tmp_path / "arrays.npz", specs)
    assert [(array.dtype, array.shape) for array in read] == [(array.dtype, array.shape) for array in arrays]
    assert all((there == here).all() for there, here in zip(read, arrays, strict=True))
    assert digest_of(read) == digest_of(arrays)


def test_a_model_in_this_process_runs_on_the_device_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(relax, "VirtualMachine", lambda made, device: asked.append(device) or {"main": made})
    LocalModels(1, tvm.cuda(1)).load(lambda: None)
    LocalModels(1).load(lambda: None)
    assert asked == [tvm.cuda(1), tvm.cpu()]


def test_after_closing_nobody_waits_for_ever(tmp_path: Path) -> None:
    models = far(Shelf(), tmp_path)
    model = models.load(executable(1.0))
    np.testing.assert_array_equal(model(X)[0], X + 1)
    models._fleet.close()
    with pytest.raises(InputError, match=r"closed.*make another one"):
        model(X)
