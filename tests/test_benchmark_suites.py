"""Every case of the benchmarks' suites can be built for eqtune and for its peers."""

import numpy as np
import pytest

from benchmarks.dot_suites import DOT_SUITES, DotCase
from benchmarks.suites import SUITES, Case, named, suite

CASES = [case for suite in SUITES.values() for case in suite]


def test_there_are_at_least_sixty_kernels_of_all_kinds() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60


@pytest.mark.parametrize("case", [case for case in CASES if case.bytes_moved < 2e6], ids=lambda case: case.name)
def test_eqtune_and_onnx_runtime_get_the_same_kernel(case: Case) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs ONNX Runtime: pip install eqtune[onnx]")
    import tvm

    from eqtune.runtime import ModelRunner
    from eqtune.transform.apply_tuned import untuned_executable

    inputs = case.inputs()
    session = onnxruntime.InferenceSession(case.onnx().SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, inputs)
    (actual,) = ModelRunner(untuned_executable(case.relax(), tvm.target.Target("llvm")))(*inputs.values())
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


def test_functions_have_an_arithmetic_limit_and_copies_none() -> None:
    by_name = {case.name: case for case in CASES}
    assert by_name["relu_1x256x56x56"].arithmetic_s(1e11) == 0.0
    assert by_name["sigmoid_64x4096"].arithmetic_s(2e9) == pytest.approx(9 * 64 * 4096 / 1e9)
    assert by_name["conv3x3_7x7_960_960_g960"].arithmetic_s(2e9) == pytest.approx(9 * 49 * 960 / 1e9)


DOT_CASES = [case for cases in DOT_SUITES.values() for case in cases]


def test_dot_suites_are_found_by_name_and_apart_from_the_others() -> None:
    assert set(suite("int8,bf16")) == set(DOT_CASES)
    assert not set(suite("all")) & set(DOT_CASES)
    assert len({case.name for case in (*CASES, *DOT_CASES)}) == len(CASES) + len(DOT_CASES)
    assert named(DOT_CASES[0].name) is DOT_CASES[0]


@pytest.mark.parametrize(
    "case", [case for case in DOT_SUITES["int8"] if case.kind.startswith("QLinear")], ids=lambda case: case.name
)
def test_quantised_results_fill_their_range(case: DotCase) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs ONNX Runtime: pip install eqtune[onnx]")
    session = onnxruntime.InferenceSession(case.onnx().SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, case.inputs())
    assert 40 < result.std() < 90


@pytest.mark.parametrize("case", DOT_SUITES["bf16"], ids=lambda case: case.name)
def test_pytorch_gets_the_same_bfloat16_product(case: DotCase) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install eqtune[torch]")
    import tvm

    from eqtune.runtime import ModelRunner
    from eqtune.transform.apply_tuned import untuned_executable

    (x,) = case.inputs().values()
    product = case.torch()(torch.from_numpy(x.astype(np.float32)).bfloat16()).float().numpy()
    (expected,) = ModelRunner(untuned_executable(case.relax(), tvm.target.Target("llvm"), plain=True))(x)
    assert product.shape == expected.shape
    np.testing.assert_allclose(product, expected, rtol=2.0**-8, atol=1e-3)  # PyTorch rounds the sums to bfloat16
