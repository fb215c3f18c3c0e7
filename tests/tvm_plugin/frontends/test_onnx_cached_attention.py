"""GroupQueryAttention, by which generated language models keep keys and values: imported, it is ONNX Runtime's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from onnx import TensorProto as P  # noqa: E402
from onnx import helper, numpy_helper  # noqa: E402

import eqtune  # noqa: E402
from eqtune.compile.untuned import untuned_executable  # noqa: E402
from eqtune.frontends import load_model  # noqa: E402
from eqtune.machine import detect_target  # noqa: E402
from eqtune.runtime import ModelRunner  # noqa: E402
from eqtune.transform.narrow_weights import KeepNarrowWeights  # noqa: E402

pytestmark = pytest.mark.unoptimised

DOMAIN = "com.microsoft"
HEADS, SHARED, WIDTH = 4, 2, 16


def rotations(places: int = 64) -> dict[str, Any]:
    angles = np.arange(places)[:, None] * 10000.0 ** (-np.arange(WIDTH // 2) / (WIDTH // 2))
    return {"cosines": np.cos(angles).astype("float32"), "sines": np.sin(angles).astype("float32")}


def lengths_of_mask() -> list[Any]:
    """What exporters make of a mask of the words so far."""
    return [
        helper.make_node("ReduceSum", ["mask", "last"], ["count"], keepdims=0),
        helper.make_node("Sub", ["count", "one"], ["before"]),
        helper.make_node("Cast", ["before"], ["lengths"], to=P.INT32),
        helper.make_node("Shape", ["mask"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["all"], axis=0),
        helper.make_node("Cast", ["all"], ["total"], to=P.INT32),
    ]


NUMBERS = {"one": np.array(1, "int64"), "last": np.array([1], "int64")}


def model(nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], constants: dict[str, Any]) -> Any:
    def value(name: str, shape: Any) -> Any:
        return helper.make_tensor_value_info(name, P.INT64 if name in ("mask", "words") else P.FLOAT, shape)

    graph = helper.make_graph(
        nodes,
        "step",
        [value(*one) for one in inputs.items()],
        [value(*one) for one in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def attention(
    new: int, kept: int, total: int, batch: int = 1, packed: bool = False, biased: bool = False, **attributes: Any
) -> Any:
    attributes = {"num_heads": HEADS, "kv_num_heads": SHARED, "do_rotary": 1, **attributes}
    inputs = {"q": (batch, new, (HEADS + 2 * SHARED * packed) * WIDTH)}
    if not packed:
        inputs |= dict.fromkeys(("k", "v"), (batch, new, SHARED * WIDTH))
    inputs |= dict.fromkeys(("old_k", "old_v"), (batch, SHARED, kept, WIDTH))
    inputs |= {"bias": (batch, HEADS, new, total)} if biased else {}
    inputs |= {"mask": (batch, total)}
    names = ["q", *(["", ""] if packed else ["k", "v"]), "old_k", "old_v", "lengths", "total"]
    names += ["cosines", "sines"] if attributes["do_rotary"] else []
    names += ["", "bias"] if biased else []
    node = helper.make_node("GroupQueryAttention", names, ["y", "new_k", "new_v"], domain=DOMAIN, **attributes)
    cache = (batch, SHARED, max(kept, total), WIDTH)
    outputs = {"y": (batch, new, HEADS * WIDTH), "new_k": cache, "new_v": cache}
    constants = NUMBERS | (rotations() if attributes["do_rotary"] else {})
    return model([*lengths_of_mask(), node], inputs, outputs, constants)


CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "one more word": ({"new": 1, "kept": 16, "total": 17}, (17,)),
    "a cache with places left": ({"new": 1, "kept": 16, "total": 16}, (10,)),
    "a cache that is full then": ({"new": 1, "kept": 16, "total": 16}, (16,)),
    "three more words": ({"new": 3, "kept": 16, "total": 16}, (12,)),
    "two sequences": ({"new": 1, "kept": 16, "total": 17, "batch": 2}, (17, 11)),
    "the first words": ({"new": 8, "kept": 16, "total": 8}, (8,)),
    "the first words, fewer in one": ({"new": 8, "kept": 8, "total": 8, "batch": 2}, (8, 5)),
    "packed": ({"new": 1, "kept": 16, "total": 17, "packed": True, "rotary_interleaved": 1}, (17,)),
    "a window": ({"new": 1, "kept": 16, "total": 17, "local_window_size": 5}, (17,)),
    "a softcap": ({"new": 2, "kept": 16, "total": 18, "softcap": 0.7}, (18,)),
    "a bias": ({"new": 2, "kept": 16, "total": 18, "biased": True}, (18,)),
    "a bias where places are left": ({"new": 1, "kept": 16, "total": 12, "biased": True}, (12,)),
    "not turned": ({"new": 2, "kept": 15, "total": 17, "do_rotary": 0, "scale": 0.3}, (17,)),
}


@pytest.mark.parametrize("case", CASES)
def test_attention_with_a_cache(case: str) -> None:
    given, counts = CASES[case]
    imported = load_model(attention(**given))
    inputs = imported.random_inputs(0)
    inputs[-1] = (np.arange(given["total"]) < np.array(counts)[:, None]).astype(np.int64)
    actual = ModelRunner(untuned_executable(imported.mod, detect_target(1)))(*inputs)
    for one, expected in zip(actual, imported.reference(*inputs), strict=True):
        np.testing.assert_allclose(one, expected, atol=2e-6)


@pytest.mark.parametrize("attributes", [{"smooth_softmax": 1}, {"sliding_window_cache": 1, "local_window_size": 8}])
def test_what_is_not_imported_is_named(attributes: dict[str, Any]) -> None:
    name = next(iter(attributes))
    with pytest.raises(eqtune.errors.UnsupportedModelError, match=f"GroupQueryAttention with {name} cannot"):
        load_model(attention(1, 16, 17, **attributes))


def test_what_onnx_runtime_refuses_to_run_is_one_error() -> None:
    imported = load_model(attention(8, 1, 8))
    with pytest.raises(eqtune.errors.InputError, match=r"ONNX Runtime cannot run step: .*total_sequence_length"):
        imported.reference(*imported.random_inputs(0))


def test_a_generated_decoder_is_tuned(tmp_path: Any) -> None:
    """A table and products of 4 bits, norms with a skip connection, and a cache: what model builders write."""
    rng = np.random.default_rng(0)
    width, words, kept = HEADS * WIDTH, 4096, 24
    constants = NUMBERS | rotations()

    def weights(name: str, columns: int, places: int) -> list[str]:
        constants[f"{name}_w"] = rng.integers(0, 256, (columns, places // 32, 16), np.uint8)
        constants[f"{name}_s"] = (0.02 * (rng.random((columns, places // 32)) + 0.5)).astype("float32")
        return [f"{name}_w", f"{name}_s"]

    def product(name: str, x: str, columns: int, places: int) -> Any:
        sizes = {"K": places, "N": columns, "bits": 4, "block_size": 32, "accuracy_level": 4}
        stored = weights(name, columns, places)
        constants[stored[1]] = constants[stored[1]].reshape(-1)
        return helper.make_node("MatMulNBits", [x, *stored], [name], domain=DOMAIN, **sizes)

    table = weights("table", words, width)
    constants["table_w"] = constants["table_w"].reshape(words, -1)
    constants["gamma"] = np.ones(width, "float32")
    table = [table[0], "words", table[1]]
    blocks = {"bits": 4, "block_size": 32, "gather_axis": 0, "quantize_axis": 1}
    heads = {"num_heads": HEADS, "kv_num_heads": SHARED, "do_rotary": 1}
    nodes = [
        *lengths_of_mask(),
        helper.make_node("GatherBlockQuantized", table, ["x"], domain=DOMAIN, **blocks),
        helper.make_node("SimplifiedLayerNormalization", ["x", "gamma"], ["normed"], epsilon=1e-5, axis=-1),
        product("qkv", "normed", (HEADS + 2 * SHARED) * WIDTH, width),
        helper.make_node(
            "GroupQueryAttention",
            ["qkv", "", "", "old_k", "old_v", "lengths", "total", "cosines", "sines"],
            ["attended", "new_k", "new_v"],
            domain=DOMAIN,
            **heads,
        ),
        product("out", "attended", width, width),
        helper.make_node(
            "SkipSimplifiedLayerNormalization",
            ["x", "out", "gamma"],
            ["again", "", "", "sum"],
            domain=DOMAIN,
            epsilon=1e-5,
        ),
        product("logits", "again", words, width),
    ]
    cache = dict.fromkeys(("old_k", "old_v"), (1, SHARED, kept, WIDTH))
    inputs = {"words": (1, 1), "mask": (1, kept + 1), **cache}
    grown = (1, SHARED, kept + 1, WIDTH)
    outputs = {"logits": (1, 1, words), "new_k": grown, "new_v": grown}
    path = tmp_path / "decoder.onnx"
    onnx.save(model(nodes, inputs, outputs, constants), path)
    result = eqtune.tune_model(path, work_dir=tmp_path / "work", trials=4, seed=0, progress=False)
    assert result.max_rel_error < 1e-4  # it has no tasks where, on a busy machine, the untuned model was as fast
    assert "eqtune.narrow_product" in KeepNarrowWeights()(load_model(path).mod).script()
