"""Operators that have no converter are decomposed.

No others: a full decomposition turns a BERT's 48 reshapes into 264.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.export
from torch.export.graph_signature import InputKind, OutputKind
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from ...errors import UnsupportedModelError
from .constants import LIKE_ANOTHER, Constants, makes_number
from .converters import CONVERTERS
from .experts import EXPERT_DECOMPOSITIONS
from .fast_paths import FAST_PATH_DECOMPOSITIONS
from .nodes import calls_of
from .rare import RARE_DECOMPOSITIONS
from .recurrent import projects_states
from .state import decomposed

__all__ = ["check_signature", "translatable"]

OUR_DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    **EXPERT_DECOMPOSITIONS,
    **FAST_PATH_DECOMPOSITIONS,
    **RARE_DECOMPOSITIONS,
}

NOT_TVMS = {"cross_entropy_loss.default"}
"""Operators that are decomposed, although TVM's importer has converters: it does not look at the options."""


def translatable(program: torch.export.ExportedProgram) -> tuple[torch.export.ExportedProgram, Constants]:
    """The program in operators that have converters, but for those of its constants.

    torch.export takes about a second each time. What the program calls as it is given is decomposed at once; only what
    comes of that may need more.
    """
    defaults = functools.cache(lambda: dict(torch.export.default_decompositions()))

    def decompositions(unknown: set[Any]) -> dict[Any, Callable[..., Any]]:
        ours = {one: OUR_DECOMPOSITIONS[str(one)] for one in unknown if str(one) in OUR_DECOMPOSITIONS}
        others = unknown - ours.keys()
        return ours | ({one: defaults()[one] for one in others if one in defaults()} if others else {})

    table = decompositions(_unknown(program, Constants(program)))
    while True:
        functional = decomposed(program, table)
        computed = Constants(functional)
        unknown = _unknown(functional, computed)
        helpful = decompositions(unknown - table.keys())
        if not helpful:
            break
        table |= helpful
    _check_not_random(functional)
    if unknown:
        raise UnsupportedModelError(_why_unknown(unknown))
    check_signature(functional)  # in-place updates of buffers show only now
    _keep_tensors(functional)
    return functional, computed


def _unknown(program: torch.export.ExportedProgram, computed: Constants) -> set[Any]:
    """Operators that have no converter, but for those of constants."""
    known = (ExportedProgramImporter().convert_map.keys() - NOT_TVMS) | CONVERTERS.keys()
    nodes = [node for node in calls_of(program) if node.target.__name__ not in known or projects_states(node)]
    return {node.target for node in nodes if node not in computed and not makes_number(node)}


def _why_unknown(operators: set[Any]) -> str:
    of_data = {one for one in operators if torch.Tag.dynamic_output_shape in getattr(one, "tags", ())}
    named = of_data or operators
    names = ", ".join(sorted(str(one) if hasattr(one, "namespace") else one.__name__ for one in named))
    if not of_data:
        return f"TVM's importer does not know the PyTorch operators {names}"
    return (
        f"the size of what {names} finds depends on data, and only static shapes can be tuned. End the model before "
        "it, or keep all elements and use torch.where"
    )


def _keep_tensors(program: torch.export.ExportedProgram) -> None:
    """Leave out of a program's outputs what is no tensor, as weights of attention that nobody asked for: None."""
    output = program.graph.output_node()
    specs = program.graph_signature.output_specs
    kept = [
        (value, spec) for value, spec in zip(output.args[0], specs, strict=True) if isinstance(value, torch.fx.Node)
    ]
    output.args = (tuple(value for value, _ in kept),)
    specs[:] = [spec for _, spec in kept]


def check_signature(program: torch.export.ExportedProgram) -> None:
    """Raises UnsupportedModelError where a program changes what is no buffer, or takes what is no tensor."""
    for spec in program.graph_signature.output_specs:
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT):
            raise UnsupportedModelError(
                f"the model changes {spec.target!r} when it runs; buffers may change, but not inputs, parameters or "
                "what norms keep (was it exported in training mode? call model.eval() first)"
            )
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT and not isinstance(spec.arg, torch.export.graph_signature.TensorArgument):
            raise UnsupportedModelError(f"the input {spec.arg.name!r} is not a tensor; export the model with it fixed")


def _check_not_random(program: torch.export.ExportedProgram) -> None:
    for node in calls_of(program):
        if any(user.target not in LIKE_ANOTHER for user in node.users) and _draws(node):
            raise UnsupportedModelError(
                f"the model draws random numbers ({node.target}), which would be the same in each run here; make them "
                "an input of the model"
            )


_RANDOM = re.compile(
    r"aten\.(rand|normal|log_normal|bernoulli|binomial|multinomial|uniform|exponential|poisson|cauchy|geom)"
)
_DROPOUT = re.compile(r"aten\.(native_|alpha_|feature_)*dropout")


def _draws(node: torch.fx.Node) -> bool:
    """Whether a node's result is random, as a dropout in training mode is."""
    name = str(node.target)
    if _DROPOUT.match(name):
        train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train")
        return train is None or bool(train)
    return _RANDOM.match(name) is not None
