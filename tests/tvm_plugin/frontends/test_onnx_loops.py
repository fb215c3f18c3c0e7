"""Loops and scans of ONNX models: written out where constants tell how often they run, refused where inputs do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import eqtune
from eqtune.errors import UnsupportedModelError
from eqtune.frontends import load_model, verify_import
from eqtune.frontends.onnx.loops import with_loops_written_out

onnx = pytest.importorskip("onnx")

pytestmark = pytest.mark.unoptimised
pytest.importorskip("onnxruntime")

WITH_TRIP_COUNT = """
    trips = Constant <value = int64 {4}> ()
    last, every = Loop <body = step (int64 i, bool go, float[2,3] h) => (bool go, float[2,3] t, float[2,3] t)
        { x_i = Gather (x, i) s = Add (h, x_i) t = Tanh (s) }> (trips, , start)
"""

WITH_CONDITION = """
    yes = Constant <value = bool {1}> ()
    one = Constant <value = int64 {1}> ()
    four = Constant <value = int64 {4}> ()
    zero = Constant <value = int64 {0}> ()
    end, last, every = Loop <
        body = step (int64 i, bool go, int64 n, float[2,3] h) => (bool more, int64 m, float[2,3] t, float[2,3] t)
            { x_i = Gather (x, n) s = Add (h, x_i) t = Celu <alpha = 0.5> (s) m = Add (n, one) more = Less (m, four) }
    > (, yes, zero, start)
"""

NESTED = """
    trips = Constant <value = int64 {2}> ()
    inner = Constant <value = int64 {3}> ()
    first = Constant <value = int64 {0}> ()
    last, every = Loop <body = outer (int64 i, bool go, float[2,3] h) => (bool go, float[2,3] v, float[2,3] v) {
        u = Loop <body = again (int64 j, bool on, float[2,3] g) => (bool on, float[2,3] f)
            { k = Add (i, j) x_k = Gather (x, k) p = Mul (g, x_k) f = Sigmoid (p) }> (inner, , h)
        is_first = Equal (i, first)
        v = If <
            then_branch = doubled () => (float[2,3] d) { d = Add (u, u) },
            else_branch = same () => (float[2,3] e) { e = Sub (u, h) }
        > (is_first)
    }> (trips, , start)
"""

SCAN = """
    last, every = Scan <
        num_scan_inputs = 1, scan_input_directions = [1], scan_output_directions = [1], scan_output_axes = [1],
        body = step (float[2,3] h, float[2,3] x_i) => (float[2,3] t, float[2,3] s) { s = Add (h, x_i) t = Tanh (s) }
    > (start, x)
"""

SCAN_IN_A_LOOP = """
    trips = Constant <value = int64 {2}> ()
    last, every = Loop <body = outer (int64 i, bool go, float[2,3] h) => (bool go, float[2,3] t, float[2,3] t) {
        s = Scan <num_scan_inputs = 1, body = step (float[3] g, float[3] h_j) => (float[3] f) { f = Add (g, h_j) }>
            (zeros, h)
        w = Add (h, s)
        t = Tanh (w)
    }> (trips, , start)
"""

WITH_WEIGHTS = """
    trips = Constant <value = int64 {4}> ()
    last, every = Loop <
        body = step (int64 i, bool go, float[2,3] h) => (bool go, float[2,3] t, float[2,3] t)
            <float[3,3] w = {1, 0, 2, 0, 1, 0, 0.5, 0, 1}> { x_i = Gather (x, i) s = MatMul (x_i, w) t = Max (h, s) }
    > (trips, , start)
"""

WITH_A_SEQUENCE = """
    zero = Constant <value = int64 {0}> ()
    sizes = Constant <value = int64[2] {1, 2}> ()
    numbers = Constant <value = float[3] {2, 1, 4}> ()
    parts = SplitToSequence <axis = 0> (numbers, sizes)
    factor = SequenceAt (parts, zero)
    scaled = Mul (start, factor)
""" + WITH_TRIP_COUNT.replace(", start)", ", scaled)")

WITH_A_BRANCH = """
    trips = Constant <value = int64 {2}> ()
    seven = Constant <value = int64 {7}> ()
    grown, every = Loop <body = step (int64 i, bool go, float[2,3] h) => (bool go, float[2,3] t, float[2,3] t)
        { x_i = Gather (x, i) t = Add (h, x_i) }> (trips, , start)
    many = Less (seven, count)
    last = If <
        then_branch = negated () => (float[2,3] d) { d = Neg (grown) },
        else_branch = same () => (float[2,3] e) { e = Identity (grown) }
    > (many)
"""


WITH_TWO_BRANCHES = (
    WITH_A_BRANCH.replace("last = If", "once = If")
    + """
    last = If <
        then_branch = sum () => (float[2,3] f) { f = Add (grown, once) },
        else_branch = difference () => (float[2,3] g) { g = Sub (grown, once) }
    > (many)
"""
)

WITH_A_SCAN_BEHIND_A_BRANCH = (
    WITH_A_BRANCH.replace("last = If", "once = If")
    + """
    total = Scan <num_scan_inputs = 1, body = add (float[3] p, float[3] row) => (float[3] q) { q = Add (p, row) }>
        (zeros, grown)
    last = Sub (once, total)
"""
)

WITH_A_NORM_IN_A_BRANCH = """
    every = Identity (x)
    factors = Constant <value = float[3] {1, 2, 3}> ()
    seven = Constant <value = int64 {7}> ()
    few = Less (count, seven)
    last = If <
        then_branch = normed () => (float[2,3] e) { d = LayerNormalization (start, factors) e = Relu (d) },
        else_branch = same () => (float[2,3] f) { f = Identity (start) }
    > (few)
"""


WITH_PARTS_IN_A_BRANCH = """
    every = Identity (x)
    factors = Constant <value = float[3] {1, 2, 3}> ()
    seven = Constant <value = int64 {7}> ()
    few = Less (count, seven)
    last = If <
        then_branch = scaled () => (float[2,3] e) {
            a, b = Split <axis = 0> (start)
            c = Mul (a, factors)
            e = Concat <axis = 0> (b, c)
        },
        else_branch = same () => (float[2,3] f) { f = Identity (start) }
    > (few)
"""


def model(body: str, opset: int = 17) -> Any:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> loops (float[4,2,3] x, float[2,3] start, int64 count) => '
        f"(float[2,3] last, float[N,M,3] every) <float[3] zeros = {{0, 0, 0}}> {{ {body} }}"
    )


BODIES = (
    *(WITH_TRIP_COUNT, WITH_CONDITION, NESTED, SCAN, SCAN_IN_A_LOOP, WITH_WEIGHTS, WITH_A_SEQUENCE),
    *(WITH_A_BRANCH, WITH_TWO_BRANCHES, WITH_A_SCAN_BEHIND_A_BRANCH),
)


@pytest.mark.parametrize("opset", [12, 17])
@pytest.mark.parametrize("body", BODIES)
def test_loops_compute_what_onnx_runtime_does(body: str, opset: int) -> None:
    assert verify_import(load_model(model(body, opset))) < 1e-6


def test_a_branch_computes_with_parts_and_constants() -> None:
    assert verify_import(load_model(model(WITH_PARTS_IN_A_BRANCH))) < 1e-6


def test_a_branch_reads_one_of_several_results() -> None:
    assert verify_import(load_model(model(WITH_A_NORM_IN_A_BRANCH))) < 1e-5


def test_weights_of_a_body_are_there_once() -> None:
    def weights(steps: int) -> int:
        text = WITH_WEIGHTS.replace("Gather (x, i)", "Gather (x, zero)").replace("{4}", f"{{{steps}}}")
        written = with_loops_written_out(model("zero = Constant <value = int64 {0}> ()" + text))
        return sum(list(tensor.dims) == [3, 3] for tensor in written.graph.initializer)

    assert weights(2) == weights(20) == 1


def test_a_loop_in_a_branch_that_constants_choose() -> None:
    text = WITH_TRIP_COUNT.replace("last, every =", "u, v =").replace("trips = Constant <value = int64 {4}> ()", "")
    body = f"""
        trips = Constant <value = int64 {{4}}> ()
        yes = Constant <value = bool {{1}}> ()
        last, every = If <
            then_branch = looped () => (float[2,3] u, float[4,2,3] v) {{ {text} }},
            else_branch = same () => (float[2,3] p, float[4,2,3] q) {{ p = Identity (start) q = Identity (x) }}
        > (yes)
    """
    assert verify_import(load_model(model(body))) < 1e-6


def test_a_model_with_a_loop_is_tuned(tmp_path: Any) -> None:
    result = eqtune.tune_model(model(WITH_TRIP_COUNT), trials=1, threads=1, work_dir=tmp_path, progress=False)
    x, start = np.ones((4, 2, 3), "float32"), np.zeros((2, 3), "float32")
    last, every = result.run(x, start, np.asarray(0))
    assert every.shape == (4, 2, 3)
    np.testing.assert_allclose(last, every[-1])
    np.testing.assert_allclose(every[0], np.tanh(x[0]), rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (WITH_TRIP_COUNT.replace("(trips, , start)", "(count, , start)"), "how often it runs depends on inputs"),
        (WITH_CONDITION.replace("Less (m, four)", "Less (m, count)"), "whether it goes on depends on inputs"),
        (NESTED.replace("Equal (i, first)", "Equal (i, count)"), "which nodes run depends on inputs"),
        (WITH_TRIP_COUNT.replace("{4}", "{100000}"), "more than 20000 nodes"),
        (WITH_TRIP_COUNT.replace("{4}", "{0}"), "never runs"),
        (WITH_TRIP_COUNT.replace("(trips, , start)", "(, , start)"), "has no end"),
    ],
)
def test_what_cannot_be_written_out_is_refused(body: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(model(body))
