"""Attention as other front ends write it: Relax's operator, and PyTorch's question whether a row sees any place."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

from eqtune.compile.untuned import untuned_executable
from eqtune.machine import detect_target
from eqtune.relax_ir.functions import operator, top_level_bindings
from eqtune.runtime import ModelRunner
from eqtune.transform import AskMaximaForEmptyRows, AttentionAsProducts

N = tirx.Var("n", "int64")


def attention_module(places, keys, bias=False, dtype="float32", **attributes):
    """nn.attention of [2, places, 3, 8] and [2, keys, 3, 8]."""
    builder = relax.BlockBuilder()
    shapes = [(2, places, 3, 8), (2, keys, 3, 8), (2, keys, 3, 8), *([(2, 1, places, keys)] if bias else [])]
    inputs = [relax.Var(f"x{i}", relax.TensorType(shape, dtype)) for i, shape in enumerate(shapes)]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(op.nn.attention(*inputs, **attributes)))
        builder.emit_func_output(result)
    return builder.get()


def attention(query, key, value, bias=0.0, scale=8**-0.5, later=None):
    """Of [batch, places, heads, width]; rows see places up to their own and `later` more."""
    query, key, value = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
    scores = query @ key.transpose(0, 1, 3, 2) * scale + bias
    if later is not None:
        row, place = np.ogrid[: scores.shape[2], : scores.shape[3]]
        scores = np.where(place <= row + later, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ value).transpose(0, 2, 1, 3)


def names(mod):
    return [operator(binding.value) for binding in top_level_bindings(mod["main"])]


@pytest.mark.parametrize("symbolic", [False, True], ids=["known", "symbolic"])
@pytest.mark.parametrize(
    ("keys", "attributes", "expected"),
    [
        (5, {}, {}),
        (5, {"causal_mask": "TopLeft"}, {"later": 0}),
        (9, {"causal_mask": "BottomRight"}, {"later": 4}),
        (5, {"scale": tirx.FloatImm("float32", 0.5)}, {"scale": 0.5}),
    ],
    ids=["plain", "first row", "last row", "scaled"],
)
def test_attention_becomes_products(symbolic, keys, attributes, expected):
    mod = AttentionAsProducts()(attention_module(N if symbolic else 5, keys, **attributes))
    assert names(mod).count("relax.matmul") == 2
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, n, 3, 8), dtype="float32") for n in (5, keys, keys))
    machine = relax.VirtualMachine(tvm.compile(mod, target=detect_target()), tvm.cpu())
    found = machine["main"](*map(tvm.runtime.tensor, (query, key, value))).numpy()
    np.testing.assert_allclose(found, attention(query, key, value, **expected), rtol=1e-5, atol=1e-6)


def test_a_bias_is_added():
    model, target = attention_module(5, 9, bias=True), detect_target()
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, n, 3, 8), dtype="float32") for n in (5, 9, 9)]
    arrays.append(rng.standard_normal((2, 1, 5, 9), dtype="float32"))
    (piped,) = ModelRunner(relax.build(model, target, relax_pipeline="eqtune"))(*arrays)
    np.testing.assert_allclose(piped, attention(*arrays), rtol=1e-5, atol=1e-6)


def test_scores_of_float16_stay_in_float32():
    """Queries and keys of 100 have products that float16 has no number for."""
    model, target = attention_module(5, 9, bias=True, dtype="float16"), detect_target()
    rng = np.random.default_rng(0)
    arrays = [(k * rng.standard_normal((2, n, 3, 8))).astype("float16") for n, k in ((5, 100), (9, 100), (9, 1))]
    arrays.append(rng.standard_normal((2, 1, 5, 9)).astype("float16"))
    (piped,) = ModelRunner(relax.build(model, target, relax_pipeline="eqtune"))(*arrays)
    np.testing.assert_allclose(piped, attention(*(x.astype("float64") for x in arrays)), rtol=0, atol=5e-3)


def test_sliding_windows_stay():
    mod = attention_module(5, 5, causal_mask="TopLeft", window_size=2)
    assert AttentionAsProducts()(mod).same_as(mod)


def test_maxima_tell_whether_a_row_is_empty():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 6), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            infinite = builder.emit(op.equal(x, relax.const(-np.inf, "float32")))
            some = builder.emit(op.astype(builder.emit(op.logical_not(infinite)), "int8"))
            result = builder.emit_output(builder.emit(op.max(some, [-1], keepdims=True)))
        builder.emit_func_output(result)
    model, target = builder.get(), detect_target()
    mod = AskMaximaForEmptyRows()(model)
    assert names(mod)[:4] == ["relax.max", "relax.equal", "relax.logical_not", "relax.astype"]
    rows = np.zeros((4, 6), np.float32)
    rows[1], rows[2, :5], rows[3, 0] = -np.inf, -np.inf, np.inf
    (wanted,) = ModelRunner(untuned_executable(model, target))(rows)
    (found,) = ModelRunner(untuned_executable(mod, target))(rows)
    assert wanted[:, 0].tolist() == [1, 0, 1, 1]
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)
