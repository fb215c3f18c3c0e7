"""Axis roles and surroundings are read the same from every layout."""

from __future__ import annotations

import pytest
import tvm
from tvm.script import tirx as T

from eqtune.search.space.access import dtype_bytes
from eqtune.search.space.analysis import analyze


@T.prim_func(private=True, s_tir=True)
def strided_nhwc(
    x: T.Buffer((1, 9, 9, 4), "float32"), w: T.Buffer((8, 3, 3, 4), "float32"), out: T.Buffer((1, 4, 4, 8), "float32")
):
    T.func_attr({"tirx.noalias": True, "layout_free_buffers": [1]})
    for n, h, w_, f, r, s, c in T.grid(1, 4, 4, 8, 3, 3, 4):
        with T.sblock("conv"):
            vn, vh, vw, vf, vr, vs, vc = T.axis.remap("SSSSRRR", [n, h, w_, f, r, s, c])
            with T.init():
                out[vn, vh, vw, vf] = T.float32(0)
            out[vn, vh, vw, vf] = out[vn, vh, vw, vf] + x[vn, vh * 2 + vr, vw * 2 + vs, vc] * w[vf, vr, vs, vc]


@T.prim_func(private=True, s_tir=True)
def grouped_nchw(
    x: T.Buffer((1, 6, 5, 5), "float32"), w: T.Buffer((4, 3, 1, 1), "float32"), out: T.Buffer((1, 4, 5, 5), "float32")
):
    T.func_attr({"tirx.noalias": True})
    for n, f, h, w_, c in T.grid(1, 4, 5, 5, 3):
        with T.sblock("conv"):
            vn, vf, vh, vw, vc = T.axis.remap("SSSSR", [n, f, h, w_, c])
            with T.init():
                out[vn, vf, vh, vw] = T.float32(0)
            out[vn, vf, vh, vw] = out[vn, vf, vh, vw] + x[vn, vf // 2 * 3 + vc, vh, vw] * w[vf, vc, 0, 0]


@T.prim_func(private=True, s_tir=True)
def sum_of_squares(x: T.Buffer((4, 8), "float32"), out: T.Buffer((4,), "float32")):
    T.func_attr({"tirx.noalias": True})
    for i, k in T.grid(4, 8):
        with T.sblock("sum"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                out[vi] = T.float32(0)
            out[vi] = out[vi] + x[vi, vk] * x[vi, vk]


@T.prim_func(private=True, s_tir=True)
def gate(
    x: T.Buffer((1, 8), "float32"),
    w: T.Buffer((8, 16), "float32"),
    image: T.Buffer((49, 16), "float32"),
    out: T.Buffer((49, 16), "float32"),
):
    T.func_attr({"tirx.noalias": True})
    product = T.sblock_alloc_buffer((1, 16))
    for i, j, k in T.grid(1, 16, 8):
        with T.sblock("product"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                product[vi, vj] = T.float32(0)
            product[vi, vj] = product[vi, vj] + x[vi, vk] * w[vk, vj]
    for i, j in T.grid(49, 16):
        with T.sblock("spread"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = image[vi, vj] * product[0, vj]


@T.prim_func(private=True, s_tir=True)
def by_address(x: T.Buffer((8,), "float32"), out: T.Buffer((8,), "float32")):
    T.func_attr({"tirx.noalias": True})
    for i in range(8):
        with T.sblock("call"):
            vi = T.axis.spatial(8, i)
            out[vi] = T.call_extern("float32", "first_of", T.address_of(x[vi]))


def contraction(function):
    found = analyze(tvm.IRModule({"main": function})).contraction
    assert found is not None
    return found


def names(axes):
    return [axis.name for axis in axes]


def test_roles_of_a_strided_convolution() -> None:
    found = contraction(strided_nhwc)
    assert names(found.rows) == ["vn", "vh", "vw"]
    assert names(found.columns) == ["vf"]
    assert names(found.reduction) == ["vr", "vs", "vc"]
    assert found.right.weight
    assert not found.left.weight
    assert found.contiguous is not None
    assert found.contiguous.name == "vf"
    assert found.window
    assert found.flops == 2 * 4 * 4 * 8 * 3 * 3 * 4


def test_index_expressions_keep_strides_and_windows() -> None:
    left = contraction(strided_nhwc).left.access
    assert left.indices[1].coefficients == {1: 2, 4: 1}
    assert left.stride(2) == 2 * 4
    assert left.stride(6) == 1


def test_a_grouped_convolution_has_columns_in_runs() -> None:
    found = contraction(grouped_nchw)
    assert found.groups == 2
    assert names(found.columns) == ["vf"]
    assert not found.left.access.linear


def test_a_sum_of_squares_is_no_contraction() -> None:
    assert analyze(tvm.IRModule({"main": sum_of_squares})).contraction is None


def test_a_product_that_is_spread_over_an_image_is_no_contraction() -> None:
    """Its tile would have to write the whole image, unrolled."""
    assert analyze(tvm.IRModule({"main": gate})).contraction is None


def test_a_symbolic_shape_is_refused() -> None:
    @T.prim_func(private=True, s_tir=True)
    def symbolic(x: T.handle, y: T.handle):
        n = T.int64()
        a = T.match_buffer(x, (n,), "float32")
        b = T.match_buffer(y, (n,), "float32")
        for i in range(n):
            with T.sblock("copy"):
                v = T.axis.spatial(n, i)
                b[v] = a[v]

    with pytest.raises(ValueError, match="symbolic"):
        analyze(tvm.IRModule({"main": symbolic}))


def test_only_the_first_number_of_a_type_counts_its_bits() -> None:
    types = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int4": 1, "bool": 1}
    assert {dtype: dtype_bytes(dtype) for dtype in types} == types


def test_what_is_called_with_an_address_is_read() -> None:
    (block,) = analyze(tvm.IRModule({"main": by_address})).blocks
    assert [read.buffer for read in block.reads] == [0]
