"""`fast_math`: Winograd's convolutions are used where they are accurate enough, and never otherwise."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.s_tir import Schedule

import eqtune
from eqtune.gpu_machine import resolve_target
from eqtune.machine import describe_machine, detect_target, device_name, target_json
from eqtune.records import Context, Record, RecordDatabase
from eqtune.records.traces import trace_to_json
from eqtune.records.workload import serialize_workload
from eqtune.report.table import kernel_table
from eqtune.search.space import Hardware
from eqtune.search.space.amx.halves import HALVES_PERMITTED
from eqtune.tasks import extract_tasks
from eqtune.transform import LowerToKernels
from eqtune.tune.advice import fast_math_advice
from eqtune.tune.forms import model_forms


def convolution(scale: float) -> tvm.IRModule:
    """tanh(scale * conv(x, w)): with large sums, tanh makes their absolute errors relative ones."""
    rng = np.random.default_rng(0)
    kernel = relax.const(scale * rng.standard_normal((128, 128, 3, 3)).astype("float32"))
    x = relax.Var("x", relax.TensorType((1, 128, 26, 26), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.tanh(builder.emit(relax.op.nn.conv2d(x, kernel))))
        builder.emit_func_output(y)
    return builder.get()


@pytest.fixture(autouse=True)
def no_tiles(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As on a CPU without AMX, whose products would win over Winograd's."""
    if "with_tiles" not in request.fixturenames:
        monkeypatch.setattr("eqtune.search.space.amx.products.AMX_FEATURES", ())


@pytest.fixture
def with_tiles() -> None:
    """As the machine is."""


def tune(scale: float, work_dir: Path, trials: int, rules: tuple[str, ...] = ("winograd-4x4",)) -> eqtune.TuneResult:
    return eqtune.tune_model(
        convolution(scale),
        trials=trials,
        time_budget_s=300.0,
        work_dir=work_dir,
        graph=eqtune.GraphConfig(rules=rules),
        fast_math=True,
        threads=1,
        progress=False,
    )


def test_a_user_is_told_what_fast_math_could_do_for_the_model(tmp_path: Path) -> None:
    result = eqtune.tune_model(
        convolution(1e-3), trials=4, work_dir=tmp_path, graph=eqtune.GraphConfig(rules=()), threads=1, progress=False
    )
    told = "fast math: not permitted; 100% of the arithmetic is in convolutions that it makes faster (--fast-math"
    assert told in kernel_table(result.summary)


def test_no_advice_where_little_can_be_gained() -> None:
    mod = convolution(1.0)
    flops = 2.0 * 128 * 128 * 9 * 24 * 24
    assert fast_math_advice(mod, flops, Hardware()).startswith("not permitted; 100%")
    assert not fast_math_advice(mod, 4 * flops, Hardware())  # a quarter of the model
    pointwise = relax.op.nn.conv2d
    x = relax.Var("x", relax.TensorType((1, 32, 8, 8), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(pointwise(x, relax.const(np.zeros((32, 32, 1, 1), "float32"))))
            z = builder.emit_output(pointwise(y, relax.const(np.zeros((32, 32, 3, 3), "float32")), strides=2))
        builder.emit_func_output(z)
    assert not fast_math_advice(builder.get(), 1.0, Hardware())


def test_where_there_are_tiles_all_products_of_several_rows_count() -> None:
    tiles = Hardware(dot_products=("amx-bf16",), tile_flops_per_s=4e12)
    x = relax.Var("x", relax.TensorType((16, 64), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.matmul(x, relax.const(np.zeros((64, 32), "float32"))))
        builder.emit_func_output(y)
    flops = 2.0 * 16 * 64 * 32
    told = (
        "not permitted; 50% of the arithmetic is in products and convolutions that it makes faster "
        "(--fast-math, fast_math=True)"
    )
    assert fast_math_advice(builder.get(), 2 * flops, tiles) == told
    assert not fast_math_advice(builder.get(), 2 * flops, Hardware())
    assert fast_math_advice(convolution(1.0), 2.0 * 128 * 128 * 9 * 24 * 24, tiles).startswith("not permitted; 100%")


def product() -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType((64, 96), "float32"))
    weight = np.random.default_rng(0).standard_normal((96, 64)).astype("float32")
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.matmul(x, relax.const(weight)))
        builder.emit_func_output(y)
    return builder.get()


@pytest.mark.usefixtures("with_tiles")
def test_passes_and_the_pipeline_take_the_permission_too() -> None:
    target = tvm.target.Target({"kind": "llvm", "mcpu": "sapphirerapids", "num-cores": 2})
    for fast_math in (False, True):
        kernels = LowerToKernels(target, fast_math=fast_math)(product())
        (kernel,) = (f for f in kernels.functions.values() if isinstance(f, tvm.tirx.PrimFunc))
        assert (HALVES_PERMITTED in kernel.attrs) == fast_math
        pipeline = relax.get_pipeline("eqtune", fast_math=fast_math)
        with target:
            scheduled = pipeline(product())
        assert ("eqtune_amx" in scheduled.script()) == fast_math


def test_the_pipeline_may_use_winograd_unless_records_are_of_the_exact_graph(tmp_path: Path) -> None:
    target, mod = detect_target(1), convolution(1e-3)

    def uses_winograd(**options: object) -> bool:
        with target:
            return "winograd" in str(relax.get_pipeline("eqtune", **options)(mod).script())

    assert not uses_winograd()
    assert uses_winograd(fast_math=True)
    assert not uses_winograd(fast_math=True, graph=False)
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        for task in extract_tasks(LowerToKernels(target)(mod)):
            here = Context(target_json(target), device_name(target), 1, tvm.__version__)
            database.add_workload(task.workload_hash, serialize_workload(task.mod), name=task.name, flops=task.flops)
            database.add([Record(task.workload_hash, "", trace_to_json(Schedule(task.mod).trace), here, (1e-3,))])
    assert not uses_winograd(fast_math=True, work_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("with_tiles")
@pytest.mark.skipif("amx-bf16" not in describe_machine(detect_target(1), measure=False).dot_products, reason="no AMX")
def test_fast_math_takes_tiles_where_the_machine_has_them(tmp_path: Path) -> None:
    fast = tune(1e-3, tmp_path, trials=24, rules=())
    assert fast.summary.graph == {"form": "as given, channels last, bfloat16 halves", "fast math": "used"}
    assert 1e-7 < fast.max_rel_error <= 1e-5
    assert [task.decision["sketch"] for task in fast.tasks if task.flops and task.decision] == ["amx"]


@pytest.mark.slow
def test_fast_math_is_used_only_where_the_outputs_stay_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = tune(1e-3, tmp_path, trials=10)
    assert fast.summary.graph["form"].startswith("rewritten with fast math")
    assert fast.summary.graph["fast math"] == "used"
    assert 1e-6 < fast.max_rel_error <= 1e-4

    # As if a run of the untuned model took too long for an early check.
    monkeypatch.setattr("eqtune.tune.accuracy.SCREENING_SHARE", 0.0)
    refused = tune(0.8, tmp_path, trials=30)
    assert not refused.summary.graph["form"].startswith("rewritten with fast math")
    assert "fast math: refused: off by" in kernel_table(refused.summary)
    assert refused.max_rel_error <= 1e-4
    assert refused.latency_s < refused.baseline_latency_s
    again = tune(0.8, tmp_path, trials=34)  # what was refused is not tuned again for nothing
    assert again.summary.graph == refused.summary.graph
    assert not any("winograd" in task.name for task in again.tasks)


@pytest.mark.slow
def test_fast_math_that_overflows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eqtune.tune.baselines.UNTUNED_S_PER_OPERATION", 0.0)  # quick to run, so checked first
    errors = iter([(math.inf, math.inf)])
    monkeypatch.setattr("eqtune.tune.accuracy.compare", lambda *_: next(errors, (0.0, 0.0)))
    result = tune(1e-3, tmp_path, trials=10)
    assert str(result.summary.graph["fast math"]).startswith("refused: outputs are not finite")
    assert not str(result.summary.graph["form"]).startswith("rewritten with fast math")


def test_on_a_gpu_fast_math_also_permits_tensor_cores_for_float32() -> None:
    x, weight = relax.Var("x", relax.TensorType((32, 64), "float32")), relax.const(np.ones((64, 32), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.matmul(x, weight))
        builder.emit_func_output(y)
    forms = {}
    for target in ("nvidia/nvidia-h100", {"kind": "llvm"}):
        for fast_math in (False, True):
            config = eqtune.GraphConfig(rules=(), fast_math=fast_math)
            found, _ = model_forms(builder.get(), resolve_target(target), config)
            forms[str(target), fast_math] = [(form.name, form.lossy) for form in found.forms]
    exact = [("as given", False)]
    assert forms.pop(("nvidia/nvidia-h100", True)) == [*exact, ("as given, tfloat32", True)]
    assert all(names == exact for names in forms.values())
