"""Attention is one kernel, and every candidate of it computes what softmax and products do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir.expr import TensorLoad
from tvm.tirx import BufferStore

from eqtune.search.space import Hardware, build_space
from eqtune.search.space.expressions import nodes_of
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.tasks import extract_tasks, lower_to_kernels

op = relax.op
HEADS, ROWS, PLACES, DEPTH, COLUMNS = 3, 24, 256, 10, 32
AVX2 = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})
Values = dict[str, np.ndarray[Any, Any]]


def module(define: Callable[..., Any], **shapes: tuple[int, ...]) -> Any:
    builder = relax.BlockBuilder()
    inputs = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()}
    with builder.function("main", list(inputs.values())):
        with builder.dataflow():
            result = builder.emit_output(define(builder.emit, **inputs))
        builder.emit_func_output(result)
    return builder.get()


def names(mod: Any, target: Any = AVX2) -> list[str]:
    return sorted(task.name for task in extract_tasks(lower_to_kernels(mod, target)))


def between_heads(emit: Any, q: Any, k: Any, v: Any) -> Any:
    apart = [0, 2, 1, 3]
    q, k, v = (emit(op.permute_dims(tensor, axes)) for tensor, axes in ((q, apart), (k, [0, 2, 3, 1]), (v, apart)))
    scores = emit(op.multiply(emit(op.matmul(q, k)), relax.const(0.3, "float32")))
    return op.permute_dims(emit(op.matmul(emit(op.nn.softmax(scores)), v)), apart)


def one_head(emit: Any, q: Any, k: Any, v: Any) -> Any:
    return op.matmul(emit(op.nn.softmax(emit(op.matmul(q, emit(op.permute_dims(k)))))), v)


def with_mask(emit: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = emit(op.subtract(mask, emit(op.divide(emit(op.matmul(q, k)), relax.const(-3.0, "float32")))))
    return op.matmul(emit(op.nn.softmax(scores, 2)), v)


def masked(emit: Any, q: Any, k: Any, v: Any, seen: Any) -> Any:
    seen = emit(op.greater(seen, relax.const(0.0, "float32")))
    capped = emit(op.tanh(emit(op.matmul(q, k))))
    scores = emit(op.where(seen, capped, relax.const(-np.inf, "float32")))
    return op.matmul(emit(op.nn.softmax(scores)), v)


def short(**lengths: int) -> dict[str, tuple[int, ...]]:
    """Shapes of queries, keys and values without heads between their rows."""
    rows, places, columns = (
        lengths.get(name, n) for name, n in (("rows", ROWS), ("places", PLACES), ("columns", COLUMNS))
    )
    return {"q": (HEADS, rows, DEPTH), "k": (HEADS, DEPTH, places), "v": (HEADS, places, columns)}


def softmax(scores: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    result: np.ndarray[Any, Any] = powers / powers.sum(-1, keepdims=True)
    return result


CAUSAL = np.where(np.tri(61, 310) > 0, 0, -np.inf).astype("float32")


def ragged(emit: Any, q: Any, k: Any, v: Any) -> Any:
    apart = [0, 2, 1, 3]
    q, k, v = (emit(op.permute_dims(tensor, axes)) for tensor, axes in ((q, apart), (k, [0, 2, 3, 1]), (v, apart)))
    scores = emit(op.add(emit(op.matmul(q, k)), relax.const(CAUSAL)))
    return op.permute_dims(emit(op.matmul(emit(op.nn.softmax(scores)), v)), apart)


def ragged_places(emit: Any, q: Any, k: Any, v: Any, bias: Any) -> Any:
    return op.matmul(emit(op.nn.softmax(emit(op.add(emit(op.matmul(q, k)), bias)))), v)


CASES: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]], Callable[[Values], Any]]] = {
    "between heads": (
        between_heads,
        {"q": (1, ROWS, HEADS, DEPTH), "k": (1, PLACES, HEADS, DEPTH), "v": (1, PLACES, HEADS, COLUMNS)},
        lambda x: np.einsum("bhij,bjhc->bihc", softmax(0.3 * np.einsum("bihd,bjhd->bhij", x["q"], x["k"])), x["v"]),
    ),
    "keys place by place": (
        between_heads,
        {"q": (1, ROWS, HEADS, 16), "k": (1, 32, HEADS, 16), "v": (1, 32, HEADS, COLUMNS)},
        lambda x: np.einsum("bhij,bjhc->bihc", softmax(0.3 * np.einsum("bihd,bjhd->bhij", x["q"], x["k"])), x["v"]),
    ),
    "many keys place by place, one head": (
        one_head,
        {"q": (ROWS, 32), "k": (320, 32), "v": (320, COLUMNS)},
        lambda x: softmax(x["q"] @ x["k"].T) @ x["v"],
    ),
    "301 keys place by place": (
        between_heads,
        {"q": (1, ROWS, HEADS, 16), "k": (1, 301, HEADS, 16), "v": (1, 301, HEADS, 36)},
        lambda x: np.einsum("bhij,bjhc->bihc", softmax(0.3 * np.einsum("bihd,bjhd->bhij", x["q"], x["k"])), x["v"]),
    ),
    "with a mask": (
        with_mask,
        {**short(), "mask": (ROWS, PLACES)},
        lambda x: softmax(x["mask"] + x["q"] @ x["k"] / 3) @ x["v"],
    ),
    "masked": (
        masked,
        {**short(), "seen": (ROWS, PLACES)},
        lambda x: softmax(np.where(x["seen"] > 0, np.tanh(x["q"] @ x["k"]), -np.inf)) @ x["v"],
    ),
    "ragged between heads, causal": (
        ragged,
        {"q": (1, 61, HEADS, DEPTH), "k": (1, 310, HEADS, DEPTH), "v": (1, 310, HEADS, COLUMNS)},
        lambda x: np.einsum("bhij,bjhc->bihc", softmax(CAUSAL + np.einsum("bihd,bjhd->bhij", x["q"], x["k"])), x["v"]),
    ),
    "ragged rows": (
        ragged_places,
        {**short(rows=41), "bias": (HEADS, 1, 1)},
        lambda x: softmax(x["q"] @ x["k"]) @ x["v"],
    ),
    "ragged columns": (
        ragged_places,
        {**short(columns=40), "bias": (HEADS, 1, 1)},
        lambda x: softmax(x["q"] @ x["k"]) @ x["v"],
    ),
    "ragged columns between heads": (
        between_heads,
        {"q": (1, ROWS, HEADS, DEPTH), "k": (1, PLACES, HEADS, DEPTH), "v": (1, PLACES, HEADS, 36)},
        lambda x: np.einsum("bhij,bjhc->bihc", softmax(0.3 * np.einsum("bihd,bjhd->bhij", x["q"], x["k"])), x["v"]),
    ),
    "ragged rows, places and columns": (
        ragged_places,
        {**short(rows=41, places=301, columns=25), "bias": (HEADS, 1, 1)},
        lambda x: softmax(x["q"] @ x["k"]) @ x["v"],
    ),
    "windows of 53 places": (
        ragged_places,
        {**short(rows=53, places=53), "bias": (HEADS, 1, 1)},
        lambda x: softmax(x["q"] @ x["k"]) @ x["v"],
    ),
    "ragged places": (
        ragged_places,
        {**short(places=301), "bias": (1, ROWS, 1)},
        lambda x: softmax(x["q"] @ x["k"]) @ x["v"],
    ),
}


@pytest.mark.unoptimised
@pytest.mark.parametrize("registers", [(64, 32), (32, 16)], ids=["AVX-512", "AVX2"])
@pytest.mark.parametrize("case", CASES)
def test_candidates_compute_attention(case: str, registers: tuple[int, int]) -> None:
    define, shapes, reference = CASES[case]
    mod = module(define, **shapes)
    turned = ["transpose"]  # the keys, whose rows become columns
    others = turned if "between heads" in case else ["greater"] if case == "masked" else []
    assert names(mod) == ["attention", *others]
    task = max(extract_tasks(lower_to_kernels(mod, AVX2)), key=lambda task: task.flops)
    q, v = (shapes[name] for name in "qv")
    rows, places = (shape[1] if len(shape) == 4 else shape[-2] for shape in (q, v))
    heads = 1 if "one head" in case else HEADS
    products = 2 * heads * rows * places * (q[-1] + v[-1])
    assert products < task.flops < 1.3 * products
    hardware = Hardware(threads=2, vector_bytes=registers[0], vector_registers=registers[1])
    (sketch,) = build_space(task.mod, hardware).sketches
    assert sketch.name == "attention"

    rng = np.random.default_rng(0)
    inputs = {name: 2 * rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    expected = reference({name: value.astype("float64") for name, value in inputs.items()})
    if case == "masked":
        inputs["seen"] = inputs["seen"] > 0
    if "between heads" in case:
        inputs["k"] = np.ascontiguousarray(inputs["k"].transpose(0, 2, 3, 1))
    choices = np.stack([rng.choice(knob.values, 4000) for knob in sketch.knobs], -1)
    choices = choices[sketch.legal(choices)]
    assert np.isfinite(sketch.latency_s(choices)).all()
    assert np.isfinite(sketch.features(choices)).any(axis=0).sum() > 10
    once, by_heads = (choices[(choices[:, -2:] == where).any(1)] for where in (2, 3))  # when panels are copied
    assert len(by_heads) or heads == 1
    for row in (*choices[:3], *once[:2], *by_heads[:2]):
        schedule = sketch.apply({knob.name: int(v) for knob, v in zip(sketch.knobs, row, strict=True)})
        function = prepare_for_lowering(schedule.mod["main"]).with_attr("global_symbol", "main")
        library = tvm.compile(tvm.IRModule({"main": function}), AVX2)
        result = tvm.runtime.tensor(np.full(expected.shape, np.nan, dtype="float32"))
        given = [*inputs.values(), *([np.pad(CAUSAL, [(0, 3), (0, 10)])] if "causal" in case else [])]
        library["main"](*(tvm.runtime.tensor(value) for value in given), result)
        np.testing.assert_allclose(result.numpy(), expected, atol=3e-6 * np.abs(expected).max())


def test_operands_of_one_name_are_told_apart() -> None:
    """Names are those of a model's variables: what is copied in panels are keys and values, and not the query."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var("x", relax.TensorType(shape, "float32")) for shape in short().values()]
    with builder.function("main", inputs):
        with builder.dataflow():
            q, k, v = inputs
            weights = builder.emit(op.nn.softmax(builder.emit(op.matmul(q, k))))
            result = builder.emit_output(op.matmul(weights, v))
        builder.emit_func_output(result)
    (task,) = extract_tasks(lower_to_kernels(builder.get(), AVX2))
    (sketch,) = build_space(task.mod, Hardware()).sketches
    choices = np.stack([np.random.default_rng(0).choice(knob.values, 4000) for knob in sketch.knobs], -1)
    row = next(row for row in choices[sketch.legal(choices)] if (row[-2:] == 2).all())
    main = sketch.apply({knob.name: int(v) for knob, v in zip(sketch.knobs, row, strict=True)}).mod["main"]
    query, keys, values, _ = main.params
    assert {str(parameter.name) for parameter in (query, keys, values)} == {"x"}
    copied = {s.value.source for s in nodes_of(main.body, BufferStore) if isinstance(s.value, TensorLoad)}
    assert {keys, values} <= copied
    assert query not in copied


def test_short_rows_short_sums_and_what_would_be_filled_up_too_far_stay_three_kernels() -> None:
    def plain(emit: Any, q: Any, k: Any, v: Any) -> Any:
        return op.matmul(emit(op.nn.softmax(emit(op.matmul(q, k)))), v)

    three = ["matmul", "matmul1", "softmax"]
    assert names(module(plain, **short())) == ["attention"]
    assert names(module(plain, **short(places=32))) == ["attention"]
    assert names(module(plain, **short(places=16))) == three
    assert names(module(plain, **short(columns=20))) == three  # 32 would be computed
    assert names(module(plain, **short(columns=24))) == ["attention"]
    assert names(module(plain, **short(places=264))) == ["attention"]
    assert names(module(plain, **short(places=257))) == ["attention"]
    assert names(module(plain, **short(rows=5))) == three  # 6 would be computed
    assert names(module(plain, **short(rows=49, places=49))) == three  # 52 in tiles that 16 registers are bad at
    avx512 = tvm.target.Target({"kind": "llvm", "mcpu": "skylake-avx512"})
    assert names(module(plain, **short(rows=49, places=49)), avx512) == ["attention"]
    assert names(module(plain, **short(rows=257))) == ["attention"]
    assert names(module(plain, **short(rows=1))) == three
    assert names(module(plain, **{**short(), "q": (HEADS, ROWS, 1), "k": (HEADS, 1, PLACES)})) == three


def test_where_products_may_be_of_tiles_short_rows_are_left_to_them() -> None:
    def plain(emit: Any, q: Any, k: Any, v: Any) -> Any:
        return op.matmul(emit(op.nn.softmax(emit(op.matmul(q, k)))), v)

    amx = tvm.target.Target({"kind": "llvm", "mcpu": "sapphirerapids"})
    assert names(module(plain, **short(places=128)), amx) == ["matmul", "matmul1", "softmax"]
    assert names(module(plain, **short(places=256)), amx) == ["attention"]


def test_a_mask_that_is_not_constant_cannot_be_filled_up() -> None:
    assert "attention" not in names(module(with_mask, **short(places=300), mask=(ROWS, 300)))
    assert "attention" in names(module(with_mask, **short(places=300), mask=(ROWS, 1)))


def test_what_follows_an_attention_stays_apart() -> None:
    def cleared(emit: Any, q: Any, k: Any, v: Any, seen: Any) -> Any:
        rows = emit(op.greater(seen, relax.const(0.0, "float32")))
        result = emit(op.matmul(emit(op.nn.softmax(emit(op.matmul(q, k)))), v))
        return op.where(rows, result, relax.const(0.0, "float32"))

    assert names(module(cleared, **short(), seen=(ROWS, 1))) == ["attention", "greater_where"]


def test_weights_that_are_read_transposed_stay_with_their_products() -> None:
    def of_weights(emit: Any, x: Any) -> Any:
        keys, values = (relax.const(np.zeros(shape, "float32")) for shape in ((1024, 256), (256, 1024)))
        scores = emit(op.matmul(x, emit(op.permute_dims(keys))))
        return op.matmul(emit(op.nn.softmax(scores)), emit(op.permute_dims(values)))

    assert names(module(of_weights, x=(ROWS, 256))) == ["matmul", "matmul1", "softmax"]


def test_scores_that_something_else_reads_are_kept() -> None:
    def probabilities_too(emit: Any, q: Any, k: Any, v: Any) -> Any:
        weights = emit(op.nn.softmax(emit(op.matmul(q, k))))
        return op.add(emit(op.sum(weights, [2], keepdims=True)), emit(op.matmul(weights, v)))

    def another_axis(emit: Any, q: Any, k: Any, v: Any) -> Any:
        return op.matmul(emit(op.nn.softmax(emit(op.matmul(q, k)), 1)), v)

    assert "attention" not in " ".join(names(module(probabilities_too, **short())))
    assert "attention" not in " ".join(names(module(another_axis, **short())))
