"""Matrix products and models on this machine's GPU, beside what others make of them. See `benchmarks.gpu`.

Each function makes one row, is bounded in time, and keeps what it measured in a work directory where it is given one:
called again with the same directory, it goes on where it was stopped.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.gpu import cublas, metaschedule, torch_compile

__all__ = ["matmul_row", "metaschedule_row", "model_row", "ranking_row", "reason_to_skip"]

CHUNK = 32
"""Candidates that are measured and kept together."""

LEAST_RANKED = 32
"""Candidates whose order says something."""

TORCH_LIMIT_S = 600.0
TORCH_SHARE = 0.25
"""Of a model's time, what is kept for torch.compile."""


def reason_to_skip() -> str:
    """Why nothing can be measured here; "" when it can."""
    from eqtune.gpu_machine import find_compiler
    from eqtune.measure.cuda.measurer import gpu_count

    if not gpu_count():
        return "there is no NVIDIA GPU that can be used here"
    compiler = find_compiler()
    if compiler is None or compiler.kind != "nvcc":
        return "there is no nvcc on PATH or in CUDA_HOME"
    return ""


def matmul_row(
    size: int,
    dtype: str,
    sums: str,
    trials: int,
    seed: int,
    work_dir: Path,
    seconds: float = math.inf,
    flush_l2: bool = False,
) -> dict[str, Any]:
    """Tune one square product; time cuBLAS (through PyTorch) and dlight's default schedule on the same device.

    Parameters
    ----------
    size : int
        Rows, columns and reduction.
    dtype, sums : str
        Of the operands and of the result: "float16" and "float32", for example.
    trials : int
        Candidates that are measured.
    seed : int
    work_dir : Path
        Where records are kept.
    seconds : float
        Of searching, at most.
    flush_l2 : bool
        Empty L2 before each timed call of our and dlight's kernels; cuBLAS is then not timed.

    Returns
    -------
    dict
        Seconds (`eqtune_s`, `dlight_s`, `cublas_s`), ratios, the clock of the fastest run, and the dtype that cuBLAS's
        results have (`cublas_writes`): the operands', half as much to write, where PyTorch cannot ask for another. A
        peer that cannot run, dlight too, has None, and `skipped` says why. `trials` were measured in all runs in
        `work_dir`, of which `failed` failed. Seconds of this run: `wall_s`, of it building with references (`build_s`)
        and running (`run_s`).
    """
    from eqtune import tune_kernels
    from eqtune.gpu_machine import resolve_target
    from eqtune.measure.cuda.measurer import CudaMeasurer

    target = resolve_target("cuda")
    kernel = _matmul(size, dtype, sums)
    started = time.monotonic()
    with CudaMeasurer(target, flush_l2=flush_l2, seed=seed) as measurer, _budget(work_dir, seconds) as budget_s:
        found = tune_kernels(
            kernel,
            target,
            trials=trials,
            time_budget_s=budget_s,
            work_dir=work_dir,
            measure=measurer,
            seed=seed,
            progress=False,
        )
        wall_s, spent = time.monotonic() - started, measurer.overheads
        device = measurer.describe()["device"]
        dlight = "; ".join(measurer.baseline_failures.values())
    (task,) = found.tasks
    dlight_s = task.baseline_latency_s if math.isfinite(task.baseline_latency_s) else None
    skipped = [] if dlight_s is not None else [f"dlight: {dlight or 'its kernel does not run'}"]
    cublas_s, writes, why = (None, None, "L2 is flushed") if flush_l2 else cublas(size, dtype, sums)
    skipped += [f"cuBLAS: {why}"] if why else []
    return {
        "device": device,
        "kernel": f"matmul {size} {dtype} -> {sums}",
        "eqtune_s": task.latency_s,
        "tflops": 2e-12 * size**3 / task.latency_s,
        "dlight_s": dlight_s,
        "over_dlight": None if dlight_s is None else dlight_s / task.latency_s,
        "cublas_s": cublas_s,
        "cublas_writes": writes,
        "share_of_cublas": None if cublas_s is None else cublas_s / task.latency_s,
        "trials": task.trials,
        "failed": task.failed,
        "wall_s": wall_s,
        "build_s": spent.build_s,
        "run_s": spent.run_s,
        "sketch": (task.decision or {}).get("sketch", ""),
        "clock_mhz": _clock_mhz(work_dir),
        "skipped": "; ".join(skipped),
    }


@contextlib.contextmanager
def _budget(work_dir: Path, seconds: float) -> Iterator[float | None]:
    """What to give a run of so many more seconds: the budget of a work directory counts those of earlier runs.

    None for no limit.
    """
    from eqtune.records import RecordDatabase

    work_dir.mkdir(parents=True, exist_ok=True)
    with RecordDatabase(work_dir / "records.sqlite") as database:
        spent_s = database.get_number("benchmark", "spent_s") or 0.0
    started = time.monotonic()
    try:
        yield seconds + spent_s if math.isfinite(seconds) else None
    finally:
        with RecordDatabase(work_dir / "records.sqlite") as database:
            database.put_json("benchmark", {"spent_s": spent_s + time.monotonic() - started})


def _clock_mhz(work_dir: Path) -> float | None:
    """The clock that the fastest record of a work directory was timed at; None where nothing told it."""
    from eqtune.records import RecordDatabase
    from eqtune.records.record import notes_of

    with RecordDatabase(work_dir / "records.sqlite") as database:
        fastest = min(database.all(), key=lambda record: record.latency_s, default=None)
    return None if fastest is None else notes_of(fastest).get("clock_mhz")


def metaschedule_row(
    size: int, dtype: str, sums: str, trials: int, seed: int, seconds: float = math.inf, eqtune_s: float | None = None
) -> dict[str, Any]:
    """What MetaSchedule finds for one square product, in at most `seconds`; `over_metaschedule` where ours is given.

    Returns
    -------
    dict
        `metaschedule_s`, None where no candidate worked; `trials` that it measured. Its own runner took that figure
        while it tuned, one average for each candidate; eqtune's is a minimum of several.
    """
    from eqtune.gpu_machine import resolve_target

    latencies_s, why = metaschedule(_matmul(size, dtype, sums), resolve_target("cuda"), trials, seed, seconds)
    best_s = min(latencies_s, default=None)
    return {
        "kernel": f"matmul {size} {dtype} -> {sums}",
        "metaschedule_s": best_s,
        "over_metaschedule": None if best_s is None or eqtune_s is None else best_s / eqtune_s,
        "trials": len(latencies_s),
        "skipped": f"MetaSchedule: {why}" if why else "",
    }


def model_row(
    name: str, trials: int, seed: int, work_dir: Path, seconds: float = math.inf, graph: bool = True
) -> dict[str, Any]:
    """Tune one model of the zoo, and time torch.compile(max-autotune, frozen) on the same device.

    Parameters
    ----------
    name : str
    trials : int
        Of the whole model, in each of two runs.
    seed : int
    work_dir : Path
        Where records are kept, of each run in a folder of its own.
    seconds : float
        In all, at most: most of them for searching, shared by the runs; what is left for torch.compile, which is
        stopped then, or after `TORCH_LIMIT_S`.
    graph : bool
        Tune it once more without the graph search, so that its gain can be told.

    Returns
    -------
    dict
        Seconds (`eqtune_s`, `without_graph_s`, `torch_compile_s`), `graph_gain` (0.1: a tenth more speed) and ratios.
    """
    from eqtune import tune_model

    started = time.monotonic()
    latency_s: dict[str, float] = {}
    search_s = seconds - min(TORCH_LIMIT_S, TORCH_SHARE * seconds)
    kinds = ("saturate", "off") if graph else ("saturate",)
    for kind in kinds:
        with _budget(work_dir / kind, search_s / len(kinds)) as budget_s:
            found = tune_model(
                f"zoo:{name}",
                target="cuda",
                trials=trials,
                time_budget_s=budget_s,
                graph=kind,
                work_dir=work_dir / kind,
                seed=seed,
                progress=False,
            )
            latency_s[kind] = found.latency_s
    torch_s, why = torch_compile(name, seed, min(TORCH_LIMIT_S, seconds - (time.monotonic() - started)))
    own_s, without_s = latency_s["saturate"], latency_s.get("off")
    return {
        "model": name,
        "eqtune_s": own_s,
        "without_graph_s": without_s,
        "graph_gain": None if without_s is None else without_s / own_s - 1.0,
        "torch_compile_s": torch_s,
        "over_torch_compile": None if torch_s is None else torch_s / own_s,
        "skipped": f"torch.compile: {why}" if why else "",
    }


def ranking_row(
    size: int,
    dtype: str,
    sums: str,
    measurer: Any,
    candidates: int,
    seed: int,
    work_dir: Path,
    seconds: float = math.inf,
) -> dict[str, Any]:
    """Measure candidates of a product, and correlate the order that is predicted with the measured one.

    A third are the best by the estimate, a third are near those, and a third are random legal ones, of which most are
    slow in ways that say nothing (`measured.candidates`).

    Parameters
    ----------
    size : int
    dtype, sums : str
    measurer : eqtune.measure.Measurer
        With the `hardware` that the space is built from.
    candidates : int
        Half of them are learnt from; the others are held out.
    seed : int
    work_dir : Path
        Where the measurements are kept; those that are there are not made again.
    seconds : float
        No `CHUNK` of candidates is begun after them; those that are left are not counted, and the row is `cut_short`.

    Returns
    -------
    dict
        Spearman's correlation on the held-out half: of the analytic model (`before`), of the learnt one that sees what
        is known before compiling (`after`), and after (`after_compiling`).
    """
    from benchmarks.measured import candidates as choose
    from eqtune.cost_model import LateColumns, create
    from eqtune.cost_model.metrics import spearman
    from eqtune.measure.base import NO_REFERENCE
    from eqtune.records.record import notes_of
    from eqtune.records.workload import as_workload
    from eqtune.search.space import build_space
    from eqtune.search.space.features import COMPILED, FEATURES, with_compiled
    from eqtune.tasks import task_of
    from eqtune.tune.kernel_search import decision_key

    end_s = time.monotonic() + seconds
    task = task_of("matmul", as_workload(_matmul(size, dtype, sums))["main"])
    space = build_space(task.mod, measurer.hardware)
    rng = np.random.default_rng(seed)
    points = rng.permutation(choose(space, candidates, rng))
    decisions = [space.decision(point) for point in points]
    known = _known(work_dir, task, measurer.describe(), seed)
    missing = [decision for decision in decisions if decision_key(decision) not in known]
    for start in range(0, len(missing), CHUNK):
        if time.monotonic() >= end_s:
            break
        measured = measurer.measure(task, missing[start : start + CHUNK])
        if measured[0].error == NO_REFERENCE:
            raise RuntimeError(f"nothing can be compared: {measured[0].detail}")
        _keep(work_dir, task, measurer.describe(), measured, seed)
    known = _known(work_dir, task, measurer.describe(), seed)
    done = [i for i, decision in enumerate(decisions) if decision_key(decision) in known]
    row = {
        "device": measurer.describe()["device"],
        "kernel": f"matmul {size} {dtype} -> {sums}",
        "candidates": len(done),
        **({"cut_short": True} if len(done) < len(decisions) else {}),
    }
    if len(done) < LEAST_RANKED:
        return row | {"skipped": f"out of time with {len(done)} candidates"}
    points, records = points[done], [known[decision_key(decisions[i])] for i in done]
    latencies_s = np.array([record.latency_s if not record.error else math.inf for record in records])
    learnt, held = np.arange(len(points)) % 2 == 0, np.arange(len(points)) % 2 == 1
    features = space.features(points)
    compiled = with_compiled(features, [notes_of(record) for record in records])
    model = LateColumns(create("xgboost", seed=seed), [FEATURES.index(name) for name in COMPILED], seed=seed)
    model.fit(compiled[learnt], latencies_s[learnt], np.zeros(int(learnt.sum()), dtype=np.int64))
    return row | {
        "failed": int(np.isinf(latencies_s).sum()),
        "before": spearman(-space.latency_s(points[held]), latencies_s[held]),
        "after": spearman(model.predict(features[held]), latencies_s[held]),
        "after_compiling": spearman(model.predict(compiled[held]), latencies_s[held]),
    }


def _known(work_dir: Path, task: Any, device: dict[str, Any], seed: int) -> dict[str, Any]:
    """Records of a work directory by their decisions: those of this kernel, device and seed."""
    from eqtune.records import Context, RecordDatabase

    if not work_dir.exists():
        return {}
    with RecordDatabase(work_dir / "records.sqlite") as database:
        records = database.for_workload(task.workload_hash, Context(**device))
    return {record.decision: record for record in records if record.seed == seed}


def _keep(work_dir: Path, task: Any, device: dict[str, Any], measured: Sequence[Any], seed: int) -> None:
    """Add measurements to the records of a work directory."""
    from eqtune import __version__
    from eqtune.records import Context, Record, RecordDatabase
    from eqtune.records.workload import serialize_workload
    from eqtune.tune.kernel_search import decision_key

    work_dir.mkdir(parents=True, exist_ok=True)
    context = Context(**device)
    with RecordDatabase(work_dir / "records.sqlite") as database:
        text = serialize_workload(task.mod)
        database.add_workload(task.workload_hash, text, name=task.name, flops=task.flops)
        database.add(
            [
                Record(
                    task.workload_hash,
                    decision_key(m.decision),
                    m.trace,
                    context,
                    m.latencies_s,
                    m.error,
                    m.detail,
                    time.time(),
                    seed,
                    __version__,
                    json.dumps(dict(m.notes), sort_keys=True) if m.notes else "",
                )
                for m in measured
            ]
        )


def _matmul(size: int, dtype: str, sums: str) -> Any:
    from tvm import te, tirx

    extent = tirx.IntImm("int64", size)
    a, b = (te.placeholder((extent, extent), dtype, name=name) for name in "ab")
    k = te.reduce_axis((0, extent), name="k")

    def product(i: Any, j: Any) -> Any:
        left, right = a[i, k], b[k, j]
        return te.sum(left * right if dtype == sums else left.astype(sums) * right.astype(sums), axis=k)

    return te.create_prim_func([a, b, te.compute((extent, extent), product, name="c")])
