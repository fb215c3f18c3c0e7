"""Sizes that symbols are taken to be, where forms of a model are compared unmeasured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir

from ..relax_ir.constants import has_shape
from ..relax_ir.tensors import BOUNDS, shape_of

__all__ = ["TYPICAL_SIZE", "typical_size", "typical_sizes"]

TYPICAL_SIZE, TYPICAL_IMAGE = 16, 224
"""Of symbolic sizes, where forms of a model are compared; the second of the height and width of images."""


def typical_size(shape: Sequence[Any], place: int) -> int:
    """Of a size that is open in an input of this shape: an image's, if that has three channels, or another."""
    is_image = len(shape) == 4 and shape[1] == 3 and not any(isinstance(extent, int) for extent in shape[2:])
    return TYPICAL_IMAGE if is_image and place >= 2 else TYPICAL_SIZE


def typical_sizes(mod: ir.IRModule) -> dict[str, int]:
    """Of symbols that have bounds, or are sizes of images, by name."""
    if "main" not in mod:
        return {}
    main = mod["main"]
    low, high = ((main.attrs or {}).get(name, {}) for name in BOUNDS)
    sizes = {str(name): TYPICAL_SIZE for name in low}
    for parameter in main.params:
        shape = shape_of(parameter) if has_shape(parameter.ty) else []
        for place, extent in enumerate(shape):
            if isinstance(extent, ir.Var) and typical_size(shape, place) != TYPICAL_SIZE:
                sizes[str(extent.name)] = typical_size(shape, place)
    sizes = {name: max(size, int(low.get(name, size))) for name, size in sizes.items()}
    return {name: min(size, int(high.get(name, size))) for name, size in sizes.items()}
