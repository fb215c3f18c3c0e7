"""`eqtune graph MODEL`: search equal graphs, and tell what was found."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .options import MODEL, WORK_DIR, add_model_options, check_writable, model_arguments, write_text

if TYPE_CHECKING:
    from ..graph_search import GraphResult

__all__ = ["add_parser", "run"]


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "graph",
        help="search equal graphs of a model",
        description="Find a cheaper graph that computes the same, by equality saturation; tell which rules led there.",
    )
    parser.add_argument("model", nargs="?", help=MODEL)
    add_model_options(parser)
    parser.add_argument(
        "--rules", metavar="NAME,NAME", help="only these rules (default: all but those marked in --list-rules)"
    )
    parser.add_argument("--list-rules", action="store_true", help="list the rules and exit")
    parser.add_argument("--extractors", metavar="NAME,NAME", help="greedy, greedy-dag, ilp (default: all three)")
    parser.add_argument("--fast-math", action="store_true", help="permit rules that lose floating-point accuracy")
    parser.add_argument(
        "--measure", action="store_true", help="go by kernels measured on this machine, not by an analytic model"
    )
    parser.add_argument(
        "--work-dir", default=WORK_DIR, metavar="DIR", help=f"where --measure keeps kernels' times ({WORK_DIR})"
    )
    limits = parser.add_argument_group("limits of the exploration")
    limits.add_argument("--e-nodes", type=int, default=50_000, metavar="N", help="e-nodes (50000)")
    limits.add_argument("--iterations", type=int, default=20, metavar="N", help="rounds (20)")
    limits.add_argument("--seconds", type=float, default=10.0, metavar="S", help="wall-clock seconds (10)")
    limits.add_argument("--k-multi", type=int, default=1, metavar="K", help="rounds with multi-pattern rules (1)")
    parser.add_argument("--no-verify", action="store_true", help="do not compare outputs on random inputs")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (0)")
    parser.add_argument("--explain", action="store_true", help="list replaced kernels and the rules that led there")
    parser.add_argument("--html", metavar="FILE", help="draw the graphs before and after, side by side")
    parser.add_argument("--output", metavar="FILE", help="write the resulting module as .json")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search and report. Returns 0 whether or not something cheaper was found."""
    import tvm

    from ..frontends import load_model
    from ..graph_search import GraphConfig, optimize_graph
    from ..machine import describe_machine
    from ..search.graph.cost import AnalyticCost
    from ..search.graph.draw import page
    from ..search.graph.extract import EXTRACTORS
    from ..search.graph.rules import EXTENDED_RULES, RULES
    from ..search.graph.saturate import Limits
    from ..transform.simplify import simplify
    from ..tune.session import Session, Settings

    if args.list_rules:
        used = {rule.name for rule in RULES}
        rows = [
            {
                "rule": rule.name,
                "reason": rule.reason,
                "source": rule.source,
                "default": rule.name in used,
                "fast_math": rule.fast_math,
            }
            for rule in EXTENDED_RULES
        ]
        lines = [
            f"{r['rule']:36s} {'' if r['default'] else '(by name only) '}{'(fast math) ' if r['fast_math'] else ''}"
            f"{r['reason']}"
            for r in rows
        ]
        print(json.dumps(rows, indent=1) if args.json else "\n".join(lines))
        return 0
    if args.model is None:
        raise InputError("no model was given: try `eqtune graph zoo:nasrnn`, or `eqtune graph --list-rules`")
    if min(args.e_nodes, args.iterations, args.k_multi) < 0 or not args.seconds >= 0:
        raise InputError("limits must be numbers from 0: --e-nodes, --iterations, --seconds, --k-multi")
    for file in (args.html, args.output):
        if file:
            check_writable(file)
    config = GraphConfig(
        rules=_names(args.rules),
        limits=Limits(args.e_nodes, args.iterations, args.seconds, args.k_multi),
        fast_math=args.fast_math,
        verify=not args.no_verify,
        seed=args.seed,
        extractors=_names(args.extractors) or EXTRACTORS,
    )
    config.check_permitted()
    mod = simplify(load_model(args.model, **model_arguments(args)).mod)
    if args.measure:
        with Session(Settings(work_dir=args.work_dir, seed=args.seed, progress=False)) as session:
            result = optimize_graph(mod, config, prices=session.graph_prices(mod))
    else:
        result = optimize_graph(mod, replace(config, cost=AnalyticCost(describe_machine())))
    if args.output:
        write_text(args.output, str(tvm.ir.save_json(result.mod)))
    if args.html:
        if not result.graphs:
            raise InputError(f"there is no graph to draw: {result.kept_because}")
        write_text(args.html, "\n".join(page(args.model, before, after) for before, after in result.graphs))
    if args.json:
        json.dump({"model": args.model, **result.to_json()}, sys.stdout, indent=1)
        print()
    else:
        print("\n".join(_lines(result, explain=args.explain, measured=args.measure)))
    return 0


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def _lines(result: GraphResult, *, explain: bool, measured: bool) -> list[str]:
    """The report for people."""
    lines = [f"{'rule':36s} {'matches':>8s} {'ms':>8s}  in the result"]
    for name, rule in sorted(result.rules.items(), key=lambda item: -item[1].used):
        survives = f"{rule.used} terms" if rule.used and result.changed else "-"
        lines.append(f"{name:36s} {rule.matches:8d} {rule.seconds * 1e3:8.1f}  {survives}")
    lines.append(
        f"\n{result.e_nodes} e-nodes in {result.e_classes} e-classes after {result.iterations} rounds; "
        f"stopped by: {result.stop_reason or 'nothing to search'}"
    )
    priced = f", kernels priced in {result.measure_s:.2f} s" if measured else ""
    lines.append(f"explored in {result.explore_s:.2f} s, extracted in {result.extract_s:.2f} s{priced}\n")
    lines.append(
        f"{'cost, measured terms' if measured else 'estimated cost':24s} {result.cost_before_s * 1e6:12.1f} us as given"
    )
    for name, extractor in result.extractors.items():
        gap = "" if extractor.gap is None else ", optimal" if extractor.gap == 0 else f", gap {extractor.gap:.1%}"
        lines.append(f"  {name:22s} {extractor.cost_s * 1e6:12.1f} us in {extractor.seconds:.2f} s{gap}")
    if result.price_before_s is not None and result.price_after_s is not None:
        lines.append(
            f"{'cost, fused kernels':24s} {result.price_before_s * 1e6:12.1f} us as given, "
            f"{result.price_after_s * 1e6:.1f} us with the new graph"
        )
    if result.rel_err is not None:
        lines.append(f"outputs agree to {result.rel_err:.1e} (relative to the largest element)")
    lines.append(f"the given graph is kept: {result.kept_because}" if result.kept_because else "the new graph is used")
    if explain:
        lines.append("" if result.changed else "nothing was replaced")
        for replacement, count in Counter(result.replacements).items():
            times = f"{count} x " if count > 1 else ""
            lines.append(
                f"{times}{replacement.original}\n  is now {replacement.replacement}, by {', '.join(replacement.rules)}"
            )
    return lines
