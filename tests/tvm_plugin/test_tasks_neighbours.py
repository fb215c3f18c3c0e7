"""Graph networks' sums over neighbours are one kernel, which computes what numpy does."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from eqtune.tasks.lower import lower_to_kernels

TARGET = tvm.target.Target({"kind": "llvm", "num-cores": 2})
NODES, EDGES = 90, 400
GENERATOR = np.random.default_rng(0)
SOURCES, TARGETS = GENERATOR.integers(0, NODES, EDGES), GENERATOR.integers(0, NODES, (EDGES, 1))


def run(build, *arrays):
    """The result, and the names of the kernels."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"x{i}", relax.TensorType(a.shape, str(a.dtype))) for i, a in enumerate(arrays)]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(build(builder.emit, *inputs))
        builder.emit_func_output(result)
    kernels = lower_to_kernels(builder.get(), TARGET)
    machine = relax.VirtualMachine(relax.build(kernels, TARGET), tvm.cpu())
    names = [variable.name_hint for variable, f in kernels.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    return machine["main"](*map(tvm.runtime.tensor, arrays)).numpy(), names


def values(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype("float32")


@pytest.mark.parametrize("columns", [(128,), (10,), (3, 16)], ids=str)
@pytest.mark.parametrize("factors", ["none", "left", "right"])
@pytest.mark.parametrize(("reduction", "ufunc"), [("add", np.add), ("max", np.maximum)])
def test_neighbours_are_added_up_in_one_kernel(columns, factors, reduction, ufunc):
    nodes, data, weights = values(NODES, *columns), values(NODES, *columns), values(EDGES, *[1] * len(columns))

    def build(emit, x, y, w, sources, targets):
        rows = emit(op.take(x, sources, 0, mode="clip"))
        rows = emit(op.broadcast_to(rows, (EDGES, *columns)))
        if factors != "none":
            rows = emit(op.multiply(w, rows) if factors == "left" else op.multiply(rows, w))
        return emit(op.scatter_nd(y, targets, rows, reduction))

    result, kernels = run(build, nodes, data, weights, SOURCES, TARGETS)
    expected = data.copy()
    ufunc.at(expected, TARGETS[:, 0], nodes[SOURCES] * (1 if factors == "none" else weights))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert kernels == ["scatter_gathered"]


@pytest.mark.parametrize(("mode", "first", "last"), [("clip", 0, -1), ("wrap", -5, 7)])
def test_places_outside_are_what_the_operators_say(mode, first, last):
    """Sources are those at the end, or are counted round; a target outside is none."""
    nodes, data = values(NODES, 32), values(NODES, 32)
    sources, targets = np.array([-5, 3, NODES + 7]), np.array([[1], [NODES], [2]])

    def build(emit, x, y, i, j):
        return emit(op.scatter_nd(y, j, emit(op.take(x, i, 0, mode=mode)), "add"))

    result, kernels = run(build, nodes, data, sources, targets)
    assert kernels == ["scatter_gathered"]
    expected = data.copy()
    expected[1] += nodes[first]
    expected[2] += nodes[last]
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("step", [1, -1])
def test_slices_that_leave_all_as_it_is(step):
    """Importers write them before a scatter; one that turns the rows is none of these."""
    nodes, data = values(NODES, 16), values(NODES, 16)
    ends = [EDGES] if step == 1 else [-EDGES - 1]

    def build(emit, x, y, i, j):
        rows = emit(op.gather_nd(x, emit(op.expand_dims(i, 1))))
        rows = emit(op.strided_slice(rows, [0], [0 if step == 1 else EDGES - 1], ends, [step]))
        return emit(op.scatter_nd(y, j, rows, "add"))

    result, kernels = run(build, nodes, data, SOURCES, TARGETS)
    expected = data.copy()
    np.add.at(expected, TARGETS[:, 0], nodes[SOURCES][::step])
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert ("scatter_gathered" in kernels) == (step == 1)


def test_one_factor_for_each_row_of_every_edge_is_multiplied_before():
    """As many rows as edges, so that the factors' shape alone does not tell whose they are."""
    nodes, weights = values(NODES, 6, 16), values(6, 1)
    sources, targets = SOURCES[:6], TARGETS[:6]

    def build(emit, x, w, i, j):
        return emit(op.scatter_nd(x, j, emit(op.multiply(emit(op.take(x, i, 0, mode="clip")), w)), "add"))

    result, kernels = run(build, nodes, weights, sources, targets)
    expected = nodes.copy()
    np.add.at(expected, targets[:, 0], nodes[sources] * weights)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert "scatter_gathered" not in kernels


def test_a_grid_of_targets_gets_elements_of_the_gathered_rows():
    nodes, data, sources = values(NODES, 5, 16), values(NODES, 16), SOURCES[:4]
    targets = GENERATOR.permutation(NODES)[:20].reshape(4, 5, 1)

    def build(emit, x, y, i, j):
        return emit(op.scatter_nd(y, j, emit(op.take(x, i, 0, mode="clip")), "add"))

    result, kernels = run(build, nodes, data, sources, targets)
    expected = data.copy()
    np.add.at(expected, targets[..., 0], nodes[sources])
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert "scatter_gathered" not in kernels


def test_a_row_at_a_number_is_taken_before():
    """The number is no tensor of places."""
    nodes, data, targets = values(NODES, 16), values(NODES, 16), np.array([4])

    def build(emit, x, y, j):
        return emit(op.scatter_nd(y, j, emit(op.take(x, relax.prim_value(3), 0)), "add"))

    result, kernels = run(build, nodes, data, targets)
    expected = data.copy()
    expected[4] += nodes[3]
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert "scatter_gathered" not in kernels


def test_rows_that_another_block_gathers_stay_there():
    """What they are gathered from is known in that block alone."""
    shapes = {"x": (NODES, 16), "y": (NODES, 16), "i": (EDGES,), "j": (EDGES, 1)}
    x, y, i, j = (relax.Var(n, relax.TensorType(s, "int64" if n in "ij" else "float32")) for n, s in shapes.items())
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y, i, j]):
        with builder.dataflow():
            rows = builder.emit_output(op.take(builder.emit(op.nn.relu(x)), i, 0, mode="clip"))
        builder.emit_func_output(builder.emit(op.scatter_nd(y, j, rows, "add")))
    kernels = lower_to_kernels(builder.get(), TARGET)
    assert relax.analysis.check_well_formed(kernels)
    assert "scatter_gathered" not in [variable.name_hint for variable in kernels.get_global_vars()]


def test_graphs_of_any_size_stay_several_kernels():
    nodes, edges = tvm.tirx.Var("nodes", "int64"), tvm.tirx.Var("edges", "int64")
    shapes = {"x": (nodes, 16), "y": (nodes, 16), "w": (edges, 1), "i": (edges,), "j": (edges, 1)}
    dtypes = {"i": "int64", "j": "int64"}
    x, y, w, i, j = (relax.Var(n, relax.TensorType(s, dtypes.get(n, "float32"))) for n, s in shapes.items())
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y, w, i, j]):
        with builder.dataflow():
            rows = builder.emit(op.multiply(w, builder.emit(op.take(x, i, 0, mode="clip"))))
            result = builder.emit_output(builder.emit(op.scatter_nd(y, j, rows, "add")))
        builder.emit_func_output(result)
    names = [variable.name_hint for variable in lower_to_kernels(builder.get(), TARGET).get_global_vars()]
    assert "scatter_gathered" not in names


def test_one_factor_for_each_element_is_multiplied_before():
    nodes, data, weights = values(NODES, 24), values(NODES, 24), values(EDGES, 24)

    def build(emit, x, y, w, i, j):
        return emit(op.scatter_nd(y, j, emit(op.multiply(emit(op.take(x, i, 0, mode="clip")), w)), "add"))

    result, kernels = run(build, nodes, data, weights, SOURCES, TARGETS)
    expected = data.copy()
    np.add.at(expected, TARGETS[:, 0], nodes[SOURCES] * weights)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert "scatter_gathered" not in kernels
