"""Marks of schedules: the table says what the code does, and rewriters run behind those that they need."""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import s_tir, tirx

import eqtune.search
from eqtune.records.traces import TVM_ANNOTATIONS, parse_trace, trace_to_json
from eqtune.search.space import Hardware, build_space, marks
from eqtune.search.space.expressions import nodes_of
from eqtune.search.space.gpu.hardware import DEVICES
from eqtune.search.space.hardware import with_weights
from eqtune.search.space.lowering import CPU_STEPS, GPU_STEPS, prepare_for_lowering
from eqtune.search.space.marks import AHEAD_OF_TIME, LANE_TREE, MARKS, OWN, TRANSPOSE_TILE, TVM
from eqtune.search.strategies.moves import Moves

sys.path.insert(0, str(Path(__file__).parent))
import test_amx as amx
import test_gpu_tensor_core as tensor
import test_memory_bound as memory
import test_resample as resample
import test_rolling_windows as rolling
import test_space_contraction as contraction

SEARCH = Path(eqtune.search.__file__).parent
TREES = {path.relative_to(SEARCH): ast.parse(path.read_text(encoding="utf-8")) for path in SEARCH.rglob("*.py")}
ROWS = {mark.name: mark for mark in MARKS}


def modules() -> Iterator[tuple[str, Any]]:
    """Those of `search/space`, by their names in it, but for the table itself."""
    for path, tree in TREES.items():
        name = ".".join(path.with_suffix("").parts)
        if name.startswith("space.") and name != "space.marks":
            yield name.removeprefix("space."), tree


def annotated_and_used(tree: Any) -> tuple[set[str], set[str]]:
    """The marks that a module annotates, and those that it does anything else with."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "marks"]
    imported = {alias.name for node in imports for alias in node.names}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    annotated = [call.args[1] for call in calls if call.func.attr == "annotate"]
    assert all(isinstance(name, ast.Name) for name in annotated), "annotations come from marks.py"
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in imported]
    used = {node.id for node in names if node not in annotated}
    return {getattr(marks, node.id) for node in annotated}, {getattr(marks, name) for name in used}


def test_the_table_says_who_sets_and_who_reads_each_mark() -> None:
    setters, readers, homes = defaultdict(set), defaultdict(set), defaultdict(set)
    for name, tree in modules():
        annotated, used = annotated_and_used(tree)
        for mark in annotated:
            setters[mark].add(name)
        for mark in used:
            readers[mark].add(name)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and used:
                homes[node.name].add(name)
    assert dict(setters) == {mark.name: set(mark.set_by) for mark in MARKS}
    for mark in MARKS:
        assert readers[mark.name] == {home for name in mark.read_by if name != TVM for home in homes[name]}, mark.name


def test_names_of_marks_are_written_once() -> None:
    for path, tree in TREES.items():
        constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert path == Path("space/marks.py") or not constants & set(ROWS), path


def test_every_mark_of_our_own_is_read_by_a_step() -> None:
    steps = {step.rewrite.__name__ for step in (*CPU_STEPS, *GPU_STEPS)}
    assert [mark.name for mark in MARKS if mark.name.startswith(OWN) and not steps & set(mark.read_by)] == []


@pytest.mark.parametrize("steps", [CPU_STEPS, GPU_STEPS], ids=["CPU", "GPU"])
def test_steps_run_behind_those_that_they_need(steps: Any) -> None:
    order = [step.rewrite for step in steps]
    assert len(set(order)) == len(order)
    for place, step in enumerate(steps):
        late = [needed.__name__ for needed in step.needs if needed in order[place:]]
        assert late == [], step.rewrite.__name__


def test_traces_may_annotate_what_schedules_do_and_of_tvms_names_no_other() -> None:
    assert {mark.name for mark in MARKS if not mark.name.startswith(OWN)} - {AHEAD_OF_TIME} == TVM_ANNOTATIONS
    for mark in MARKS:
        parse_trace(json.dumps([[["Annotate", ["l0", 1], [mark.name], []]], []]))


MACHINE = Hardware(threads=2)
FAR_WEIGHTS = with_weights(MACHINE, 1 << 30)
SMALL_CACHE = Hardware(threads=2, l2_bytes=32 * 1024)
H100 = DEVICES["nvidia/nvidia-h100"].hardware()

KERNELS: dict[str, tuple[Callable[[], Any], Any, int]] = {
    "product": (lambda: contraction.matmul((300, 512), (512, 256), weights=[1]), FAR_WEIGHTS, 5),
    "image": (lambda: contraction.conv(32, 27, 64, 3, padding=1), MACHINE, 30),
    "groups": (lambda: contraction.conv(6, 7, 48, 3, "NHWC", "HWIO", groups=2, padding=1), MACHINE, 5),
    "small_groups": (contraction.KERNELS["groups_of_4_nhwc"], MACHINE, 1),
    "softmax": (lambda: memory.kernel(memory.CASES["softmax"][0], [(3, 24, 128)]), SMALL_CACHE, 10),
    "average_pool": (lambda: memory.kernel(*rolling.CASES["average pool"]), MACHINE, 30),
    "resized": (lambda: resample.resized((1, 3, 8, 16), (16, 40)), MACHINE, 5),
    "tile_registers": (amx.KERNELS["float32_nhwc"], amx.HARDWARE, 5),
    "tensor_cores": (lambda: tensor.matmul(128, 128, 256, "float16", "float32"), H100, 40),
}
"""Each with a machine, and how many schedules to look at."""


def schedules() -> Iterator[Any]:
    for build, hardware, count in KERNELS.values():
        space = build_space(build(), hardware)
        for point in Moves(space).sample(np.random.default_rng(0), count):
            yield space.apply(space.decision(point))


def marks_in(schedule: Any) -> set[tuple[str, str]]:
    """The marks that a schedule's trace sets, and on what."""
    instructions, _ = json.loads(trace_to_json(schedule.trace))
    marked = [(names[0], of[0][0]) for kind, of, names, _ in instructions if kind == "Annotate"]
    return {(name, {"b": "block", "l": "loop"}[variable]) for name, variable in marked}


def test_schedules_mark_what_the_table_says_and_rewriters_drop_the_marks() -> None:
    found: set[tuple[str, str]] = set()
    kept: set[str] = set()
    for schedule in schedules():
        if marks_in(schedule) <= found:
            continue
        found |= marks_in(schedule)
        function = prepare_for_lowering(schedule.mod["main"])
        for node in nodes_of(function.body, (tirx.For, s_tir.SBlock)):
            kept |= {name for name in map(str, node.annotations) if name.startswith(OWN)}
    assert found == {(mark.name, mark.on) for mark in MARKS}
    assert kept <= {TRANSPOSE_TILE, LANE_TREE}, "loops that no rewriter fits"
