"""Tensor intrinsics by the names that traces hold: everything that one depends on is in its name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

__all__ = ["register_intrinsic"]

_DTYPE, _SUMS, _SCOPE = "(float16|bfloat16|float32|int8|uint8)", "(float16|float32|int32)", r"(shared(?:\.dyn)?)"


def register_intrinsic(name: str) -> bool:
    """Register what a schedule of this space calls so; False, and nothing, for names of others."""
    for pattern, register in _KINDS:
        if match := re.fullmatch(pattern, name):
            # Dtypes that do not go together, for example: TVM then refuses the trace that has the name.
            with contextlib.suppress(Exception):
                register(*match.groups(default=""))
                return True
    return False


def _warpgroups(dtype: str, width: str, a_along: str, b_along: str, sums: str, swapped: str) -> None:
    from .warpgroup import MOST_COLUMNS, multiply_intrinsic

    if 0 < int(width) <= MOST_COLUMNS and int(width) % 8 == 0:
        multiply_intrinsic(dtype, sums, int(width), a_along == "1", b_along == "1", bool(swapped))


def _fragments(kind: str, dtype: str, sums: str, products: str = "1") -> Any:
    if kind == "mma":
        from .mma import mma_fragments

        return mma_fragments(dtype, sums, int(products))
    from .fragments import fragments

    return fragments(dtype, sums)


def _fill(kind: str, sums: str) -> None:
    _fragments(kind, "float16", sums)  # whose operands do not matter


def _compute(kind: str, swapped: str, dtype: str, sums: str, products: str = "1") -> None:
    _fragments(kind, dtype, sums, products).compute(bool(swapped))


def _store(kind: str, sums: str, scope: str) -> None:
    _fragments(kind, "float16", sums).store(scope)


def _load(kind: str, operand: str, transposed: str, dtype: str, products: str = "1") -> None:
    _fragments(kind, dtype, "float32", products).load(operand, bool(transposed))


_KINDS: tuple[tuple[str, Callable[..., None]], ...] = (
    (rf"eqtune_wgmma_{_DTYPE}_(?:float32|int32)_(\d{{1,3}})_([01])([01])_{_SUMS}(_swapped)?", _warpgroups),
    (rf"eqtune_(w?mma)_fill_{_SUMS}", _fill),
    (rf"eqtune_(w?mma)_store_{_SUMS}_{_SCOPE}", _store),
    (rf"eqtune_(mma)_compute_(swapped_)?{_DTYPE}_{_SUMS}_([13])", _compute),
    (rf"eqtune_(wmma)_compute_(swapped_)?{_DTYPE}_{_SUMS}", _compute),
    (rf"eqtune_(mma)_load_([ab])_(transposed_)?{_DTYPE}_([13])", _load),
    (rf"eqtune_(wmma)_load_([ab])_(transposed_)?{_DTYPE}", _load),
)
