"""Pixels as TFLite finds them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["nearest_pixels"]


def nearest_pixels(given: int, wanted: int, align_corners: bool, half_pixel_centers: bool) -> NDArray[np.int64]:
    """Along one axis of `given` pixels, the one that each of `wanted` pixels is: [wanted], in float32 as in TFLite.

    With `align_corners`, places between two pixels are rounded, halves up; otherwise they belong to the pixel before.
    """
    between_first_and_last = align_corners and wanted > 1
    step = np.float32(given - between_first_and_last) / np.float32(wanted - between_first_and_last)
    places = (np.arange(wanted, dtype="float32") + np.float32(0.5 * half_pixel_centers)) * step
    whole = np.floor(places)
    if align_corners:  # not the floor of `places + 0.5`, which is rounded itself
        whole += places - whole >= 0.5
    return np.minimum(whole.astype("int64"), given - 1)
