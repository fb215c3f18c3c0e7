"""Passes under their Relay names, in the pipelines that people wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from numpy.typing import NDArray
from tvm import relax

from eqtune import relay
from eqtune.compile.untuned import untuned_executable
from eqtune.errors import InputError
from eqtune.machine import detect_target, target_json
from eqtune.records import RecordDatabase
from eqtune.relay import transform
from eqtune.runtime import ModelRunner

TEXT = """#[version = "0.0.5"]
def @main(%x: Tensor[(1, 4, 8, 8), float32], %w1: Tensor[(8, 4, 3, 3), float32], %w2: Tensor[(8, 4, 3, 3), float32],
          %g: Tensor[(8), float32], %b: Tensor[(8), float32], %m: Tensor[(8), float32], %v: Tensor[(8), float32]) {
  %0 = nn.conv2d(%x, %w1, padding=[1, 1, 1, 1], channels=8, kernel_size=[3, 3]);
  %1 = nn.batch_norm(%0, %g, %b, %m, %v);
  %2 = nn.relu(%1.0);
  %3 = nn.conv2d(%x, %w2, padding=[1, 1, 1, 1], channels=8, kernel_size=[3, 3]);
  %4 = nn.relu(%3);
  concatenate((%2, %4), axis=1)
}
"""
RNG = np.random.default_rng(0)
PARAMS = {
    **{name: RNG.standard_normal((8, 4, 3, 3)).astype("float32") for name in ("w1", "w2")},
    **{name: RNG.uniform(0.5, 1.5, 8).astype("float32") for name in ("g", "b", "m", "v")},
}
TARGET = tvm.target.Target("llvm")


@pytest.fixture
def mod() -> tvm.IRModule:
    return relay.from_text(TEXT, PARAMS)


def operators(mod: tvm.IRModule) -> list[str]:
    bindings = [binding for block in mod["main"].body.blocks for binding in block.bindings]
    return [b.value.op.name.removeprefix("relax.") for b in bindings if isinstance(b.value, relax.Call)]


def outputs(mod: tvm.IRModule) -> NDArray[Any]:
    data = np.random.default_rng(1).standard_normal((1, 4, 8, 8)).astype("float32")
    return ModelRunner(untuned_executable(mod, TARGET))(data)[0]


def test_the_example_of_three_passes_runs_as_it_is_written(mod: tvm.IRModule) -> None:
    seq = tvm.transform.Sequential(
        [relay.transform.InferType(), relay.transform.FoldScaleAxis(), relay.transform.EqualitySaturation()]
    )
    np.testing.assert_allclose(outputs(seq(mod)), outputs(mod), rtol=1e-4, atol=1e-4)


def test_the_pipeline_of_the_documentation_merges_convolutions_and_stays_right(mod: tvm.IRModule) -> None:
    pipeline = tvm.transform.Sequential(
        [
            relay.transform.InferType(),
            relay.transform.SimplifyInference(),
            relay.transform.FoldConstant(),
            relay.transform.FoldScaleAxis(),
            relay.transform.EqualitySaturation(),
            relay.transform.DeadCodeElimination(),
        ]
    )
    optimized = pipeline(mod)
    assert "nn.batch_norm" not in operators(optimized)
    np.testing.assert_allclose(outputs(optimized), outputs(mod), rtol=1e-4, atol=1e-4)


def test_fold_scale_axis_leaves_no_scale_beside_the_weights(mod: tvm.IRModule) -> None:
    folded = transform.FoldScaleAxis()(mod)
    assert "multiply" not in operators(folded)
    assert "nn.batch_norm" not in operators(folded)


def test_combine_parallel_conv2d_makes_one_convolution(mod: tvm.IRModule) -> None:
    simplified = transform.SimplifyInference()(mod)
    combined = transform.FoldConstant()(transform.CombineParallelConv2D()(simplified))
    assert operators(simplified).count("nn.conv2d") == 2
    assert operators(combined).count("nn.conv2d") == 1
    np.testing.assert_allclose(outputs(combined), outputs(mod), rtol=1e-4, atol=1e-4)


def test_combine_parallel_dense_makes_one_product() -> None:
    text = (
        '#[version = "0.0.5"]\ndef @main(%x: Tensor[(16, 64), float32], %w: Tensor[(64, 64), float32], '
        "%v: Tensor[(64, 64), float32]) { nn.dense(%x, %w) + tanh(nn.dense(%x, %v)) }"
    )
    weights = RNG.standard_normal((2, 64, 64)).astype("float32")
    mod = relay.from_text(text, {"w": weights[0], "v": weights[1]})
    assert operators(mod).count("matmul") == 2
    combined = transform.CombineParallelDense()(mod)
    assert operators(combined).count("matmul") == 1
    data = RNG.standard_normal((16, 64)).astype("float32")
    expected, actual = (ModelRunner(untuned_executable(module, TARGET))(data)[0] for module in (mod, combined))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_convert_layout_moves_convolutions_to_channels_last(mod: tvm.IRModule) -> None:
    converted = transform.ConvertLayout({"nn.conv2d": ["NHWC", "default"]})(mod)
    bindings = [b for block in converted["main"].body.blocks for b in block.bindings]
    layouts = {
        (str(b.value.attrs.data_layout), str(b.value.attrs.kernel_layout))
        for b in bindings
        if isinstance(b.value, relax.Call) and b.value.op.name == "relax.nn.conv2d"
    }
    assert layouts == {("NHWC", "HWIO")}
    np.testing.assert_allclose(outputs(converted), outputs(mod), rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="choose from NCW, NWC, NCHW"):
        transform.ConvertLayout({"nn.conv2d": ["NCHW16c"]})


def test_mixed_precision_computes_in_float16(mod: tvm.IRModule) -> None:
    mixed = transform.ToMixedPrecision("float16")(transform.SimplifyInference()(mod))
    assert "float16" in mixed.script()
    with pytest.raises(InputError, match="float16 only"):
        transform.ToMixedPrecision("bfloat16")


@pytest.mark.parametrize(
    ("body", "results"),
    [
        ("nn.dense(%x, %w)", "float16"),
        ("nn.softmax(cast(nn.dense(%x, %w), dtype='float32'))", "float32"),
        ("cast(cast(nn.dense(%x, %w), dtype='float16'), dtype='float32')", "float32"),
        ("%0 = nn.dense(%x, %w); (%0, (nn.relu(%0), %x))", "float16 float16 float32"),
    ],
)
def test_results_keep_the_precision_they_were_computed_in_unless_told_otherwise(body: str, results: str) -> None:
    text = '#[version = "0.0.5"]\ndef @main(%x: Tensor[(2, 4), float32], %w: Tensor[(3, 4), float32]) { %s }'
    program = relay.from_text(text.replace("%s", body.replace("'", '"')))

    def dtypes(mod: tvm.IRModule) -> list[str]:
        def leaves(ty: Any) -> list[str]:
            return [d for f in ty.fields for d in leaves(f)] if isinstance(ty, relax.TupleType) else [str(ty.dtype)]

        assert relax.analysis.check_well_formed(mod)
        return leaves(mod["main"].ret_ty)

    assert dtypes(transform.ToMixedPrecision()(program)) == results.split()
    kept = transform.ToMixedPrecision(keep_orig_output_dtype=True)(program)
    assert set(dtypes(kept)) == {"float32"}
    assert "float16" in kept.script()


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in transform.__all__
        if name not in ("AutoSchedule", "ConvertLayout", "FuseOps", "EqualitySaturation")
    ],
)
def test_every_pass_runs_in_a_sequential_and_leaves_a_well_formed_module(name: str, mod: tvm.IRModule) -> None:
    result = tvm.transform.Sequential([getattr(relay.transform, name)()])(mod)
    assert relax.analysis.check_well_formed(result)


def test_common_subexpressions_are_computed_once() -> None:
    text = '#[version = "0.0.5"]\ndef @main(%x: float32) { %0 = exp(%x); %1 = exp(%x); add(%0, %1) }'
    assert operators(transform.EliminateCommonSubexpr()(relay.from_text(text))) == ["exp", "add"]


def test_simplify_expr_cancels_transposes() -> None:
    text = (
        '#[version = "0.0.5"]\ndef @main(%x: Tensor[(2, 3), float32]) '
        "{ exp(transpose(transpose(%x, axes=[1, 0]), axes=[1, 0])) }"
    )
    assert operators(transform.SimplifyExpr()(relay.from_text(text))) == ["exp"]


def test_canonicalize_ops_takes_products_out_of_flattened_tensors() -> None:
    text = """#[version = "0.0.5"]
    def @main(%x: Tensor[(1, 6, 8), float32], %w: Tensor[(5, 8), float32], %b: Tensor[(5), float32]) {
      %0 = nn.dense(reshape(%x, newshape=[-1, 8]), %w, units=5);
      add(reshape(%0, newshape=[1, 6, 5]), %b)
    }"""
    weights = {"w": RNG.standard_normal((5, 8)).astype("float32"), "b": RNG.standard_normal(5).astype("float32")}
    mod = relay.from_text(text, weights)
    tidy = transform.CanonicalizeOps()(mod)
    assert operators(tidy) == ["permute_dims", "matmul", "add"]
    data = RNG.standard_normal((1, 6, 8)).astype("float32")
    expected, actual = (ModelRunner(untuned_executable(module, TARGET))(data)[0] for module in (mod, tidy))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_flattened_product_that_is_read_twice_stays() -> None:
    text = """#[version = "0.0.5"]
    def @main(%x: Tensor[(1, 6, 8), float32], %w: Tensor[(8, 5), float32]) {
      %0 = nn.matmul(reshape(%x, newshape=[6, 8]), %w, units=5);
      (reshape(%0, newshape=[1, 6, 5]), %0)
    }"""
    assert operators(transform.CanonicalizeOps()(relay.from_text(text))) == ["reshape", "matmul", "reshape"]


GELUS = {
    "pytorch": "%0 = erf(multiply(%x, 0.707107f)); %1 = add(0.5f, multiply(%0, 0.5f)); multiply(%x, %1)",
    "onnx": "%0 = divide(%x, 1.41421356f); %1 = add(erf(%0), 1f); %2 = multiply(%x, %1); multiply(%2, 0.5f)",
    "tensorflow": "(0.5f * %x) * (1f + erf(%x * 0.70710678f))",
}
NOT_GELUS = {
    "other width": "%x * (0.5f + 0.5f * erf(%x * 0.7f))",
    "other half": "%x * (0.4f + 0.5f * erf(%x * 0.70710678f))",
    "mirrored": "%x * (0.5f + 0.5f * erf(%x * -0.70710678f))",
    "other data": "%x * (0.5f + 0.5f * erf(exp(%x) * 0.70710678f))",
    "wider result": "%x * (0.5f + 0.5f * erf(%x * reshape(0.70710678f, newshape=[1, 1, 1])))",
}


def activation(body: str) -> list[str]:
    mod = relay.from_text(f'#[version = "0.0.5"]\ndef @main(%x: Tensor[(4, 8), float32]) {{ {body} }}')
    tidy = transform.CanonicalizeOps()(transform.FoldConstant()(mod))
    data = RNG.standard_normal((4, 8)).astype("float32")
    expected, actual = (ModelRunner(untuned_executable(module, TARGET))(data)[0] for module in (mod, tidy))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    return operators(tidy)


@pytest.mark.parametrize("importer", GELUS)
def test_canonicalize_ops_finds_the_gelu_of_every_importer(importer: str) -> None:
    assert activation(GELUS[importer]) == ["nn.gelu"]


@pytest.mark.parametrize("difference", NOT_GELUS)
def test_what_is_almost_a_gelu_stays(difference: str) -> None:
    assert "nn.gelu" not in activation(NOT_GELUS[difference])


def test_canonicalize_ops_finds_silu() -> None:
    assert activation("multiply(sigmoid(%x), %x)") == ["nn.silu"]
    assert "nn.silu" not in activation("multiply(sigmoid(%x), exp(%x))")


@pytest.mark.parametrize(("count", "factor"), [(40, "%{}"), (1200, "1.01f")], ids=["squares", "chain"])
def test_products_of_any_number_beside_an_activation(count: int, factor: str) -> None:
    steps = "".join(f"%{i + 1} = multiply(%{i}, {factor.format(i)}); " for i in range(count))
    body = f"%0 = sigmoid(%x); {steps}multiply(%{count}, %x)"
    mod = relay.from_text(f'#[version = "0.0.5"]\ndef @main(%x: Tensor[(4, 8), float32]) {{ {body} }}')
    assert len(operators(transform.CanonicalizeOps()(mod))) == count + 2


def test_fuse_ops_makes_kernels_for_a_target(mod: tvm.IRModule) -> None:
    fused = transform.FuseOps(target=TARGET)(transform.SimplifyInference()(mod))
    assert set(operators(fused)) <= {"call_tir", "call_tir_inplace", "reshape"}


def test_without_fusion_every_operator_is_a_kernel(mod: tvm.IRModule) -> None:
    def kernels(level: int) -> int:
        lowered = transform.FuseOps(fuse_opt_level=level, target=TARGET)(transform.SimplifyInference()(mod))
        return sum(1 for name in operators(lowered) if name.startswith("call_tir"))

    assert kernels(0) > kernels(2)


def test_scales_are_folded_in_the_direction_asked_for() -> None:
    text = """#[version = "0.0.5"]
    def @main(%x: Tensor[(2, 8), float32], %w: Tensor[(8, 8), float32], %s: Tensor[(8), float32]) {
      nn.dense(%x, %w) * %s
    }"""
    weights = {"w": RNG.standard_normal((8, 8)).astype("float32"), "s": RNG.uniform(1, 2, 8).astype("float32")}
    mod = relay.from_text(text, weights)
    assert "multiply" in operators(transform.ForwardFoldScaleAxis()(mod))
    assert "multiply" not in operators(transform.BackwardFoldScaleAxis()(mod))


def test_entry_functions_are_kept() -> None:
    text = '#[version = "0.0.5"]\ndef @main(%x: float32) { exp(%x) }\ndef @other(%x: float32) { tanh(%x) }'
    for entries, kept in ((None, {"main"}), (["main", "other"], {"main", "other"})):
        result = transform.RemoveUnusedFunctions(entries)(relay.from_text(text))
        assert {var.name_hint for var in result.get_global_vars()} == kept


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("CombineParallelBatchMatmul", {"min_num_branches": 2}),
        ("CombineParallelConv2D", {"min_num_branches": 2}),
        ("CombineParallelDense", {"min_num_branches": 2, "to_batch": False}),
        ("DeadCodeElimination", {"inline_once": True, "ignore_impurity": True}),
        ("EliminateCommonSubexpr", {"fskip": None}),
        ("FoldConstant", {"fold_qnn": True}),
        ("ToMixedPrecision", {"mixed_precision_type": "float16", "missing_op_mode": 2}),
    ],
)
def test_pipelines_may_pass_the_arguments_that_relay_took(
    name: str, options: dict[str, Any], mod: tvm.IRModule
) -> None:
    result = tvm.transform.Sequential([getattr(relay.transform, name)(**options)])(mod)
    assert relax.analysis.check_well_formed(result)


@pytest.mark.parametrize(
    ("name", "nearest"), [("AnnotateTarget", "FuseOpsByPattern"), ("AlterOpLayout", "ConvertLayout")]
)
def test_a_pass_without_a_counterpart_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(InputError, match=f"{name} has no counterpart for Relax; the nearest is: .*{nearest}"):
        getattr(relay.transform, name)("dnnl")
    with pytest.raises(AttributeError, match="no attribute 'FoldScaleAxes'; it has"):
        relay.transform.FoldScaleAxes  # noqa: B018


@pytest.mark.slow
def test_auto_schedule_measures_and_applies(tmp_path: Path) -> None:
    text = (
        '#[version = "0.0.5"]\ndef @main(%x: Tensor[(16, 64), float32], %w: Tensor[(64, 64), float32]) '
        "{ nn.relu(nn.dense(%x, %w, units=64)) }"
    )
    weight = RNG.standard_normal((64, 64)).astype("float32")
    mod = relay.from_text(text, {"w": weight})
    scheduled = transform.AutoSchedule(trials=4, work_dir=tmp_path / "work", threads=1, progress=False)(mod)
    with RecordDatabase(tmp_path / "work" / "records.sqlite") as database:
        (context,) = database.contexts()
    assert (context.target, context.threads) == (target_json(detect_target(1)), 1), "what tune_model would find"
    machine = relax.VirtualMachine(tvm.compile(scheduled, "llvm"), tvm.cpu())
    data = RNG.standard_normal((16, 64)).astype("float32")
    actual = machine["main"](tvm.runtime.tensor(data)).numpy()
    np.testing.assert_allclose(actual, np.maximum(data @ weight.T, 0), rtol=1e-4, atol=1e-4)
