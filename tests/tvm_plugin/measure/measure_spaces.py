"""Spaces that the tests' workers import by name: a small matmul sketch, and one whose candidates fail on purpose."""

from __future__ import annotations

import ctypes
import time
from types import SimpleNamespace

import numpy as np
import tvm
from tvm import s_tir
from tvm.script import tirx as T

from eqtune.search.space.base import Knob, Sketch, Space

SIZE = 64


class Tiled(Sketch):
    """A register tile, the weight packed ahead of time."""

    name = "tiled"
    knobs = (Knob("rows", (2, 4, 8)), Knob("columns", (16, 32)), Knob("unused", (0, 1)))

    def __init__(self, mod):
        self.mod = mod

    def legal(self, values):
        return np.ones(len(values), dtype=np.bool_)

    def features(self, values):
        raise NotImplementedError

    def latency_s(self, values):
        return np.ones(len(values))

    def apply(self, values):
        schedule = s_tir.Schedule(self.mod, error_render_level="none")
        block = schedule.get_sblock("C")
        columns = values["columns"]
        packed = schedule.cache_read(block, 1, "global")
        schedule.transform_layout(packed, ("write", 0), lambda k, n: (n // columns, k, n % columns))
        schedule.annotate(packed, "meta_schedule.layout_rewrite_preproc", 1)
        i, j, k = schedule.get_loops(block)
        io, ii = schedule.split(i, [None, values["rows"]])
        jo, ji = schedule.split(j, [None, columns])
        schedule.reorder(jo, io, k, ii, ji)
        schedule.vectorize(ji)
        schedule.decompose_reduction(block, k)
        return schedule


class Faulty(Tiled):
    """Fails in the way that its only knob names."""

    name = "faulty"
    knobs = (Knob("fault", tuple(range(8))),)

    def apply(self, values):
        fault = FAULTS[values["fault"]]
        if fault == "raises":
            raise ValueError("this sketch does not fit")
        if fault == "build hangs":
            time.sleep(3600)
        if fault == "build crashes":
            ctypes.string_at(0)
        kernel = KERNELS[fault].with_attr("tirx.noalias", True).without_attr("global_symbol")
        return SimpleNamespace(mod=tvm.IRModule({"main": kernel}), trace=s_tir.Schedule(self.mod).trace)


FAULTS = (
    "raises",
    "build hangs",
    "build crashes",
    "does not compile",
    "run hangs",
    "run crashes",
    "wrong",
    "too large",
)


@T.prim_func(s_tir=True)
def does_not_compile(
    A: T.Buffer((SIZE, SIZE), "float32"), B: T.Buffer((SIZE, SIZE), "float32"), C: T.Buffer((SIZE, SIZE), "float32")
):
    for i in T.thread_binding(SIZE, thread="threadIdx.x"):
        C[i, 0] = A[i, 0] + B[i, 0]


@T.prim_func(s_tir=True)
def run_hangs(
    A: T.Buffer((SIZE, SIZE), "float32"), B: T.Buffer((SIZE, SIZE), "float32"), C: T.Buffer((SIZE, SIZE), "float32")
):
    for i in T.serial(T.int64(1) << T.int64(50)):
        C[T.cast(i % T.int64(64), "int32"), 0] = C[T.cast(i * T.int64(7) % T.int64(64), "int32"), 1] + A[0, 0] + B[0, 0]


@T.prim_func(s_tir=True)
def run_crashes(
    A: T.Buffer((SIZE, SIZE), "float32"), B: T.Buffer((SIZE, SIZE), "float32"), C: T.Buffer((SIZE, SIZE), "float32")
):
    for i in range(32):
        C[i * 1000000, 0] = A[i, 0] + B[i, 0]


@T.prim_func(s_tir=True)
def wrong(
    A: T.Buffer((SIZE, SIZE), "float32"), B: T.Buffer((SIZE, SIZE), "float32"), C: T.Buffer((SIZE, SIZE), "float32")
):
    for i, j in T.grid(SIZE, SIZE):
        C[i, j] = A[i, j] + B[i, j]


@T.prim_func(s_tir=True)
def too_large(
    A: T.Buffer((SIZE, SIZE), "float32"), B: T.Buffer((SIZE, SIZE), "float32"), C: T.Buffer((SIZE, SIZE), "float32")
):
    with T.sblock("root"):
        huge = T.sblock_alloc_buffer((SIZE, 1 << 24), "float32")
        for i, j in T.grid(SIZE, 1 << 24):
            huge[i, j] = A[i, 0]
        for i, j in T.grid(SIZE, SIZE):
            C[i, j] = huge[i, j * 1000] + B[i, j]


KERNELS = {
    "does not compile": does_not_compile,
    "run hangs": run_hangs,
    "run crashes": run_crashes,
    "wrong": wrong,
    "too large": too_large,
}


def build(mod, hardware):
    """Both sketches."""
    return Space([Tiled(mod), Faulty(mod)])
