"""Candidates are built and timed on a Ray cluster, models are run there; an actor that is killed loses none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from eqtune.errors import MissingExtraError, SetupError
from eqtune.machine import detect_target
from eqtune.measure import create
from eqtune.measure.ray import measurer as ray_cluster

SCRIPT = """
    import json
    import tempfile
    from pathlib import Path

    import numpy as np
    import ray
    from tvm import relax, te

    from eqtune.machine import detect_target
    from eqtune.measure import LocalMeasurer, RayMeasurer
    from eqtune.records.workload import as_workload, workload_hash
    from eqtune.search.space.base import Decision
    from eqtune.tasks.task import Task
    from eqtune.compile.untuned import untuned_executable

    x, builder = relax.Var("x", relax.TensorType((4,), "float32")), relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.add(x, x))
        builder.emit_func_output(y)

    a, b = te.placeholder((64, 64), name="A"), te.placeholder((64, 64), name="B")
    k = te.reduce_axis((0, 64), name="k")
    c = te.compute((64, 64), lambda i, j: te.sum(a[i, k] * b[k, j], k), name="C")
    mod = as_workload(te.create_prim_func([a, b, c]))
    task = Task("matmul", mod, workload_hash(mod), calls=1, flops=1.0, bytes_moved=1.0)
    tiled = [Decision("tiled", {"rows": r, "columns": n, "unused": 0}) for r in (2, 4, 8) for n in (16, 32)]
    raises, crashes, wrong = (Decision("faulty", {"fault": fault}) for fault in (0, 5, 6))
    decisions = [*tiled[:3], raises, wrong, crashes, *tiled[3:]]

    measuring = RayMeasurer(detect_target(1), threads=1, timeout_s=60.0, space_builder="measure_spaces:build")
    with measuring as measurer:  # nothing here hangs: a busy machine may take its time
        (baseline_s,) = measurer.baseline([task])
        ray.kill(measurer.actors[0])
        measured = measurer.measure(task, decisions)
        found = {
            "baseline_s": baseline_s,
            "errors": [m.error for m in measured],
            "latencies_s": [m.latency_s for m in measured if not m.error],
            "losses": measurer.losses,
            "device": measurer.describe()["device"],
            "in order": [m.decision for m in measured] == decisions,
        }
        model = measurer.models.load(untuned_executable(builder.get(), detect_target(1)))
        found["outputs"] = model(np.arange(4, dtype="float32"))[0].tolist()
        (found["model_s"],) = measurer.models.time_s([model], [np.zeros(4, "float32")], budget_s=0.01)
        measurer.retime(task, tiled[:1])
        files = Path(tempfile.gettempdir()).glob("eqtune-ray-device-*/model-*.so")
        directory = max(files, key=lambda file: file.stat().st_mtime).parent
        found["libraries"] = len(list(directory.glob("*.so"))) - 1
    found["left"] = directory.exists()
    print("FOUND", json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not ray_cluster.ray_available(), reason="needs the extra: pip install 'eqtune[ray]'")
def test_a_killed_actor_loses_no_candidate():
    """In a process of its own: Ray warns of much that pytest would turn into errors."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], env=environment, capture_output=True, text=True, timeout=400
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("FOUND "))
    assert found["in order"]
    assert found["errors"] == ["", "", "", "build_error", "wrong_result", "crash", "", "", ""]
    assert min(found["latencies_s"]) < found["baseline_s"]  # one may be slow: Ray uses the cores, too
    assert found["losses"] == 3, "the killed actor, and two that the crashing kernel took along"
    assert found["device"].endswith(" on ray")
    assert found["outputs"] == [0, 2, 4, 6]
    assert 0 < found["model_s"] < 1
    assert found["libraries"] == 2, "of the last batch: a kernel, and what packs its weights"
    assert not found["left"]


class Cluster:
    """Stands in for the module `ray`: without a CPU, tasks wait for ever."""

    def __init__(self, cpus: float) -> None:
        self.cpus = cpus
        self.cancelled: list[str] = []
        self.exceptions = SimpleNamespace(RayError=RuntimeError)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus} if self.cpus else {}

    def wait(self, tasks: list[str], timeout: float) -> tuple[list[str], list[str]]:
        time.sleep(0 if self.cpus else 0.01)
        return (tasks[-1:], tasks[:-1]) if self.cpus else ([], tasks)

    def get(self, task: str) -> dict[str, str]:
        if task == "dies":
            raise RuntimeError(task)
        return {"built": task}

    def cancel(self, task: str, force: bool) -> None:
        self.cancelled.append(task)


def test_builders_that_no_node_can_run_are_one_error(monkeypatch):
    cluster = Cluster(cpus=0)
    monkeypatch.setitem(sys.modules, "ray", cluster)
    with pytest.raises(SetupError, match=r"no CPU to build on for 0.1 s; add a node with `ray start"):
        ray_cluster._collect(["a", "b"], limit_s=10.0, patience_s=0.1)
    assert cluster.cancelled == ["a", "b"]


def test_what_builders_answer_is_in_order(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", Cluster(cpus=2))
    first, second, third = ray_cluster._collect(["a", "dies", "b"], limit_s=10.0, patience_s=0.1)
    assert (first, second["error"], third) == ({"built": "a"}, "crash", {"built": "b"})


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(ray_cluster, "ray_available", lambda: False)
    with pytest.raises(MissingExtraError, match=r"eqtune\[ray\]"):
        create("ray", target=detect_target(1))


TRACEBACK = """\x1b[36mray::DeviceActor.load()\x1b[39m (pid=1, ip=10.0.0.1, repr=<DeviceActor>)
  File "node.py", line 1, in load
OSError: [Errno 28] No space left on device"""


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (TRACEBACK, "OSError: [Errno 28] No space left on device"),
        (f"The actor died because of an error raised in its creation task, {TRACEBACK}", "OSError: [Errno 28]"),
        ("The actor died unexpectedly.\n\tactor_id: 1\n\tpid: 2", "The actor died unexpectedly."),
        ("", "RuntimeError"),
    ],
)
def test_what_happened_on_a_node_is_told(monkeypatch, said, line):
    def get(_: str) -> None:
        raise RuntimeError(said)

    cluster = Cluster(cpus=2)
    monkeypatch.setattr(cluster, "get", get)
    monkeypatch.setitem(sys.modules, "ray", cluster)
    (answer,) = ray_cluster._collect(["a"], limit_s=10.0, patience_s=0.1)
    assert answer["error"] == "crash"
    assert f"took longer than 10 s: {line}" in answer["detail"]
    assert "actor_id" not in answer["detail"]


def test_a_cluster_that_does_not_answer_is_one_error(monkeypatch):
    def init(**_: object) -> None:
        raise ConnectionError

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    monkeypatch.setattr(ray_cluster, "ray_available", lambda: True)
    with pytest.raises(SetupError, match=r"cluster does not answer \(ConnectionError\); see `ray status`"):
        create("ray", target=detect_target(1), threads=1)
