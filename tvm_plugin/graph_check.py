"""Whether a module that the graph search found may be used: its outputs are compared, and it is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import ir

from .compile.untuned import untuned_executable
from .frontends.imported import InputInfo, random_input
from .frontends.verify import compare
from .graph_result import GraphConfig, GraphResult
from .machine import detect_target
from .runtime import ModelRunner
from .search.graph.relax_ops import static_type

__all__ = ["Runner", "Timer", "why_refused"]

Outputs = list[NDArray[Any]]
Runner = Callable[[ir.IRModule, Sequence[NDArray[Any]]], Outputs]
Timer = Callable[[ir.IRModule], float]

COARSER = {"float16": 100, "bfloat16": 800}
"""How many times the tolerance outputs may differ: TVM sums in their own precision, of 11 and 8 bits."""


def why_refused(
    mod: ir.IRModule,
    candidate: ir.IRModule,
    config: GraphConfig,
    run: Runner | None,
    timer: Timer | None,
    result: GraphResult,
) -> str:
    """Why a candidate must not be used; "" where its outputs are those of `mod`, and it is faster if timed.

    Fills `result`.
    """
    reason = _compare(mod, candidate, config, run or _run_plain, result) if config.verify else ""
    if not reason and timer is not None:
        result.latency_before_s, result.latency_after_s = timer(mod), timer(candidate)
        if result.latency_after_s >= result.latency_before_s:
            reason = "the new module is not faster"
    return reason


def _compare(mod: ir.IRModule, candidate: ir.IRModule, config: GraphConfig, run: Runner, result: GraphResult) -> str:
    """Why the candidate must not be used; "" when its outputs are the original's."""
    started = time.perf_counter()
    inputs = _random_inputs(mod["main"], config.seed)
    if inputs is None:
        return "the outputs cannot be compared: an input has a symbolic shape or is no tensor"
    try:
        expected, actual = run(mod, inputs), run(candidate, inputs)
    except (RuntimeError, ValueError, TypeError) as error:  # what TVM raises for a module it cannot compile or run
        return f"the outputs cannot be compared: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
    result.verify_s += time.perf_counter() - started
    result.rel_err = 0.0
    for before, after in zip(expected, actual, strict=True):
        if before.shape != after.shape or before.dtype != after.dtype:
            return f"an output changed from {before.dtype}{before.shape} to {after.dtype}{after.shape}"
        difference = compare([after], [before])[1]
        result.rel_err = max(result.rel_err, difference)
        allowed = config.tolerance * COARSER.get(before.dtype.name, 1)
        if difference > allowed:
            return f"an output differs by {difference:.2e} relative to its largest element; {allowed:g} is allowed"
    return ""


def _random_inputs(main: Any, seed: int) -> list[NDArray[Any]] | None:
    """An array for each parameter, as models get them; None where a parameter is no static tensor."""
    generator = np.random.default_rng(seed)
    inputs = []
    for param in main.params:
        ty = static_type(param.ty)
        if ty is None:
            return None
        inputs.append(random_input(generator, InputInfo(str(param.name), ty.shape, ty.dtype)))
    return inputs


def _run_plain(mod: ir.IRModule, inputs: Sequence[NDArray[Any]]) -> Outputs:
    """Run "main" with plain schedules, on this machine's CPU."""
    return ModelRunner(untuned_executable(mod, detect_target(), plain=True))(*inputs)
