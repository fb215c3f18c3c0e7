"""Everything that is claimed of GPUs, measured on this machine's; or, without one, what can be built for it.

Without a mode: products of 4096 beside cuBLAS and dlight; how well the cost model ranks held-out measurements before
and after it learnt from others; MetaSchedule on the products; models beside torch.compile, and what the graph search
gains. `--compile-only` needs no GPU: does every sketch of every kernel of the zoo build, and can be launched.

    python -m benchmarks.gpu --json out.json --keep records
    python -m benchmarks.gpu --json out.json --keep records --parts 'product-*,ranking-*' --minutes 9
    python -m benchmarks.gpu --compile-only --json out.json
    python -m benchmarks.gpu --compile-only --models squeezenet --target nvidia/nvidia-a100 --samples 4 --ptxas

Each part is a row, written as soon as it is known; one that fails says why and loses no other. Run again with the same
`--json` and `--keep`, it does what is missing or was measured with other settings: with `--minutes`, a long measurement
is cut in as many runs as it takes.

With `--compile-only`, a row a model: distinct `kernels` (of both layouts), `sketches` that fit them, `candidates` that
were tried (of each sketch the one with the best estimate, and `--samples` random legal ones), how many were `built` to
CUDA source and are `launchable` within the device's limits, and what failed. With `--ptxas`, sources become cubins;
`spilling` counts CUDA kernels that spill registers, `refused` those that spill or take so many that they would not be
run.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.output import table, write

__all__ = ["check_model", "main"]

PRODUCTS = (("float16", "float32"), ("float32", "float32"), ("int8", "int32"), ("float16", "float16"))
"""Dtypes of operands and sums."""

PRODUCT_SIZE = 4096

RANKED = 256
"""Candidates that the cost model is trained and judged on."""

CUT_SHARE = 0.85
"""A part that took this much of what was left may have been ended by it."""

_Part = Callable[[float], dict[str, Any]]
"""From the seconds that are left to a row."""

MODELS = (
    "resnet50",
    "bert_base",
    "nasrnn",
    "tensat_bert",
    "resnext50",
    "nasneta",
    "squeezenet",
    "vgg19",
    "inceptionv3",
)
"""ResNet-50 and BERT-base, and the seven of Tensat (Yang et al., 2021)."""


def check_model(name: str, target: Any, hardware: Any, samples: int, compiler: Any, seed: int) -> dict[str, Any]:
    """One row: build candidates of every sketch of every kernel of a model, in both layouts."""
    from eqtune import zoo
    from eqtune.tune.forms import model_forms

    started = time.monotonic()
    counts: Counter[str] = Counter(kernels=0, sketches=0, candidates=0, built=0, launchable=0)
    failures: list[str] = []
    forms, _ = model_forms(zoo.relax(name), target, "off")
    for task in forms.tasks:
        counts["kernels"] += 1
        counts += _check_kernel(task, target, hardware, samples, compiler, seed, failures)
    covered = counts["kernels"] - counts["uncovered"]
    return {
        "model": name,
        "kernels": counts["kernels"],
        "covered": covered,
        **{key: counts[key] for key in ("sketches", "candidates", "built", "launchable")},
        **({key: counts[key] for key in ("cuda_kernels", "spilling", "refused")} if compiler else {}),
        "wall_s": time.monotonic() - started,
        "failures": "\n".join(failures),
    }


def _check_kernel(
    task: Any, target: Any, hardware: Any, samples: int, compiler: Any, seed: int, failures: list[str]
) -> Counter[str]:
    from eqtune.measure.cuda.code import cuda_source, launch_problem, ptxas_resources, resource_problem
    from eqtune.search.space import build_space
    from eqtune.search.space.lowering import prepare_for_lowering
    from eqtune.search.strategies.moves import Moves

    counts: Counter[str] = Counter()
    rng = np.random.default_rng(seed)
    space = build_space(task.mod, hardware)
    points = Moves(space).sample(rng, 256)
    latency_s = space.latency_s(points)
    good = 0
    for index, sketch in enumerate(space.sketches):
        rows = np.flatnonzero(points[:, 0] == index)
        if not rows.size:
            continue
        counts["sketches"] += 1
        best = rows[np.argmin(latency_s[rows])]
        chosen = [best, *rng.choice(rows, min(samples, rows.size), replace=False)]
        functions = {}
        for number, row in enumerate(chosen):
            decision = space.decision(points[row])
            counts["candidates"] += 1
            try:
                function = prepare_for_lowering(space.apply(decision).mod["main"])
                problem = launch_problem(function, hardware)
                cuda_source({"kernel": function}, target)
            except Exception as error:  # noqa: BLE001 - TVM raises many kinds; each is a row of the report
                said = str(error).strip().splitlines() or [type(error).__name__]
                failures.append(f"{task.name}: {sketch.name} {dict(decision.values)}: {said[-1][:160]}")
                continue
            counts["built"] += 1
            if problem:
                failures.append(f"{task.name}: {sketch.name} {dict(decision.values)}: {problem}")
                continue
            counts["launchable"] += 1
            good += 1
            functions[f"k{number}"] = function
        if compiler is not None and functions:
            for resources in ptxas_resources(cuda_source(functions, target), hardware.arch, compiler).values():
                counts["cuda_kernels"] += 1
                counts["spilling"] += resources.spill_bytes > 0
                problem = resource_problem([resources], hardware)
                counts["refused"] += bool(problem)
                if problem:
                    failures.append(f"{task.name}: {sketch.name}: {problem}")
    counts["uncovered"] += not good
    return counts


def _measure(args: argparse.Namespace) -> int:
    """Print and write the rows of what was asked for; the exit code: 2 where there is no GPU, 1 where a part failed."""
    from benchmarks import gpu_measured
    from eqtune.gpu_machine import let_tvm_compile

    reason = gpu_measured.reason_to_skip()
    if reason:
        print(f"skipped: {reason}; --compile-only checks what needs none", file=sys.stderr)
        return 2
    let_tvm_compile()
    started = time.monotonic()
    rows = _known_rows(args.json)
    with tempfile.TemporaryDirectory(prefix="eqtune-gpu-") as temporary:
        for part, make in _parts(args, rows, Path(args.keep or temporary)).items():
            begun = time.monotonic()
            left_s = math.inf if args.minutes is None else 60.0 * args.minutes - (begun - started)
            if left_s <= 0:
                print("out of time: run again for the rest", flush=True)
                break
            try:
                row = make(left_s)
            except Exception as error:  # noqa: BLE001 - one part must not lose the others
                traceback.print_exc()
                said = str(error).strip().splitlines() or [""]
                row = {"kernel": "", "error": f"{type(error).__name__}: {said[-1][:300]}"}
            if time.monotonic() - begun > CUT_SHARE * left_s:
                row["cut_short"] = True
            rows[part] = {"part": part, **_settings(args, part), **row}
            write(list(rows.values()), args.json)
            print(table([rows[part]]), flush=True)
    return int(any("error" in row for row in rows.values()))


def _known_rows(path: str | None) -> dict[str, dict[str, Any]]:
    """Rows of earlier runs by their parts."""
    if path is None or not Path(path).exists():
        return {}
    return {row["part"]: row for row in json.loads(Path(path).read_text(encoding="utf-8")) if "part" in row}


def _settings(args: argparse.Namespace, part: str) -> dict[str, Any]:
    """Options that a part's row depends on: one of other settings is measured again."""
    kind = part.partition("-")[0]
    settings = {"seed": args.seed} if kind == "model" else {"seed": args.seed, "size": args.size}
    if kind != "ranking":
        settings["asked_trials"] = args.model_trials if kind == "model" else args.trials
    return settings | ({"flush_l2": args.flush_l2} if kind == "product" else {})


def _parts(args: argparse.Namespace, rows: Mapping[str, Mapping[str, Any]], keep: Path) -> dict[str, _Part]:
    """What is missing among what was asked for, most telling first.

    Raises SystemExit when `--parts` names nothing.
    """
    models = MODELS if args.models == "all" else args.models.split(",")
    model_parts: list[tuple[str, _Part]] = [(f"model-{name}", partial(_model, args, keep, name)) for name in models]
    parts: dict[str, _Part] = {
        **{f"product-{a}-{c}": partial(_product, args, keep, a, c) for a, c in PRODUCTS},
        **{f"ranking-{a}-{c}": partial(_ranking, args, keep, a, c) for a, c in PRODUCTS},
        **dict(model_parts[:2]),
        **{f"metaschedule-{a}-{c}": partial(_peer, args, rows, a, c) for a, c in PRODUCTS},
        **dict(model_parts[2:]),
    }
    wanted = {part for pattern in args.parts.split(",") for part in fnmatch.filter(parts, pattern)}
    if not wanted:
        sys.exit(f"--parts {args.parts!r} names none of {', '.join(parts)}")
    done = {
        part
        for part, row in rows.items()
        if "error" not in row and not row.get("cut_short") and _settings(args, part).items() <= row.items()
    }
    return {part: make for part, make in parts.items() if part in wanted - done}


def _product(args: argparse.Namespace, keep: Path, dtype: str, sums: str, left_s: float) -> dict[str, Any]:
    from benchmarks.gpu_measured import matmul_row

    # Budgets are totals over all runs in a folder: another product would find them spent.
    work_dir = keep / f"product-{dtype}-{sums}-{args.size}{'-flushed' * args.flush_l2}"
    return matmul_row(args.size, dtype, sums, args.trials, args.seed, work_dir, left_s, args.flush_l2)


def _ranking(args: argparse.Namespace, keep: Path, dtype: str, sums: str, left_s: float) -> dict[str, Any]:
    from benchmarks.gpu_measured import ranking_row
    from eqtune.gpu_machine import resolve_target
    from eqtune.measure.cuda.measurer import CudaMeasurer

    with CudaMeasurer(resolve_target("cuda"), seed=args.seed) as measurer:
        work_dir = keep / f"ranking-{dtype}-{sums}"
        return ranking_row(args.size, dtype, sums, measurer, RANKED, args.seed, work_dir, left_s)


def _peer(
    args: argparse.Namespace, rows: Mapping[str, Mapping[str, Any]], dtype: str, sums: str, left_s: float
) -> dict[str, Any]:
    from benchmarks.gpu_measured import metaschedule_row

    product = f"product-{dtype}-{sums}"
    row = rows.get(product, {})
    own = row.get("eqtune_s") if _settings(args, product).items() <= row.items() else None
    return metaschedule_row(args.size, dtype, sums, args.trials, args.seed, left_s, own)


def _model(args: argparse.Namespace, keep: Path, name: str, left_s: float) -> dict[str, Any]:
    from benchmarks.gpu_measured import model_row

    return model_row(name, args.model_trials, args.seed, keep / f"model-{name}", left_s)


def main() -> None:
    """Parse arguments, build, print, write. Exit code 1 when a kernel has no candidate that can be launched."""
    from eqtune import zoo
    from eqtune.gpu_machine import describe_gpu, find_compiler, resolve_target

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile-only", action="store_true", help="build, and run nothing")
    parser.add_argument(
        "--parts", default="*", help="comma-separated patterns of parts, such as product-*,model-resnet50"
    )
    parser.add_argument("--minutes", type=float, help="begin no part after this time; the last ends soon after it")
    parser.add_argument("--keep", metavar="DIR", help="keep records here; a part that was cut short goes on from them")
    parser.add_argument("--size", type=int, default=PRODUCT_SIZE, help="rows, columns and reduction of the products")
    parser.add_argument("--trials", type=int, default=500, help="of each product")
    parser.add_argument("--model-trials", type=int, default=2000, help="of each model, in each of two runs")
    parser.add_argument("--flush-l2", action="store_true", help="empty L2 before each timed call; of ours and dlight's")
    parser.add_argument("--target", default="nvidia/nvidia-h100", help="a tag (this one); an unknown one lists all")
    parser.add_argument("--models", default="all", help="comma-separated names of the zoo, or all")
    parser.add_argument("--samples", type=int, default=1, help="random candidates of each sketch, beside the best")
    parser.add_argument("--ptxas", action="store_true", help="compile to cubins with nvcc, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write rows here")
    args = parser.parse_args()
    if not args.compile_only:
        sys.exit(_measure(args))
    target = resolve_target(args.target)
    hardware = describe_gpu(target)
    compiler = find_compiler() if args.ptxas else None
    if args.ptxas and (compiler is None or compiler.kind != "nvcc"):
        parser.error("--ptxas needs nvcc (the CUDA toolkit) on PATH")
    rows = []
    for name in zoo.names() if args.models == "all" else args.models.split(","):
        rows.append(check_model(name, target, hardware, args.samples, compiler, args.seed))
        write(rows, args.json)
        shown = {key: value for key, value in rows[-1].items() if key != "failures"}
        print(table([shown]), flush=True)
        for failure in rows[-1]["failures"].splitlines():
            print(f"  {failure}", flush=True)
    total = {key: sum(row[key] for row in rows) for key in ("kernels", "covered", "candidates", "built", "launchable")}
    print(f"on {hardware.name}, {hardware.arch}: " + ", ".join(f"{value} {key}" for key, value in total.items()))
    sys.exit(0 if total["covered"] == total["kernels"] else 1)


if __name__ == "__main__":
    main()
