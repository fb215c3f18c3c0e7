"""Products of float32 on tensor cores: only where permitted, and as exact as promised."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tvm import te, tirx

from eqtune.gpu_machine import find_compiler, gpu_target
from eqtune.measure.arguments import Interface
from eqtune.measure.check import mismatch, relative_tolerance
from eqtune.measure.cuda.code import cuda_source, launch_problem, ptxas_resources
from eqtune.measure.elsewhere.exported import interface_fields, interface_of
from eqtune.records.workload import as_workload, workload_hash
from eqtune.search.space import Decision, build_space
from eqtune.search.space.gpu.tf32 import permit_tf32, permitted_products
from eqtune.search.space.lowering import prepare_for_lowering

sys.path.insert(0, str(Path(__file__).parent))
import cuda_on_cpu
import test_gpu_space as kernels
from test_gpu_tensor_core import A100, H100, RTX_5090, T4, matmul

TILE = {"wi": 2, "fi": 4, "wj": 2, "fj": 2, "bk": 64, "stages": 2, "mma": 1, "split": 1}


def sketches(mod, hardware):
    return [sketch.name for sketch in build_space(mod, hardware).sketches]


def test_tensor_cores_take_float32_only_where_it_is_permitted_and_they_can():
    exact = matmul(64, 64, 64, "float32", "float32")
    permitted = permit_tf32(exact)
    assert "gpu_tensor_core" not in sketches(exact, H100)
    assert "gpu_tensor_core" in sketches(permitted, H100)
    assert "gpu_tensor_core" not in sketches(permitted, T4)
    assert workload_hash(permitted) != workload_hash(exact)  # so that records of one never serve the other
    other = kernels.KERNELS["row_sums"]()
    assert workload_hash(permit_tf32(other)) == workload_hash(other)
    with pytest.raises(ValueError, match="1 or 3"):
        permit_tf32(exact, products=2)


def test_three_products_cost_three_times_as_much():
    values = np.array([[2, 4, 2, 4, 32, 3, 1, 1]])
    one, three = (
        build_space(permit_tf32(matmul(4096, 4096, 4096, "float32", "float32"), products), A100).sketches[0]
        for products in (1, 3)
    )
    assert 2.0 < three.latency_s(values)[0] / one.latency_s(values)[0] < 3.1


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("products", "transposed", "least", "most"), [(1, False, 2e-5, 1e-3), (3, False, 0, 2e-6), (3, True, 0, 2e-6)]
)
def test_errors_are_what_the_number_of_products_promises(products, transposed, least, most, tmp_path):
    mod = permit_tf32(matmul(40, 56, 80, "float32", "float32", transposed), products)
    small = {"wi": 2, "fi": 1, "wj": 2, "fj": 2, "bk": 16, "stages": 3, "mma": 1, "split": 1}
    schedule = build_space(mod, H100).apply(Decision("gpu_tensor_core", small))
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal([int(e) for e in p.shape]).astype(np.float32) for p in mod["main"].params]
    a, b = (array.astype(np.float64) for array in inputs[:2])
    expected = np.maximum(a @ (b.T if transposed else b), 0)
    factors = Interface.of(mod["main"]).factors
    tolerance = relative_tolerance(factors or "float32", 80)
    for result in cuda_on_cpu.run(schedule, gpu_target(H100), inputs, tmp_path):
        assert least <= np.abs(result - expected).max() / expected.max() <= most
        assert mismatch(result, expected.astype(np.float32), tolerance) == ""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("products", [1, 3])
def test_nan_is_not_rounded_to_a_number(products, tmp_path):
    """GPUs write NaN as 0x7FFFFFFF."""
    a, b = (te.placeholder((tirx.IntImm("int64", 32), tirx.IntImm("int64", 32)), name=name) for name in "ab")
    k = te.reduce_axis((0, tirx.IntImm("int64", 32)), name="k")
    c = te.compute(a.shape, lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    mod = permit_tf32(as_workload(te.create_prim_func([a, b, c])), products)
    small = {"wi": 1, "fi": 1, "wj": 1, "fj": 1, "bk": 16, "stages": 2, "mma": 1, "split": 1}
    schedule = build_space(mod, H100).apply(Decision("gpu_tensor_core", small))
    inputs = [np.ones((32, 32), np.float32) for _ in mod["main"].params]
    inputs[0].view(np.uint32)[3, 5] = 0x7FFFFFFF
    for result in cuda_on_cpu.run(schedule, gpu_target(H100), inputs, tmp_path):
        assert np.isnan(result[3]).all()
        assert (np.delete(result, 3, axis=0) == 32.0).all()


def test_the_check_of_a_kernel_knows_what_it_may_round():
    for products in (1, 3):
        mod = permit_tf32(matmul(16, 16, 16, "float32", "float32"), products)
        interface = Interface.of(mod["main"])
        assert interface.factors == ("tfloat32" if permitted_products(mod["main"]) == 1 else "")
        assert interface_of(interface_fields(interface)) == interface


@pytest.mark.skipif(find_compiler() is None or find_compiler().kind != "nvcc", reason="needs nvcc")
@pytest.mark.parametrize(("products", "hardware"), [(1, A100), (3, H100), (3, RTX_5090)])
def test_compiled_code_multiplies_tfloat32_in_registers(products, hardware, tmp_path):
    mod = permit_tf32(matmul(1000, 1000, 520, "float32", "float32"), products)
    function = prepare_for_lowering(build_space(mod, hardware).apply(Decision("gpu_tensor_core", TILE)).mod["main"])
    assert launch_problem(function, hardware) == ""
    source = cuda_source({"kernel": function}, gpu_target(hardware))
    compiler = find_compiler()
    (resources,) = ptxas_resources(source, hardware.arch, compiler).values()
    assert resources.spill_bytes == 0
    (tmp_path / "k.cu").write_text(source)
    command = [compiler.path, "-ptx", f"-arch={hardware.arch}", "-o", str(tmp_path / "k.ptx"), str(tmp_path / "k.cu")]
    subprocess.run(command, check=True, capture_output=True)
    ptx = (tmp_path / "k.ptx").read_text()
    assert "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" in ptx
    assert "ld.local" not in ptx
