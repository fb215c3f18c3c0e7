"""`eqtune tune MODEL`: make a model faster."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..errors import InputError, SetupError
from .options import (
    MODEL,
    add_model_options,
    add_search_options,
    check_writable,
    model_arguments,
    parse_sizes,
    parse_target,
    search_arguments,
)

__all__ = ["add_parser", "run"]

EXPORT = (
    "write the tuned model as a library for TVM's runtime: a .so, linked here, or a .tar of object files, linked where "
    "it is loaded; also what an earlier run has found: the same command with --export, once its budget is spent, "
    "measures nothing more"
)


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune",
        help="make a model faster",
        description="Search equal graphs and the schedules of every kernel, check the result, and say what was gained.",
        epilog="For example: eqtune tune model.onnx --budget 300 --work-dir work --report report.html --export "
        "model.so. The same again with a larger budget goes on where it stopped.",
    )
    parser.add_argument("model", help=MODEL)
    add_model_options(parser)
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=128",
        help="what a size that stays open (no --shape) is where the model is tuned, compared and timed",
    )
    parser.add_argument("--graph", default="saturate", help="saturate (default): search equal graphs first; or off")
    parser.add_argument(
        "--fast-math",
        action="store_true",
        help="permit Winograd's convolutions, which round differently: they are off by up to 1e-5 of a layer's largest "
        "value, direct ones by 5e-7; also float32 as three products of tfloat32 on a GPU, of bfloat16 on a CPU with "
        "AMX; used only where they are faster and the whole model stays within 1e-4",
    )
    parser.add_argument("--no-verify", action="store_true", help="do not compare outputs with the reference")
    parser.add_argument("--report", metavar="FILE", help="write an HTML report")
    parser.add_argument("--export", metavar="FILE", help=EXPORT)
    add_search_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Tune, print the table, write what was asked for."""
    from ..report.table import kernel_table
    from ..tune import tune_model
    from ..tune.result import check_export_path

    if args.export is not None:
        suffix = check_export_path(args.export).suffix
        if args.measure == "compile-only":
            raise InputError(
                "--measure compile-only builds no library that --export could write: leave out --export; in Python, "
                "build the result's `mod` where the device is, with tvm.compile"
            )
        if suffix == ".so":
            _check_linker(args)
    for file in (args.report, args.export):
        if file is not None:
            check_writable(file)
    result = tune_model(
        args.model,
        **model_arguments(args),
        graph=args.graph,
        fast_math=args.fast_math,
        verify=not args.no_verify,
        sizes=parse_sizes(args.size),
        **search_arguments(args),
    )
    if args.json:
        json.dump(result.summary.to_json(), sys.stdout, indent=1)
        print()
    else:
        print(kernel_table(result.summary))
    if args.report:
        path = result.report(args.report)
        if not args.json:
            print(f"report: {path}")
    if args.export:
        path = result.export(args.export)
        if not args.json:
            context = result.summary.context
            on_cpu = json.loads(context.target)["kind"] == "llvm"
            print(f"tuned model: {path}" + (f"; run it with TVM_NUM_THREADS={context.threads}" if on_cpu else ""))
    return 130 if result.interrupted else 0


def _check_linker(args: argparse.Namespace) -> None:
    """Raise SetupError, before hours are spent, where a library could not be linked."""
    from ..gpu_machine import resolve_target
    from ..runtime import can_link, linker_of

    target = parse_target(args.target)
    compiler = None if target is None else linker_of(resolve_target(target, args.threads))
    if not can_link(compiler):
        raise SetupError(
            f"there is no {compiler or 'C++ compiler'}, which links {args.export}: install {compiler or 'g++'}, or "
            "export a .tar, which needs none"
        )
