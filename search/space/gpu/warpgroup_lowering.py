"""What TVM's schedules cannot say of a product by `wgmma`.

The pipeline's steps, where S tiles are in shared memory:

    for k:                                      for k:
        a[k], b[k] -> shared                        barrier
        barrier                             ->      multiply(shared) of k - S + 1, without waiting
        multiply(shared) of k - S + 1               a[k], b[k] -> shared
        barrier                                     wait for the sums

One barrier is enough: tiles are overwritten by those of S steps later, behind the next barrier, and every thread has
waited for its sums before it.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir.expr import TensorLoad, TensorRegion

from ..expressions import binding_of, nodes_of, substitute
from ..marks import PIPELINE_ORDER, PIPELINE_STAGE, SWIZZLED
from ..statements import annotations_without, block_with, with_body

__all__ = ["CONSTRAINTS", "CUDA_TYPES", "LANES", "MULTIPLY", "lower_warpgroups"]

LANES = 128
"""Threads of a warpgroup."""

MULTIPLY, WAIT = "eqtune_wgmma", "eqtune_wait_wgmma"
"""What the names of the device functions begin with."""

CUDA_TYPES = {"float32": "float", "int32": "int"}
CONSTRAINTS = {"float32": "f", "int32": "r"}
"""By what assembly asks for a register."""


def lower_warpgroups(func: Any) -> Any:
    """Exchange pieces of lines in blocks marked SWIZZLED, wait as late as possible in the loop marked PIPELINE_STAGE,
    and let each thread use row 0 of its sums.

    The same object when no product in it is computed by warpgroups. Raises ValueError where one is in no pipeline.
    """
    if not _multiplies(func.body):
        return func
    products = [block for block in nodes_of(func.body, s_tir.SBlock) if _multiplies(block.body)]
    matches = [match for block in products for match in block.match_buffers]
    sums = [match.source.source for match in matches if match.buffer.scope() == "local"]

    def own_row(node: Any, indices: Any) -> list[Any] | None:
        if not any(node.same_as(buffer) for buffer in sums):
            return None
        return [*indices[:-2], tirx.const(0, str(indices[-2].ty.dtype)), indices[-1]]

    def load(node: Any) -> Any:
        indices = own_row(node.source, node.indices)
        return node if indices is None else tirx.BufferLoad(node.source, indices)

    def store(node: Any) -> Any:
        indices = own_row(node.buffer, node.indices)
        return node if indices is None else tirx.BufferStore(node.buffer, node.value, indices)

    def region(node: Any) -> Any:
        # What intrinsics see stays whole: they are the ones that know of row 0.
        if not any(node.source.same_as(buffer) for buffer in sums) or _extent(node.region[-2]) == LANES:
            return node
        zero = ir.Range.from_min_extent(tirx.const(0, str(node.region[-2].min.ty.dtype)), 1)
        return tirx.BufferRegion(node.source, [*node.region[:-2], zero, node.region[-1]])

    waits: list[Any] = []

    def pipeline(loop: Any) -> Any:
        changed = _wait_late(loop)
        if changed is not loop:
            waits.append(changed)
        return changed

    body = tvm_ffi.structural_map(func.body, [(TensorLoad, load), (tirx.BufferStore, store), (TensorRegion, region)])
    body = tvm_ffi.structural_map(body, [(s_tir.SBlock, _exchange_pieces), (tirx.For, pipeline)])
    if len(waits) != 1:  # a trace of somebody else: the sums would be read before they are there
        raise ValueError(f"a product by warpgroups in {len(waits)} pipelines")
    return func.with_body(body)


def _exchange_pieces(block: Any) -> Any:
    """The 128-byte swizzle: the piece of a line, by the last three bits of the line's number."""
    if SWIZZLED not in block.annotations:
        return block

    def store(node: Any) -> Any:
        *outer, line, piece, place = node.indices
        return tirx.BufferStore(node.buffer, node.value, [*outer, line, piece ^ (line % 8), place])

    body = tvm_ffi.structural_map(block.body, (tirx.BufferStore, store))
    return block_with(block, body=body, annotations=annotations_without(block, SWIZZLED))


def _wait_late(loop: Any) -> Any:
    """A pipeline's loop whose last statement multiplies: copies come between the instructions and the wait."""
    is_pipeline = PIPELINE_STAGE in loop.annotations and isinstance(loop.body, tirx.SeqStmt)
    if not is_pipeline or not _multiplies(loop.body.seq[-1]):
        return loop
    *copies, multiply = loop.body.seq
    stages = [int(stage) for stage in loop.annotations[PIPELINE_STAGE]]
    region, height = _target(multiply)
    buffer = region.source
    call = tirx.Evaluate(_wait(str(buffer.dtype), int(buffer.shape[-1]), height, buffer.data))
    waited = s_tir.SBlockRealize([], True, s_tir.SBlock([], [region], [region], "wait", call))
    # As one statement: TVM counts copies that follow what waits for them as groups of their own.
    together = tirx.For(tirx.Var("copies", "int32"), 0, 1, tirx.ForKind.SERIAL, tirx.SeqStmt(copies))
    changed = {PIPELINE_STAGE: [stages[0], stages[-1], stages[-1]], PIPELINE_ORDER: [1, 0, 2]}
    return with_body(loop, tirx.SeqStmt([together, multiply, waited]), annotations=changed)


def _wait(sums: str, registers: int, height: int, data: Any) -> Any:
    """Waits until the sums at `data` are there: a thread's `registers` of each of `height` instructions."""
    from tvm.backend.cuda.op import cuda_func_call  # workers for CPUs go without

    name = f"{WAIT}_{sums}_{registers}_{height}"
    places = [LANES * registers * tile + n for tile in range(height) for n in range(registers)]
    held = ", ".join(f'"+{CONSTRAINTS[sums]}"(d[{place}])' for place in places)
    source = f"""
__forceinline__ __device__ void {name}({CUDA_TYPES[sums]}* d) {{
  asm volatile("wgmma.wait_group.sync.aligned 0;" : {held} :: "memory");
}}
"""
    return cuda_func_call(name, data, source_code=source)


def _target(multiply: Any) -> tuple[Any, int]:
    """What a loop of instructions adds to, as a region by the variables of loops around it, and its extent."""
    bindings: list[tuple[Any, Any]] = []
    loops: list[Any] = []
    sums: list[Any] = []

    def visit(realize: Any) -> None:
        bindings.extend((axis, substitute(value, bindings)) for axis, value in binding_of(realize))
        sums.extend(match.source for match in realize.block.match_buffers if match.buffer.scope() == "local")

    tvm_ffi.structural_walk(multiply, [(s_tir.SBlockRealize, visit), (tirx.For, loops.append)], order="pre")
    tiles = [loop for loop in loops if loop.thread_binding is None]
    height = int(tiles[0].extent) if tiles else 1
    bindings += [(loop.loop_var, loop.min) for loop in tiles]
    parts = [(substitute(substitute(part.min, bindings), bindings), part.extent) for part in sums[0].region]
    tile = len(parts) - 4
    ranges = [
        ir.Range.from_min_extent(start, tirx.const(height, str(start.ty.dtype)) if n == tile else extent)
        for n, (start, extent) in enumerate(parts)
    ]
    return tirx.BufferRegion(sums[0].source, ranges), height


def _multiplies(statement: Any) -> bool:
    """Whether a call in a statement issues instructions of warpgroups."""
    calls = nodes_of(statement, ir.Call)
    return any(call.args and str(getattr(call.args[0], "value", "")).startswith(MULTIPLY) for call in calls)


def _extent(part: Any) -> int | None:
    return int(part.extent) if isinstance(part.extent, tirx.IntImm) else None
