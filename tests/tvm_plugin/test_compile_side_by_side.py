"""Kernels are compiled on all cores, and the executable is the same as one that was compiled in one piece."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from eqtune.compile import side_by_side
from eqtune.compile.executable import build_executable, build_scheduled, scheduled
from eqtune.compile.untuned import untuned_executable
from eqtune.gpu_machine import resolve_target
from eqtune.machine import detect_target
from eqtune.runtime import ModelRunner
from eqtune.tasks import lower_to_kernels


def layers(widths: Sequence[int]) -> tvm.IRModule:
    """Products of different widths in a row: a kernel each."""
    rng = np.random.default_rng(0)
    x: Any = relax.Var("x", relax.TensorType((4, widths[0]), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            for rows, columns in itertools.pairwise(widths):
                weight = relax.const(rng.standard_normal((rows, columns)).astype("float32") / rows**0.5)
                x = builder.emit(relax.op.tanh(relax.op.matmul(x, weight)))
            result = builder.emit_output(x)
        builder.emit_func_output(result)
    return builder.get()


MODEL = layers(range(8, 34))
DATA = np.random.default_rng(1).standard_normal((4, 8)).astype("float32")


@pytest.fixture
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "core_count", lambda: 3)


def libraries(executable: Any) -> list[str]:
    return [str(module.kind) for module in executable.mod.imports]


@pytest.mark.usefixtures("three_cores")
def test_calls_that_are_compiled_find_their_kernels(tmp_path: Path) -> None:
    target = detect_target(1)
    kernels = scheduled(lower_to_kernels(MODEL, target), target, {})
    executable = build_scheduled(kernels, target, calls_compiled=True)
    assert libraries(executable) == ["llvm"]
    (want,) = ModelRunner(build_scheduled(kernels, target), threads=1)(DATA)
    executable.export_library(str(tmp_path / "model.so"))
    for module in (executable, tvm.runtime.load_module(str(tmp_path / "model.so"))):
        (got,) = ModelRunner(module, threads=1)(DATA)
        np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("three_cores")
def test_a_model_of_several_libraries_runs_and_is_exported(tmp_path: Path) -> None:
    target = detect_target(1)
    executable = build_executable(lower_to_kernels(MODEL, target), target)
    assert libraries(executable) == ["llvm"] * 3
    (got,) = ModelRunner(executable, threads=1)(DATA)
    (want,) = ModelRunner(untuned_executable(MODEL, target), threads=1)(DATA)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    executable.export_library(str(tmp_path / "model.so"))
    (again,) = ModelRunner(tvm.runtime.load_module(str(tmp_path / "model.so")), threads=1)(DATA)
    np.testing.assert_array_equal(again, got)


@pytest.mark.usefixtures("three_cores")
def test_code_for_another_machine_is_compiled_and_not_loaded() -> None:
    target = resolve_target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]})
    assert libraries(build_executable(lower_to_kernels(MODEL, target), target)) == ["llvm"] * 3


def test_a_small_model_stays_in_one_piece() -> None:
    target = detect_target(1)
    small = layers(range(8, 12))
    executable = build_executable(lower_to_kernels(small, target), target)
    assert libraries(executable) == ["llvm"]
    assert ModelRunner(executable, threads=1)(DATA)[0].shape == (4, 11)


@pytest.mark.usefixtures("three_cores")
def test_what_fails_in_another_thread_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no code for this kernel")

    target = detect_target(1)
    kernels = lower_to_kernels(MODEL, target)
    monkeypatch.setattr(side_by_side, "_library", refuse)
    with pytest.raises(RuntimeError, match="no code for this kernel"):
        build_executable(kernels, target)
