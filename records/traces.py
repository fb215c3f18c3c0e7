"""Schedule traces as JSON text, and back. TVM is imported when a function is called, not with the module."""

from __future__ import annotations

import json
from typing import Any

from eqtune.errors import RecordError

from .object_graph import INDEX_MAP_TYPES, checked_graph

__all__ = ["TVM_ANNOTATIONS", "apply_trace", "parse_trace", "replay", "trace_to_json"]

_UNSAFE = frozenset({"AnnotateBufferAccess", "UnsafeHideBufferAccess", "UnsafeSetDType"})
"""Instructions that may change what a kernel computes; no schedule of eqtune or MetaSchedule has them, but for what is
kept in float32..."""

_WIDENED = frozenset({"float16", "bfloat16", "float32"})
"""... in kernels with buffers of these alone, whose sums it makes more precise."""

TVM_ANNOTATIONS = frozenset(
    {
        "pragma_auto_unroll_max_step",
        "pragma_loop_partition_hint",
        "pragma_unroll_explicit",
        "software_pipeline_async_stages",
        "software_pipeline_order",
        "software_pipeline_stage",
        "tirx.manifest_shared_memory_local_stage",
    }
)
"""What schedules of eqtune annotate by names of TVM's: those of `search/space/marks.py`. Some others make TVM link
code."""

_ANNOTATIONS = TVM_ANNOTATIONS | {
    "double_buffer_scope",
    "local_stage",
    "permuted_layout",
    "vector_bytes",
    "warp_execution",
}
"""What schedules of eqtune and of MetaSchedule annotate, beside names of their own."""

_OWN_ANNOTATIONS = ("eqtune.", "meta_schedule.")

_TILES = frozenset({"SamplePerfectTile", "SamplePartitionedTile"})
"""Instructions that choose the lengths of tiles: at random, unless their decisions are stored, too."""


def trace_to_json(trace: Any) -> str:
    """A `tvm.s_tir.schedule.Trace` as compact JSON text.

    `Trace.as_json` leaves IntImm and FloatImm objects inside, which `json` cannot write: they become numbers here.
    """
    return json.dumps(_plain(trace.as_json()), separators=(",", ":"))


def apply_trace(text: str, schedule: Any) -> None:
    """Replay `text` (from `trace_to_json`) on a fresh `tvm.s_tir.Schedule` of the same kernel.

    The schedule is changed in place. A schedule made with `error_render_level="none"` makes a failing trace cheap.

    Raises
    ------
    RecordError
        When the text is not a trace, or does not fit the kernel. The schedule may be half changed then.
    """
    from tvm.s_tir.schedule import ScheduleError, Trace

    trace = parse_trace(text)
    if any(kind == "UnsafeSetDType" for kind, *_ in trace[0]) and not _dtypes(schedule.mod) <= _WIDENED:
        raise RecordError("a stored trace widens sums to float32 in a kernel that has other types")
    try:
        Trace.apply_json_to_schedule(trace, schedule)
    except (ScheduleError, ValueError, TypeError, KeyError, IndexError, RuntimeError, OverflowError) as error:
        message = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RecordError(f"a stored trace does not fit this kernel: {message}") from error


def replay(text: str, mod: Any) -> Any:
    """A new `tvm.s_tir.Schedule` of `mod` with the trace applied. Raises RecordError as `apply_trace` does."""
    from tvm.s_tir import Schedule

    schedule = Schedule(mod, error_render_level="none")
    apply_trace(text, schedule)
    return schedule


def parse_trace(text: str) -> list[list[Any]]:
    """The trace as [instructions, decisions], checked.

    An instruction is [kind, inputs, attributes, outputs], a decision [index of an instruction, value]. TVM checks
    most of this itself, but it would write out of bounds for an index that is out of range, divide by a tile of no
    elements, look for ever for tiles that nothing decides, link code that an annotation holds, and build whatever an
    index map is said to be. Raises RecordError.
    """
    try:
        trace = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"a stored trace is not JSON: {error}") from error
    if not (isinstance(trace, list) and len(trace) == 2 and all(isinstance(part, list) for part in trace)):
        raise RecordError("a stored trace is not a pair of instructions and decisions")
    instructions, decisions = trace
    instructions[:] = map(_checked_instruction, instructions)
    decided: dict[int, Any] = {}
    for decision in decisions:
        match decision:
            case [int(index), value] if 0 <= index < len(instructions) and _is_decision(value):
                decided[index] = value
                continue
        raise RecordError(f"a stored trace has a malformed decision: {str(decision)[:80]}")
    for index, (kind, *_) in enumerate(instructions):
        if kind in _TILES and decided.get(index) is None:
            raise RecordError(f"a stored trace has the instruction {kind!r} without its decision")
    return trace


def _is_decision(value: Any) -> bool:
    """Whether it is no list, or one of tiles: TVM computes the first, and divides by the others."""
    return not isinstance(value, list) or (all(type(tile) is int for tile in value) and 0 not in value[1:])


def _checked_instruction(instruction: Any) -> list[Any]:
    match instruction:
        case ["Annotate", list(), [str(key)], list()] if key in _ANNOTATIONS or key.startswith(_OWN_ANNOTATIONS):
            pass
        case ["Annotate", list(), [str(key)], list()]:
            raise RecordError(f"a stored trace has the annotation {key!r:.80}, which no schedule needs")
        case ["UnsafeSetDType", [str()], [int(), "float32"], list()]:
            pass
        case ["SamplePerfectTile", list(), [int(tiles), int()], list()] if tiles > 0:
            pass
        case ["SamplePartitionedTile", list(), [int(tiles), int(at), int(by)], list()] if 0 <= at < tiles and by > 0:
            pass
        case [str(kind), *_] if kind in _TILES:
            raise RecordError(f"a stored trace has a malformed choice of tiles: {str(instruction)[:80]}")
        case [str(kind), list(), list(), list()] if kind in _UNSAFE:
            raise RecordError(f"a stored trace has the instruction {kind!r}, which no schedule needs")
        case ["Annotate", *_]:
            raise RecordError(f"a stored trace has a malformed annotation: {str(instruction)[:80]}")
        case [str(), list(), list(), list()]:
            pass
        case _:
            raise RecordError(f"a stored trace has a malformed instruction: {str(instruction)[:80]}")
    kind, inputs, attributes, outputs = instruction
    if kind == "TransformLayout" and attributes[2:3] == [None]:  # no value to pad with
        return [kind, _checked(inputs), [*_checked(attributes[:2]), None, *_checked(attributes[3:])], outputs]
    return [kind, _checked(inputs), _checked(attributes), outputs]


def _dtypes(mod: Any) -> set[str]:
    """Of all buffers of its functions."""
    import tvm_ffi
    from tvm.s_tir import SBlock

    blocks: list[Any] = []
    functions = list(mod.functions.values())
    for function in functions:
        tvm_ffi.structural_walk(function.body, (SBlock, blocks.append))
    buffers = [*(p for f in functions for p in f.params), *(b for block in blocks for b in block.alloc_buffers)]
    return {str(buffer.dtype) for buffer in buffers}


def _checked(value: Any) -> Any:
    """The value, without nulls, which TVM follows, and with its index maps checked.

    Those are text that begins like a JSON object, which TVM reads as one.
    """
    if value is None:
        raise RecordError("a stored trace has a null where a value must be")
    if isinstance(value, list):
        return [_checked(item) for item in value]
    if not (isinstance(value, str) and value.lstrip().startswith("{")):
        return value
    try:
        return checked_graph(value, INDEX_MAP_TYPES)
    except RecordError as error:
        raise RecordError(f"a stored trace has a damaged index map: {error}") from error


def _plain(value: Any) -> Any:
    """Nested lists and dicts of Python's own types."""
    from tvm import tirx

    if isinstance(value, tirx.IntImm):
        return int(value.value)
    if isinstance(value, tirx.FloatImm):
        return float(value.value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str):  # tvm_ffi.String is a str; json wants exactly that
        return str(value)
    return value
