"""Tables of bytes in registers: results are those of the loads that they stand for, on each kind of CPU."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from eqtune.machine import features_here
from eqtune.search.space.byte_tables import (
    BYTE_TABLES,
    BYTES,
    TABLE_INSTRUCTIONS,
    has_table,
    looks_up_elements,
    pick_from_tables,
    table_index,
)
from eqtune.search.space.hardware import Hardware
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.search.space.memory_bound import memory_bound_sketches

CPUS = {
    "avx512vbmi": ({"mcpu": "x86-64-v4", "mattr": ["+avx512vbmi"]}, r"vperm[it]2b"),
    "avx2": ({"mcpu": "x86-64-v3"}, "vpshufb"),
}
"""By feature: a CPU that has little more, so that whoever has the feature runs its code, and its instruction."""


def looked_up(count: int, lanes: int, of: str, result: str, feature: str | None) -> Any:
    """y[i] = table[x[i] + 3] in vectors, scheduled."""
    x, table = te.placeholder((count,), of, "x"), te.placeholder((BYTES,), result, "table")
    moved = te.compute((count,), lambda i: x[i] + tirx.const(3, of), name="moved")
    y = te.compute((count,), lambda i: table[table_index(moved(i))], name="y")
    function = te.create_prim_func([x, table, y]).with_attr("tirx.noalias", True)
    sch = tvm.s_tir.Schedule(function if feature is None else function.with_attr(BYTE_TABLES, feature))
    block = sch.get_sblock("y")
    sch.compute_inline(sch.get_sblock("moved"))
    _, inner = sch.split(sch.get_loops(block)[0], [None, lanes])
    sch.vectorize(inner)
    return sch.mod["main"]


def compiled(function: Any, cpu: Mapping[str, Any]) -> Any:
    target = tvm.target.Target({"kind": "llvm", **cpu})
    module = tvm.IRModule({"main": prepare_for_lowering(function).with_attr("global_symbol", "main")})
    return tvm.compile(module, target)


@pytest.mark.parametrize("feature", CPUS)
@pytest.mark.parametrize(("count", "lanes"), [(256, 16), (256, 8), (256, 32), (256, 64), (100, 16), (6, 16), (35, 7)])
@pytest.mark.parametrize(("of", "result"), [("uint8", "int8"), ("int8", "uint8")])
def test_each_byte_gets_its_own(feature: str, count: int, lanes: int, of: str, result: str) -> None:
    cpu, instruction = CPUS[feature]
    library = compiled(looked_up(count, lanes, of, result, feature), cpu)
    whole = TABLE_INSTRUCTIONS[feature].least <= lanes <= TABLE_INSTRUCTIONS[feature].lanes
    assert bool(re.search(instruction, library.mod.inspect_source("asm"))) == whole
    if feature not in features_here():
        pytest.skip(f"a CPU with {feature} runs this")
    generator = np.random.default_rng(0)
    x, table = (generator.permutation(BYTES).astype("uint8") for _ in range(2))
    x, table = x[:count].view(of), table.view(result)
    y = tvm.runtime.tensor(np.zeros(count, result))
    library["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(table), y)
    np.testing.assert_array_equal(y.numpy(), table[(x + np.array(3, of)).view("uint8")])


def test_what_is_said_to_have_no_instructions_stays_as_it_is() -> None:
    for feature in (None, "", "neon"):
        function = looked_up(64, 16, "uint8", "uint8", feature)
        assert pick_from_tables(function).same_as(function)


def test_other_loads_stay_as_they_are() -> None:
    """Rows of an embedding by bytes, and a table of other numbers, are no tables of bytes."""
    x = te.placeholder((64,), "uint8", "x")
    rows, numbers = te.placeholder((BYTES, 4), "int8", "rows"), te.placeholder((BYTES,), "int32", "numbers")
    taken = te.compute((64, 4), lambda i, j: rows[table_index(x(i)), j], name="taken")
    found = te.compute((64,), lambda i: numbers[table_index(x(i))], name="found")
    for operand, result in ((rows, taken), (numbers, found)):
        sch = tvm.s_tir.Schedule(te.create_prim_func([x, operand, result]).with_attr(BYTE_TABLES, "avx2"))
        sch.vectorize(sch.get_loops(sch.get_sblock(result.op.name))[-1])
        assert pick_from_tables(sch.mod["main"]).same_as(sch.mod["main"])


@pytest.mark.parametrize("feature", CPUS)
def test_nothing_is_looked_up_ahead_of_a_condition(feature: str) -> None:
    """A second row has no bytes: they would be read behind the first one."""
    x, table = te.placeholder((32,), "uint8", "x"), te.placeholder((BYTES,), "uint8", "table")
    seven = tirx.const(7, "uint8")
    y = te.compute((2, 32), lambda i, j: tirx.if_then_else(i < 1, table[table_index(x[i * 32 + j])], seven), name="y")
    sch = tvm.s_tir.Schedule(te.create_prim_func([x, table, y]).with_attr(BYTE_TABLES, feature))
    sch.vectorize(sch.get_loops(sch.get_sblock("y"))[-1])
    assert has_table(sch.mod["main"])
    assert pick_from_tables(sch.mod["main"]).same_as(sch.mod["main"])


@pytest.mark.parametrize("feature", CPUS)
def test_schedules_of_tables_run_over_several_axes_and_are_estimated_by_what_picks(feature: str) -> None:
    shape = [tirx.IntImm("int64", extent) for extent in (4, 6, 16)]  # as Relax makes kernels
    x, table = te.placeholder(shape, "uint8", "x"), te.placeholder((BYTES,), "int8", "table")
    y = te.compute(x.shape, lambda *at: table[table_index(x(*at))], name="y")
    loaded = te.create_prim_func([x, table, y]).with_attr("tirx.noalias", True)
    hardware = Hardware(threads=1, vector_bytes=TABLE_INSTRUCTIONS[feature].lanes)
    latency_s, functions = [], []
    for function in (loaded, loaded.with_attr(BYTE_TABLES, feature)):
        (sketch,) = memory_bound_sketches(tvm.IRModule({"main": function}), hardware)
        values = np.array([*itertools.product(*(knob.values for knob in sketch.knobs))])
        values = values[sketch.legal(values)]
        best = values[np.argmin(sketch.latency_s(values))]
        latency_s.append(sketch.latency_s(values).min())
        decision = {knob.name: int(value) for knob, value in zip(sketch.knobs, best, strict=True)}
        functions.append(sketch.apply(decision).mod["main"])
    assert latency_s[1] < latency_s[0] / 2
    assert not pick_from_tables(functions[1]).same_as(functions[1])
    cpu, instruction = CPUS[feature]
    library = compiled(functions[1], cpu)
    assert re.search(instruction, library.mod.inspect_source("asm"))
    if feature not in features_here():
        pytest.skip(f"a CPU with {feature} runs this")
    generator = np.random.default_rng(0)
    bytes_, table = (generator.integers(0, 256, shape, "uint8") for shape in ((4, 6, 16), BYTES))
    found = tvm.runtime.tensor(np.zeros((4, 6, 16), "int8"))
    library["main"](tvm.runtime.tensor(bytes_), tvm.runtime.tensor(table.view("int8")), found)
    np.testing.assert_array_equal(found.numpy(), table.view("int8")[bytes_])


def test_what_a_byte_becomes_on_the_way_to_a_place_is_no_byte() -> None:
    x, table = te.placeholder((64,), "uint8", "x"), te.placeholder((BYTES,), "uint8", "table")
    truth = te.compute((64,), lambda i: table[tirx.Cast("int32", tirx.Cast("bool", x(i)))], name="truth")
    assert not has_table(te.create_prim_func([x, table, truth]))


def test_elements_are_looked_up_in_their_places() -> None:
    """What finds them in others, or sums them, is no element-wise kernel."""
    x, table = te.placeholder((4, 8), "int8", "x"), te.placeholder((BYTES,), "int8", "table")
    k = te.reduce_axis((0, 8), "k")
    found = te.compute(x.shape, lambda i, j: table[table_index(x[i, j])], name="found")
    turned = te.compute(x.shape, lambda i, j: table[table_index(x[i, 7 - j])], name="turned")
    summed = te.compute((4,), lambda i: te.sum(table[table_index(x[i, k])].astype("int32"), axis=k), name="summed")
    kernels = [te.create_prim_func([x, table, y]) for y in (found, turned, summed)]
    assert [*map(has_table, kernels)] == [True, True, True]
    assert [*map(looks_up_elements, kernels)] == [True, False, False]
