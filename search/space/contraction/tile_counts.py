"""How many tiles, vectors and registers each candidate has: what legality and the estimate both go by.

All functions work on columns of knob values, arrays of shape [n].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .copies import UNPACKED
from .join_vectors import joined_vectors
from .last_tile import overlapping_columns, overlapping_rows
from .plan import Plan, whole_width

__all__ = ["Column", "Tiles", "fused_loops", "tiles"]

Column = NDArray[np.float64]
Loop = tuple[Column, NDArray[np.bool_]]
"""Iterations, and whether the last one is ragged."""


@dataclass(frozen=True)
class Tiles:
    """Derived quantities of each candidate, arrays of shape [n].

    `width` is the elements of a vector, `vectors` the vectors in a row of the tile, `sums` the accumulators, and
    `registers` what the tile needs in all; `row_tiles`, `column_tiles` and `lines` count tiles, ragged ones included;
    `chunks` is the number of parallel iterations (1 when serial).
    """

    width: Column
    vectors: Column
    sums: Column
    registers: Column
    row_tiles: Column
    column_tiles: Column
    lines: Column
    chunks: Column
    scalar_tail: NDArray[np.bool_]
    ragged_rows: NDArray[np.bool_]
    ragged_columns: NDArray[np.bool_]
    whole_rows: NDArray[np.bool_]
    whole_columns: NDArray[np.bool_]
    """Whether the last tile is whole, ragged or not."""
    ragged_lines: NDArray[np.bool_]
    ragged_parallel: NDArray[np.bool_]
    """Whether a ragged loop was fused into the parallel one with others: its tail cannot be split off."""
    redundant_depth: NDArray[np.bool_]
    """Whether the last fused loop has one iteration: the same program as without it."""


def tiles(plan: Plan, lanes: int, v: Mapping[str, Column]) -> Tiles:
    """Count tiles, vectors and registers."""
    mr, m2, nr = v["mr"], v["m2"], v["nr"]
    choices, which = np.unique(nr, return_inverse=True)
    widths = [plan.vector_width(int(choice), lanes) for choice in choices]
    width = np.array([w for w, _ in widths], dtype=np.float64)[which]
    scalar_tail = np.array([scalar for _, scalar in widths])[which]
    pads = np.array([plan.pads_columns(int(choice), lanes) for choice in choices])[which]
    padded = pads & (v["pack"] != UNPACKED)
    whole = np.array([whole_width(int(choice), lanes) for choice in choices], dtype=np.float64)[which]
    overlapping = overlapping_columns(plan, v)
    width = np.where(padded | overlapping, whole, width)
    scalar_tail &= ~overlapping
    joined = np.array([plan.joins_vectors(int(choice), lanes) for choice in choices])[which]
    pieces = np.array([len(joined_vectors(int(choice), lanes)) for choice in choices], dtype=np.float64)[which]
    vectors = np.where(joined, pieces, nr // width)
    width = np.where(joined, lanes, width)
    sums = m2 * mr * vectors
    operands = np.where(m2 * mr > 1, vectors, 1) + 1
    if plan.slides_over_channels:
        operands = vectors + 2
    row_tiles = -(-plan.unrolled_extent // mr)
    column_tiles = -(-plan.vector_extent // nr)
    lines = -(-plan.second_extent // m2)
    ragged_rows = plan.unrolled_extent % mr != 0
    ragged_columns = (plan.vector_extent % nr != 0) & ~padded
    ragged_lines = plan.second_extent % m2 != 0
    outer = [axis.extent for axis in plan.outer] + ([plan.groups] if plan.groups > 1 else [])
    ones = np.ones(len(nr))
    never = np.zeros(len(nr), dtype=np.bool_)
    rows = [(extent * ones, never) for extent in outer]
    if plan.second is not None:
        rows.append((lines, ragged_lines))
    rows.append((-(-row_tiles // v["chunk"]), ragged_rows))
    chunks, spoiled, redundant = fused_loops(v, (column_tiles, ragged_columns), rows)
    return Tiles(
        width=width,
        vectors=vectors,
        sums=sums,
        registers=sums + operands,
        row_tiles=row_tiles,
        column_tiles=column_tiles,
        lines=lines,
        chunks=chunks,
        scalar_tail=scalar_tail,
        ragged_rows=ragged_rows,
        ragged_columns=ragged_columns,
        whole_rows=~ragged_rows | overlapping_rows(plan, v),
        whole_columns=~ragged_columns | overlapping,
        ragged_lines=ragged_lines,
        ragged_parallel=spoiled,
        redundant_depth=redundant,
    )


def fused_loops(
    v: Mapping[str, Column], column: Loop, rows: Sequence[Loop]
) -> tuple[Column, NDArray[np.bool_], NDArray[np.bool_]]:
    """Iterations of the outer loops that are fused; `ragged_parallel` and `redundant_depth` (`Tiles`).

    The loop over columns is outside of those over rows, or inside; `rows` are in order, outermost first.
    """
    chunks = np.ones(len(v["order"]))
    spoiled, redundant = (np.zeros(len(v["order"]), dtype=np.bool_) for _ in range(2))
    for order, loops in enumerate(([column, *rows], [*rows, column])):
        for depth, (extent, ragged) in enumerate(loops):
            inside = (v["order"] == order) & (v["depth"] > depth)
            redundant |= (v["order"] == order) & (v["depth"] == depth + 1) & (extent == 1) & (depth > 0)
            spoiled |= inside & ragged & (v["depth"] > 1) & (extent > 1)
            chunks = np.where(inside, chunks * extent, chunks)
    return chunks, spoiled, redundant
