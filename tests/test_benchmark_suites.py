"""Every case of the benchmarks' suites can be built for eqtune and for its peers."""

import numpy as np
import pytest

from benchmarks.suites import SUITES, Case

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
