"""Measured candidates of the zoo's kernels: what the prior is trained on, and what the ablation replays.

    python -m benchmarks.measured --models squeezenet,nasrnn --candidates 40 --out benchmarks/data
    python -m benchmarks.measured --target cuda --models resnet50,bert_base --kernels 8 --out benchmarks/data/gpu

One file a model; `benchmarks/data/README.md` is the data card. Each kernel's candidates are a third random legal ones,
a third the best by the analytic estimate, and a third random among the best twentieth by that estimate; `--search`
adds what a search with the default parts asks for. Float32, batch 1; one thread, or the GPU of this machine.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eqtune.search.space.base import Points, Space
from eqtune.search.space.features import FEATURES

__all__ = ["MeasuredKernel", "TableSpace", "load", "save"]


@dataclass(frozen=True)
class MeasuredKernel:
    """Candidates of one kernel with their latencies; `n` of them.

    Attributes
    ----------
    model, name, workload_hash : str
        Where the kernel is from.
    flops : float
        Floating-point operations of one call.
    sketches : list
        For each sketch its name and its knobs: `[name, [[knob, [value, ...]], ...]]`.
    points : int16 [n, 1 + knobs]
        The candidates as decision vectors over `sketches`.
    features : float32 [n, len(FEATURES)]
    analytic_s : float64 [n]
        The space's estimate.
    latencies_s : float64 [n]
        Measured; `inf` for a failure.
    """

    model: str
    name: str
    workload_hash: str
    flops: float
    sketches: list[Any]
    points: Points
    features: NDArray[np.float32]
    analytic_s: NDArray[np.float64]
    latencies_s: NDArray[np.float64]


class TableSpace:
    """A `DecisionSpace` of the measured candidates alone, so that a search among them needs no machine.

    One sketch with one knob, which candidate it is: all are enumerated, and neighbours mean nothing.
    """

    def __init__(self, kernel: MeasuredKernel) -> None:
        self._kernel = kernel

    @property
    def cardinalities(self) -> NDArray[np.int64]:
        """The number of candidates, shape [1, 1]."""
        return np.array([[len(self._kernel.points)]], dtype=np.int64)

    def legal(self, points: Points) -> NDArray[np.bool_]:
        """All candidates are, shape [n]."""
        return np.ones(len(points), dtype=np.bool_)

    def features(self, points: Points) -> NDArray[np.float32]:
        """Shape [n, len(FEATURES)]."""
        return self._kernel.features[points[:, 1]]

    def latency_s(self, points: Points) -> NDArray[np.float64]:
        """The analytic estimate in seconds, shape [n]."""
        return self._kernel.analytic_s[points[:, 1]]

    def measured_s(self, points: Points) -> NDArray[np.float64]:
        """What was measured, in seconds, shape [n]."""
        return self._kernel.latencies_s[points[:, 1]]


_ARRAYS = ("points", "features", "analytic_s", "latencies_s")


def save(kernels: Sequence[MeasuredKernel], context: dict[str, Any], path: Path) -> None:
    """Write one model's kernels and where they were measured, without pickle."""
    header = {
        "features": FEATURES,
        "context": context,
        "kernels": [
            {k: v for k, v in vars(kernel).items() if k not in _ARRAYS} | {"rows": len(kernel.points)}
            for kernel in kernels
        ],
    }
    width = max(kernel.points.shape[1] for kernel in kernels)
    arrays: dict[str, Any] = {
        "points": np.concatenate([np.pad(k.points, ((0, 0), (0, width - k.points.shape[1]))) for k in kernels]),
        "features": np.concatenate([k.features for k in kernels]),
        "analytic_s": np.concatenate([k.analytic_s for k in kernels]).astype(np.float32),
        "latencies_s": np.concatenate([k.latencies_s for k in kernels]).astype(np.float32),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part.npz")
    np.savez_compressed(partial, header=np.array(json.dumps(header)), **arrays)
    partial.replace(path)


def load(directory: Path) -> list[MeasuredKernel]:
    """All kernels of all files of a directory, in order of file names. Features that came later are NaN.

    Raises ValueError when a file has features that are gone: the spaces have changed, and it must be measured again.
    """
    kernels = []
    for path in sorted(directory.glob("*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            header = json.loads(str(arrays["header"]))
            gone = set(header["features"]) - set(FEATURES)
            if gone:
                raise ValueError(
                    f"{path} holds features that are gone, {gone}; run python -m benchmarks.measured again"
                )
            columns = {name: arrays[name] for name in _ARRAYS}
        features = np.full((len(columns["features"]), len(FEATURES)), np.nan, dtype=np.float32)
        features[:, [FEATURES.index(name) for name in header["features"]]] = columns["features"]
        start = 0
        for fields in header["kernels"]:
            rows = slice(start, start := start + fields.pop("rows"))
            width = 1 + max(len(knobs) for _, knobs in fields["sketches"])
            kernels.append(
                MeasuredKernel(
                    **fields,
                    points=columns["points"][rows, :width],
                    features=features[rows],
                    analytic_s=columns["analytic_s"][rows].astype(np.float64),
                    latencies_s=columns["latencies_s"][rows].astype(np.float64),
                )
            )
    return kernels


def candidates(space: Space, count: int, rng: np.random.Generator) -> Points:
    """At most `count` distinct legal points: a third at random, a third the best by estimate, a third near the best."""
    from eqtune.search.strategies.moves import Moves

    moves = Moves(space)
    drawn = moves.sample(rng, 4096)
    if len(drawn) <= count:
        return drawn
    estimates = space.latency_s(drawn)
    order = np.argsort(estimates, kind="stable")
    _, first = np.unique(estimates[order], return_index=True)  # one of those that the estimate cannot tell apart
    near = order[: max(count, len(order) // 20)]
    third = count // 3
    chosen = [order[first[:third]], rng.permutation(near)[:third], rng.permutation(len(drawn))]
    return moves.distinct(drawn[np.concatenate(chosen)])[:count]


def collect(model: str, args: argparse.Namespace) -> None:
    """Measure one model's kernels and write its file."""
    from eqtune import cost_model, zoo
    from eqtune.cost_model import BlendedScore
    from eqtune.search import strategies
    from eqtune.search.space import build_space
    from eqtune.tune.forms import model_forms

    target, measuring = _measurer(args)
    form = model_forms(zoo.relax(model, seed=args.seed), target, "off")[0].forms[0]
    tasks = [task for task in form.tasks if task.flops <= args.most_gflop * 1e9]
    if args.only:
        tasks = [task for task in tasks if task.workload_hash in args.only.split(",")]
    # Every other one, most work first, rather than the largest alone: sizes differ.
    tasks = tasks[:: max(1, math.ceil(len(tasks) / args.kernels))]
    kernels = []
    with measuring as measurer:
        hardware, context = measurer.hardware, measurer.describe()
        for task in tasks:
            space = build_space(task.mod, hardware)
            points = candidates(space, args.candidates, np.random.default_rng(args.seed))
            measured = measurer.measure(task, [space.decision(point) for point in points])
            latencies_s = np.array([m.latency_s for m in measured])
            search = strategies.create("annealed-evolution").begin(space, args.seed)
            search.tell(points, latencies_s)
            learnt = cost_model.create("xgboost", args.seed)
            while len(points) < args.candidates + args.search:
                learnt.fit(space.features(points), latencies_s, np.zeros(len(points), dtype=np.int64))
                asked = search.ask(32, BlendedScore(space, learnt, len(points)))
                if not len(asked):
                    break
                measured = measurer.measure(task, [space.decision(p) for p in asked], float(latencies_s.min()))
                told = np.array([m.latency_s for m in measured])
                search.tell(asked, told)
                points, latencies_s = np.concatenate([points, asked]), np.concatenate([latencies_s, told])
            kernels.append(
                MeasuredKernel(
                    model,
                    task.name,
                    task.workload_hash,
                    task.flops,
                    [[s.name, [[k.name, k.values] for k in s.knobs]] for s in space.sketches],
                    points,
                    space.features(points),
                    space.latency_s(points),
                    latencies_s,
                )
            )
            best_us = latencies_s.min() * 1e6
            print(f"{model} {task.name[:40]}: {len(points)} candidates, best {best_us:.1f} us", flush=True)
            # After each kernel: a run that is cut short keeps what it has.
            where = {**context, "hardware": asdict(hardware), "seed": args.seed}
            save(kernels, where, Path(args.out) / f"{model}.npz")


def _measurer(args: argparse.Namespace) -> tuple[Any, Any]:
    """The target, and what measures for it."""
    from eqtune.gpu_machine import is_gpu, let_tvm_compile, resolve_target
    from eqtune.machine import describe_machine
    from eqtune.measure import LocalMeasurer
    from eqtune.measure.cuda.measurer import CudaMeasurer

    target = resolve_target(args.target, threads=1)
    if is_gpu(target):
        let_tvm_compile()
        return target, CudaMeasurer(target, seed=args.seed)
    return target, LocalMeasurer(target, describe_machine(target, threads=1), threads=1, seed=args.seed)


def main() -> None:
    """Parse arguments, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llvm", help="llvm (one thread) or cuda")
    parser.add_argument("--models", default="squeezenet", help="comma-separated names of the zoo")
    parser.add_argument("--kernels", type=int, default=14, help="kernels of a model at most")
    parser.add_argument("--only", help="comma-separated workload hashes")
    parser.add_argument("--candidates", type=int, default=40, help="candidates of a kernel")
    parser.add_argument("--search", type=int, default=0, help="candidates that a search adds to those")
    parser.add_argument("--most-gflop", type=float, default=1.5, help="leave out kernels with more work")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="benchmarks/data", help="directory of the files")
    args = parser.parse_args()
    for model in args.models.split(","):
        collect(model, args)


if __name__ == "__main__":
    main()
