"""How long folding batch norms and weight-only work takes, for each model of the zoo.

    python -m benchmarks.simplify --json out.json

`first_s` is in a process that never touched the memory of the results (page faults dominate large weights),
`again_s` the minimum of three more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from benchmarks.output import table, write


def measure(model: str) -> dict[str, float | str]:
    """One row."""
    from eqtune import zoo
    from eqtune.transform.simplify import simplify

    mod = zoo.relax(model)
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        simplify(mod)
        seconds.append(time.perf_counter() - started)
    return {"model": model, "first_s": seconds[0], "again_s": min(seconds[1:])}


def main() -> None:
    """Each model in a process of its own."""
    from eqtune import zoo

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="all", help="comma-separated names, or all")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", help="write rows here")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one)))
        return
    rows = []
    for name in zoo.names() if args.models == "all" else args.models.split(","):
        command = [sys.executable, "-m", "benchmarks.simplify", "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        write(rows, args.json)
    print(table(rows))


if __name__ == "__main__":
    main()
