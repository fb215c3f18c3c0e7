"""Tiles of sums in vector registers, rows times vectors of columns: which fit, and how fast they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LARGEST_BODY", "tile_efficiency", "tile_fits"]

LARGEST_BODY = 56
"""Multiply-adds in an unrolled body: more run no faster and take up to three times as long to compile. Much smaller
bodies are unrolled by LLVM, which takes as long, and now and then spills."""

FAR_LOAD = 1.8
"""Loads of the first cache that take as long as one of the second (Zen 5, vgg19: tiles of 2 x 64 take 1.35 times as
long as those of 10 x 32)."""

NEAR_LOAD = 1.3
"""Multiply-adds that take as long as a load of the first cache, and what comes with it, where loads are fast."""


def tile_fits(rows: Any, vectors: Any, steps: Any, registers: int) -> NDArray[np.bool_]:
    """Whether the sums fit the registers, with a row's vectors and a factor, and the unrolled body stays small."""
    result: NDArray[np.bool_] = (rows * vectors + vectors + 1 <= registers) & (rows * vectors * steps <= LARGEST_BODY)
    return result


def tile_efficiency(rows: Any, vectors: Any, reduction: float, fmas_per_load: float) -> NDArray[np.float64]:
    """Share of the multiply-add peak that tiles reach over a reduction of that many steps."""
    sums = rows * vectors
    # Four cycles pass before a sum can be added to again; its operands are loaded once for a row or column of products.
    # A row's element is wanted from the first cache again and again, vectors come from the second one.
    loads = (rows + FAR_LOAD * vectors) / sums
    loading = max(NEAR_LOAD, fmas_per_load) * loads
    return np.asarray(np.minimum(1.0, sums / 8) / np.maximum(1.0, loading) * reduction / (reduction + 6))
