"""How fast this machine is: small kernels, compiled by TVM as candidates are.

They run in a process of their own, `python -m eqtune.measure.peaks`: TVM reads the number of threads from the
environment, once a process, and takes half the cores where nothing is set.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from ..errors import SetupError
from ..machine import core_count
from ..search.space.hardware import MEMORY_BYTES, Hardware
from .affinity import on_first_core
from .lean_import import leave_out

__all__ = ["measure_speeds"]

ROUNDS = 16
"""Each kernel is timed this often, in turns, so that a slow moment of the machine does not hit one of them alone."""

PATIENCE = 6
"""So many times the rounds, at most, while all threads together look slower than one: something else is running."""

PATIENCE_S = 4.0
"""And after so many seconds even rounds that are still missing are given up."""

ALL_CORES_CLOCK = 0.65
"""All cores under load keep at least this share of one core's clock. A slower figure is somebody else's doing."""

BUSY_START_S = 1e-4
"""Starting a parallel region takes microseconds. Where it takes longer than this, a thread waits for a core that
somebody else has, or a container has used up its quota: no reason to plan kernels for one thread."""

LIMIT_S = 120.0


def measure_speeds(target: Mapping[str, Any], hardware: Hardware, limit_s: float | None = None) -> dict[str, float]:
    """Measure what `Hardware` calls measured, in one to two seconds.

    Each figure is the best of several runs: other processes can only make a machine look slower. "Copy" adds a
    constant on the way, so that no library routine with other rules for caches takes its place.

    Parameters
    ----------
    target : mapping
        A target of this machine as a JSON object.
    hardware : Hardware
        Vector width, threads and cache sizes.
    limit_s : float, optional
        Give up after so many seconds, with an empty answer.

    Returns
    -------
    dict
        peak_flops_per_s, peak_flops_per_s_all (FLOP/s), bandwidth_bytes_per_s, cache_bandwidth_bytes_per_s (bytes
        read plus bytes written a second), parallel_overhead_s (seconds), half_vector_rate, fmas_per_load,
        tile_flops_per_s (FLOP/s).

    Raises
    ------
    SetupError
        When TVM cannot compile or run the kernels here.
    """
    question = json.dumps({"target": dict(target), "hardware": hardware.to_json()})
    if question not in _KNOWN:
        try:
            _KNOWN[question] = _ask(question, hardware.threads, LIMIT_S if limit_s is None else limit_s)
        except subprocess.TimeoutExpired as error:
            if limit_s is None:
                raise SetupError(
                    f"measuring this machine took more than {LIMIT_S:g} s: something else keeps it busy; try again "
                    "when it is idle, or with a time budget"
                ) from error
            return {}
    return dict(_KNOWN[question])


_KNOWN: dict[str, dict[str, float]] = {}
"""Answers by question: each is measured once in the life of this process."""


def _ask(question: str, threads: int, limit_s: float) -> dict[str, float]:
    environment = {**os.environ, "TVM_NUM_THREADS": str(threads), "TVM_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "eqtune.measure.peaks"],
        input=question,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise SetupError(f"TVM cannot run a small kernel on this machine: {said}; try `eqtune doctor`")
    speeds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return speeds


def _measure(target: Any, hardware: Hardware, cores: int) -> dict[str, float]:
    import tvm

    from .peak_kernels import CHAINS, STEPS, TILE_STEPS, arguments_of, copy, fma, fma_from_cache, tiles, touch

    lanes, threads = hardware.lanes(4), hardware.threads
    large = min(MEMORY_BYTES, 2 * hardware.l3_bytes) // 4 // (threads * lanes)
    small = hardware.l2_bytes // 4 // 4 // lanes
    functions = {
        "fma_one": fma(1, lanes),
        "fma_from_cache": fma_from_cache(lanes),
        "fma_all": fma(threads, lanes),
        "fma_half": fma(1, max(1, lanes // 2)),
        "copy_memory": copy(threads, large, lanes),
        "copy_cached": copy(1, small, lanes),
        "parallel": touch(threads),
        "serial": touch(1),
    }
    has_tiles = "amx-bf16" in hardware.dot_products
    if has_tiles:
        functions["tiles"] = tiles()
    mod = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    module = tvm.compile(mod, target).jit()
    calls = {
        "fma_one": 2,
        "fma_half": 2,
        "fma_all": 2,
        "fma_from_cache": 2,
        "copy_memory": 1,
        "copy_cached": 100,
        "parallel": 20,
        "serial": 20,
        "tiles": 2,
    }
    repeats = {"parallel": 10, "serial": 10}  # of 100 us: between two turns of another process
    arguments = {name: arguments_of(function) for name, function in functions.items()}
    seconds = dict.fromkeys(functions, float("inf"))
    loads = []
    started = time.monotonic()
    for number_of_rounds in range(1, PATIENCE * ROUNDS + 1):
        latest = {}
        for name in functions:
            timer = module.time_evaluator(name, tvm.cpu(), number=calls[name], repeat=repeats.get(name, 1))
            latest[name] = min(timer(*arguments[name]).results)
            seconds[name] = min(seconds[name], latest[name])
        loads.append(latest["fma_from_cache"] / latest["fma_one"])  # at one clock, which moves with what is computed
        if time.monotonic() - started > PATIENCE_S:
            break
        undisturbed = seconds["fma_all"] < 1.1 * seconds["fma_one"]
        if number_of_rounds >= ROUNDS and undisturbed:
            break
    flops = 2.0 * lanes * CHAINS * STEPS
    one = flops / seconds["fma_one"]
    return {
        "peak_flops_per_s": one,
        "peak_flops_per_s_all": _peak_of_all(one, flops * threads / seconds["fma_all"], threads, cores),
        "bandwidth_bytes_per_s": 8.0 * threads * large * lanes / seconds["copy_memory"],
        "cache_bandwidth_bytes_per_s": 8.0 * small * lanes / seconds["copy_cached"],
        "parallel_overhead_s": _overhead(seconds),
        "half_vector_rate": min(2.0, max(1.0, seconds["fma_one"] / seconds["fma_half"])),
        "fmas_per_load": max(1.0, statistics.median(loads)),
        "tile_flops_per_s": TILE_STEPS * 4 * 2.0 * 16 * 16 * 32 / seconds["tiles"] if has_tiles else 0.0,
    }


def _peak_of_all(one: float, measured: float, threads: int, cores: int) -> float:
    """FLOP/s of all threads, of those of one and what was measured, perhaps beside a busy neighbour.

    A peak that is too low ends the search at half speed, one that is too high only lets it go on. Hardware threads
    that share a core are believed: together they may be no faster than one.
    """
    if threads <= cores and measured < ALL_CORES_CLOCK * threads * one:
        return threads * one
    return max(one, measured)


def _overhead(seconds: Mapping[str, float]) -> float:
    """Seconds of starting a parallel region."""
    return min(BUSY_START_S, max(0.0, seconds["parallel"] - seconds["serial"]))


def main() -> None:
    """Read {"target": ..., "hardware": ...} from standard input, print the speeds as one line of JSON."""
    leave_out()
    import tvm

    question = json.loads(sys.stdin.read())
    cores = core_count()  # of those that this process may use before it is bound to one
    with on_first_core():
        speeds = _measure(tvm.target.Target(question["target"]), Hardware.from_json(question["hardware"]), cores)
    print(json.dumps(speeds))


if __name__ == "__main__":
    main()
