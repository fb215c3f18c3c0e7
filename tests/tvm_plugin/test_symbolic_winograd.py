"""Winograd's convolutions of images of any number and size, which fast math permits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

import eqtune
from eqtune.compile.executable import build_scheduled
from eqtune.errors import MismatchError
from eqtune.machine import describe_machine, detect_target
from eqtune.runtime import LocalModels, ModelRunner
from eqtune.schedules.overwritable import OVERWRITABLE
from eqtune.search.space.hardware import Hardware
from eqtune.symbolic import WINOGRAD, permit_winograd, tiled_kernels
from eqtune.symbolic.winograd_choice import SHARED_WEIGHTS
from eqtune.tasks import lower_to_kernels
from eqtune.transform import ChannelsLast, LowerToKernels

N, H, W = (tirx.Var(name, "int64") for name in ("n", "h", "w"))
RNG = np.random.default_rng(0)
WEIGHTS = np.random.default_rng(1).standard_normal((2, 16, 16, 3, 3)).astype(np.float32) / np.float32(12)
LARGE = {"n": 4, "h": 64, "w": 64}


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


class Layer:
    """A convolution, a bias, perhaps a residual, and a relu, with channels last."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 3, padding: int = 1, residual: bool = False, stride: int = 1
    ) -> None:
        self.weight = normal(kernel, kernel, inputs, outputs) / np.float32(kernel * inputs**0.5)
        self.bias, self.residual = normal(1, 1, 1, outputs), residual
        self.padding, self.stride = padding, stride

    def module(self, n: Any = N, h: Any = H, w: Any = W) -> tvm.IRModule:
        kernel, _, inputs, outputs = self.weight.shape
        x = relax.Var("x", relax.TensorType((n, h, w, inputs), "float32"))
        arguments = [x]
        if self.residual:
            assert 2 * self.padding == kernel - 1
            arguments.append(relax.Var("y", relax.TensorType((n, h, w, outputs), "float32")))
        builder = relax.BlockBuilder()
        with builder.function("main", arguments):
            with builder.dataflow():
                value = builder.emit(
                    op.nn.conv2d(
                        x,
                        relax.const(self.weight),
                        strides=(self.stride,) * 2,
                        padding=(self.padding,) * 4,
                        data_layout="NHWC",
                        kernel_layout="HWIO",
                    )
                )
                value = builder.emit(op.add(value, relax.const(self.bias)))
                if self.residual:
                    value = builder.emit(op.add(value, arguments[1]))
                value = builder.emit_output(op.nn.relu(value))
            builder.emit_func_output(value)
        return builder.get()

    def __call__(self, x: np.ndarray, *others: np.ndarray) -> np.ndarray:
        """In float64."""
        size = self.weight.shape[0]
        around = [(0, 0), (self.padding, self.padding), (self.padding, self.padding), (0, 0)]
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(x.astype(float), around), (size, size), (1, 2))
        result = np.einsum("nyxcij,ijco->nyxo", windows, self.weight.astype(float), optimize=True) + self.bias
        return np.maximum(sum(others, result), 0)


def kernels(
    mod: tvm.IRModule, sizes: Mapping[str, int] = LARGE, hardware: Hardware | None = None
) -> dict[str, tirx.PrimFunc]:
    """Not scheduled, with permissions."""
    target = detect_target()
    permitted = permit_winograd(
        lower_to_kernels(mod, target), hardware or describe_machine(target, measure=False), sizes, 16
    )
    return {name.name_hint: f for name, f in permitted.functions_items() if isinstance(f, tirx.PrimFunc)}


def outputs_of_tile(mod: tvm.IRModule, sizes: Mapping[str, int] = LARGE, **hardware: Any) -> list[Any]:
    machine = describe_machine(detect_target(), measure=False)
    found = kernels(mod, sizes, Hardware(**{**machine.to_json(), **hardware}))
    return [None if WINOGRAD not in f.attrs else tuple(map(int, f.attrs[WINOGRAD])) for f in found.values()]


def compiled(mod: tvm.IRModule, outputs: int, hardware: Hardware | None = None) -> ModelRunner:
    """With so many rows and columns of results a tile, whatever an estimate says."""
    target = detect_target()
    lowered = lower_to_kernels(mod, target)
    for variable, function in lowered.functions_items():
        if isinstance(function, tirx.PrimFunc):
            lowered.update_func(variable, function.with_attr(WINOGRAD, [outputs, outputs]))
    with target:
        tiled = tiled_kernels(lowered, hardware or describe_machine(target, measure=False))
    names = {tile.tile.name for tiles in tiled.tiles.values() for tile in tiles}
    assert names == {"data", "products", "results"}
    return ModelRunner(build_scheduled(tiled.mod, target))


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    """As float32 in Winograd's convolutions rounds."""
    assert found.shape == wanted.shape
    if wanted.size:
        assert np.abs(found - wanted).max() <= 1e-5 * max(1.0, np.abs(wanted).max())


SIZES = ((1, 1, 1), (1, 3, 5), (2, 4, 4), (1, 7, 9), (3, 8, 16), (1, 33, 30), (0, 8, 8))
"""Smaller than a tile, whole tiles, with a border; more blocks than one; none at all."""


@pytest.mark.parametrize("outputs", [2, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_any_number_of_images_of_any_size(outputs: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads have tiles of their own, or share those of a block and so each weight."""
    monkeypatch.setattr("eqtune.symbolic.winograd_choice.SHARED_WEIGHTS", 0 if shared else SHARED_WEIGHTS)
    layer = Layer(32, 48, residual=True)
    run = compiled(layer.module(), outputs)
    for n, h, w in SIZES:
        x, y = normal(n, h, w, 32), normal(n, h, w, 48)
        close(run(x, y)[0], layer(x, y))


@pytest.mark.parametrize("sizes", [(N, 9, 14), (1, H, W), (2, 12, W)])
@pytest.mark.parametrize(("kernel", "padding"), [(3, 0), (3, 1), (5, 2), (3, 3)])
def test_some_sizes_are_open(sizes: tuple[Any, ...], kernel: int, padding: int) -> None:
    layer = Layer(16, 32, kernel, padding)
    run = compiled(layer.module(*sizes), 4)
    for given in ((1, 9, 14), (3, 20, 7)):
        x = normal(*(size if isinstance(size, int) else known for size, known in zip(sizes, given, strict=True)), 16)
        close(run(x)[0], layer(x))


def test_one_thread_and_narrow_vectors() -> None:
    layer = Layer(32, 16)
    machine = describe_machine(detect_target(1), measure=False).to_json()
    run = compiled(layer.module(), 4, Hardware(**{**machine, "threads": 1, "vector_bytes": 32, "vector_registers": 16}))
    x = normal(1, 21, 13, 32)
    close(run(x)[0], layer(x))


def test_it_is_chosen_where_it_takes_less_time() -> None:
    assert outputs_of_tile(Layer(128, 128).module()) == [(4, 4)]
    few = {"n": 1, "h": 2, "w": 2}
    assert outputs_of_tile(Layer(128, 128).module(), few) == [None], "larger weights would be read for two tiles"
    many = Layer(512, 512).module(N, 8, 8)
    assert outputs_of_tile(many, {"n": 1}, weights_in_memory=True) == [(2, 2)], "less to read from memory"
    assert outputs_of_tile(many, {"n": 16}, weights_in_memory=True) == [(4, 4)]
    assert outputs_of_tile(Layer(32, 32, 5, 2).module()) == [(4, 4)]
    assert outputs_of_tile(Layer(32, 32, stride=2).module()) == [None]
    assert outputs_of_tile(Layer(32, 24).module()) == [None], "channels do not fill vectors"
    assert outputs_of_tile(Layer(128, 128).module(), tile_flops_per_s=1e13, dot_products=("amx-bf16",)) == [(4, 4)]
    assert outputs_of_tile(Layer(64, 64).module(1, 56, 56)) == [None], "the graph search does it where sizes are known"


def test_the_result_may_overwrite_the_residual_but_not_the_image() -> None:
    target = detect_target()
    with target:
        mod = lower_to_kernels(Layer(32, 32, residual=True).module(), target)
        tiled = tiled_kernels(permit_winograd(mod, describe_machine(target, measure=False), LARGE, 16), Hardware())
    (kernel,) = (f for f in tiled.mod.functions.values() if isinstance(f, tirx.PrimFunc))
    names = [str(kernel.params[int(place)].name) for place in kernel.attrs[OVERWRITABLE]]
    assert names == ["y"]


def network() -> tvm.IRModule:
    """Two layers and a pooling, with channels first, as models come."""
    x = relax.Var("image", relax.TensorType((N, 16, H, W), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for weight in WEIGHTS:
                value = builder.emit(op.nn.conv2d(value, relax.const(weight), padding=(1, 1)))
                value = builder.emit(op.nn.relu(value))
            value = builder.emit_output(op.nn.max_pool2d(value, (2, 2), strides=(2, 2)))
        builder.emit_func_output(value)
    return builder.get()


def tuned(work_dir: Path, **arguments: Any) -> Any:
    arguments = {"time_budget_s": 0.1, "fast_math": True, "sizes": LARGE} | arguments
    return eqtune.tune_model(network(), threads=2, progress=False, work_dir=work_dir, **arguments)


def test_fast_math_for_a_model_with_open_sizes(tmp_path: Path) -> None:
    result = tuned(tmp_path)
    assert result.summary.graph["fast math"] == "used"
    assert str(result.summary.graph["form"]).endswith("Winograd")
    assert result.max_rel_error <= 1e-4
    plain = tuned(tmp_path, fast_math=False)
    assert str(plain.summary.graph["fast math"]).startswith("not permitted; 100% of the arithmetic is in convolutions")
    for shape in ((1, 16, 5, 7), (2, 16, 32, 19)):
        x = normal(*shape)
        np.testing.assert_allclose(result.run(x)[0], plain.run(x)[0], atol=1e-4)


def test_tiles_of_all_stages_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_s = [3e-3, 2e-3, 1e-3]  # the baseline, by estimate, measured
    monkeypatch.setattr(LocalModels, "time_s", lambda _, models, *given, **options: runs_s[: len(models)])
    result = tuned(tmp_path, trials=60, time_budget_s=None)
    assert result.summary.trials
    found = {task.name.split(", ")[-1].split(" of ")[0] for task in result.tasks if task.trials}
    assert found >= {"data", "products", "results"}
    x = normal(1, 16, 21, 10)
    np.testing.assert_allclose(result.run(x)[0], tuned(tmp_path, fast_math=False).run(x)[0], atol=1e-4)


def test_fast_math_that_is_wrong_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eqtune.tune import open_sizes

    checked, calls = open_sizes._checked, []

    def refusing(built: Any, accuracies: Any) -> tuple[float, float]:
        calls.append(built)
        if len(calls) == 1:
            raise MismatchError("at n=4, off by a lot")
        return checked(built, accuracies)

    monkeypatch.setattr(open_sizes, "_checked", refusing)
    result = tuned(tmp_path)
    assert result.summary.graph["fast math"] == "refused: at n=4, off by a lot"
    assert "Winograd" not in str(result.summary.graph["form"])


def test_the_passes_do_it_too() -> None:
    mod, target = network(), detect_target()
    run = ModelRunner(tvm.compile(mod, target=target, relax_pipeline=relax.get_pipeline("eqtune", fast_math=True)))
    exact = ModelRunner(tvm.compile(mod, target=target, relax_pipeline=relax.get_pipeline("eqtune")))
    x = normal(2, 16, 30, 41)
    (found,), (wanted,) = run(x), exact(x)
    assert 0 < np.abs(found - wanted).max() <= 1e-4, "the same would be the same kernels"
    lowered = tvm.transform.Sequential([ChannelsLast(), LowerToKernels(target, fast_math=True)])(mod)
    assert any(WINOGRAD in (f.attrs or {}) for f in lowered.functions.values())
