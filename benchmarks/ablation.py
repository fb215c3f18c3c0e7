"""Every technique of the schedule search, switched off or replaced by another, one at a time.

    python -m benchmarks.ablation --json ablation.json             # no machine: toy spaces, and benchmarks/data
    python -m benchmarks.ablation --parts one,several,first,give-up --measure    # on this machine

Each row is a mean over kernels; `kernel` tells which ones. On the machine, all variants search the same kernels (one
thread, float32) with the same seeds, and a candidate is measured once, whoever asks for it. `after_16`, `after_32`,
`after_64` are best latency / the best that any variant found, geometric mean over kernels and seeds; `to_95` is the
mean number of trials until a candidate within 5 % of that best (one more than there are trials where none was found).
`first` and `give-up` are benchmarks/ablation_machine.py's.
docs/ablation.md says what was made of it.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ablation_machine import first_batches, give_up
from benchmarks.ablation_replay import scores_on_tables, strategies_on_toys
from benchmarks.measured import load
from benchmarks.output import table, write
from benchmarks.replay import RememberingMeasurer
from benchmarks.suites import suite
from eqtune import cost_model
from eqtune.machine import describe_machine, detect_target
from eqtune.records import Context, RecordDatabase
from eqtune.records.workload import serialize_workload
from eqtune.search import allocation, strategies
from eqtune.search.allocation.base import TaskStatus
from eqtune.search.space import Hardware, Space, build_space
from eqtune.search.strategies.annealed_evolution import AnnealedEvolution, Descent
from eqtune.search.strategies.batch import BatchConfig
from eqtune.search.strategies.evolution import Breeding
from eqtune.tasks import Task
from eqtune.tune.budget import Budget
from eqtune.tune.forms import model_forms
from eqtune.tune.kernel_search import KernelSearch
from eqtune.tune.loop import TuningLoop, Variant
from eqtune.tune.progress import Progress
from eqtune.tune.transfer import Transfer

KERNELS = (
    "conv3x3_27x27_32_128",
    "conv1x1_13x13_512_1000",
    "conv3x3_56x56_64_64",
    "conv3x3_56x56_128_128_s2",
    "conv3x3_14x14_576_576_g576",
    "dense_64x768x768",
)
"""Cases of benchmarks.suites that are searched one by one."""

SEQUENCE = tuple(case.name for case in suite("conv") if case.flops < 2.1e8)
"""Cases that are searched in one run, for transfer and allocation."""

FIRST = tuple(case.name for case in suite("all") if case.compute_bound and case.flops < 2.1e8)
"""Cases whose first batches are compared."""


PARTS = ("toys", "tables", "one", "several", "first", "give-up")
ON_THE_MACHINE = PARTS[2:]

TAKEN_BY = {"only": {"one", "several"}, "trials": {"one", "several", "give-up"}}
"""Parts that an option has to do with."""


@dataclass(frozen=True)
class Parts:
    """What a variant searches with; the defaults are `tune_model`'s."""

    strategy: Any = field(default_factory=AnnealedEvolution)
    model: str = "xgboost"
    transfer: int = 0
    allocator: str = "gradient"


def variants() -> dict[str, Parts]:
    """One technique changed in each."""
    plain = Parts()
    default = plain.strategy
    large = BatchConfig(exhaustive_limit=0)
    return {
        "default": plain,
        "strategy: evolution": replace(plain, strategy=strategies.create("evolution")),
        "strategy: annealing": replace(plain, strategy=strategies.create("annealing")),
        "strategy: random": replace(plain, strategy=strategies.create("random")),
        "model: analytic estimate alone": replace(plain, model="analytic"),
        "no descent": replace(plain, strategy=replace(default, descent=Descent(share=0.0))),
        "no enumeration of small spaces": replace(plain, strategy=replace(default, batch=large)),
        "no random share": replace(plain, strategy=replace(default, batch=BatchConfig(epsilon=0.0))),
        "draft: 64 points scored a round": replace(
            plain, strategy=replace(default, chains=0, breeding=Breeding(population=64, generations=0), batch=large)
        ),
    }


@dataclass(frozen=True)
class Bench:
    """Kernels, and what measures them."""

    kernels: dict[str, tuple[Task, Space]]
    measurer: RememberingMeasurer

    def run(self, names: Sequence[str], parts: Parts, seed: int, trials: int) -> dict[str, list[float]]:
        """Search some kernels together; each one's latencies in seconds, in the order of measuring."""
        start = len(self.measurer.asked)
        with tempfile.TemporaryDirectory() as directory, RecordDatabase(Path(directory) / "records.sqlite") as database:
            described = self.measurer.describe()
            context = Context(*(described[name] for name in ("target", "device", "threads", "tvm_version")))
            searches = [self._search(name, parts, seed, database) for name in names]
            TuningLoop(
                kernels=searches,
                variants=[Variant("all", {search.task.workload_hash: search.task.calls for search in searches})],
                measurer=self.measurer,
                database=database,
                context=context,
                model=cost_model.create(parts.model, seed),
                allocation=allocation.create(parts.allocator).begin(seed),
                budget=Budget(trials=trials),
                progress=Progress(enabled=False),
                seed=seed,
                eqtune_version="ablation",
                transfer=Transfer(database, context, parts.transfer) if parts.transfer else None,
            ).run()
        asked = self.measurer.asked[start:]
        return {
            name: [seconds for key, seconds in asked if key == self.kernels[name][0].workload_hash] for name in names
        }

    def _search(self, name: str, parts: Parts, seed: int, database: RecordDatabase) -> KernelSearch:
        task, space = self.kernels[name]
        database.add_workload(task.workload_hash, serialize_workload(task.mod), name=task.name, flops=task.flops)
        status = TaskStatus(task.name, task.calls, task.flops, 0.0, space.sketches[0].name, [])
        return KernelSearch(task, space, parts.strategy.begin(space, seed), status)


def open_cases(names: Sequence[str], hardware: Hardware) -> dict[str, tuple[Task, Space]]:
    """The kernel with most work of each case, channels last where that is a form of it, with its space."""
    target = detect_target(1)
    found = {}
    for case in suite("all"):
        if case.name in names:
            task = model_forms(case.relax(0), target, "off")[0].forms[0].tasks[0]
            found[case.name] = task, build_space(task.mod, hardware)
    return found


def one_by_one(bench: Bench, names: Sequence[str], seeds: int, trials: int, only: str) -> list[dict[str, Any]]:
    """A row a variant: each kernel searched alone."""
    runs: dict[str, list[tuple[str, list[float]]]] = {}
    for label, parts in variants().items():
        if any(part in label for part in only.split(",")):
            runs[label] = [
                (name, bench.run([name], parts, seed, trials)[name]) for name in names for seed in range(seeds)
            ]
            bench.measurer.save()
    return [{"variant": label, **_figures(bench, found, trials)} for label, found in runs.items()]


def together(bench: Bench, names: Sequence[str], seeds: int, trials: int, only: str) -> list[dict[str, Any]]:
    """A row a variant: the kernels are searched in one run, with so many trials a kernel on average."""
    plain = Parts(allocator="round-robin")
    both = {
        "one run, no transfer": plain,
        "one run, transfer of 4": replace(plain, transfer=4),
        "one run, transfer of 8": replace(plain, transfer=8),
        "one run, gradient": replace(plain, transfer=4, allocator="gradient"),
    }
    runs = {}
    for label, parts in both.items():
        if any(part in label for part in only.split(",")):
            runs[label] = [bench.run(names, parts, seed, trials * len(names)) for seed in range(seeds)]
            bench.measurer.save()
    rows = []
    for label, found in runs.items():
        flat = [(name, latencies) for run in found for name, latencies in run.items()]
        totals = [sum(min(seconds) * bench.kernels[name][0].calls for name, seconds in run.items()) for run in found]
        rows.append({"variant": label, **_figures(bench, flat, trials), "sum_us": float(np.mean(totals)) * 1e6})
    return rows


def _figures(bench: Bench, runs: Sequence[tuple[str, list[float]]], trials: int) -> dict[str, Any]:
    ratios: dict[int, list[float]] = {16: [], 32: [], 64: []}
    needed, missed = [], 0
    for name, latencies in runs:
        best_s = bench.measurer.best_s(bench.kernels[name][0].workload_hash)
        curve = np.minimum.accumulate(latencies)
        for after, values in ratios.items():
            if after <= trials:
                values.append(math.log(curve[min(after, len(curve)) - 1] / best_s))
        reached = np.flatnonzero(curve <= best_s / 0.95)
        needed.append(int(reached[0]) + 1 if len(reached) else trials + 1)
        missed += not len(reached)
    figures: dict[str, Any] = {f"after_{k}": math.exp(np.mean(v)) if v else None for k, v in ratios.items()}
    return {**figures, "to_95": float(np.mean(needed)), "missed": missed, "runs": len(runs)}


def main() -> None:
    """Parse arguments, search, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", default="replay.json.gz", help="measurements that are replayed")
    parser.add_argument("--measure", action="store_true", help="measure what the table lacks, and add it")
    parser.add_argument("--parts", default="toys,tables", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--only", help="of one, several: variants whose names contain one of these")
    parser.add_argument("--stride", type=int, default=3, help="every so many kernels of the tables")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trials", type=int, help="a kernel, of one, several, give-up (64)")
    parser.add_argument("--json", metavar="FILE", help="write rows here")
    args = parser.parse_args()
    parts = set(args.parts.split(","))
    if parts - set(PARTS):
        parser.error(f"unknown parts {sorted(parts - set(PARTS))}; there are {list(PARTS)}")
    for option, takers in TAKEN_BY.items():
        if getattr(args, option) is not None and not parts & takers:
            parser.error(f"--{option} is of the parts {sorted(takers)} only")
    args.only, args.trials = args.only or "", 64 if args.trials is None else args.trials
    if parts & set(ON_THE_MACHINE) and not args.measure and not Path(args.table).exists():
        parser.error(f"there is no table {args.table}: name one with --table, or add --measure")
    if "give-up" in parts and not args.measure:
        parser.error("the part give-up takes times of its own; add --measure")
    rows: list[dict[str, Any]] = []
    if "toys" in parts:
        rows += _over("toy spaces", strategies_on_toys(args.seeds))
    if "tables" in parts:
        rows += _over("measured tables", scores_on_tables(load(Path("benchmarks/data")), 1, args.stride))
    if parts & set(ON_THE_MACHINE):
        rows += _on_the_machine(args, parts)
    write(rows, args.json)
    for columns in dict.fromkeys(tuple(row) for row in rows):
        print(table([row for row in rows if tuple(row) == columns]))


def _over(kernels: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"kernel": kernels, **row} for row in rows]


def _on_the_machine(args: argparse.Namespace, parts: set[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    target = detect_target(1)
    hardware = describe_machine(target, threads=1)
    with RememberingMeasurer(Path(args.table), target, hardware, args.measure) as measurer:
        if "one" in parts:
            bench = Bench(open_cases(KERNELS, measurer.hardware), measurer)
            rows += _over("one by one", one_by_one(bench, list(bench.kernels), args.seeds, args.trials, args.only))
        if "several" in parts:
            bench = Bench(open_cases(SEQUENCE, measurer.hardware), measurer)
            rows += _over("several", together(bench, list(bench.kernels), args.seeds, args.trials, args.only))
        if "first" in parts:
            known = load(Path("benchmarks/data"))
            rows += _over("first", first_batches(open_cases(FIRST, measurer.hardware), measurer, known, args.seeds))
        if "give-up" in parts:
            opened = open_cases(KERNELS, measurer.hardware)
            rows += _over("give-up", give_up(opened, target, measurer.hardware, args.trials, 0))
        print(f"{len(measurer.asked)} candidates asked for, {measurer.unknown} of them not in the table")
    return rows


if __name__ == "__main__":
    main()
