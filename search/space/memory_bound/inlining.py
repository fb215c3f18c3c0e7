"""Which element-wise stages of a kernel are inlined into what reads them: all but those that would explode.

A stage that reads the one before several times multiplies its loads, and one whose index names an axis several times
multiplies the indices behind it; over a few stages, TVM lowers such values for minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.ir.expr import TensorLoad

from ..expressions import nodes_of
from ..schedule import schedule_of
from .kernel import Kernel, is_library_call, read_kernel

__all__ = ["inlined", "inlined_kernel"]

MOST_LOADS, MOST_LOADS_OF_CALLS = 512, 64
"""Of the value of an element-wise stage that is inlined, and of one with functions. Of running sums of exponentials of
seven elements, TVM lowered one for ten minutes. Transforms of Winograd's tiles load 486."""

MOST_INDEX_NODES = 640
"""Of the index of a load. TVM simplifies one of a thousand nodes for a second, each time that it is seen: of rolls,
reshapes and reflections one behind the other, kernels compiled for minutes."""


def inlined(mod: Any, keep: Iterable[str]) -> Any:
    """A schedule in which every element-wise stage is inlined, except outputs and those named in `keep`."""
    return _inlined(mod, frozenset(keep)).copy()


@lru_cache(maxsize=128)
def _inlined(mod: Any, keep: frozenset[str]) -> Any:
    """Several sketches of a kernel begin so, again for each point; a copy takes a tenth of the time, trace included."""
    schedule = schedule_of(mod)
    root = schedule.get_sblock("root")
    outputs = {schedule.get(block).name_hint for block in schedule.get_output_blocks(root)}
    blocks = schedule.get_child_blocks(root)
    stages = [schedule.get(block) for block in blocks]
    kept = keep | outputs | _large_blocks(stages, keep) | _overwritten(stages)
    for block, stage in zip(blocks, stages, strict=True):
        if str(stage.name_hint) in kept or not _may_inline(stage):
            continue
        try:
            schedule.compute_inline(block)
        except s_tir.ScheduleError:
            continue  # a shape that TVM cannot inline stays a stage
    return schedule


def _may_inline(block: Any) -> bool:
    return block.init is None and all(int(v.iter_type) == tirx.IterVar.DataPar for v in block.iter_vars)


def _overwritten(blocks: Sequence[Any]) -> set[str]:
    """Names of the blocks whose buffers another one writes to, too: statements of an operator, which it does not say
    that they do. TVM would inline the first values all the same."""
    stores = [{store.buffer for store in nodes_of(block.body, tirx.BufferStore)} for block in blocks]
    writers = Counter(buffer for written in stores for buffer in written)
    return {
        str(block.name_hint)
        for block, written in zip(blocks, stores, strict=True)
        if any(writers[buffer] > 1 for buffer in written)
    }


@lru_cache(maxsize=128)
def inlined_kernel(mod: Any, keep: frozenset[str]) -> Kernel:
    """`read_kernel` of the stages that `inlined` leaves: several sketches ask for the same ones.

    Raises
    ------
    ValueError
        When a shape is symbolic.
    """
    return read_kernel(_inlined(mod, keep))


def _large_blocks(blocks: Sequence[Any], keep: frozenset[str]) -> set[str]:
    """Names of the blocks that stay stages, as `keep` do: values of so many loads, and what long indices would read."""
    sizes: dict[Any, _ValueSize] = {}
    found: set[str] = set()
    for block in blocks:
        size = _value_size(block, sizes)
        if size.index_nodes > MOST_INDEX_NODES:
            read = {region.source for region in block.reads} & sizes.keys()
            found |= {sizes.pop(buffer).block for buffer in read}
            size = _value_size(block, sizes)
        if size.loads > (MOST_LOADS_OF_CALLS if size.calls else MOST_LOADS):
            found.add(size.block)
        elif block.init is None and size.block not in keep:
            sizes |= {region.source: size for region in block.writes}
    return found


@dataclass(frozen=True)
class _ValueSize:
    """How large the expression is that a block writes, with the blocks before it inlined.

    Attributes
    ----------
    block : str
        Its name.
    loads : int
    calls : bool
        Whether functions of a library are among it.
    index_nodes : int
        Of the longest index of a load, all dimensions together.
    uses : dict
        How often at most an index names an axis of the result, by its place: the indices of whoever loads the result
        come there.
    """

    block: str
    loads: int
    calls: bool
    index_nodes: int
    uses: dict[int, int]


def _value_size(block: Any, sizes: Mapping[Any, _ValueSize]) -> _ValueSize:
    """`sizes` are of the blocks that are inlined, by what they write."""
    loads, calls = nodes_of(block.body, TensorLoad), nodes_of(block.body, ir.Call)
    read = [sizes[load.source] for load in loads if load.source in sizes]
    places = {index.min: place for region in block.writes for place, index in enumerate(region.region)}
    index_nodes, uses = 0, Counter[int]()
    for load in loads:
        before = sizes.get(load.source)
        nodes, names = before.index_nodes if before else 0, Counter[int]()
        for axis, index in enumerate(load.indices):
            found = nodes_of(index, ir.Expr)
            times = before.uses.get(axis, 0) if before else 1
            nodes += times * len(found)
            for place in (places[node] for node in found if node in places):
                names[place] += times
        index_nodes = max(index_nodes, nodes)
        uses |= names
    return _ValueSize(
        block=str(block.name_hint),
        loads=len(loads) - len(read) + sum(size.loads for size in read),
        calls=any(map(is_library_call, calls)) or any(size.calls for size in read),
        index_nodes=index_nodes,
        uses=dict(uses),
    )
