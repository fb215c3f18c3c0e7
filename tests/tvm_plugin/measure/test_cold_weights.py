"""Kernels of models with many weights are timed as such a model calls them: with weights that no near cache holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

import eqtune
from eqtune.machine import detect_target
from eqtune.measure import LocalMeasurer
from eqtune.measure.arguments import BufferSpec, Interface
from eqtune.measure.bench import MOST_TURNS, WEIGHT_DTYPES, Bench, _memory_of_weights
from eqtune.measure.build import Program
from eqtune.records import RecordDatabase
from eqtune.records.record import COLD_WEIGHTS
from eqtune.schedules.analytic import machine_running
from eqtune.schedules.best import best_schedule
from eqtune.schedules.stored import stored_schedules
from eqtune.search.space import build_space
from eqtune.search.space.contraction.prefetch import FAR
from eqtune.search.space.hardware import Hardware, with_weights
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.symbolic.schedules import _measured
from eqtune.tasks import extract_tasks, lower_to_kernels
from eqtune.tasks.task import Task
from eqtune.tune.prices import defaults

from ..small_models import module, weight


def product(columns: int = 48) -> tvm.IRModule:
    return module((8, 64), lambda builder, x: relax.op.matmul(x, weight(64, columns)))


def kernel(mod: tvm.IRModule) -> Task:
    (task,) = extract_tasks(lower_to_kernels(mod, detect_target(1)))
    return task


class Watch:
    """Stands for a compiled kernel: notes where its arguments lie."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def get_function(self, symbol: str) -> Any:
        return lambda *arguments: self.calls.append([tensor.data_ptr() for tensor in arguments])


def addresses(interface: Interface, path: Path, model_bytes: int, *repeats: int) -> list[list[int]]:
    """Of the arguments of so many calls, in as many evaluations as there are numbers."""
    watch = Watch()
    bench = Bench("0" * 16, interface, tvm.cpu(), path, 0, "normal")
    for repeat in repeats:
        assert len(bench.evaluate_cold(Program(watch, "kernel"), 1, repeat, model_bytes)) == repeat
    return watch.calls


def test_each_call_finds_its_weights_elsewhere_until_the_whole_model_was_passed(tmp_path: Path) -> None:
    interface = Interface.of(kernel(product()).mod["main"])
    calls = addresses(interface, tmp_path, 5 * 64 * 48 * 4, 5, 7)
    (position,) = interface.weights
    weights = [call[position] for call in calls]
    assert len(set(weights[:5])) == 5
    assert weights == (weights[:5] * 3)[:12], "also from one evaluation to the next"
    gaps = np.diff(sorted(weights[:5]))
    assert (gaps == 64 * 48 * 4).all()
    others = [call[:position] + call[position + 1 :] for call in calls]
    assert all(call == others[0] for call in others), "activations stay where they are"


def test_of_tiny_weights_no_more_than_enough_take_turns(tmp_path: Path) -> None:
    mod = module((8, 64), lambda builder, x: relax.op.matmul(x, weight(64, 8)))
    calls = addresses(Interface.of(kernel(mod).mod["main"]), tmp_path, 1 << 21, MOST_TURNS + 5)
    assert len({tuple(call) for call in calls}) == MOST_TURNS


@pytest.mark.parametrize(("bound", "weights", "exchanged"), [(8, (0, 1), []), (None, (1,), []), (None, (0, 1), [0])])
def test_indices_are_never_exchanged(
    bound: int | None, weights: tuple[int, ...], exchanged: list[int], tmp_path: Path
) -> None:
    """Nor are other weights, where it is known that something indexes: it may be computed of them."""
    specs = (BufferSpec((8, 64), "float32"), BufferSpec((3,), "int64"), BufferSpec((3, 64), "float32"))
    interface = Interface(specs, (2,), bound, reduction=1, weights=weights)
    calls = addresses(interface, tmp_path, 1 << 20, 5, 7)
    assert [place for place in range(3) if len({call[place] for call in calls}) > 1] == exchanged


def test_what_stands_for_weights_is_an_ordinary_number_in_every_dtype() -> None:
    memory = _memory_of_weights(1 << 12)
    for dtype in WEIGHT_DTYPES:
        values = memory.view(np.uint16) if dtype == "bfloat16" else memory.view(dtype)
        if dtype == "bfloat16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        if values.dtype.kind == "f":
            least = np.finfo("float32" if dtype == "bfloat16" else dtype).tiny
            assert np.isfinite(values).all()
            assert (np.abs(values) >= least).all(), "neither zero nor denormal"
    assert len(np.unique(memory)) == 32, "products are as hard as any"


@pytest.mark.slow
def test_candidates_are_compared_with_their_own_weights() -> None:
    task = kernel(product(512))
    hardware = Hardware(bandwidth_bytes_per_s=1e6)  # so that reading weights takes long
    decisions, _ = defaults(build_space(task.mod, hardware))
    with LocalMeasurer(detect_target(1), hardware=hardware, threads=1, workers=1) as measurer:
        warm = measurer.describe()["device"]
        measurer.model_bytes = 1 << 20
        assert measurer.describe()["device"] == warm + COLD_WEIGHTS
        measured = measurer.measure(task, decisions)
        assert [m.error for m in measured] == [""] * len(decisions)
        (again,) = measurer.retime(task, decisions[:1])
        assert 0 < again.latency_s < 1e-2


@pytest.mark.slow
def test_a_model_with_more_weights_than_the_caches_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"graph": "off", "work_dir": tmp_path, "threads": 1, "progress": False}
    eqtune.tune_model(product(512), trials=2, **arguments)  # type: ignore[arg-type]
    monkeypatch.setattr(Hardware, "near_bytes", 1024)
    result = eqtune.tune_model(product(512), trials=6, **arguments)  # type: ignore[arg-type]
    assert result.tasks[0].trials == 6, "what was timed otherwise does not count"
    assert result.tasks[0].decision["values"]["far_weights"] == 1
    assert FAR in result.mod.script()
    assert COLD_WEIGHTS not in str(result)
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        warm, cold = sorted(database.contexts(), key=lambda context: len(context.device))
        assert cold.device == warm.device + COLD_WEIGHTS
        best = {context: database.best(result.tasks[0].workload_hash, context) for context in (warm, cold)}
    with detect_target(1):
        (found,) = stored_schedules(tmp_path).values()
    assert best[cold] is not None
    assert found.latency_s == best[cold].latency_s, "a large model's records are worth more"


@pytest.mark.parametrize("far", [False, True])
def test_tiles_measured_with_weights_elsewhere_are_used(far: bool) -> None:
    """On a device of a cluster, say: nobody is told there what the model holds."""
    hardware = Hardware(threads=1, l3_bytes=32 << 20)
    there, here = (with_weights(hardware, (64 << 20) * many) for many in (not far, far))
    mod = kernel(product(512)).mod
    best = best_schedule(build_space(mod, there))
    assert best is not None
    decision = best.decisions[0]
    assert decision.values["far_weights"] != far
    measured = _measured(build_space(mod, here), decision)
    assert measured is not None
    assert measured.scheduled is not None
    schedule, found = measured.scheduled
    assert found.values == {**decision.values, "far_weights": int(far)}
    assert (FAR in prepare_for_lowering(schedule.mod["main"]).script()) == far


@pytest.mark.parametrize("many", [False, True])
def test_weights_that_come_from_memory_are_asked_for(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels without records, which are scheduled by estimate, and of those with open sizes."""
    monkeypatch.setattr(Hardware, "near_bytes", 1024 if many else property(lambda hardware: hardware.l3_bytes))
    rows = tvm.tirx.Var("rows", "int64")
    open_sizes = module((rows, 64), lambda builder, x: relax.op.matmul(x, weight(64, 512)))
    target = detect_target(1)
    for mod in (product(512), open_sizes):
        assert machine_running(mod, target).weights_in_memory == many
        with target:
            assert (FAR in relax.get_pipeline("eqtune", graph=False)(mod).script()) == many
