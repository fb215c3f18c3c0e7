"""A recurrent layer as one operator: its kernel, and its steps written out, compute what the equations of ONNX say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

import eqtune.recurrent.loop as loop
from eqtune.frontends import load_model, verify_import
from eqtune.gpu_machine import resolve_target
from eqtune.machine import detect_target
from eqtune.recurrent import CELLS, LANES, OPERATOR, Layer, recurrent, with_steps_written_out
from eqtune.relax_ir.functions import operator, top_level_bindings
from eqtune.tasks import extract_tasks, lower_to_kernels
from eqtune.transform.simplify import simplify

torch = pytest.importorskip("torch")

FUNCTIONS = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
}


def layer_of(cell: str, batch: int, hidden: int, directions: int = 1, steps: int = 5) -> Layer:
    backwards = ((False,), (False, True))[directions - 1]
    return Layer(cell, backwards, (CELLS[cell].activations,) * directions, steps, batch, hidden)


def weights_of(layer: Layer, dtype: str = "float32") -> list[Any]:
    """Arguments of the operator in plain shapes, units not in blocks: shares, recurrence, states, and those that only
    some layers have."""
    rng = np.random.default_rng(0)
    units = (layer.directions, layer.gates, layer.hidden)
    shapes = [(layer.steps, layer.batch, *units), (*units, layer.hidden)]
    shapes += [(layer.directions, layer.batch, layer.hidden)] * (1 + layer.has_memory)
    shapes += [(layer.directions, layer.hidden)] * layer.has_hidden_bias
    shapes += [(layer.directions, 3, layer.hidden)] * layer.has_peepholes
    lengths = [np.arange(layer.batch) * 3 % (layer.steps + 1)] * layer.has_lengths
    return [*(rng.uniform(-1, 1, shape).astype(dtype) for shape in shapes), *lengths]


def module_of(layer: Layer, weights: list[Any]) -> tvm.IRModule:
    """A function of the shares, the rest constants, everything in blocks."""
    missing = -layer.hidden % LANES

    def blocks(array: Any, axis: int) -> Any:
        padded = np.pad(array, [(0, missing if axis == a else 0) for a in range(array.ndim)])
        return padded.reshape(*array.shape[:axis], layer.blocks, LANES, *array.shape[axis + 1 :])

    shares, recurrence, *rest = weights
    by_block = blocks(shares, 4).transpose(0, 1, 2, 4, 3, 5).reshape(layer.steps, layer.batch, -1)
    panels = blocks(np.pad(recurrence, [(0, 0)] * 3 + [(0, missing)]), 2).transpose(0, 2, 4, 1, 3)
    states, more = rest[: 1 + layer.has_memory], rest[1 + layer.has_memory :]
    arrays = (panels, *states, *(blocks(array, array.ndim - 1) if array.ndim > 1 else array for array in more))
    constants = [relax.const(np.ascontiguousarray(array), str(array.dtype)) for array in arrays]
    x = relax.Var("x", relax.TensorType(by_block.shape, str(by_block.dtype)))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(recurrent(layer, x, *constants)))
        builder.emit_func_output(result)
    return builder.get()


def run(mod: tvm.IRModule, layer: Layer, weights: list[Any], threads: int) -> list[Any]:
    missing = -layer.hidden % LANES
    padded = np.pad(weights[0], [(0, 0)] * 4 + [(0, missing)])
    padded = padded.reshape(*padded.shape[:4], layer.blocks, LANES).transpose(0, 1, 2, 4, 3, 5)
    target = detect_target(threads) if threads < 3 else tvm.target.Target({"kind": "llvm", "num-cores": threads})
    machine = relax.VirtualMachine(relax.build(lower_to_kernels(mod, target), target), tvm.cpu())
    result = machine["main"](tvm.runtime.tensor(padded.reshape(layer.steps, layer.batch, -1)))
    return [result.numpy()] if hasattr(result, "numpy") else [part.numpy() for part in result]


def expected(layer: Layer, weights: list[Any]) -> list[Any]:
    """ONNX's equations, in float64."""
    shares, recurrence, *rest = (array.astype("float64") for array in weights)
    lengths = rest.pop() if layer.has_lengths else np.full(layer.batch, layer.steps)
    looks = rest.pop() if layer.has_peepholes else np.zeros((layer.directions, 3, layer.hidden))
    every = np.zeros((layer.steps, layer.batch, layer.directions, layer.hidden))
    memories = []

    def bounded(x: Any) -> Any:
        return np.clip(x, -layer.clip, layer.clip) if layer.clip else x

    for d, backwards in enumerate(layer.reversed):
        f, *others = (FUNCTIONS[name] for name in layer.activations[d])
        h = rest[0][d]
        c = rest[1][d] if layer.has_memory else h
        bias = rest[-1][d] if layer.has_hidden_bias else 0.0
        for t in reversed(range(layer.steps)) if backwards else range(layer.steps):
            given, weight, lasts = shares[t, :, d], recurrence[d], (t < lengths)[:, None]
            state = np.einsum("bk,gnk->bgn", h, weight)
            if layer.cell == "RNN":
                new = f(bounded(given[:, 0] + state[:, 0]))
            elif layer.cell == "LSTM":
                i, forget = (f(bounded(given[:, g] + state[:, g] + looks[d, g] * c)) for g in (0, 2))
                memory = forget * c + i * others[0](bounded(given[:, 3] + state[:, 3]))
                memory = np.clip(memory, -layer.cell_clip, layer.cell_clip) if layer.cell_clip else memory
                new = f(bounded(given[:, 1] + state[:, 1] + looks[d, 1] * memory)) * others[1](memory)
                c = np.where(lasts, memory, c)
            else:
                z, r = (f(bounded(given[:, g] + state[:, g])) for g in range(2))
                before = layer.cell == "GRU_LINEAR_BEFORE_RESET"
                seen = r * (state[:, 2] + bias) if before else (r * h) @ weight[2].T
                new = z * h + (1 - z) * others[0](bounded(given[:, 2] + seen))
            every[t, :, d], h = np.where(lasts, new, 0), np.where(lasts, new, h)
        memories.append(c)
    return [every, np.stack(memories)] if layer.has_memory else [every]


def assert_equal(got: list[Any], wanted: list[Any], tolerance: float = 2e-6) -> None:
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    ("batch", "hidden", "directions", "threads"),
    [(1, 32, 1, 2), (1, 40, 2, 1), (7, 19, 2, 2), (17, 16, 1, 1), (3, 33, 2, 3)],
    ids=["one-row", "a-ragged-block", "a-direction-a-thread", "many-rows", "two-directions-by-tiles"],
)
def test_the_loop_computes_the_layer(
    cell: str, batch: int, hidden: int, directions: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LEAST_FLOPS", 0)  # as many threads as there are, however small
    layer = layer_of(cell, batch, hidden, directions)
    weights = weights_of(layer)
    assert_equal(run(module_of(layer, weights), layer, weights, threads), expected(layer, weights))


@pytest.mark.parametrize("cell", CELLS)
def test_steps_written_out_compute_the_layer(cell: str) -> None:
    layer = layer_of(cell, 3, 19, 2)
    weights = weights_of(layer)
    mod = with_steps_written_out(module_of(layer, weights), lambda call: True)
    assert OPERATOR not in [operator(getattr(b, "value", None)) for b in top_level_bindings(mod["main"])]
    assert_equal(run(mod, layer, weights, 1), expected(layer, weights))


@pytest.mark.parametrize("written_out", [False, True])
def test_memories_may_be_cut(written_out: bool) -> None:
    layer = replace(layer_of("LSTM", 3, 19), cell_clip=0.3)
    weights = weights_of(layer)
    wanted = expected(layer, weights)
    assert np.abs(wanted[1]).max() == 0.3, "nothing is cut"
    mod = module_of(layer, weights)
    mod = with_steps_written_out(mod, lambda call: True) if written_out else mod
    assert_equal(run(mod, layer, weights, 1), wanted)


@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("has_lengths", [False, True])
def test_bounds_peepholes_and_lengths(
    cell: str, has_lengths: bool, written_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LEAST_FLOPS", 0)
    more = {"clip": 0.4, "has_peepholes": cell == "LSTM", "has_lengths": has_lengths}
    more |= {"cell_clip": 0.3} if cell == "LSTM" else {}
    layer = replace(layer_of(cell, 7, 19, 2), **more)
    weights = weights_of(layer)
    mod = module_of(layer, weights)
    mod = with_steps_written_out(mod, lambda call: True) if written_out else mod
    assert_equal(run(mod, layer, weights, 2), expected(layer, weights))
    assert not np.allclose(expected(layer, weights)[0], expected(replace(layer, clip=0.0), weights)[0])


def test_directions_may_differ_in_their_activations() -> None:
    layer = Layer("RNN", (True, False), (("relu",), ("sigmoid",)), 4, 2, 20)
    weights = weights_of(layer)
    assert_equal(run(module_of(layer, weights), layer, weights, 2), expected(layer, weights))


def test_float64_goes_step_by_step() -> None:
    layer = layer_of("LSTM", 2, 8)
    weights = weights_of(layer, "float64")
    assert_equal(run(module_of(layer, weights), layer, weights, 1), expected(layer, weights), 1e-14)


def test_a_layer_is_one_kernel_however_long() -> None:
    """Written out, a step was two kernels and a product: 1800 calls, whose lowering alone took a minute."""

    def calls(steps: int) -> int:
        layer = torch.nn.LSTM(8, 16, 2, batch_first=True)
        mod = load_model(layer, example_inputs=(torch.zeros(1, steps, 8),)).mod
        kernels = lower_to_kernels(simplify(mod, detect_target(2)), detect_target(2))
        return sum(task.calls for task in extract_tasks(kernels))

    assert calls(3) == calls(30) < 12


def test_one_step_is_a_product_whose_schedule_is_searched_for() -> None:
    layer = layer_of("LSTM", 1, 32, steps=1)
    kernels = lower_to_kernels(simplify(module_of(layer, weights_of(layer)), detect_target(1)), detect_target(1))
    assert "lstm" not in [task.name for task in extract_tasks(kernels)]


def test_gpus_get_the_steps() -> None:
    layer = layer_of("GRU", 2, 16)
    mod = module_of(layer, weights_of(layer))
    target = resolve_target("nvidia/nvidia-h100", None)
    for given in (simplify(mod, target), mod):
        kernels = lower_to_kernels(given, target)
        assert sum("matmul" in task.name for task in extract_tasks(kernels)) >= 2


@pytest.mark.parametrize(
    ("target", "instruction"),
    [
        ({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}, "vfmadd231ps"),
        (
            {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1", "num-cores": 2},
            "fmla\tv",
        ),
    ],
    ids=["AVX2", "NEON"],
)
def test_the_loop_compiles_for_narrower_vectors(target: dict[str, Any], instruction: str) -> None:
    chosen = tvm.target.Target(target)
    layer = layer_of("LSTM", 4, 64)
    kernels = lower_to_kernels(module_of(layer, weights_of(layer)), chosen)
    functions = {
        variable: function.with_attr("global_symbol", variable.name_hint)
        for variable, function in kernels.functions_items()
        if isinstance(function, tirx.PrimFunc)
    }
    assert instruction in tvm.compile(tvm.IRModule(functions), chosen).mod.inspect_source("asm")


def test_a_layer_whose_first_states_are_inputs() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.LSTM(6, 20, bidirectional=True)

        def forward(self, x: Any, h: Any, c: Any) -> Any:
            return self.layer(x, (h, c))

    example_inputs = tuple(torch.linspace(-1, 1, n).reshape(s) for n, s in ((90, (5, 3, 6)), *[(120, (2, 3, 20))] * 2))
    assert verify_import(load_model(Model(), example_inputs=example_inputs)) < 1e-5


def test_unknown_shapes_are_refused() -> None:
    layer = layer_of("RNN", 1, 16)
    steps = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((steps, 1, 16), "float32"))
    rest = [relax.const(np.zeros(shape, "float32")) for shape in ((1, 1, 16, 1, 16), (1, 1, 16))]
    builder = relax.BlockBuilder()
    with pytest.raises(ValueError, match="known shapes"), builder.function("main", [x]):
        builder.emit(recurrent(layer, x, *rest))


def test_products_of_inputs_are_one_for_all_steps_and_directions() -> None:
    mod = load_model(torch.nn.GRU(6, 20, bidirectional=True), example_inputs=(torch.zeros(9, 1, 6),)).mod
    names = [operator(getattr(b, "value", None)) for b in top_level_bindings(simplify(mod)["main"])]
    assert names.count("relax.matmul") == 1
