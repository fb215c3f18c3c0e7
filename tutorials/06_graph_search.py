# Search equal graphs
# ===================
#
# The graph search alone, without tuning: a pass that replaces the graph of a model by an equal one that is cheaper.
# It grows an e-graph, which holds very many equal graphs at once, by rules that were each verified, and extracts the
# cheapest graph from it.

import numpy as np
import tvm
from tvm import relax

import eqtune
from eqtune.search.graph.cost import AnalyticCost
from eqtune.search.graph.egraph import EGraph
from eqtune.search.graph.encode import encode_block
from eqtune.search.graph.extract import extract
from eqtune.search.graph.rules import select
from eqtune.search.graph.rules.pattern import matmul, reduce, tensors
from eqtune.search.graph.rules.rule import Rule
from eqtune.search.graph.saturate import Limits

# A model in Relax: three products of one input, as in attention, and a score for each row.

rng = np.random.default_rng(0)


def weight(*shape):
    return relax.const((0.1 * rng.standard_normal(shape)).astype("float32"))


def module(build, shape):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(build(x))
        builder.emit_func_output(result)
    return builder.get()


def attention(x):
    query, key, value = (relax.op.matmul(x, weight(256, 256)) for _ in range(3))
    scores = relax.op.nn.softmax(relax.op.matmul(query, relax.op.permute_dims(key)))
    mixed = relax.op.matmul(scores, value)
    return relax.op.sum(relax.op.matmul(mixed, weight(256, 256)), axis=[1], keepdims=True)


mod = module(attention, (64, 256))

# 1. The pass, between others of your own. Weights should be constants, folded.

pipeline = tvm.transform.Sequential(
    [
        eqtune.transform.FoldBatchNorm(),
        eqtune.transform.FoldWeights(),
        eqtune.transform.EqualitySaturation(eqtune.GraphConfig(limits=Limits(e_nodes=20_000, seconds=5.0))),
        relax.transform.CanonicalizeBindings(),
    ]
)


def operators(mod):
    return [binding.value.op.name for binding in mod["main"].body.blocks[0].bindings if hasattr(binding.value, "op")]


print("as given:  ", *operators(mod))
print("rewritten: ", *operators(pipeline(mod)))
assert operators(pipeline(mod)).count("relax.matmul") < operators(mod).count("relax.matmul")

# 2. What happened, and why: `optimize_graph` is what the pass calls. `eqtune graph MODEL --explain` prints the same.
# The outputs of both graphs were compared on random inputs before the new one was returned.

result = eqtune.optimize_graph(mod)
print(f"\n{result.e_nodes} e-nodes, {result.stop_reason}; {result.cost_before_s * 1e6:.1f} us are now", end=" ")
print(f"{result.cost_after_s * 1e6:.1f} us by an analytic estimate; outputs agree to {result.rel_err:.0e}")
for replacement in result.replacements:
    print(f"  {replacement.original}\n    is now {replacement.replacement}, by {', '.join(replacement.rules)}")
assert result.changed

# 3. A rule of your own. The sum of each row of x @ y is x times the sums of y's rows: one column instead of 256.
# A condition is a function of the match, which knows types and attributes (`Rule`'s module tells more).

x, y = tensors("x y")


def sums_rows(m):
    return m.r.kind == "sum" and m.r.keepdims and m.r.axes == (1,) and len(m.x.shape) == len(m.y.shape) == 2


row_sums = Rule(
    "row-sums-of-matmul",
    before=reduce(matmul(x, y), "r"),
    after=matmul(x, reduce(y, "r")),
    when=(sums_rows,),
    reason="one column is computed instead of all",
)
with_own = eqtune.optimize_graph(mod, eqtune.GraphConfig(extra_rules=(row_sums,)))
print(f"\nwith a rule of our own: {with_own.cost_after_s * 1e6:.1f} us")
for replacement in with_own.replacements:
    print(f"  {replacement.original}\n    is now {replacement.replacement}, by {', '.join(replacement.rules)}")
assert with_own.cost_after_s < result.cost_after_s
assert any(row_sums.name in replacement.rules for replacement in with_own.replacements)

# It was verified first: both sides were evaluated exactly, modulo primes, on random tensors of many shapes. A rule that
# is wrong is refused with the shapes for which it fails. This one forgets that a maximum is no sum.


def reduces_rows(m):
    return m.r.keepdims and m.r.axes == (1,) and len(m.x.shape) == len(m.y.shape) == 2


wrong = Rule("any-reduction-of-matmul", row_sums.before, row_sums.after, row_sums.reason, when=(reduces_rows,))
try:
    eqtune.GraphConfig(extra_rules=(wrong,))
except eqtune.InputError as error:
    print(f"refused: {error}")
else:
    raise AssertionError("an unsound rule was accepted")

# 4. Rules that are equal over the reals but round differently need `fast_math`: a 3x3 convolution as Winograd's
# minimal filtering. The error that it adds is measured, and bounded by `tolerance`.

image = module(lambda x: relax.op.nn.conv2d(x, weight(128, 128, 3, 3), padding=1), (1, 128, 28, 28))
exact = eqtune.optimize_graph(image)
fast = eqtune.optimize_graph(image, eqtune.GraphConfig(fast_math=True, tolerance=1e-4))
print(f"\nwithout fast_math: {exact.kept_because or 'rewritten'}")
print(f"with fast_math: {', '.join(name for name, rule in fast.rules.items() if rule.used)}; ", end="")
print(f"{fast.cost_before_s * 1e6:.0f} -> {fast.cost_after_s * 1e6:.0f} us, relative error {fast.rel_err:.1e}")
assert fast.changed
assert fast.rel_err < 1e-4

# 5. Step by step, for a search of your own over rules: apply some by name, look, and go back to a snapshot.

block = mod["main"].body.blocks[0]
egraph = EGraph(encode_block(block).graph, select())


def best_us():
    return extract(egraph.view(), AnalyticCost(), ("greedy-dag",))[0].cost_s * 1e6


print(f"\n{egraph.e_nodes} e-nodes, best {best_us():.1f} us")
egraph.push()
for name in ("merge-matmul-shared-input", "matmul-associate-right", "matmul-associate-right"):
    step = egraph.apply([name])
    print(f"{name}: {sum(step.matches.values())} matches, {egraph.e_nodes} e-nodes, best {best_us():.1f} us")
improved_us = best_us()
egraph.pop()
print(f"back to {egraph.e_nodes} e-nodes, best {best_us():.1f} us")
assert improved_us < best_us()
