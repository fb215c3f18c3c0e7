"""The outputs that a tuned model must meet, where running the untuned model would take too much of the budget."""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

import eqtune
from eqtune.compile.untuned import untuned_executable, untuned_module
from eqtune.frontends.imported import imported_model
from eqtune.machine import detect_target
from eqtune.measure import LocalMeasurer
from eqtune.records import RecordDatabase
from eqtune.report.table import closing_lines
from eqtune.runtime import LocalModels, ModelRunner
from eqtune.tune import baselines, model, reference, session
from eqtune.tune.budget import Budget
from eqtune.tune.workdir import WorkDirectory

from .small_models import module, weight

Body = Callable[[relax.BlockBuilder, relax.Var], relax.Expr]


def convolution(bb: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    y = bb.emit(relax.op.nn.relu(bb.emit(relax.op.nn.conv2d(x, weight(12, 4, 3, 3), padding=1, groups=2))))
    return relax.op.nn.max_pool2d(y, (3, 3), (2, 2), (1, 1), ceil_mode=True)


def product(bb: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    return relax.op.nn.softmax(bb.emit(relax.op.matmul(x, weight(64, 70))))


BODIES: dict[str, tuple[tuple[int, ...], Body]] = {
    "convolution and ragged pooling": ((1, 8, 17, 17), convolution),
    "product and softmax": ((33, 64), product),
    "sum of all": ((7, 9), lambda bb, x: relax.op.sum(x)),
    "statistics": ((5, 96), lambda bb, x: relax.op.nn.layer_norm(x, weight(96), weight(96), axes=[-1])),
    "sorting": ((4, 30), lambda bb, x: relax.op.sort(x)),
    "largest": ((4, 30), lambda bb, x: relax.op.astype(relax.op.argmax(x, axis=1), "float32")),
    "comparison": ((4, 30), lambda bb, x: relax.op.where(relax.op.greater(x, weight(30)), x, weight(4, 30))),
    "table": ((4, 30), lambda bb, x: relax.op.take(x, relax.const([3, 1, 29], "int32"), axis=1)),
    "truth values": (
        (4, 64),
        lambda bb, x: relax.op.astype(
            bb.emit(relax.op.logical_not(bb.emit(relax.op.greater(x, weight(64))))), "float32"
        ),
    ),
    "one element": ((1,), lambda bb, x: relax.op.exp(x)),
}


@pytest.mark.parametrize("name", BODIES)
def test_plain_schedules_compute_what_stock_tvm_does(name: str) -> None:
    mod = module(*BODIES[name])
    x = np.random.default_rng(1).standard_normal(BODIES[name][0]).astype("float32")
    target = detect_target(2)
    (expected,) = ModelRunner(untuned_executable(mod, target), threads=2)(x)
    (actual,) = ModelRunner(untuned_executable(mod, target, plain=True), threads=2)(x)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def rounded(bb: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    scale, zero = relax.const(0.1, "float32"), relax.const(0, "int8")
    return relax.op.dequantize(bb.emit(relax.op.quantize(x, scale, zero)), scale, zero)


@pytest.mark.parametrize(
    ("body", "apart", "permitted"),
    [(rounded, 0.0, 8 / 256), (rounded, 0.05, 0.1), (rounded, 1.0, 0.25), (product, 0.05, 0.0)],
)
def test_what_roundings_make_of_a_quantised_model_is_measured(
    body: Body, apart: float, permitted: float, tmp_path: Path
) -> None:
    """Where the source computes it in two ways; other models have nothing to round."""
    ones = np.ones((33, 64), np.float32)
    imported = imported_model(
        module((33, 64), body), "quantised", "onnx", lambda x: [ones], lambda x: [ones - np.float32(apart)]
    )
    target = detect_target(1)
    with contextlib.closing(WorkDirectory(tmp_path)) as work:
        told = [reference.Reference(imported, target, work, 0, "here", LocalModels(1)).roundings for _ in range(2)]
    assert told == pytest.approx([permitted, permitted], rel=1e-4)


def test_what_another_version_of_eqtune_computed_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake in the untuned model outlived its correction: the right tuned model was refused from then on."""
    wrong, right = np.zeros((7, 9), np.float32), np.ones((7, 9), np.float32)
    mod = module((7, 9), lambda bb, x: relax.op.exp(x))
    told: list[float] = []
    with contextlib.closing(WorkDirectory(tmp_path)) as work:
        for version, outputs in (("1", wrong), ("2", right), ("2", wrong)):
            monkeypatch.setattr(reference, "__version__", version)
            imported = imported_model(mod, "model", "relax", lambda x, outputs=outputs: [outputs])
            compared = reference.Reference(imported, detect_target(1), work, 0, "here", LocalModels(1))
            told.append(float(compared.outputs[0].mean()))
    assert told == [0.0, 1.0, 1.0]


def test_a_model_that_takes_long_untuned_is_compared_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = spy_on_untuned(monkeypatch)
    monkeypatch.setattr(baselines, "UNTUNED_S_PER_OPERATION", 1e9)
    result = tune(tmp_path)
    assert built == [True]
    assert result.max_rel_error <= 1e-4
    assert result.summary.plain_baseline
    assert any("plain schedules" in line for line in closing_lines(result.summary))
    again = tune(tmp_path)
    assert built == [True]  # outputs and latency are kept in the work directory
    assert again.max_rel_error <= 1e-4
    assert again.baseline_latency_s == result.baseline_latency_s


def test_a_kernel_for_which_nothing_better_is_found_keeps_the_plain_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "UNTUNED_S_PER_OPERATION", 1e9)
    monkeypatch.setattr("eqtune.tune.acceptance.Acceptance._choose", lambda *_: None)
    result = tune(tmp_path)
    assert any(task.measured for task in result.tasks)
    for task in result.tasks:
        assert not task.measured or (task.latency_s == task.baseline_latency_s and "Parallel" in task.trace)
    assert result.max_rel_error <= 1e-4


def test_plain_schedules_that_do_not_compile_are_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(mod: tvm.IRModule) -> tvm.IRModule:
        raise ValueError("not today")

    monkeypatch.setattr(baselines, "UNTUNED_S_PER_OPERATION", 1e9)
    monkeypatch.setattr("eqtune.compile.untuned.with_plain_schedules", refuse)
    assert tune(tmp_path).max_rel_error <= 1e-4


def test_a_wrong_model_is_refused_without_the_untuned_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "UNTUNED_S_PER_OPERATION", 1e9)
    exact = reference.Reference.first_run.func  # type: ignore[attr-defined]

    def wrong(self: reference.Reference) -> Any:
        outputs, seconds = exact(self)
        return [output + 1.0 for output in outputs], seconds

    monkeypatch.setattr(reference.Reference, "first_run", property(wrong))
    with pytest.raises(eqtune.MismatchError):
        tune(tmp_path)


def test_outputs_without_a_finite_number_are_not_said_to_be_equal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They differed by 0, whatever the tuned model computes: NaN equals NaN."""
    caplog.set_level(logging.INFO, "eqtune")
    mod = module((4, 30), lambda bb, x: relax.op.sqrt(bb.emit(relax.op.negative(bb.emit(relax.op.exp(x))))))
    result = eqtune.tune_model(mod, trials=1, graph="off", threads=1, work_dir=tmp_path, progress=False)
    assert math.isnan(result.max_rel_error)
    assert result.summary.max_rel_error is None
    assert "NOT COMPARED" in caplog.text


def test_what_runs_quickly_is_run_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = spy_on_untuned(monkeypatch)
    assert not tune(tmp_path).summary.plain_baseline
    assert built == [False]


def test_what_onnx_runtime_cannot_run_is_refused_before_it_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = pytest.importorskip("onnx")
    helper, double = onnx.helper, onnx.TensorProto.DOUBLE
    taps = onnx.numpy_helper.from_array(np.random.default_rng(0).standard_normal((4, 3, 3, 3)), "taps")
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "taps"], ["y"])],
        "precise",
        [helper.make_tensor_value_info("x", double, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", double, [1, 4, 6, 6])],
        [taps],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = {"trials": 4, "graph": "off", "threads": 1, "work_dir": tmp_path, "progress": False}
    with monkeypatch.context() as patched:
        patched.setattr(session.Session, "search", lambda *_, **__: pytest.fail("kernels are searched"))
        with pytest.raises(eqtune.InputError, match="ONNX Runtime cannot load precise"):
            eqtune.tune_model(proto, **options)
    assert math.isnan(eqtune.tune_model(proto, verify=False, **options).max_rel_error)


def tune(work_dir: Path) -> eqtune.TuneResult:
    mod = module(*BODIES["product and softmax"])
    return eqtune.tune_model(
        mod, time_budget_s=20.0, trials=4, graph="off", threads=1, work_dir=work_dir, progress=False
    )


def spy_on_untuned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each untuned module that is built from now on has plain schedules."""
    built: list[bool] = []

    def build(mod: tvm.IRModule, target: Any, plain: bool = False) -> Any:
        built.append(plain)
        return untuned_module(mod, target, plain)

    monkeypatch.setattr(reference, "untuned_module", build)
    return built


@pytest.mark.parametrize("slower", [False, True])
def test_a_large_model_is_not_in_memory_untuned_while_it_is_built_tuned(
    slower: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untuned: list[weakref.ref[Any]] = []
    alive: list[int] = []
    build, compiled = reference.Reference._built, model._compiled

    def seen(self: reference.Reference, mod: tvm.IRModule) -> Any:
        executable = build(self, mod)
        untuned.append(weakref.ref(executable))
        return executable

    def counted(*arguments: Any) -> Any:
        alive.append(sum(executable() is not None for executable in untuned))
        return compiled(*arguments)

    monkeypatch.setattr(reference, "MANY_BYTES", 0)
    monkeypatch.setattr(reference.Reference, "_built", seen)
    monkeypatch.setattr(model, "_compiled", counted)
    if slower:
        monkeypatch.setattr(model, "_beside_baseline", lambda *_: (2.0, 1.0))
    mod = module(*BODIES["product and softmax"])
    result = eqtune.tune_model(mod, trials=2, graph="off", progress=False, work_dir=tmp_path, threads=1)
    assert alive == [0]
    assert len(untuned) == (2 if slower else 1)  # compiled again where it is what is returned
    assert result.max_rel_error <= 1e-4


@pytest.mark.parametrize(("layers", "time_s", "plain"), [(30, 60.0, False), (100, 60.0, True), (100, 600.0, False)])
def test_many_kernels_of_their_own_are_not_compiled_in_a_short_time(layers: int, time_s: float, plain: bool) -> None:
    """A quantised model of 82 layers took half a minute of 60 s to compile as TVM writes it."""
    with contextlib.closing(LocalMeasurer(detect_target(1), threads=1, workers=1)) as measurer:
        database: Any = None
        untuned = baselines.Baselines(database, measurer, detect_target(1), runs=True)
        untuned.choose(1e6, Budget(time_s=time_s), own_kernels=layers)
    assert untuned.plain is measurer.plain_baselines is plain


@pytest.mark.parametrize("plain", [False, True])
def test_plain_kernels_of_another_version_are_timed_again(
    plain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plain schedules may be others; untuned kernels are TVM's."""
    kernel: Any = SimpleNamespace(task=SimpleNamespace(workload_hash="a" * 16), baseline_s=math.nan)
    measurer: Any = SimpleNamespace(baseline=lambda tasks: [1e-3 for _ in tasks])
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        untuned = baselines.Baselines(database, measurer, detect_target(1), runs=True)
        untuned.plain = plain
        monkeypatch.setattr(baselines, "__version__", "1")
        untuned.measure([kernel], "here")
        assert untuned.take_known([kernel], "here") == []
        monkeypatch.setattr(baselines, "__version__", "2")
        assert untuned.take_known([kernel], "here") == ([kernel] if plain else [])
