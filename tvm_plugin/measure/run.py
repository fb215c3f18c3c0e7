"""Call, check and time one program: the same steps wherever the device is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .arguments import Domain
from .base import MAX_DETAIL
from .bench import Bench
from .build import Program
from .timing import Effort, time_kernel

__all__ = ["run_program"]


def run_program(bench_for: Callable[[Domain], Bench], program: Program, request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a "run" request of `server.py`.

    Parameters
    ----------
    bench_for : callable
        The kernel's buffers, with inputs drawn in the given way.
    program : Program
        What to run.
    request : mapping
        "domain", "effort", "best_s", "save", "check" and "model_bytes", as `server.py` says.
    """
    bench = bench_for(request["domain"])
    if request["save"]:
        first_s = bench.call(program)
        if not bench.finite():
            other = bench_for("positive")
            first_s = other.call(program)
            bench = other if other.finite() else bench_for(request["domain"])
            if bench is not other:
                first_s = bench.call(program)
        bench.save()
    else:
        first_s = bench.call(program)
        if request["check"] and not program.checked:
            wrong = bench.mismatch()
            if wrong:
                return {"error": "wrong_result", "detail": wrong[:MAX_DETAIL]}
    program.checked |= bool(request["check"])
    model_bytes = int(request.get("model_bytes", 0))
    evaluate = partial(bench.evaluate, program)
    if model_bytes:
        evaluate = partial(bench.evaluate_cold, program, model_bytes=model_bytes)
    latencies_s, given_up = time_kernel(evaluate, first_s, Effort(**request["effort"]), float(request["best_s"]))
    return {"latencies_s": latencies_s, "given_up": given_up, "domain": bench.domain}
