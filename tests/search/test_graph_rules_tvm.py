"""Both sides of every rule compute the same in float32 when TVM compiles them, and the same as the evaluator says."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from eqtune.search.graph.relax_ops import write_term
from eqtune.search.graph.rules import EXTENDED_RULES, Group, Rule
from eqtune.search.graph.terms import TermGraph
from eqtune.search.graph.verify import instances_of
from eqtune.search.graph.verify.evaluate import evaluate
from eqtune.search.graph.verify.floats import Floats
from eqtune.search.graph.verify.verify import FAST_MATH_TOLERANCE, TOLERANCE

RULES = [rule.make(3) if isinstance(rule, Group) else rule for rule in EXTENDED_RULES]
POSITIVE = frozenset({"divide", "log", "power", "rsqrt", "sqrt"})
"""Functions that are not defined, or not tame, everywhere."""


def emit(builder: relax.BlockBuilder, name: str, graphs: tuple[TermGraph, TermGraph]) -> None:
    """A function of the leaves that returns the outputs of both graphs."""
    leaves = [ty for term, ty in zip(graphs[0].terms, graphs[0].types, strict=True) if term.op == "leaf"]
    params = [relax.Var(f"x{i}", relax.TensorType(ty.shape, ty.dtype)) for i, ty in enumerate(leaves)]
    with builder.function(name, params):
        with builder.dataflow():
            results = []
            for graph in graphs:
                values: dict[int, relax.Expr] = {}
                for i in graph.live():
                    term, types = graph.terms[i], [graph.types[argument] for argument in graph.terms[i].args]
                    if term.op == "leaf":
                        values[i] = params[term.attrs.index]
                        continue
                    arguments = [values[argument] for argument in term.args]
                    values[i] = builder.emit(write_term(term.op, term.attrs, arguments, types, graph.types[i]))
                results += [values[output] for output in graph.outputs]
            result = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(result)


@pytest.mark.unoptimised
@pytest.mark.slow
def test_rules_hold_when_compiled_by_tvm() -> None:
    cases: list[tuple[Rule, tuple[TermGraph, TermGraph]]] = [(rule, next(instances_of(rule))) for rule in RULES]
    builder = relax.BlockBuilder()
    for i, (_, graphs) in enumerate(cases):
        emit(builder, f"rule_{i}", graphs)
    machine = relax.VirtualMachine(tvm.compile(builder.get(), tvm.target.Target({"kind": "llvm"})), tvm.cpu())
    generator = np.random.default_rng(0)
    for i, (rule, graphs) in enumerate(cases):
        kinds = {getattr(term.attrs, "name", "") for graph in graphs for term in graph.terms}
        # Of one sign, relu would be nothing, and a maximum might be padded by zero.
        least = 0.5 if kinds & POSITIVE else -0.5
        leaves = [
            (least + generator.random(ty.shape)).astype(ty.dtype)
            for term, ty in zip(graphs[0].terms, graphs[0].types, strict=True)
            if term.op == "leaf"
        ]
        found = [value.numpy() for value in machine[f"rule_{i}"](*map(tvm.runtime.tensor, leaves))]
        before, after = found[: len(found) // 2], found[len(found) // 2 :]
        expected = evaluate(graphs[0], leaves, Floats())
        tolerance = FAST_MATH_TOLERANCE if rule.fast_math else TOLERANCE
        for x, y, z in zip(before, after, expected, strict=True):
            scale = max(1.0, float(np.abs(z).max()))
            np.testing.assert_allclose(x, z, rtol=0, atol=TOLERANCE * scale, err_msg=f"{rule.name}: TVM, evaluator")
            np.testing.assert_allclose(y, x, rtol=0, atol=tolerance * scale, err_msg=f"{rule.name}: after, before")
