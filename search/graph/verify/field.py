"""Arithmetic modulo a prime, in which both sides of a rule are compared exactly.

What an identity may rely on, and nothing else:

* add, subtract, multiply, divide, negative, square, matmul, convolution, sums and means: the laws of a field;
* max and min, alone, in reductions and in pooling: a free semilattice each (associative, commutative, idempotent; for
  pooling, with a neutral element). relu(x) is max(x, 0). That max distributes over anything else, or that relu(c x) is
  c relu(x) for c > 0, is not known: rules that need such laws are rejected;
* softmax: f(x - mean(x)) / sum f(x - mean(x)) for a random f, so that it commutes with permutations of its axis and is
  unchanged by adding what is constant along it;
* silu(x) is x sigmoid(x), rsqrt(x) is 1 / sqrt(x), power with a small integer is repeated multiplication; every other
  function is a random function of its arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from fractions import Fraction

import numpy as np

from .evaluate import Array

__all__ = ["PRIMES", "SMALL_EXPONENTS", "Field"]

PRIMES = (2147483647, 2147483629, 2147483587, 2147483579, 2147483563, 2147483549)
"""The largest below 2**31: a product of two residues fits an int64."""

_CHUNK = 32
"""Terms of a matrix product between two reductions: 32 * 2**16 * 2**31 < 2**53, exact in float64."""

SMALL_EXPONENTS = 8
"""Powers up to this one are products."""


class Field:
    """The integers modulo a prime, with random functions that a seed determines. Residues are int64; see `Algebra`."""

    lowest = -1

    def __init__(self, prime: int, seed: int) -> None:
        self.prime = prime
        self._seed = np.uint64(seed)
        self._joined: dict[str, dict[int, frozenset[int]]] = {"max": {}, "min": {}}

    def constant(self, value: float | int | bool) -> Array:
        """A number as the fraction that it stands for: 0.1 is one tenth, not the nearest float."""
        return np.array(_residue(value, self.prime), np.int64)

    def unary(self, kind: str, x: Array) -> Array:
        """See `Algebra`."""
        if kind == "negative":
            return -x % self.prime
        if kind == "square":
            return x * x % self.prime
        if kind == "relu":
            return self._join("max", np.stack([x, np.zeros_like(x)], -1))
        if kind == "silu":
            return x * self._random("sigmoid", x) % self.prime
        if kind == "rsqrt":
            return self._inverse(self._random("sqrt", x))
        return self._random(kind, x)

    def binary(self, kind: str, x: Array, y: Array) -> Array:
        """See `Algebra`."""
        if kind == "add":
            return (x + y) % self.prime
        if kind == "subtract":
            return (x - y) % self.prime
        if kind == "multiply":
            return x * y % self.prime
        if kind == "divide":
            return x * self._inverse(y) % self.prime
        if kind == "power":
            return self._power(x, y)
        return self._join({"maximum": "max", "minimum": "min"}[kind], np.stack([x, y], -1))

    def matmul(self, x: Array, y: Array) -> Array:
        """See `Algebra`."""
        total = np.zeros(1, np.int64)
        for start in range(0, x.shape[-1], _CHUNK):
            a, b = x[..., start : start + _CHUNK], y[..., start : start + _CHUNK, :].astype(np.float64)
            high, low = (a >> 16).astype(np.float64) @ b, (a & 0xFFFF).astype(np.float64) @ b
            total = (total + (high.astype(np.int64) % self.prime << 16) + low.astype(np.int64)) % self.prime
        return total

    def reduce(self, kind: str, x: Array) -> Array:
        """See `Algebra`."""
        if kind in ("max", "min"):
            return self._join(kind, x)
        total: Array = x.sum(-1) % self.prime
        if kind == "mean":
            total = total * pow(x.shape[-1], -1, self.prime) % self.prime
        return total

    def softmax(self, x: Array) -> Array:
        """See `Algebra`."""
        raised = self._random("exp of difference", (x - self.reduce("mean", x)[..., None]) % self.prime)
        return raised * self._inverse(self.reduce("sum", raised))[..., None] % self.prime

    def _inverse(self, x: Array) -> Array:
        return self._raised(x, self.prime - 2)

    def _raised(self, x: Array, exponent: int) -> Array:
        result = np.ones_like(x)
        while exponent:
            if exponent & 1:
                result = result * x % self.prime
            x = x * x % self.prime
            exponent >>= 1
        return result

    def _power(self, x: Array, y: Array) -> Array:
        result = self._random("power", x, y)
        for exponent in range(SMALL_EXPONENTS + 1):
            result = np.where(y == exponent, self._raised(x, exponent), result)
        return result

    def _random(self, name: str, *arguments: Array) -> Array:
        """A random function into the field, the same for equal names and arguments."""
        state = _mixed(np.uint64(int.from_bytes(name.encode()[-8:].rjust(8), "big")) ^ self._seed)
        for argument in arguments:
            state = _mixed(state ^ argument.astype(np.uint64))
        result: Array = (state % np.uint64(self.prime)).astype(np.int64)
        return result

    def _join(self, kind: str, x: Array) -> Array:
        """Join along the last axis. What joins several numbers is a random function of the set of them."""
        known = self._joined[kind]
        rows = x.reshape(-1, x.shape[-1])
        sets = [_atoms(row, known) for row in rows.tolist()]
        result = np.empty(len(sets), np.int64)
        several = [i for i, atoms in enumerate(sets) if len(atoms) > 1]
        for i, atoms in enumerate(sets):
            if len(atoms) < 2:
                result[i] = next(iter(atoms), self.lowest)
        if several:
            members = np.array([member for i in several for member in sets[i]], np.uint64)
            starts = np.cumsum([0, *(len(sets[i]) for i in several[:-1])])
            result[several] = self._random(kind, np.add.reduceat(_mixed(members ^ self._seed), starts))
            known.update((int(result[i]), sets[i]) for i in several)
        return result.reshape(x.shape[:-1])


@functools.lru_cache(maxsize=4096)
def _residue(value: float | int | bool, prime: int) -> int:
    exact = Fraction(value)
    # A model's constants are float32; a float64, from a rule, is nearer to its fraction, whose parts may be larger.
    size, bits = (14, 22) if float(np.float32(value)) == value else (24, 50)
    simple = exact.limit_denominator(1 << size)
    fraction = simple if abs(simple - exact) * (1 << bits) <= abs(exact) else exact
    return fraction.numerator * pow(fraction.denominator, -1, prime) % prime


def _atoms(row: list[int], known: Mapping[int, frozenset[int]]) -> frozenset[int]:
    atoms: set[int] = set()
    for value in row:
        if value in known:
            atoms |= known[value]
        elif value >= 0:
            atoms.add(value)
    return frozenset(atoms)


def _mixed(x: Array | np.uint64) -> Array:
    """Splitmix64's finaliser: a bijection of 64-bit numbers under which neighbours look unrelated."""
    with np.errstate(over="ignore"):
        x = np.asarray(x, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ x >> np.uint64(31))
