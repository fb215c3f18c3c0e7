"""Products by Hopper's wgmma: who gets them, and what becomes of them. `test_gpu_kernels_run` runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm

from eqtune.gpu_machine import describe_gpu, find_compiler, gpu_target
from eqtune.measure.cuda_code import cuda_source, launch_problem, ptxas_resources
from eqtune.search.space import Decision, build_space
from eqtune.search.space.gpu.hardware import DEVICES
from eqtune.search.space.lowering import prepare_for_lowering
from eqtune.search.strategies.moves import Moves

sys.path.insert(0, str(Path(__file__).parent))
import test_gpu_tensor_core as tensor

H100 = DEVICES["nvidia/nvidia-h100"].hardware()
TARGET = gpu_target(H100)
needs_nvcc = pytest.mark.skipif(find_compiler() is None or find_compiler().kind != "nvcc", reason="needs nvcc")


def names(mod, hardware=H100):
    return {sketch.name for sketch in build_space(mod, hardware).sketches}


def test_only_hopper_gets_them_and_only_compiled_for_its_own_instructions():
    mod = tensor.matmul(256, 256, 512, "float16", "float32")
    assert "gpu_warpgroup" in names(mod)
    without = describe_gpu(tvm.target.Target({"kind": "cuda", "arch": "sm_90"}))
    others = [DEVICES[tag].hardware() for tag in ("nvidia/nvidia-a100", "nvidia/geforce-rtx-5090")]
    assert all("gpu_warpgroup" not in names(mod, hardware) for hardware in (without, *others))
    assert "sm_90a" in str(TARGET)


def test_bytes_are_multiplied_only_along_the_reduction():
    assert "gpu_warpgroup" in names(tensor.matmul(256, 256, 1024, "int8", "int32", transposed=True))
    assert "gpu_warpgroup" not in names(tensor.matmul(256, 256, 1024, "int8", "int32"))


@pytest.mark.parametrize(("dtype", "sums"), [("float16", "float32"), ("float16", "float16"), ("bfloat16", "float32")])
def test_the_estimate_prefers_them_for_large_products(dtype, sums):
    space = build_space(tensor.matmul(4096, 4096, 4096, dtype, sums), H100)
    points = Moves(space).sample(np.random.default_rng(0), 2000)
    latency_s = space.latency_s(points)
    assert space.decision(points[np.argmin(latency_s)]).sketch == "gpu_warpgroup"
    assert latency_s.min() > 2 * 4096**3 / H100.tensor_peak("float16")


def test_sampled_candidates_become_cuda_and_can_be_launched():
    space = build_space(tensor.matmul(500, 520, 1000, "float16", "float32"), H100)
    points = Moves(space).sample(np.random.default_rng(0), 400)
    found = [d for d in map(space.decision, points) if d.sketch == "gpu_warpgroup"]
    for decision in found[:6]:
        function = prepare_for_lowering(space.apply(decision).mod["main"])
        assert launch_problem(function, H100) == "", decision
        assert "wgmma.mma_async" in cuda_source({"kernel": function}, TARGET), decision


@needs_nvcc
@pytest.mark.parametrize("knobs", [{"height": 1, "width": 256}, {"height": 2, "width": 128}], ids=["wide", "high"])
@pytest.mark.parametrize(("dtype", "sums"), [("float16", "float32"), ("float16", "float16"), ("bfloat16", "float32")])
def test_sums_stay_in_registers_and_instructions_are_not_serialized(dtype, sums, knobs, tmp_path):
    space = build_space(tensor.matmul(1024, 1024, 1024, dtype, sums), H100)
    tile = {"groups": 2, "stages": 4, "split": 1}
    function = prepare_for_lowering(space.apply(Decision("gpu_warpgroup", tile | knobs)).mod["main"])
    source = cuda_source({"kernel": function}, TARGET)
    (resources,) = ptxas_resources(source, H100.arch, find_compiler()).values()
    assert resources.spill_bytes == resources.stack_bytes == 0
    assert resources.registers < 200  # of two groups, 255 would be all that there are
    (tmp_path / "k.cu").write_text(source)
    files = ["-o", str(tmp_path / "k"), str(tmp_path / "k.cu")]
    command = [find_compiler().path, "-cubin", f"-arch={H100.arch}", "-Xptxas=-v", *files]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert "Used" in said
    assert "serialized" not in said
    assert "injected" not in said  # no waits but ours
