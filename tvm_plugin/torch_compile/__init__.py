"""`torch.compile(model, backend="eqtune", options={...})`: what Dynamo captures is tuned when it is first called.

PyTorch's own backend "tvm" went with Relay. This one is found by the entry point "torch_dynamo_backends". A captured
graph gets weights as arguments in each call; here they become constants, as tuning needs them, and each call looks
whether they are still what they were (weights.py). What the graph does to memory is done again (memory.py): arguments
that it changes, outputs that are views of arguments or of each other, strides. A graph that Dynamo captures once more,
with open sizes, is compiled for all of them, unmeasured (any_size.py). What cannot be tuned, and what is no faster,
stays with PyTorch; a warning says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError
from ..tune import tune_model
from .captured import CapturedGraph

__all__ = ["CapturedGraph", "compile_graph"]

BUDGET_S = 120.0
"""Of one graph, unless options say otherwise: a model may be captured in several."""

_ANSWERED_HERE = ("model", "params", "example_inputs", "shapes", "target", "function")
OPTIONS = tuple(name for name in inspect.signature(tune_model).parameters if name not in _ANSWERED_HERE)


def compile_graph(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> CapturedGraph:
    """What `torch.compile(..., backend="eqtune")` calls for each graph that it captures.

    Parameters
    ----------
    graph : torch.fx.GraphModule
    example_inputs : sequence
        Not used: they may be fake. The graph is tuned with what it is first called with.
    mode : str, optional
        Belongs to PyTorch's own backend, and is refused.
    options : mapping, optional
        Arguments of `tune_model` by name (`time_budget_s`, `trials`, `work_dir`, `fast_math`, ...). A graph gets 120 s
        unless `time_budget_s` or `trials` is given, and as many threads as PyTorch has unless `threads` is.

    Raises
    ------
    InputError
        An option that `tune_model` does not have, or a mode.
    """
    if mode is not None:
        raise InputError(f"mode={mode!r} belongs to PyTorch's own backend; give options={{'trials': 500}}, say")
    given = dict(options or {})
    for name in given:
        if name not in OPTIONS:
            raise InputError(f"the backend eqtune has no option {name!r}; its options are {', '.join(OPTIONS)}")
    if given.get("trials") is None and given.get("time_budget_s") is None:
        given["time_budget_s"] = BUDGET_S
    return CapturedGraph(graph, given)
