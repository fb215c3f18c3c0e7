"""Loops that TVM splits where conditions change stay within their ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx

from eqtune.machine import detect_target
from eqtune.search.space import Hardware, build_space
from eqtune.search.space.expressions import nodes_of
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.search.space.nest import PARTITION
from eqtune.tasks import extract_tasks, lower_to_kernels

sys.path.insert(0, str(Path(__file__).parent))
from guard_pages import stays_inside

TARGET = detect_target(1)


def scheduled(mod: Any, sketch_name: str, **values: int) -> Any:
    """A kernel with one candidate's schedule, prepared; knobs that are not given have their first value."""
    sketch = next(s for s in build_space(mod, Hardware(threads=1)).sketches if s.name == sketch_name)
    return prepare_for_lowering(sketch.apply({k.name: k.values[0] for k in sketch.knobs} | values).mod["main"])


def compiled(function: Any) -> Any:
    return tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), TARGET).jit()["main"]


def split_extents(function: Any) -> list[int]:
    return [int(loop.extent) for loop in nodes_of(function.body, tirx.For) if PARTITION in loop.annotations]


def run(kernel: Any, *inputs: np.ndarray[Any, Any], shape: tuple[int, ...]) -> Any:
    output = tvm.runtime.tensor(np.full(shape, np.nan, "float32"))
    kernel(*map(tvm.runtime.tensor, inputs), output)
    return output.numpy()


def test_a_condition_of_two_axes_that_holds_from_behind_the_row() -> None:
    """Of the first row, TVM would compute 160 elements of 64, with what lies behind the last operand."""
    a, b, z = (te.placeholder((n,), name=name) for n, name in ((160, "a"), (96, "b"), (64, "z")))

    def joined(i: Any, j: Any) -> Any:
        place = i * 64 + j
        return tirx.if_then_else(place >= 160, b[place - 160], a[place]) + z[j]

    mod = tvm.IRModule({"main": te.create_prim_func([a, b, z, te.compute((4, 64), joined, name="y")])})
    kernel = compiled(scheduled(mod, "elementwise", partition=1))
    assert stays_inside(kernel, [(160,), (96,), (64,), (4, 64)])
    parts = [np.arange(n, dtype="float32") for n in (160, 96, 64)]
    want = np.concatenate(parts[:2]).reshape(4, 64) + parts[2]
    np.testing.assert_array_equal(run(kernel, *parts, shape=(4, 64)), want)


def pool(padding: int) -> Any:
    """Whose padded rows are copied three by three, each for a row of the result."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 9, 9, 16), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.nn.max_pool2d(x, (3, 3), (1, 1), [padding] * 4, layout="NHWC"))
        builder.emit_func_output(y)
    (task,) = extract_tasks(lower_to_kernels(builder.get(), TARGET))
    return scheduled(task.mod, "columns-1", lanes=16)


def test_rows_of_padding_alone_are_copied_without_rows_in_front_of_them() -> None:
    """Of those, TVM would write five in the place of three."""
    function = pool(5)
    assert split_extents(function) == [9 + 2 * 5]  # the columns of each row
    x = np.random.default_rng(0).standard_normal((1, 9, 9, 16)).astype("float32")
    windows = np.lib.stride_tricks.sliding_window_view(
        np.pad(x, [(0, 0), (5, 5), (5, 5), (0, 0)], constant_values=-np.inf), (3, 3), (1, 2)
    )
    np.testing.assert_array_equal(run(compiled(function), x, shape=(1, 17, 17, 16)), windows.max((-1, -2)))


def test_rows_that_are_seldom_of_padding_alone_are_split() -> None:
    assert sorted(split_extents(pool(1))) == [3, 9 + 2 * 1]
