"""The vectorising forms of exp and its like agree with numpy in double precision, also at the edges."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.special
import tvm
import tvm_ffi
from tvm import te, tirx
from tvm.s_tir import Schedule

from eqtune.search.space.memory_bound import vectorizable_math
from eqtune.search.space.memory_bound.math_forms import exp_below_zero

FORMS: dict[str, tuple[Callable[..., object], Callable[..., np.ndarray], float, float]] = {
    # name: (TVM's operator, reference, range of arguments, largest error in units in the last place)
    "exp": (tirx.exp, np.exp, 86.0, 2.5),
    "tanh": (tirx.tanh, np.tanh, 12.0, 5.0),
    "sigmoid": (tirx.sigmoid, scipy.special.expit, 80.0, 3.0),
    "erf": (tirx.erf, scipy.special.erf, 6.0, 6.0),
    "sinh": (tirx.sinh, np.sinh, 88.5, 6.0),
    "cosh": (tirx.cosh, np.cosh, 88.5, 6.0),
    "log": (lambda x: tirx.log(tirx.abs(x)), lambda x: np.log(np.abs(x)), 1e4, 1.0),
    "cube": (lambda x: tirx.power(x, 3.0), lambda x: x**3, 50.0, 1.5),
    "reciprocal square": (lambda x: tirx.power(x, -2.0), lambda x: x**-2, 50.0, 1.5),
    "root": (lambda x: tirx.power(tirx.abs(x), 0.5), lambda x: np.sqrt(np.abs(x)), 1e4, 0.5),
    "reciprocal root": (lambda x: tirx.power(tirx.abs(x), -0.5), lambda x: np.abs(x) ** -0.5, 1e4, 1.5),
    "three quarters": (lambda x: tirx.power(tirx.abs(x), 0.75), lambda x: np.abs(x) ** 0.75, 1e4, 2.5),
    "quarter": (lambda x: tirx.power(tirx.abs(x), 0.25), lambda x: np.abs(x) ** 0.25, 1e4, 1.0),
}
COUNT = 1 << 14


def evaluate(form: Callable[..., object], values: np.ndarray) -> tuple[np.ndarray, str]:
    """The form applied to float32 values in vectors of 16, and its program text."""
    x = te.placeholder((values.size,), "float32", "x")
    y = te.compute((values.size,), lambda i: form(x[i]), "y")
    func = in_vectors(te.create_prim_func([x, y]))
    library = tvm.compile(tvm.IRModule({"main": func}), target=tvm.target.Target({"kind": "llvm"})).jit()
    out = tvm.runtime.tensor(np.zeros_like(values))
    library["main"](tvm.runtime.tensor(values), out)
    return out.numpy(), func.script()


def in_vectors(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Scheduled in vectors of 16, then rewritten."""
    schedule = Schedule(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}))
    _, inner = schedule.split(schedule.get_loops(schedule.get_sblock("y"))[0], [None, 16])
    schedule.vectorize(inner)
    return vectorizable_math(schedule.mod["main"])


@pytest.mark.parametrize("name", FORMS)
def test_error_is_a_few_units_in_the_last_place(name: str) -> None:
    form, reference, bound, most = FORMS[name]
    rng = np.random.default_rng(0)
    small = rng.standard_normal(COUNT // 2)
    values = np.concatenate([np.linspace(-bound, bound, COUNT // 2), small]).astype(np.float32)
    got, script = evaluate(form, values)
    assert not any(f"T.{call}(" in script for call in (name, "pow"))
    expected = reference(values.astype(np.float64))
    error = np.abs(got - expected) / np.spacing(np.abs(expected).astype(np.float32))
    assert error.max() <= most


def test_a_call_of_what_a_let_names_stays_inside() -> None:
    def named(x: object) -> object:
        name = tirx.Var("name", "float32")
        return tirx.Let(name, tirx.tanh(x), tirx.exp(name) + name)

    values = np.linspace(0.0, 4.0, 64, dtype="float32")
    found, _ = evaluate(named, values)
    np.testing.assert_allclose(found, np.exp(np.tanh(values)) + np.tanh(values), rtol=1e-6)


def test_infinities_and_nan() -> None:
    edges = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 89.0, -104.0, 1e-40], dtype=np.float32)
    values = np.resize(edges, 16)
    with np.errstate(all="ignore"):
        for name in ("exp", "tanh", "sigmoid", "erf", "log", "sinh", "cosh"):
            got, _ = evaluate(FORMS[name][0], values)
            expected = FORMS[name][1](values.astype(np.float64)).astype(np.float32)
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-37)


def test_a_fourth_root_of_minus_zero_is_zero() -> None:
    """As that of libm and of PyTorch, whose reciprocal is not minus infinity."""
    zeros = np.resize(np.array([0.0, -0.0], np.float32), 16)
    for exponent, expected in ((0.25, 0.0), (0.75, 0.0), (-0.25, np.inf), (-0.75, np.inf)):
        got, _ = evaluate(lambda x, power=exponent: tirx.power(x, power), zeros)
        np.testing.assert_array_equal(got, expected)
        assert not np.signbit(got).any()


@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid", "erf", "log", "exp below zero"])
def test_nan_stays_nan_whatever_its_bits(name: str) -> None:
    """GPUs write 0x7FFFFFFF, and what is added to its exponent overflows into a number."""
    form = FORMS[name][0] if name in FORMS else exp_below_zero
    bits = [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFC00080, 0x7FC0FFFF, 0x7F800001, 0x7FA00000]
    got, _ = evaluate(form, np.resize(np.array(bits, np.uint32), 16).view(np.float32))
    assert np.isnan(got).all()


@pytest.mark.parametrize(("form", "reference"), [(tirx.sinh, np.sinh), (tirx.cosh, np.cosh)])
def test_vectors_of_doubles_have_hyperbolic_functions(
    form: Callable[..., object], reference: Callable[..., np.ndarray]
):
    values = np.concatenate([np.linspace(-709.0, 709.0, 64), np.linspace(-1e-3, 1e-3, 64)])
    x = te.placeholder(values.shape, "float64", "x")
    func = in_vectors(te.create_prim_func([x, te.compute(values.shape, lambda i: form(x[i]), "y")]))
    out = tvm.runtime.tensor(np.zeros_like(values))
    tvm.compile(tvm.IRModule({"main": func}), target="llvm").jit()["main"](tvm.runtime.tensor(values), out)
    np.testing.assert_allclose(out.numpy(), reference(values), rtol=1e-14)


def test_other_types_and_functions_without_them_stay_as_they_are() -> None:
    x = te.placeholder((8,), "float64", "x")
    double = te.create_prim_func([x, te.compute((8,), lambda i: tirx.exp(x[i]), "y")])
    assert vectorizable_math(double).same_as(double)
    x = te.placeholder((8,), "float32", "x")
    plain = te.create_prim_func([x, te.compute((8,), lambda i: tirx.sqrt(x[i]), "y")])
    assert vectorizable_math(plain).same_as(plain)


def test_nested_calls_are_all_replaced_and_equal_ones_computed_once() -> None:
    """The chain of NasRNN's cells, four deep: with nested `Let`s it took TVM more than a minute to compile."""

    def cell(x: tirx.PrimExpr) -> tirx.PrimExpr:
        state = tirx.tanh(tirx.sigmoid(tirx.sigmoid(x) + x))
        return tirx.tanh(state * tirx.sigmoid(x) + state)

    values = np.linspace(-9, 9, COUNT).astype(np.float32)
    got, script = evaluate(cell, values)
    assert "T.tanh(" not in script
    assert "T.sigmoid(" not in script
    assert script.count('T.reinterpret("float32"') == 2  # one for each of the two different sigmoids
    x = values.astype(np.float64)
    state = np.tanh(scipy.special.expit(scipy.special.expit(x) + x))
    np.testing.assert_allclose(got, np.tanh(state * scipy.special.expit(x) + state), rtol=2e-6)


def test_arguments_may_have_been_truths() -> None:
    values = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32)
    got, script = evaluate(lambda x: tirx.exp((x > 0.25).astype("float32")), values)
    assert "T.exp(" not in script
    np.testing.assert_allclose(got, np.exp((values > 0.25).astype(np.float32)), rtol=1e-6)


def test_arguments_may_have_been_rounded_to_bfloat16() -> None:
    """LLVM crashed at the rounding, which TVM does not legalise where it names values."""

    def rounded(x: tirx.Expr) -> tirx.Expr:
        return tirx.Cast("float32", tirx.Cast("bfloat16", x))

    values = np.linspace(-4, 4, 64, dtype=np.float32)
    got, script = evaluate(lambda x: tirx.erf(rounded(x) * 0.5), values)
    assert "T.erf(" not in script
    np.testing.assert_allclose(got, scipy.special.erf(values * 0.5), atol=2.0**-7)  # TVM may leave the rounding out


def test_forms_may_be_rounded_to_bfloat16() -> None:
    """TVM writes down twice what it rounds, and no name may be bound twice."""

    def rounded(x: tirx.Expr) -> tirx.Expr:
        return tirx.Cast("float32", tirx.Cast("bfloat16", exp_below_zero(x)))

    values = np.linspace(-9, 0, 64, dtype=np.float32)
    got, _ = evaluate(rounded, values)
    np.testing.assert_allclose(got, np.exp(values), rtol=2.0**-8)


def test_forms_may_be_selected_by() -> None:
    """TVM simplifies twice what a value depends on, such as a leaky ReLU of a softmax."""
    values = np.linspace(-9, 0, 64, dtype=np.float32)
    got, _ = evaluate(lambda x: tirx.Select(exp_below_zero(x) > 0.5, exp_below_zero(x), -exp_below_zero(x)), values)
    np.testing.assert_allclose(got, np.where(np.exp(values) > 0.5, 1, -1) * np.exp(values), rtol=1e-6)


def padded(value: Callable[[tirx.Expr], tirx.Expr], begin: int) -> Callable[..., tirx.Expr]:
    """`value` of what is read, zeros before `begin`."""
    return lambda read: lambda i: tirx.if_then_else(i >= begin, value(read(i - begin)), 0.0)


def silu(x: tirx.Expr) -> tirx.Expr:
    return x * tirx.sigmoid(x)


CHAINS: dict[str, tuple[Callable[..., Callable[..., tirx.Expr]], Callable[[np.ndarray, int], np.ndarray]]] = {
    "chain": (
        lambda read, begin: padded(lambda v: tirx.tanh(tirx.exp(tirx.sigmoid(v))), begin)(read),
        lambda x, begin: np.pad(np.tanh(np.exp(scipy.special.expit(x))), (begin, 0)),
    ),
    "around": (
        lambda read, begin: lambda i: 1.0 + tirx.tanh(padded(tirx.exp, begin)(read)(i)),
        lambda x, begin: 1.0 + np.tanh(np.pad(np.exp(x), (begin, 0))),
    ),
    "both": (
        lambda read, begin: lambda i: silu(padded(silu, begin)(read)(i)),
        lambda x, begin: (lambda y: y * scipy.special.expit(y))(np.pad(x * scipy.special.expit(x), (begin, 0))),
    ),
    "condition in condition": (
        lambda read, begin: padded(tirx.tanh, begin)(padded(tirx.exp, 3)(read)),
        lambda x, begin: np.pad(np.tanh(np.pad(np.exp(x), (3, 0))), (begin, 0))[: 24 + begin],
    ),
    "calls on both sides": (
        lambda read, begin: (
            lambda i: tirx.if_then_else(i >= begin, tirx.tanh(tirx.exp(read(i - begin))), tirx.exp(tirx.tanh(read(i))))
        ),
        lambda x, begin: np.concatenate([np.exp(np.tanh(x[:begin])), np.tanh(np.exp(x))]),
    ),
    "calls in the condition": (
        lambda read, begin: (
            lambda i: tirx.if_then_else(tirx.exp(read(i % 24)) > 1.0, tirx.tanh(tirx.sigmoid(read(i % 24))), 0.0)
        ),
        lambda x, begin: (lambda y: np.where(y > 0, np.tanh(scipy.special.expit(y)), 0))(x[np.arange(24 + begin) % 24]),
    ),
}
"""Of 24 numbers that `read` reads, and where they begin."""


@pytest.mark.parametrize("in_lanes", [False, True])
@pytest.mark.parametrize("begin", [16, 8, 5])
@pytest.mark.parametrize("chain", CHAINS)
def test_nested_calls_beside_conditions(chain: str, begin: int, in_lanes: bool) -> None:
    """Each side is a statement of its own; NasRNN's cell beside another vector took LLVM 5.6 s, now 0.1.

    What lay around a condition was computed once for all lanes of a vector.
    """
    form, reference = CHAINS[chain]
    x = te.placeholder((24,), "float32", "x")
    func = te.create_prim_func([x, te.compute((24 + begin,), form(lambda i: x[i], begin), "y")])
    func = in_vectors(func) if in_lanes else vectorizable_math(func.with_attr("global_symbol", "main"))
    assert not any(f"T.{call}(" in func.script() for call in ("exp", "tanh", "sigmoid"))
    values = np.linspace(-9, 9, 24, dtype=np.float32)
    library = tvm.compile(tvm.IRModule({"main": func}), target=tvm.target.Target({"kind": "llvm"})).jit()
    out = tvm.runtime.tensor(np.ones(24 + begin, np.float32))
    library["main"](tvm.runtime.tensor(values), out)
    np.testing.assert_allclose(out.numpy(), reference(values.astype(np.float64), begin), rtol=4e-6, atol=1e-30)


@pytest.mark.parametrize("begin", [16, 5])
def test_nothing_is_computed_ahead_of_the_condition_that_guards_its_load(begin: int) -> None:
    form, _ = CHAINS["chain"]
    x = te.placeholder((24,), "float32", "x")
    func = vectorizable_math(te.create_prim_func([x, te.compute((24 + begin,), form(lambda i: x[i], begin), "y")]))
    (branch,) = found(func.body, tirx.IfThenElse)
    assert len(found(branch.then_case, tirx.BufferStore)) == 1 + len(found(func.body, tirx.AllocBuffer)) == 4
    assert len(found(branch.else_case, tirx.BufferStore)) == 1
    assert len(found(func.body, tirx.BufferStore)) == 5


def found(statement: tirx.Stmt, kind: type) -> list[tirx.Stmt]:
    nodes: list[tirx.Stmt] = []
    tvm_ffi.structural_walk(statement, (kind, nodes.append))
    return nodes


def test_one_guarded_call_stays_where_it_is() -> None:
    x = te.placeholder((24,), "float32", "x")
    y = te.compute((32,), padded(tirx.exp, 8)(lambda i: x[i]), "y")
    script = vectorizable_math(te.create_prim_func([x, y])).script()
    assert "alloc_buffer" not in script
    assert "T.exp(" not in script
    assert "if_then_else" in script


def test_of_what_and_guards_the_innermost_call_is_replaced() -> None:
    x = te.placeholder((24,), "float32", "x")
    y = te.compute((32,), lambda i: tirx.Cast("float32", tirx.all(i < 24, tirx.tanh(tirx.exp(x[i])) > 0.5)), "y")
    script = vectorizable_math(te.create_prim_func([x, y])).script()
    assert "alloc_buffer" not in script
    assert "T.exp(" not in script
    assert "T.tanh(" in script
