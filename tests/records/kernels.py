"""Small kernels and one schedule of each kind of instruction, for the tests of this folder."""

from tvm import te
from tvm.s_tir import Schedule

from eqtune.records.workload import as_workload


def matmul_add(n=32, m=None, block="c", layout_free=False, names=("a", "b")):
    """(n x n) @ (n x m) + 1 as a PrimFunc."""
    m = n if m is None else m
    a = te.placeholder((n, n), "float32", names[0])
    b = te.placeholder((n, m), "float32", names[1])
    k = te.reduce_axis((0, n), "k")
    c = te.compute((n, m), lambda i, j: te.sum(a[i, k] * b[k, j], k), block)
    d = te.compute((n, m), lambda i, j: c[i, j] + 1.0, "d")
    func = te.create_prim_func([a, b, d])
    return func.with_attr("layout_free_buffers", [1]) if layout_free else func


def row_sum(n=64):
    """Sums of the rows of an n x n matrix, as a PrimFunc."""
    a = te.placeholder((n, n), "float32", "a")
    k = te.reduce_axis((0, n), "k")
    return te.create_prim_func([a, te.compute((n,), lambda i: te.sum(a[i, k], k), "c")])


def tiled_matmul(func, tile=4, block="c", flag=True):
    """A packed, register-tiled schedule of `matmul_add`; `flag` adds a boolean annotation."""
    s = Schedule(as_workload(func))
    c, d = s.get_sblock(block), s.get_sblock("d")
    packed = s.cache_read(c, 1, "global")
    s.transform_layout(packed, ("write", 0), lambda k, n: (n // 16, k, n % 16))
    s.set_scope(c, 0, "local")
    i, j, k = s.get_loops(c)
    io, ii = s.split(i, [None, tile])
    jo, ji = s.split(j, [None, 16])
    ko, ki = s.split(k, [None, 8])
    s.reorder(jo, io, ko, ki, ii, ji)
    s.reverse_compute_at(d, io, preserve_unit_loops=True)
    s.annotate(io, "pragma_loop_partition_hint", 1)
    s.annotate(c, "eqtune.note", 'a "quoted" \\ text')
    s.annotate(io, "eqtune.scale", 0.5)
    s.annotate(io, "eqtune.list", [1, 2])
    if flag:
        s.annotate(io, "eqtune.flag", True)
    s.vectorize(ji)
    s.unroll(ii)
    s.compute_at(packed, jo, preserve_unit_loops=True)
    s.parallel(jo)
    s.decompose_reduction(c, ko)
    return s


def factored_sum(func):
    """A schedule of `row_sum` with rfactor and a sampled tile."""
    s = Schedule(as_workload(func), seed=7)
    block = s.get_sblock("c")
    _, k = s.get_loops(block)
    outer, inner = s.split(k, s.sample_perfect_tile(k, 2, max_innermost_factor=16))
    partial = s.rfactor(inner, 1)
    s.reverse_compute_at(block, s.get_loops(partial)[0], preserve_unit_loops=True)
    del outer
    return s
