"""Tensor intrinsics by the names that traces hold: everything that one depends on is in its name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

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


def _mma_fill(sums: str) -> None:
    from .mma import mma_fragments

    mma_fragments("float16", sums)  # whose operands do not matter


def _mma_compute(swapped: str, dtype: str, sums: str, products: str) -> None:
    from .mma import mma_fragments

    mma_fragments(dtype, sums, int(products)).compute(bool(swapped))


def _mma_store(sums: str, scope: str) -> None:
    from .mma import mma_fragments

    mma_fragments("float16", sums).store(scope)


def _mma_load(operand: str, transposed: str, dtype: str, products: str) -> None:
    from .mma import mma_fragments

    mma_fragments(dtype, "float32", int(products)).load(operand, bool(transposed))


def _wmma_fill(sums: str) -> None:
    from .fragments import fragments

    fragments("float16", sums)


def _wmma_compute(swapped: str, dtype: str, sums: str) -> None:
    from .fragments import fragments

    fragments(dtype, sums).compute(bool(swapped))


def _wmma_store(sums: str, scope: str) -> None:
    from .fragments import fragments

    fragments("float16", sums).store(scope)


def _wmma_load(operand: str, transposed: str, dtype: str) -> None:
    from .fragments import fragments

    fragments(dtype, "float32").load(operand, bool(transposed))


_KINDS: tuple[tuple[str, Callable[..., None]], ...] = (
    (rf"eqtune_wgmma_{_DTYPE}_(?:float32|int32)_(\d{{1,3}})_([01])([01])_{_SUMS}(_swapped)?", _warpgroups),
    (rf"eqtune_mma_fill_{_SUMS}", _mma_fill),
    (rf"eqtune_mma_compute_(swapped_)?{_DTYPE}_{_SUMS}_([13])", _mma_compute),
    (rf"eqtune_mma_store_{_SUMS}_{_SCOPE}", _mma_store),
    (rf"eqtune_mma_load_([ab])_(transposed_)?{_DTYPE}_([13])", _mma_load),
    (rf"eqtune_wmma_fill_{_SUMS}", _wmma_fill),
    (rf"eqtune_wmma_compute_(swapped_)?{_DTYPE}_{_SUMS}", _wmma_compute),
    (rf"eqtune_wmma_store_{_SUMS}_{_SCOPE}", _wmma_store),
    (rf"eqtune_wmma_load_([ab])_(transposed_)?{_DTYPE}", _wmma_load),
)
