"""Transfer: what was best for one kernel is tried first on one that is like it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import te

from eqtune.measure.base import Measurement
from eqtune.records import Context, Record, RecordDatabase
from eqtune.records.workload import serialize_workload
from eqtune.search import strategies
from eqtune.search.allocation.base import TaskStatus
from eqtune.search.space import Hardware, build_space
from eqtune.search.space.base import Decision, Knob, Sketch, Space
from eqtune.search.strategies.transfer import nearest_point
from eqtune.tasks.extract import task_of
from eqtune.tune.kernel_search import KernelSearch, decision_key
from eqtune.tune.transfer import Transfer, shape_distance, shapes_of

HERE = Context('{"kind": "llvm"}', "this machine", 1, "0.27")
ELSEWHERE = Context('{"kind": "llvm"}', "another machine", 1, "0.27")


class Tiles(Sketch):
    """Two tiles whose product may not exceed 64; rows are estimated to cost nothing, columns much."""

    name = "tiles"
    knobs = (Knob("rows", (1, 2, 4, 8, 16)), Knob("columns", (0, 16, 32, 64)))

    def legal(self, values: Any) -> Any:
        return values.prod(axis=1) <= 64

    def features(self, values: Any) -> Any:
        raise AssertionError("not needed to map decisions")

    def latency_s(self, values: Any) -> Any:
        return 1.0 + values[:, 1].astype(float)

    def apply(self, values: Any) -> Any:
        raise AssertionError("nothing is lowered here")


def mapped(rows: int, columns: int, sketch: str = "tiles") -> dict[str, int] | None:
    space = Space([Tiles()])
    point = nearest_point(space, Decision(sketch, {"rows": rows, "columns": columns}))
    return None if point is None else dict(space.decision(point).values)


def test_every_knob_takes_its_value_nearest_by_ratio() -> None:
    assert mapped(3, 0) == {"rows": 4, "columns": 0}
    assert mapped(2, 40) == {"rows": 2, "columns": 32}
    assert mapped(100, 0) == {"rows": 16, "columns": 0}


def test_an_illegal_combination_gives_way_by_one_step() -> None:
    assert mapped(4, 32) == {"rows": 4, "columns": 16}  # two rows fewer is as near, and estimated to be slower


def test_decisions_of_another_sketch_and_hopeless_ones_are_not_mapped() -> None:
    assert mapped(1, 16, sketch="other") is None
    assert mapped(16, 64) is None


def matmul(rows: int, columns: int, depth: int) -> KernelSearch:
    a, b = te.placeholder((rows, depth), name="a"), te.placeholder((depth, columns), name="b")
    k = te.reduce_axis((0, depth), name="k")
    product = te.compute((rows, columns), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="matmul")
    task = task_of(f"matmul_{rows}x{columns}x{depth}", te.create_prim_func([a, b, product]))
    space = build_space(task.mod, Hardware())
    search = strategies.create("annealed-evolution").begin(space, 0)
    return KernelSearch(task, space, search, TaskStatus(task.name, 1, task.flops, 0.0, "", []))


def some_decision(kernel: KernelSearch, seed: int) -> Decision:
    (point,) = strategies.create("random").begin(kernel.space, seed).ask(1, lambda points: np.zeros(len(points)))
    return kernel.space.decision(point)


def record(database: RecordDatabase, kernel: KernelSearch, decision: Decision, context: Context) -> None:
    task = kernel.task
    database.add_workload(task.workload_hash, serialize_workload(task.mod), name=task.name, flops=task.flops)
    database.add([Record(task.workload_hash, decision_key(decision), "[[],[]]", context, (1e-3,))])


def test_the_nearest_kernel_of_the_records_comes_first(tmp_path: Path) -> None:
    near, far, new = matmul(128, 256, 256), matmul(16, 2048, 64), matmul(128, 256, 384)
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        for seed, known in enumerate((far, near)):
            record(database, known, some_decision(known, seed), HERE)
        points = Transfer(database, HERE).suggest(new, [new])
        assert len(points) == 2
        assert new.space.legal(points).all()
        np.testing.assert_array_equal(points[0], nearest_point(new.space, some_decision(near, 1)))
        assert len(Transfer(database, HERE, count=1).suggest(new, [new])) == 1


def test_records_of_another_device_suggest_nothing(tmp_path: Path) -> None:
    known, new = matmul(128, 256, 256), matmul(128, 256, 384)
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        record(database, known, some_decision(known, 0), ELSEWHERE)
        assert not len(Transfer(database, HERE).suggest(new, [new]))


def test_what_this_run_measured_counts_and_is_newer_than_the_records(tmp_path: Path) -> None:
    known, new = matmul(128, 256, 256), matmul(128, 256, 384)
    with RecordDatabase(tmp_path / "records.sqlite") as database:
        record(database, known, some_decision(known, 0), HERE)
        better = some_decision(known, 1)
        known.tell([Measurement(better, (1e-4,))])
        (point,) = Transfer(database, HERE).suggest(new, [known, new])
        np.testing.assert_array_equal(point, nearest_point(new.space, better))


def test_the_candidate_that_a_price_is_of_is_measured_first() -> None:
    kernel = matmul(64, 64, 64)
    score = lambda points: -kernel.space.latency_s(points)  # noqa: E731
    kernel.favourite = some_decision(kernel, 0)
    assert kernel.ask(1, score) == [kernel.favourite]
    assert kernel.ask(4, score)[0] == kernel.favourite
    kernel.tell([Measurement(kernel.favourite, (1e-3,))])
    assert kernel.favourite not in kernel.ask(4, score)


def test_suggestions_begin_the_first_batch_and_are_asked_once() -> None:
    kernel = matmul(64, 64, 64)
    suggested = kernel.search.ask(2, lambda points: np.zeros(len(points)))
    kernel = matmul(64, 64, 64)
    kernel.suggestions = suggested
    score = lambda points: -kernel.space.latency_s(points)  # noqa: E731
    first = kernel.ask(8, score)
    assert first[:2] == [kernel.space.decision(point) for point in suggested]
    kernel.tell([Measurement(decision, (1e-3,)) for decision in first])
    both = [decision_key(decision) for decision in [*first, *kernel.ask(8, score)]]
    assert len(set(both)) == len(both)


def test_kernels_with_other_arguments_are_infinitely_far() -> None:
    left, right = shapes_of(matmul(128, 256, 256).task.mod), shapes_of(matmul(128, 512, 256).task.mod)
    assert shape_distance(left, left) == 0.0
    assert shape_distance(left, right) == pytest.approx(math.sqrt(2))
    assert shape_distance(left, [[1, 2, 3]]) == math.inf


def test_a_batch_of_one_is_the_kernels_own() -> None:
    kernel = matmul(64, 64, 64)
    (own,) = matmul(64, 64, 64).ask(1, lambda points: -kernel.space.latency_s(points))
    other = next(d for d in (some_decision(kernel, seed) for seed in range(10)) if d != own)
    point = kernel.space.point(other)
    assert point is not None
    kernel.suggestions = point[None]
    assert kernel.ask(1, lambda points: -kernel.space.latency_s(points)) == [own]
