"""The graph search on whole models: time, size, estimated cost, and the latency of both graphs, tuned.

    python -m benchmarks.graph --models all --json out.json
    python -m benchmarks.graph --models vgg19 --fast-math --price-seconds 24 --tune-seconds 60 --json out.json

Both sides start with batch norms and weights folded, and both are tuned on the same budget (--tune-seconds or
--trials-per-kernel; without either they are not tuned), without further graph search, and then timed in turns:
`latency_rewritten_ms` is the new graph's, `latency_after_ms` that of the faster one, which is what `tune_model` keeps.
`rel_err` compares the outputs of both, untuned. `tensat_search_s` is the search time that Tensat's paper reports, on
its authors' machine; it compares with explore_s + extract_s. With --price-seconds the search goes by measured kernels,
which takes `measure_s`; 24 is what `tune_model` takes of two minutes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.output import table, write

TENSAT_SEARCH_S = {
    "nasrnn": 0.5,
    "tensat_bert": 1.4,
    "resnext50": 0.7,
    "nasneta": 10.6,
    "squeezenet": 0.3,
    "vgg19": 0.4,
    "inceptionv3": 5.1,
}
"""As published by Tensat (MLSys 2021): exploration and extraction together."""

COLUMNS = (
    "model",
    "explore_s",
    "extract_s",
    "tensat_search_s",
    "e_nodes",
    "stop_reason",
    "cost_before_us",
    "cost_after_us",
    "ilp_gap",
    "measure_s",
    "rel_err",
    "latency_before_ms",
    "latency_rewritten_ms",
    "latency_after_ms",
)
"""What the table shows; the JSON has more."""


def measure(model: str, args: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    """One row."""
    from eqtune import GraphConfig, optimize_graph, zoo
    from eqtune.machine import describe_machine
    from eqtune.search.graph.cost import AnalyticCost
    from eqtune.search.graph.saturate import Limits
    from eqtune.transform.simplify import simplify

    mod = simplify(zoo.relax(model, seed=args.seed))
    config = GraphConfig(
        limits=Limits(e_nodes=args.e_nodes),
        verify=False,
        fast_math=args.fast_math,
        seed=args.seed,
        cost=AnalyticCost(describe_machine(threads=args.threads)),
    )
    timed = [optimize_graph(mod, config) for _ in range(args.repeats)]
    fastest = min(timed, key=lambda r: r.explore_s + r.extract_s)
    result = search(mod, replace(config, verify=args.verify), args, work_dir / "prices")
    row: dict[str, Any] = {
        "model": model,
        "explore_s": fastest.explore_s,
        "extract_s": fastest.extract_s,
        "tensat_search_s": TENSAT_SEARCH_S.get(model),
        "e_nodes": result.e_nodes,
        "stop_reason": result.stop_reason,
        "cost_before_us": result.cost_before_s * 1e6,
        "cost_after_us": result.cost_after_s * 1e6,
        "ilp_gap": result.extractors["ilp"].gap,
        "rel_err": result.rel_err,
        "rules_used": ", ".join(sorted(name for name, rule in result.rules.items() if rule.used and result.changed)),
        "kept_because": result.kept_because,
        **{f"cost_{name.replace('-', '_')}_us": e.cost_s * 1e6 for name, e in result.extractors.items()},
        "measure_s": result.measure_s,
        "price_before_ms": None if result.price_before_s is None else result.price_before_s * 1e3,
        "price_after_ms": None if result.price_after_s is None else result.price_after_s * 1e3,
        "fast_math": args.fast_math,
        "tune_s": None,
        "latency_before_ms": None,
        "latency_rewritten_ms": None,
        "latency_after_ms": None,
    }
    if args.tune_seconds or args.trials_per_kernel:
        started = time.monotonic()
        graphs = {f"{model}-before": mod, **({f"{model}-after": simplify(result.mod)} if result.changed else {})}
        latencies_ms = tuned_ms(graphs, args, work_dir)
        row["latency_before_ms"], row["latency_after_ms"] = latencies_ms[0], min(latencies_ms)
        row["latency_rewritten_ms"] = latencies_ms[1] if result.changed else None
        row["tune_s"] = time.monotonic() - started
    return row


def search(mod: Any, config: Any, args: argparse.Namespace, work_dir: Path) -> Any:
    """The graph search, by measured prices where they are wanted."""
    from eqtune import optimize_graph
    from eqtune.tune.session import GRAPH_SHARE, Session, Settings

    if not args.price_seconds:
        return optimize_graph(mod, config)
    settings = Settings(
        time_budget_s=args.price_seconds / GRAPH_SHARE,
        threads=args.threads,
        work_dir=str(work_dir),
        seed=args.seed,
        progress=False,
    )
    with Session(settings) as session:
        return optimize_graph(mod, replace(config, seconds=session.graph_s), prices=session.graph_prices(mod))


def tuned_ms(graphs: Mapping[str, Any], args: argparse.Namespace, work_dir: Path) -> list[float]:
    """Milliseconds of one run of each graph, after tuning the kernels of this very graph; timed in turns."""
    import eqtune
    from eqtune.frontends import load_model
    from eqtune.machine import detect_target
    from eqtune.runtime import ModelRunner, time_side_by_side
    from eqtune.tune.forms import model_forms

    runners = []
    for name, mod in graphs.items():
        kernels = len(model_forms(mod, detect_target(args.threads), "off")[0].tasks)
        result = eqtune.tune_model(
            mod,
            trials=args.trials_per_kernel * kernels if args.trials_per_kernel else None,
            time_budget_s=args.tune_seconds or None,
            work_dir=work_dir / name,
            graph="off",
            threads=args.threads,
            seed=args.seed,
            progress=not args.quiet,
        )
        runners.append(ModelRunner(result.compile(), threads=args.threads))
    inputs = load_model(mod).random_inputs(args.seed)
    return [seconds * 1e3 for seconds in time_side_by_side(runners, inputs, budget_s=5.0, at_least=5)]


def main() -> None:
    """Parse arguments, measure, print, write."""
    from eqtune import zoo

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="nasrnn", help="comma-separated names, or all")
    parser.add_argument("--tune-seconds", type=float, default=0.0, help="of tuning, for each of both graphs (0: none)")
    parser.add_argument("--trials-per-kernel", type=int, default=0, help="measurements, for each of both graphs")
    parser.add_argument(
        "--price-seconds", type=float, default=0.0, help="go by kernels measured in this time (0: an analytic model)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="searches, of which the fastest counts (3)")
    parser.add_argument("--e-nodes", type=int, default=50_000, help="limit (50000)")
    parser.add_argument("--threads", type=int, default=None, help="threads a kernel may use (all cores)")
    parser.add_argument("--fast-math", action="store_true", help="permit rules that lose accuracy")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="do not compare outputs: faster")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work-dir", type=Path, help="keep records here (default: a temporary directory)")
    parser.add_argument("--json", metavar="FILE", help="write rows here")
    parser.add_argument("-q", "--quiet", action="store_true")
    args = parser.parse_args()
    models = zoo.names() if args.models == "all" else args.models.split(",")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in models:
            rows.append(measure(model, args, args.work_dir or Path(scratch)))
            write(rows, args.json)  # a long sweep that is cut short has lost nothing
    print(table([{name: row[name] for name in COLUMNS} for row in rows]))


if __name__ == "__main__":
    main()
