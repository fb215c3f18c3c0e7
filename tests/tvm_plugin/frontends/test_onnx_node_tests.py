"""Tests of single operators that ONNX ships with the standard: a few for each kind of converter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm

from eqtune.frontends import load_model
from eqtune.runtime import ModelRunner

onnx = pytest.importorskip("onnx")

pytestmark = pytest.mark.unoptimised
pytest.importorskip("onnxruntime")

CONSTANT_INPUTS = {
    "Clip": (1, 2),
    "CumSum": (1,),
    "Pad": (1, 2, 3),
    "QLinearMatMul": (1, 2, 3, 4, 5, 6, 7),
    "ReduceMax": (1,),
    "ReduceSumSquare": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "TopK": (1,),
}
"""Which inputs are constants in models, and inputs of the tests' graphs."""

NAMES = [
    "argmax_negative_axis_keepdims_random_select_last_index",
    "attention_24_fullymasked_qk_matmul_output_mode3_zero",
    "attention_24_qk_matmul_output_mode3_softmax_precision",
    "attention_4d_causal_with_past_and_present",
    "attention_4d_gqa_causal_nonpad_decode",
    "attention_4d_softcap_neginf_mask",
    "attention_local_window_ext_cache_rank2_mask",
    "attention_local_window_gqa_rank4_mask",
    "attention_local_window_with_past",
    "averagepool_2d_precomputed_same_upper",
    "batchnorm_epsilon_training_mode",
    "clip_min_greater_than_max",
    "constant_pad_axes",
    "convtranspose_autopad_same",
    "cumsum_2d_negative_axis",
    "gather_negative_indices",
    "gelu_tanh_2",
    "gridsample_bicubic_align_corners_1_additional_1",
    "group_normalization_epsilon",
    "hardsigmoid",
    "isinf_negative",
    "layer_normalization_4d_axis_negative_2",
    "maxpool_2d_ceil",
    "mod_float_edge_cases_fmod_0_float32",
    "mod_mixed_sign_float64",
    "qlinearmatmul_3D_int8_float16",
    "reduce_max_bool_inputs",
    "reduce_sum_square_negative_axes_keepdims_random",
    "resize_downsample_scales_cubic_A_n0p5_exclude_outside",
    "resize_tf_crop_and_resize_axes_3_2",
    "rotary_embedding_3d_input",
    "scatter_elements_with_duplicate_indices",
    "slice_neg_steps",
    "softmax_large_number",
    "top_k_negative_axis",
]


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    loader = pytest.importorskip("onnx.backend.test.loader")
    with np.errstate(all="ignore"):
        return {case.name.removeprefix("test_"): case for case in loader.load_model_tests(kind="node")}


@pytest.mark.filterwarnings("ignore")  # of arithmetic in the tests themselves
@pytest.mark.parametrize("name", NAMES)
def test_the_standard_s_own_test(name: str, cases: dict[str, Any]) -> None:
    case = cases[name]
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    arrays = dict(zip([value.name for value in model.graph.input], case.data_sets[0][0], strict=True))
    (node,) = model.graph.node
    places = CONSTANT_INPUTS.get(node.op_type, ())
    constants = {node.input[place] for place in places if place < len(node.input)} - {""}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(arrays[key]), key) for key in constants)
    inputs = [value for value in model.graph.input if value.name not in constants]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    run = ModelRunner(tvm.compile(load_model(model).mod, "llvm"))
    results = run(*(array for key, array in arrays.items() if key not in constants))
    for result, expected in zip(results, case.data_sets[0][1], strict=True):
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(result, expected, case.rtol, case.atol)
