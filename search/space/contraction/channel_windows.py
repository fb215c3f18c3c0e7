"""What windows of channels cost beside their multiply-adds: depthwise convolutions, vectors along the channels.

Each product loads its own data. Where an image has channels last, pixels are many bytes apart, mostly a power of two: a
tile's lines share few sets of the first-level cache, and how many of them it holds decides how often they are fetched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ..access import dtype_bytes
from ..hardware import PAGE_BYTES, Hardware
from .plan import Plan
from .prefetch import LINE_BYTES
from .tile_counts import Column, Tiles

__all__ = ["WINDOW_SUMS", "apart", "fetching_s", "gathered"]

WINDOW_SUMS = 8.0
"""Sums of a depthwise tile from which it slows down, 4 % each: weights and the window's data want registers as well."""
GATHERED = 7.0
"""Vector-instruction times of a vector whose elements are not side by side (Zen 5, depthwise convolution of 96 x 112 x
112 with stride 2, channels first: 1015 us; 87 with whole vectors and shuffles)."""
CHANNELS_APART = 0.3
"""Extra time of windows of which several tiles are computed before the next channels, as rows are read from memory in
pieces then (two threads of Zen 3, NASNet-A's depthwise 3 x 3 in the model, us: 126, with two tiles each 174; 65 and 97;
34 and 44). Alone, rows are in a cache, and little is lost."""
FETCHING = 1.5
"""How much faster lines reach the first-level cache from the second than a copy there is. Prefetchers fetch them in
pairs. Two threads of Zen 3 (77 GB/s each: 1.1 ns a pair), depthwise with channels last, in NASNet-A (us), with tiles of
2 x 4 pixels and 8 channels, and of 2 pixels in a row and 32 channels: 56 x 56 x 256, 7 x 7, stride 2 997 and 584; 28 x
28 x 512 likewise 952 and 334; 14 x 14 x 512, 3 x 3, 68 and 51; 56 x 56 x 128 175 and 171, one pixel wide 137. On Zen 5
(270 GB/s), a pair that took as many vector instructions made MobileNet-v2 keep channels first, 5 to 25 % slower."""
PAIR_BYTES = 2 * LINE_BYTES


def gathered(plan: Plan) -> float:
    """Loads that a vector of a window's data takes: one, or one for each few elements where they lie apart."""
    return 1.0 if plan.contraction.left.access.stride(plan.vector.position) == 1 else GATHERED


def apart(v: Mapping[str, Column], t: Tiles) -> Column:
    """Extra time of windows of which several tiles are computed before the next channels, as a factor."""
    together = (v["order"] == 1) & (v["chunk"] == 1) | (t.column_tiles == 1)
    return np.where(together, 1.0, 1.0 + CHANNELS_APART)


def fetching_s(plan: Plan, hardware: Hardware, v: Mapping[str, Column]) -> Column:
    """Seconds in which the lines of an image reach the first-level cache, of a tile of a window; channels last."""
    return _pairs_fetched(plan, hardware, v) * PAIR_BYTES / (FETCHING * hardware.cache_bandwidth_bytes_per_s)


def _pairs_fetched(plan: Plan, hardware: Hardware, v: Mapping[str, Column]) -> Column:
    """Pairs of lines of an image that a tile of a window fetches into the first-level cache; channels last.

    Where the cache holds a tile's pixels with all their channels, only those that the tile before had not. Else all of
    them, for each of their channels anew; and, where they are too many for the few sets that pixels a power of two
    apart share, for each row of taps anew.
    """
    image = plan.contraction.left.access
    across, taps = plan.unrolled[-1], plan.reduction[-1]
    strides = {axis.position: image.stride(axis.position) or 0 for axis in (*plan.row_axes, *plan.reduction)}
    if image.stride(plan.vector.position) != 1 or not strides[taps.position]:
        return np.zeros_like(v["mr"])
    item_bytes = dtype_bytes(image.dtype)
    step = strides[across.position] / strides[taps.position]
    pixels = np.minimum((v["mr"] - 1.0) * step + taps.extent, v["mr"] * taps.extent)
    rows_of_taps = float(plan.reduction_extent // taps.extent)
    rows = np.full_like(v["mr"], rows_of_taps)
    if plan.second is not None:
        beside = max((strides[axis.position] for axis in plan.reduction[:-1] if axis.extent > 1), default=0)
        step_down = strides[plan.second.position] / beside if beside else rows_of_taps
        rows = np.minimum((v["m2"] - 1.0) * step_down + rows_of_taps, v["m2"] * rows_of_taps)
    pairs = np.ceil(v["nr"] * item_bytes / PAIR_BYTES)
    bytes_apart = math.gcd(PAGE_BYTES, *(item_bytes * strides[axis.position] for axis in plan.row_axes))
    ways = hardware.l1_bytes // PAGE_BYTES
    places = ways * max(PAGE_BYTES // max(bytes_apart, LINE_BYTES), 1)
    of_all_channels = rows * pixels * plan.vector.extent * item_bytes
    once = rows * pixels * pairs
    again = v["m2"] * rows_of_taps * pixels * pairs
    new = rows * np.minimum(v["mr"] * step, pixels) * pairs
    return np.where(of_all_channels <= 0.7 * hardware.l1_bytes, new, np.where(rows * pixels <= places, once, again))
