"""Contractions by tiles of AMX as a sketch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import IRModule

from ..analysis import Kernel
from ..applicable import applies
from ..base import Knob
from ..contraction.copies import AHEAD, AT_ROOT, PAD_AT_OUTER, PAD_AT_ROOT
from ..contraction.dot_sketch import has_strides
from ..contraction.plan import dimension_of
from ..contraction.planning import make_plans
from ..contraction.sketch import TiledContraction
from ..features import feature_table
from ..hardware import Hardware
from ..permission import sums_products_of_float32, with_attribute
from .estimate import tile_cost
from .halves import HALVES_PERMITTED, halves_permitted
from .plan import TilePlan, tile_plan
from .products import SUM_TILES, TILE_ROWS, TileProduct, find_tile_product
from .schedule import LANES, copies_left, schedule_tiles, tile_height

__all__ = ["PARTS", "TileContraction", "permit_halves", "tile_sketches"]

PARTS = "eqtune.parts"
"""Attribute of a kernel whose parameters are parts of larger tensors: for each, the last dimension along which it is a
part, or -1 where it is one piece of memory. Tile registers take in a tile's rows by their distance alone."""

FAMILY_INDEX = 5.0

FEWEST_ROWS = 4
"""With fewer, reading the weights takes the time."""


def permit_halves(mod: IRModule, hardware: Hardware) -> IRModule:
    """The module with the permission for every kernel of float32 whose products tiles would take over.

    Parameters
    ----------
    mod : tvm.ir.IRModule
        Kernels that are not scheduled.
    hardware : Hardware
        Without tiles of bfloat16, no kernel has the permission.
    """
    product = find_tile_product("float32", "float32", "float32", hardware, permitted=True)
    if product is None:
        return mod

    def takes_over(kernel: Kernel) -> bool:
        return sums_products_of_float32(kernel) and any(
            plan.unrolled_extent * plan.second_extent >= FEWEST_ROWS for plan in _tile_plans(kernel, product)
        )

    return with_attribute(mod, HALVES_PERMITTED, 1, takes_over)


def tile_sketches(mod: Any, kernel: Kernel, hardware: Hardware) -> list[TileContraction]:
    """The sketch of tile products where the CPU has them for the kernel's dtypes, else none."""
    contraction = kernel.contraction
    if contraction is None:
        return []
    dtypes = contraction.left.access.dtype, contraction.right.access.dtype, contraction.block.write.dtype
    product = find_tile_product(*dtypes, hardware, halves_permitted(mod["main"]))
    if product is None:
        return []
    for plan in _tile_plans(kernel, product):
        if plan.whole_rows and not product.halves and _lies_apart(mod["main"], plan):
            continue
        sketch = TileContraction(mod, plan, hardware)
        if applies(sketch):  # an odd kernel is for other sketches
            return [sketch]
    return []


def _tile_plans(kernel: Kernel, product: TileProduct) -> list[TilePlan]:
    """Plans whose columns fill tiles."""
    plans = [tile_plan(plan, product) for plan in make_plans(kernel)]
    return [plan for plan in plans if plan is not None and plan.vector_extent >= LANES]


def _lies_apart(function: Any, plan: TilePlan) -> bool:
    """Whether rows of the left operand, or what is in a row, may lie further apart than its shape says (`PARTS`)."""
    cut = [int(dimension) for dimension in (function.attrs or {}).get(PARTS, ())]
    left = plan.contraction.left.access
    if left.buffer >= len(cut):  # one of the kernel's own, unless it only stands for a parameter
        return not plan.staged and max(cut, default=-1) >= 0
    return cut[left.buffer] > min(dimension_of(left, axis) for axis in (plan.unrolled[0], plan.grouped))


class TileContraction(TiledContraction):
    """Tiles of AMX over one kernel.

    Knobs: `mr` rows of a register tile in one line of an image and `m2` lines, which share tiles of `nr` columns;
    `chunk` such tiles in a block; `order`, `depth`, `pack` and `pad` as in `contraction.tiled`.

    Parameters
    ----------
    mod : tvm.ir.IRModule
        The kernel, as "main".
    plan : TilePlan
    hardware : Hardware
    """

    plan: TilePlan

    def __init__(self, mod: Any, plan: TilePlan, hardware: Hardware) -> None:
        super().__init__(mod, plan, hardware)
        self.name = "amx"

    @property
    def skipped_share(self) -> float:
        """Nothing is left out."""
        return 0.0

    @property
    def product_rate(self) -> float:
        """See `Sketch.product_rate`."""
        return self._hardware.tile_flops_per_s / self.plan.product.products / self._hardware.peak_flops_per_s

    def legal(self, values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Sums fit four registers, no row of tiles is wider than the output, and only whole tiles are copied apart."""
        plan, v = self.plan, self._columns(values)
        tiles = -(-v["mr"] // TILE_ROWS) * v["m2"]
        columns = v["nr"] // LANES
        ok = (tiles * columns <= SUM_TILES) & (v["mr"] % -(-v["mr"] // TILE_ROWS) == 0)
        row_tiles = -(-plan.unrolled_extent // v["mr"])
        ok &= row_tiles % v["chunk"] == 0
        copied = copies_left(plan, v)
        ragged = (plan.unrolled_extent % v["mr"] != 0) | (plan.second_extent % v["m2"] != 0)
        staged = copied | bool(plan.staged)
        ok &= (v["pad"] == PAD_AT_ROOT) | staged & ~ragged & (v["depth"] > 0)
        cost = tile_cost(plan, self._hardware, v)
        ok &= (v["depth"] == 0) | (cost.chunks > 1) & ~cost.redundant_depth
        if self._hardware.threads == 1:
            ok &= (v["depth"] == 0) | (v["pad"] == PAD_AT_OUTER)
        else:
            ok &= self._shares_operands(v, cost.chunks, -(-plan.vector_extent // v["nr"]))
        result: NDArray[np.bool_] = ok
        return result

    def latency_s(self, values: NDArray[np.int64]) -> NDArray[np.float64]:
        """The analytic estimate, shape [n]."""
        return tile_cost(self.plan, self._hardware, self._columns(values)).latency_s

    def features(self, values: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `features.FEATURES`."""
        plan, hardware = self.plan, self._hardware
        v = self._columns(values)
        c = tile_cost(plan, hardware, v)
        known = {
            "log_flops": np.log2(plan.contraction.flops),
            "log_bytes": np.log2(plan.kernel.bytes_moved),
            "family": FAMILY_INDEX,
            "log_vector_elements": np.log2(float(LANES)),
            "accumulators": np.ceil(v["mr"] / TILE_ROWS) * v["m2"] * v["nr"] / LANES,
            "register_pressure": tile_height(v["mr"]) / TILE_ROWS,
            "log_tile_m": np.log2(v["mr"] * v["m2"]),
            "log_tile_n": np.log2(v["nr"]),
            "log_block_m": np.log2(v["mr"] * v["chunk"]),
            "log_block_n": np.log2(np.where(v["order"] == 0, v["nr"], plan.vector_extent)),
            "tail_waste": c.waste,
            "log_parallel_chunks": np.log2(c.chunks),
            "imbalance": c.imbalance,
            "log_chunk_flops": np.log2(plan.contraction.flops / c.chunks),
            "l2_footprint": c.block_bytes / hardware.l2_bytes,
            "log_memory_traffic": np.log2(c.far_bytes),
            "log_pack_bytes": np.log2(c.copied_bytes + 1.0),
            "log_reduction": np.log2(float(plan.reduction_extent)),
            "compute_share": c.compute_s / c.latency_s,
            "memory_share": c.memory_s / c.latency_s,
            "log_latency": np.log2(c.latency_s),
            "variant": v["pad"] * 8 + v["pack"] * 2 + v["order"],
        }
        return feature_table(len(values), known)

    def apply(self, values: Mapping[str, int]) -> Any:
        """A `tvm.s_tir.Schedule`; raises what TVM raises when a step is impossible."""
        return schedule_tiles(self._mod, self.plan, values, self._hardware)

    def _make_knobs(self) -> tuple[Knob, ...]:
        plan = self.plan
        inside = not has_strides(plan.contraction.left.access)  # what a tile reads of such is no box
        pads = (PAD_AT_ROOT, PAD_AT_OUTER) if inside else (PAD_AT_ROOT,)
        lines = tuple(m for m in (1, 2, 4) if m <= plan.second_extent)
        rows = _row_choices(plan.unrolled_extent)
        fixed = {
            "mr": rows,
            "m2": lines,
            "ku": (1,),
            "chunk": _chunks(plan.unrolled_extent, rows),
            "pack": (AHEAD,) if plan.panel_is_weight else (AT_ROOT,),
            "pad": pads,
        }
        return tuple(replace(knob, values=fixed.get(knob.name, knob.values)) for knob in super()._make_knobs())

    def _vector_tiles(self) -> list[int]:
        """Whole tiles, no more than the columns fill: sums of a wider one would lie across the next row's."""
        most = max(1, self.plan.vector_extent // LANES)
        return [LANES * count for count in range(1, min(most, SUM_TILES) + 1)]


def _row_choices(rows: int) -> tuple[int, ...]:
    """Rows of register tiles, of one to four tiles: the fewest that cover all rows in as many, and divisors."""
    found = set()
    for count in range(1, SUM_TILES + 1):
        groups = -(-rows // (count * TILE_ROWS))
        for more in range(3):
            height = -(-rows // ((groups + more) * count))
            found.add(height * count)
        found |= {height * count for height in range(8, TILE_ROWS + 1) if rows % (height * count) == 0}
    return tuple(sorted(mr for mr in found if mr <= rows and mr % -(-mr // TILE_ROWS) == 0)) or (min(rows, TILE_ROWS),)


def _chunks(rows: int, choices: tuple[int, ...]) -> tuple[int, ...]:
    found = {1}
    for mr in choices:
        tiles = -(-rows // mr)
        found |= {
            count for count in (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 28, 32, 49, 56, 64) if tiles % count == 0
        }
        found.add(tiles)
    return tuple(sorted(found))
