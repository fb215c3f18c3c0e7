"""NonMaxSuppression as one kernel that writes the chosen boxes to the first rows of a table, and how many they are.

TVM's own legalisation takes these rows out itself, as a tensor of whose size nothing is known, and its kernel sorts all
scores of a class by one thread, starts a parallel region for each box that is chosen, and takes 3 s to compile. Here,
threads share the classes; the best box that is left is looked for each time, among those whose scores are high enough.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm import ir, relax, te, tirx
from tvm.script.ir_builder import tirx as T

from ..relax_ir.constants import array_of, is_static_tensor
from ..relax_ir.functions import operator, top_level_bindings
from ..relax_ir.te_kernels import Routine, extern_kernel, with_te_kernels
from ..relax_ir.tensors import sizes_read
from .workers import array, variable, workers, worthwhile_threads

__all__ = ["write_choices"]

CHOICE = "relax.vision.all_class_non_max_suppression"


def write_choices(mod: ir.IRModule, threads: int) -> ir.IRModule:
    """Replace the choices whose number of rows the model asks for, for a CPU; all others stay."""
    return with_te_kernels(mod, "non_max_suppression", lambda function: _found(function, threads))


def _found(function: relax.Function, threads: int) -> dict[relax.Var, Routine]:
    asked = sizes_read(function)
    return {
        binding.var: _choice(*binding.value.args, threads=threads)
        for binding in top_level_bindings(function)
        if binding.var in asked and operator(binding.value) == CHOICE and _is_known(binding.value.args)
    }


def _choice(boxes: Any, scores: Any, *limits: Any, threads: int) -> Routine:
    """The kernel of one choice; its limits are numbers."""
    most, overlap, least = (array_of(value).item() for value in limits)
    compute = partial(_choose, most=int(most), overlap=overlap, least=least, threads=threads)
    return Routine([boxes, scores], compute)


def _is_known(arguments: Any) -> bool:
    """Whether shapes and limits are numbers, and boxes that do not overlap stay."""
    limits = arguments[2:]
    known = all(isinstance(value, ir.GenericConst) for value in limits)
    return known and all(is_static_tensor(value.ty) for value in arguments) and array_of(limits[1]).item() > 0


def _choose(
    boxes: te.Tensor, scores: te.Tensor, most: int, overlap: float, least: float, threads: int
) -> list[te.Tensor]:
    """Rows of image, class and box: of each class its best boxes in order, but for those that overlap a better one.

    Boxes are [images, boxes, 4], by two opposite corners, and scores [images, classes, boxes]. A box overlaps another
    if the share of both that they have in common is `overlap` or more. Of equal scores, the first box is better. NaN is
    not chosen.
    """
    images, classes, count = (int(extent) for extent in scores.shape)
    groups, most, dtype = images * classes, min(most, count), str(scores.dtype)
    nothing = tirx.const(float("-inf"), dtype)

    def body(corners: Any, given: Any, table: Any, total: Any) -> None:
        kept, numbers = array(groups * most, "int32"), array(groups, "int32")

        def is_overlapped(group: Any, box: Any) -> Any:
            """1 or 0: whether a box overlaps one that is kept of its class."""
            found, at = _counter(), _counter()
            with T.While(tirx.all(found[0] == 0, at[0] < numbers[group])):
                first = group // classes * count
                one, other = (
                    [corners[(first + place) * 4 + side] for side in range(4)]
                    for place in (box, kept[group * most + at[0]])
                )
                with T.If(_overlaps(one, other, tirx.const(overlap, dtype))), T.Then():
                    found[0] = 1
                at[0] = at[0] + 1
            return found[0]

        def choose(group: Any) -> None:
            places, values, left = array(count, "int32"), array(count, dtype), _counter()
            with T.serial(0, tirx.IntImm("int64", count)) as box:
                score = given[group * count + box]
                with T.If(score > tirx.const(least, dtype)), T.Then():
                    places[left[0]] = box.astype("int32")
                    values[left[0]] = score
                    left[0] = left[0] + 1
            best, place, looked_at = variable(dtype), variable("int32"), _counter()
            numbers[group] = 0
            with T.While(tirx.all(numbers[group] < most, looked_at[0] < left[0])):
                best[0] = nothing
                with T.serial(0, left[0]) as at, T.If(values[at] > best[0]), T.Then():
                    best[0] = values[at]
                    place[0] = at
                values[place[0]] = nothing
                looked_at[0] = looked_at[0] + 1
                with T.If(is_overlapped(group, places[place[0]]) == 0), T.Then():
                    kept[group * most + numbers[group]] = places[place[0]]
                    numbers[group] = numbers[group] + 1

        with workers(groups, worthwhile_threads(threads, groups * count)) as group:
            choose(group)
        total[0] = tirx.IntImm("int64", 0)
        with T.serial(0, tirx.IntImm("int64", groups)) as group, T.serial(0, numbers[group]) as at:
            for column, value in enumerate((group // classes, group % classes, kept[group * most + at])):
                table[total[0] * 3 + column] = value.astype("int64")
            total[0] = total[0] + 1

    outputs = [((groups * count, 3), "int64"), ((1,), "int64")]
    found: list[te.Tensor] = extern_kernel("non_max_suppression", body, [boxes, scores], outputs)
    return found


def _counter() -> Any:
    """A variable that is zero."""
    result = variable("int32")
    result[0] = tirx.IntImm("int32", 0)
    return result


def _overlaps(one: Any, other: Any, share: Any) -> Any:
    """Whether two boxes have so much in common of all that they cover."""

    def ends(box: Any, axis: int) -> tuple[Any, Any]:
        return tirx.min(box[axis], box[axis + 2]), tirx.max(box[axis], box[axis + 2])

    sides = [[ends(box, axis) for axis in range(2)] for box in (one, other)]
    areas = [(right - left) * (bottom - top) for (left, right), (top, bottom) in sides]
    lengths = [
        tirx.max(tirx.min(high, other_high) - tirx.max(low, other_low), 0)
        for (low, high), (other_low, other_high) in zip(*sides, strict=True)
    ]
    common = lengths[0] * lengths[1]
    covered = areas[0] + areas[1] - common
    return tirx.all(covered > 0, common / covered >= share)
