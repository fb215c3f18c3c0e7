"""Products by narrow weights: every candidate computes what the dequantised weights would give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from eqtune.narrow_weights import narrow_product, narrow_weights
from eqtune.schedules.pack_weights import pack_weights
from eqtune.search.space import Hardware, build_space
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.tasks import extract_tasks, lower_to_kernels

op = relax.op
AVX2 = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})


def product(rows: tuple[int, ...], weights: Any, followed: bool) -> Any:
    """x times the weights, perhaps plus a residual, relu."""
    builder = relax.BlockBuilder()
    places = weights.words.shape[1] * 32 // weights.bits
    shapes = {"x": (*rows, places)} | ({"residual": (*rows, len(weights.words))} if followed else {})
    inputs = [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit(narrow_product(inputs[0], weights))
            if followed:
                result = builder.emit(op.nn.relu(builder.emit(op.add(result, inputs[1]))))
            result = builder.emit_output(result)
        builder.emit_func_output(result)
    return builder.get()


@pytest.mark.parametrize("registers", [(64, 32), (32, 16)], ids=["AVX-512", "AVX2"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("rows", [(1, 1), (6,)], ids=str)
def test_candidates_compute_the_product(rows: tuple[int, ...], bits: int, registers: tuple[int, int]) -> None:
    rng = np.random.default_rng(bits)
    places, columns, group = 192, 96, 32
    codes = rng.integers(0, 2**bits, (places, columns)).astype(np.uint8)
    scales = rng.random((places // group, columns), np.float32) + 0.5
    zeros = rng.integers(0, 2**bits, (places // group, columns)).astype(np.float32)
    if bits == 4:
        zeros = np.full((1, 1), 8, np.float32)
    weights = narrow_weights(codes, scales, zeros)
    assert weights is not None
    followed = len(rows) == 1
    lowered = lower_to_kernels(product(rows, weights, followed), AVX2)
    (task,) = extract_tasks(lowered)
    assert task.name == "narrow_product" + "_add_relu" * followed
    hardware = Hardware(threads=2, vector_bytes=registers[0], vector_registers=registers[1])
    (sketch,) = build_space(task.mod, hardware).sketches
    assert sketch.name == "narrow_weights"

    x = rng.standard_normal((*rows, places)).astype(np.float32)
    dequantized = scales.repeat(group, 0) * (codes - zeros.repeat(places // len(zeros), 0))
    expected = x.astype(np.float64) @ dequantized.astype(np.float64)
    inputs = [x]
    if followed:
        inputs.append(rng.standard_normal(expected.shape).astype(np.float32))
        expected = np.maximum(expected + inputs[1], 0)
    choices = np.stack([rng.choice(knob.values, 500) for knob in sketch.knobs], -1)
    choices = np.unique(choices[sketch.legal(choices)], axis=0)
    assert np.isfinite(sketch.latency_s(choices)).all()
    assert np.isfinite(sketch.features(choices)).any(axis=0).sum() > 10
    for row in choices[rng.permutation(len(choices))[:4]]:
        schedule = sketch.apply({knob.name: int(v) for knob, v in zip(sketch.knobs, row, strict=True)})
        (name,) = task.functions
        mod = tvm.IRModule({v: f for v, f in lowered.functions_items() if v.name_hint != name})
        mod[name] = schedule.mod["main"]
        packed = pack_weights(mod)
        kernels = {v: prepare_for_lowering(f) for v, f in packed.functions_items() if not isinstance(f, relax.Function)}
        for variable, kernel in kernels.items():
            packed.update_func(variable, kernel)
        machine = relax.VirtualMachine(tvm.compile(packed, AVX2), tvm.cpu())
        result = machine["main"](*map(tvm.runtime.tensor, inputs)).numpy()
        np.testing.assert_allclose(result, expected, atol=5e-6 * np.abs(expected).max())


def test_large_sums_are_as_exact_as_of_floats() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (4096, 16)).astype(np.int8)
    weights = narrow_weights(codes, np.full((1, 1), 0.01, np.float32), np.zeros((1, 1), np.float32))
    assert weights is not None
    (task,) = extract_tasks(lower_to_kernels(product((1,), weights, False), AVX2))
    x = (1000 + rng.standard_normal((1, 4096))).astype(np.float32)
    result = tvm.runtime.tensor(np.zeros((1, 16), np.float32))
    function = task.mod["main"].with_attr("global_symbol", "main")
    tvm.compile(tvm.IRModule({"main": function}), AVX2)["main"](
        *map(tvm.runtime.tensor, (x, weights.words, weights.scales)), result
    )
    exact = x.astype(np.float64) @ (codes * 0.01)
    of_floats = x @ (codes.astype(np.float32) * np.float32(0.01))
    assert np.abs(result.numpy() - exact).max() < 2 * np.abs(of_floats - exact).max()


@pytest.mark.parametrize("rows", [(2, 3), (16, 1), (2, 1, 3), (16,)], ids=str)
def test_rows_of_several_axes(rows: tuple[int, ...]) -> None:
    """All tiles that are legal can be made; what has as many rows as there are columns is not packed as weights are."""
    codes = np.random.default_rng(0).integers(0, 16, (64, 16)).astype(np.uint8)
    weights = narrow_weights(codes, np.ones((1, 1), np.float32), np.zeros((1, 1), np.float32))
    (task,) = extract_tasks(lower_to_kernels(product(rows, weights, False), AVX2))
    (sketch,) = build_space(task.mod, Hardware()).sketches
    values = np.stack(np.meshgrid(*(knob.values for knob in sketch.knobs)), -1).reshape(-1, len(sketch.knobs))
    assert {1, np.prod(rows)} <= set(sketch.knobs[0].values)
    values = values[sketch.legal(values)]
    assert len(values)
    for row in values:
        schedule = sketch.apply({knob.name: int(v) for knob, v in zip(sketch.knobs, row, strict=True)})
        packed: list[tuple[int, ...]] = []

        def collect(block: Any, packed: list[tuple[int, ...]] = packed) -> None:
            if "meta_schedule.layout_rewrite_preproc" in block.annotations:
                packed.extend(tuple(map(int, read.source.shape)) for read in block.reads)

        tvm_ffi.structural_walk(schedule.mod["main"].body, (tvm.s_tir.SBlock, collect))
        assert sorted(packed) == [(16, 1), (16, 8)]  # scales and words
