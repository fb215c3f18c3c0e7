"""Options that several commands share."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import replacing

__all__ = [
    "ALLOCATORS",
    "COST_MODELS",
    "MODEL",
    "STRATEGIES",
    "WORK_DIR",
    "add_model_options",
    "add_search_options",
    "check_writable",
    "model_arguments",
    "parse_shapes",
    "parse_sizes",
    "parse_target",
    "search_arguments",
    "write_text",
]


MODEL = (
    "a .onnx, .pt2, .tflite, .relay (Relay text) or .json (saved Relax or Relay) file, or zoo:NAME, with options as in "
    "zoo:bert_base:sequence_length=128"
)
"""What the commands take for a model."""

WORK_DIR = "eqtune-work"
"""Where all commands, and `tune_model`, keep and look for what was measured unless told otherwise."""

# Written out, because their registries load numpy and more: --help comes at once. A test compares.
STRATEGIES = ("annealed-evolution", "annealing", "evolution", "exhaustive", "random")
COST_MODELS = ("xgboost", "analytic", "random")
ALLOCATORS = ("gradient", "round-robin")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what a model leaves open."""
    parser.add_argument(
        "--params", metavar="FILE", help="weights by parameter name: a .npz, or a .params file of relay.save_param_dict"
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="NAME=1,3,224,224",
        help="the shape of an input that the model leaves open (a batch, a length); `tune` takes it open on a CPU, and "
        "tunes for any size",
    )
    parser.add_argument("--function", metavar="NAME", help="of a Relax module that has several (main, or the only one)")


def model_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `tune_model` and `load_model` that these options stand for."""
    from ..frontends.params import load_params

    params = load_params(args.params) if args.params else None
    return {"params": params, "shapes": parse_shapes(args.shape), "function": args.function}


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """The options of `tune` and `kernels` that say how, where and how long to search."""
    where = parser.add_argument_group("where")
    where.add_argument(
        "--target",
        help="a TVM target tag or JSON object (default, and llvm: this machine's CPU, fully described; cuda: its GPU)",
    )
    where.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads a kernel may use (default: all cores, two hardware threads counting once, or as many as a "
        "container's CPU quota has; TVM_NUM_THREADS and OMP_NUM_THREADS do not count)",
    )
    where.add_argument(
        "--measure",
        default="local",
        metavar="WHERE",
        help="local (default); local:flush-l2, which empties a GPU's L2 before each timed call; rpc://HOST:PORT/KEY, "
        "the servers that registered under KEY with TVM's RPC tracker (python -m eqtune.measure.rpc_server; it "
        "executes what it is sent, without a password: loopback or private networks only); ray, a Ray cluster that is "
        "running, or a local one (extra ray); compile-only, no GPU needed: candidates for a GPU are judged by "
        "compiling them",
    )
    where.add_argument(
        "--work-dir", default=WORK_DIR, metavar="DIR", help=f"records and log; running again resumes ({WORK_DIR})"
    )
    budget = parser.add_argument_group(
        "how long",
        "Whichever ends first; neither: until no kernel improves. Budgets are totals over all runs of a model in the "
        "work directory, those with fast math apart: to go on, give a larger one.",
    )
    budget.add_argument("--trials", type=int, metavar="N", help="measurements in all runs together")
    budget.add_argument("--budget", type=float, metavar="SECONDS", help="wall-clock seconds of all runs together")
    how = parser.add_argument_group("how")
    for option, names in (("--strategy", STRATEGIES), ("--cost-model", COST_MODELS), ("--allocator", ALLOCATORS)):
        default, *others = names
        how.add_argument(option, default=default, metavar="NAME", help=f"{default} (default), {', '.join(others)}")
    how.add_argument("--seed", type=int, default=0, help="of every random choice (0)")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")


def search_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `tune_model` and `tune_kernels` that these options stand for."""
    return {
        "target": parse_target(args.target),
        "threads": args.threads,
        "measure": args.measure,
        "work_dir": args.work_dir,
        "trials": args.trials,
        "time_budget_s": args.budget,
        "strategy": args.strategy,
        "cost_model": args.cost_model,
        "allocator": args.allocator,
        "seed": args.seed,
        "progress": not args.quiet,
    }


def parse_target(text: str | None) -> Any:
    """A tag stays a string; a JSON object becomes a dict. Raises InputError for broken JSON."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"--target is not JSON ({error}); give a tag or an object such as "
                         '\'{"kind": "llvm", "mcpu": "znver4"}\'') from error  # fmt: skip


def parse_shapes(items: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """["x=1,3,224,224"] -> {"x": (1, 3, 224, 224)}. Raises InputError for anything else."""
    shapes = {}
    for item in items:
        name, _, extents = item.partition("=")
        try:
            shapes[name] = tuple(int(extent) for extent in extents.split(","))
        except ValueError as error:
            raise InputError(f"--shape {item!r}: write it as NAME=1,3,224,224") from error
    return shapes


def parse_sizes(items: Sequence[str]) -> dict[str, int]:
    """["sequence=128"] -> {"sequence": 128}. Raises InputError for anything else."""
    sizes = {}
    for item in items:
        name, _, size = item.partition("=")
        if not name or not size.isdecimal():
            raise InputError(f"--size {item!r}: write it as NAME=128")
        sizes[name] = int(size)
    return sizes


def check_writable(file: str) -> None:
    """Raise InputError, before hours are spent on what goes there, if a file cannot be written."""
    exists, parents = os.path.exists(file), Path(os.path.realpath(file)).parents
    try:
        if os.path.isdir(file or ".") or (exists and not os.access(file, os.W_OK)):
            raise PermissionError
        if os.path.isfile(file) or not exists:  # it is made beside that, in a folder that may refuse for any reason
            with tempfile.TemporaryFile(dir=next(parent for parent in parents if os.path.exists(parent))):
                pass
    except OSError as error:
        raise InputError(
            f"{file or repr(file)} cannot be written; name a file in a folder that you may write to"
        ) from error


def write_text(file: str, text: str) -> None:
    """Write a file, whose folder is made; an older one stays until it is whole. Raises InputError."""
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(file)) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="replace")  # names of files may be no text
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}); name another file") from error
