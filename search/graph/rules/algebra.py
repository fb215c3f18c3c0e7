"""Element-wise arithmetic: neutral elements, signs, constants gathered, products of sums.

What depends on weights alone is free, so the rules move it together: constants stand second, and second from last.
"""

from __future__ import annotations

from ..attributes import Full, Kind
from .pattern import Pattern, add, binary, divide, full, multiply, negative, relu, subtract, tensors, unary, weights
from .rule import Match, Rule, both_ways
from .shapes import keeps_range

__all__ = ["ALGEBRA_LAWS", "ALGEBRA_RULES"]

x, y, z = tensors("x y z")
v, w = weights("v w")
c = full("c")


def one(m: Match) -> bool:
    """The constant is 1."""
    return bool(m.c.value == 1)


def zero(m: Match) -> bool:
    """The constant is 0."""
    return bool(m.c.value == 0)


def two(m: Match) -> bool:
    """The constant is 2."""
    return bool(m.c.value == 2)


def keeps_type(m: Match) -> bool:
    """The other operand broadcasts to nothing larger than x."""
    return bool(m.out[0] == m.x)


def _unit(m: Match) -> Full:
    return Full((), 1.0, m.w.dtype)


def _power(exponent: Pattern) -> Pattern:
    return binary(x, exponent, Kind("power"))


_SIGMOID = unary(x, Kind("sigmoid"))
_TIDY = "nothing to do"
_GATHER = "constants that meet are computed ahead of time"

ALGEBRA_RULES: tuple[Rule, ...] = (
    Rule("add-zero", add(x, c), x, _TIDY, when=(zero, keeps_type)),
    Rule("subtract-zero", subtract(x, c), x, _TIDY, when=(zero, keeps_type)),
    Rule("multiply-by-one", multiply(x, c), x, _TIDY, when=(one, keeps_type), source="TASO"),
    Rule("divide-by-one", divide(x, c), x, _TIDY, when=(one, keeps_type)),
    Rule("power-of-one", _power(c), x, _TIDY, when=(one, keeps_type)),
    Rule("power-of-two", _power(c), unary(x, Kind("square")), "no call of pow", when=(two, keeps_type)),
    Rule("square-by-name", multiply(x, x), unary(x, Kind("square")), "one operand instead of two"),
    Rule("negative-negative", negative(negative(x)), x, _TIDY),
    Rule("square-of-negative", unary(negative(x), Kind("square")), unary(x, Kind("square")), _TIDY),
    Rule("relu-relu", relu(relu(x)), relu(x), _TIDY),
    Rule("relu-by-name", binary(x, c, Kind("maximum")), relu(x), "relu fuses", when=(zero, keeps_type)),
    Rule("silu-by-name", multiply(x, _SIGMOID), unary(x, Kind("silu")), "one operator"),
    Rule("silu-by-name-swapped", multiply(_SIGMOID, x), unary(x, Kind("silu")), "one operator"),
    Rule("add-weight-second", add(w, x), add(x, w), "one form of a bias"),
    Rule("multiply-weight-second", multiply(w, x), multiply(x, w), "one form of a scale"),
    Rule("subtract-weight", subtract(x, w), add(x, negative(w)), "one form of a bias"),
    Rule(
        "divide-by-weight",
        divide(x, w),
        multiply(x, divide(full(_unit), w)),
        "a scale folds into weights",
        worth=(keeps_range,),
    ),
    Rule("negative-of-scale", negative(multiply(x, w)), multiply(x, negative(w)), _GATHER),
    Rule("scale-of-negative", multiply(negative(x), w), multiply(x, negative(w)), _GATHER),
    Rule("negative-of-difference", negative(subtract(x, y)), subtract(y, x), "one operator"),
    Rule("add-negative", add(x, negative(y)), subtract(x, y), "one operator"),
    Rule("add-weights", add(add(x, v), w), add(x, add(v, w)), _GATHER),
    Rule(
        "multiply-weights",
        multiply(multiply(x, v), w),
        multiply(x, multiply(v, w)),
        _GATHER,
        worth=(keeps_range,),
    ),
    Rule(
        "scale-of-bias",
        multiply(add(x, v), w),
        add(multiply(x, w), multiply(v, w)),
        "the scale can reach weights",
        worth=(keeps_range,),
    ),
    Rule(
        "sum-of-scaled",
        add(multiply(x, w), multiply(y, w)),
        multiply(add(x, y), w),
        "one product instead of two",
        worth=(keeps_range,),
    ),
)
"""Rules that simplify, or bring constants together."""

_LAW = "needed to prove other equalities; alone it only multiplies terms"

ALGEBRA_LAWS: tuple[Rule, ...] = (
    Rule("add-commute", add(x, y), add(y, x), _LAW, source="TASO"),
    *both_ways(
        "add-associate-right", add(add(x, y), z), "add-associate-left", add(x, add(y, z)), reason=_LAW, source="TASO"
    ),
    Rule("multiply-commute", multiply(x, y), multiply(y, x), _LAW, source="TASO"),
    *both_ways(
        "multiply-associate-right",
        multiply(multiply(x, y), z),
        "multiply-associate-left",
        multiply(x, multiply(y, z)),
        reason=_LAW,
        source="TASO",
    ),
    *both_ways(
        "multiply-of-sum",
        multiply(add(x, y), z),
        "sum-of-products",
        add(multiply(x, z), multiply(y, z)),
        reason=_LAW,
        source="TASO",
    ),
    *both_ways("subtract-as-add", subtract(x, y), "add-of-negative", add(x, negative(y)), reason=_LAW),
    *both_ways("negative-of-sum", negative(add(x, y)), "sum-of-negatives", add(negative(x), negative(y)), reason=_LAW),
    *both_ways(
        "quotient-of-sum", divide(add(x, y), z), "sum-of-quotients", add(divide(x, z), divide(y, z)), reason=_LAW
    ),
    *both_ways(
        "divide-of-product", divide(multiply(x, y), z), "product-with-quotient", multiply(x, divide(y, z)), reason=_LAW
    ),
    Rule("maximum-commute", binary(x, y, Kind("maximum")), binary(y, x, Kind("maximum")), _LAW),
    Rule("minimum-commute", binary(x, y, Kind("minimum")), binary(y, x, Kind("minimum")), _LAW),
)
"""The laws of a commutative ring: right, but they let an e-graph grow without end."""
