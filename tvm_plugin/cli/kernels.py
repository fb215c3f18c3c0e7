"""`eqtune kernels SOURCE`: list or tune single kernels."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..report.summary import plain
from ..report.units import number
from .options import (
    MODEL,
    add_model_options,
    add_search_options,
    check_writable,
    model_arguments,
    parse_target,
    search_arguments,
    write_text,
)

__all__ = ["add_parser", "run"]


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "kernels",
        help="list or tune single kernels",
        description="Tune TensorIR kernels, or the fused kernels of a model one by one, without a model around them. A "
        "model's kernels are those of its graph as given, without graph search or channels last: `eqtune tune`, which "
        "mostly uses others, gains little from their records.",
    )
    parser.add_argument("source", help=f"a .json IRModule of PrimFuncs, or a model: {MODEL}")
    add_model_options(parser)
    parser.add_argument("--list", action="store_true", help="only list the kernels: FLOPs, bytes, candidates, sketches")
    parser.add_argument("--only", metavar="TEXT", help="only kernels whose name contains this")
    parser.add_argument("--output", metavar="FILE", help="write the scheduled module as .json")
    add_search_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List, or tune and print one row a kernel."""
    import tvm

    from ..tune.kernels import tune_kernels

    kernels = _kernels(args)
    if args.only:
        kernels = {name: kernel for name, kernel in kernels.items() if args.only in name}
        if not kernels:
            raise InputError(f"no kernel's name contains {args.only!r}; see them with --list")
    if args.list:
        rows = _describe(kernels, args)
        print(json.dumps(rows, indent=1) if args.json else "\n".join(_line(row) for row in rows))
        return 0
    if args.output:
        check_writable(args.output)
    result = tune_kernels(kernels, **search_arguments(args))
    rows = [
        {
            "kernel": task.name,
            "baseline_us": task.baseline_latency_s * 1e6,
            "tuned_us": task.latency_s * 1e6,
            "gflops": task.flops / task.latency_s / 1e9,
            "trials": task.trials,
            "sketch": "" if task.decision is None else task.decision["sketch"],
        }
        for task in result.tasks
    ]
    if args.output:
        write_text(args.output, str(tvm.ir.save_json(result.mod)))
    if args.json:
        json.dump(plain(rows), sys.stdout, indent=1)
        print()
    else:
        for row in rows:
            print(
                f"{row['kernel'][:60]:60s} {number(row['baseline_us']):>12s} -> {number(row['tuned_us']):>10s} us  "
                f"{number(row['gflops']):>8s} GFLOPS  {row['trials']:4d} trials  {row['sketch']}"
            )
    return 130 if result.interrupted else 0


def _kernels(args: argparse.Namespace) -> dict[str, Any]:
    import tvm
    from tvm import tirx

    from ..frontends import load_model
    from ..frontends.relax_model import read_module
    from ..frontends.relay_model import is_relay_json
    from ..gpu_machine import resolve_target
    from ..machine import detect_target
    from ..tasks import lower_to_kernels
    from ..transform.simplify import simplify

    source, mod = args.source, None
    if source.endswith(".json") and Path(source).is_file() and not is_relay_json(Path(source)):
        mod = read_module(Path(source))
    if mod is None or any(isinstance(function, tvm.relax.Function) for function in mod.functions.values()):
        chosen = parse_target(args.target)
        chosen = detect_target(args.threads) if chosen is None else resolve_target(chosen, args.threads)
        model = load_model(source if mod is None else mod, **model_arguments(args))
        mod = lower_to_kernels(simplify(model.mod, chosen), chosen)
    return {v.name_hint: f for v, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}


def _describe(kernels: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    from ..gpu_machine import resolve_target
    from ..machine import describe_machine
    from ..search.space import build_space
    from ..tasks import task_of

    chosen = parse_target(args.target)
    target = None if chosen is None else resolve_target(chosen)
    hardware = describe_machine(target, threads=args.threads, measure=False)
    rows = []
    for name, kernel in kernels.items():
        task = task_of(name, kernel)
        space = build_space(task.mod, hardware)
        rows.append(
            {
                "kernel": name,
                "flops": task.flops,
                "bytes": task.bytes_moved,
                "sketches": [sketch.name for sketch in space.sketches],
                "candidates": space.size,
            }
        )
    return rows


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['kernel'][:60]:60s} {number(row['flops'] / 1e6):>10s} MFLOP {number(row['bytes'] / 1e6):>8s} MB  "
        f"{row['candidates']:.1e} candidates of {', '.join(row['sketches'])}"
    )
