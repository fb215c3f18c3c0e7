"""Every case of the benchmarks' suites can be built for eqtune and for its peers."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import kernels
from benchmarks.dot_suites import DOT_SUITES, DotCase
from benchmarks.peers.timing import in_own_process
from benchmarks.suites import SUITES, Case, named, suite

CASES = [case for suite in SUITES.values() for case in suite]


def test_there_are_at_least_sixty_kernels_of_all_kinds() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60


@pytest.mark.parametrize("case", [case for case in CASES if case.bytes_moved < 2e6], ids=lambda case: case.name)
def test_eqtune_and_onnx_runtime_get_the_same_kernel(case: Case) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs ONNX Runtime: pip install eqtune[onnx]")
    import tvm

    from eqtune.compile.untuned import untuned_executable
    from eqtune.runtime import ModelRunner

    inputs = case.inputs()
    session = onnxruntime.InferenceSession(case.onnx().SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, inputs)
    (actual,) = ModelRunner(untuned_executable(case.relax(), tvm.target.Target("llvm")))(*inputs.values())
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "matmul_512"], "--kernels takes names"),
        (["--kernels", "no such"], "no kernel of the suite 'matmul'"),
    ],
)
def test_a_suite_or_kernel_that_is_not_there_is_said_in_a_line(monkeypatch, capsys, arguments, message) -> None:
    monkeypatch.setattr("sys.argv", ["kernels", *arguments])
    with pytest.raises(SystemExit, match="2"):
        kernels.main()
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_functions_have_an_arithmetic_limit_and_copies_none() -> None:
    by_name = {case.name: case for case in CASES}
    assert by_name["relu_1x256x56x56"].arithmetic_s(1e11) == 0.0
    assert by_name["sigmoid_64x4096"].arithmetic_s(2e9) == pytest.approx(9 * 64 * 4096 / 1e9)
    assert by_name["conv3x3_7x7_960_960_g960"].arithmetic_s(2e9) == pytest.approx(9 * 49 * 960 / 1e9)


@pytest.mark.parametrize("case", SUITES["memory"], ids=lambda case: case.name)
def test_tvm_takes_all_sketches_of_memory_bound_kernels(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """A sketch that it refuses is left out, and only the log says so."""
    from eqtune.machine import detect_target
    from eqtune.search.space import Hardware, build_space
    from eqtune.tune.forms import model_forms

    caplog.set_level("INFO", "eqtune.search.space.memory_bound")
    forms, _ = model_forms(case.relax(), detect_target(2), "off")
    for hardware in (Hardware(threads=2), Hardware(vector_bytes=32, vector_registers=16)):
        for task in forms.tasks:
            assert build_space(task.mod, hardware).size > 0
    assert not caplog.messages


def test_a_copy_is_timed_from_a_core_that_the_pool_leaves_free(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.peers import copy

    entered = []

    @contextlib.contextmanager
    def on_first_core():
        entered.append(True)
        yield

    monkeypatch.setattr(copy, "on_first_core", on_first_core)
    assert copy.main(1e5, threads=1)["bytes_per_s"] > 0
    assert entered


def test_the_runner_of_metaschedule_is_there_before_its_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.peers import metaschedule

    seen = []

    def local_runner():
        seen.append("runner")
        return "runner"

    def tune_tir(*_, runner, **__):
        assert runner == "runner"
        return SimpleNamespace(get_all_tuning_records=list)

    monkeypatch.setenv("TVM_NUM_THREADS", "1")  # which tuning sets
    monkeypatch.setattr(metaschedule, "warm_up", lambda: seen.append("warm"))
    monkeypatch.setattr(metaschedule, "time", SimpleNamespace(monotonic=lambda: float(seen.append("clock") is None)))
    monkeypatch.setattr(metaschedule.ms.runner, "LocalRunner", local_runner)
    monkeypatch.setattr(metaschedule.ms, "tune_tir", tune_tir)
    assert metaschedule.tune(None, SimpleNamespace(attrs={"num-cores": 1}), trials=1).schedule is None
    assert seen == ["warm", "runner", "clock", "clock"]


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

    from eqtune.compile.untuned import untuned_executable
    from eqtune.runtime import ModelRunner

    (x,) = case.inputs().values()
    product = case.torch()(torch.from_numpy(x.astype(np.float32)).bfloat16()).float().numpy()
    (expected,) = ModelRunner(untuned_executable(case.relax(), tvm.target.Target("llvm"), plain=True))(x)
    assert product.shape == expected.shape
    np.testing.assert_allclose(product, expected, rtol=2.0**-8, atol=1e-3)  # PyTorch rounds the sums to bfloat16


def test_a_kernel_is_tuned_and_becomes_a_row() -> None:
    args = SimpleNamespace(target=None, fast_math=False, seed=0, trials=4, budget=None, peers=[], rounds=1)
    row = kernels.measure(named("matmul_100x200x300"), 1, args)
    assert row["kernel"] == "matmul_100x200x300"
    assert 0 < row["trials"] <= 4
    assert row["rel_err"] < 1e-4
    assert row["gflops"] == pytest.approx(2e-9 * 100 * 200 * 300 / (row["us"] * 1e-6))
    assert 0.05 < row["peak_fraction"] < 1.5


@pytest.mark.slow
@pytest.mark.peers
def test_metaschedule_tunes_a_kernel_that_is_timed_later(tmp_path: Path) -> None:
    arguments = {"kernel": "relu_1x256x56x56", "threads": 1, "directory": str(tmp_path)}
    module = "benchmarks.peers.metaschedule_kernel"
    found = in_own_process(module, **arguments, trials=2)
    assert 0.0 < found["found_s"] < 1.0
    assert 0.0 < in_own_process(module, **arguments, budget_s=0.1)["latency_s"] < 1.0
