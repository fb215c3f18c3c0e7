"""Measuring on GPUs: what is built, and what faults cost. A process that acts as a GPU stands in for one."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import logging
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import tvm
import tvm_ffi
from tvm import relax, te, topi

import eqtune
from eqtune.compile.untuned import untuned_executable
from eqtune.errors import InputError, SetupError
from eqtune.gpu_machine import Compiler, describe_gpu, find_compiler, resolve_target
from eqtune.machine import target_json
from eqtune.measure import RpcMeasurer
from eqtune.measure.arguments import Interface, random_inputs
from eqtune.measure.cuda import builder as cuda_builder
from eqtune.measure.cuda import code as cuda_code
from eqtune.measure.cuda import measurer as cuda
from eqtune.measure.cuda.builder import CudaBuilder
from eqtune.measure.cuda.clock import GpuClock
from eqtune.measure.cuda.code import CALLBACK, compile_cubin
from eqtune.measure.cuda.measurer import CudaMeasurer
from eqtune.measure.pool import Config
from eqtune.measure.ray import node as ray_node
from eqtune.measure.rpc import measurer as rpc
from eqtune.records.workload import as_workload, serialize_workload, workload_hash
from eqtune.schedules.default import PARSER, as_dlight_expects, default_schedule
from eqtune.search.space import build_space
from eqtune.search.space.gpu.tf32 import permit_tf32
from eqtune.search.strategies.moves import Moves
from eqtune.tasks.task import Task

from ..small_models import module

sys.path.insert(0, str(Path(__file__).parents[2] / "search"))
import test_gpu_space as kernels
import test_gpu_tensor_core as tensor

FAKE = Path(__file__).parent / "fake_gpu.py"
needs_nvcc = pytest.mark.skipif(find_compiler() is None or find_compiler().kind != "nvcc", reason="needs nvcc")
TARGET = resolve_target("nvidia/nvidia-h100")


def make_task(rows):
    x = te.placeholder((rows, 40), name="x")
    mod = as_workload(te.create_prim_func([x, topi.nn.relu(x)]))
    return Task(name="relu", mod=mod, workload_hash=workload_hash(mod), calls=1, flops=1.0, bytes_moved=1.0)


def decisions_of(task, measurer, count):
    space = build_space(task.mod, getattr(measurer, "hardware", None) or describe_gpu(TARGET))
    points = Moves(space).sample(np.random.default_rng(0), count)
    return [space.decision(point) for point in points]


@pytest.fixture
def plan(tmp_path):
    def write(*what):
        (tmp_path / "plan").write_text("\n".join(what))

    return write


@pytest.fixture
def runs(tmp_path):
    return lambda: [line.split() for line in (tmp_path / "runs").read_text().splitlines()]


@pytest.fixture
def measurer(tmp_path):
    command = (sys.executable, str(FAKE), str(tmp_path))
    with CudaMeasurer(TARGET, devices=[0], workers=1, timeout_s=5.0, runner=command) as made:
        yield made


@pytest.fixture
def builder_config(tmp_path):
    hardware, target = describe_gpu(TARGET), json.loads(target_json(TARGET))
    return Config(target, hardware.to_json(), "eqtune.search.space:build_space", 0, str(tmp_path), 0, export="so")


@needs_nvcc
@pytest.mark.slow
def test_builds_here_and_runs_there(measurer, plan, runs):
    task = make_task(16)
    plan("5e-3", "2e-3", "1e-3")
    assert measurer.baseline([task]) == [5e-3]
    found = measurer.measure(task, decisions_of(task, measurer, 2))
    assert [m.error for m in found] == ["", ""]
    assert sorted(m.latency_s for m in found) == [1e-3, 2e-3]
    assert all(m.trace for m in found)
    assert all(m.notes["clock_mhz"] == 1980 for m in found)
    assert all(0 < m.notes["registers"] < 256 and m.notes["spill_bytes"] == 0 for m in found)
    assert measurer.describe()["device"] == "a GPU of paper"
    assert len({pid for pid, *_ in runs()}) == 1


@needs_nvcc
@pytest.mark.slow
def test_a_gpu_elsewhere_gets_kernels_built_here_and_references_of_this_cpu(tmp_path, plan, runs, monkeypatch):
    monkeypatch.setattr(rpc, "rpc_status", lambda address: {"servers": 1})
    monkeypatch.setattr(rpc, "_COMMAND", (sys.executable, str(FAKE), str(tmp_path)))
    task = make_task(20)
    plan("5e-3", "2e-3", "1e-3")
    with RpcMeasurer("rpc://127.0.0.1:1/gpu", TARGET, workers=1, timeout_s=5.0) as measurer:
        assert measurer.baseline([task]) == [5e-3]
        found = measurer.measure(task, decisions_of(task, measurer, 2))
        assert measurer.describe()["device"] == "a GPU of paper over rpc, key gpu"
    assert [m.error for m in found] == ["", ""]
    assert sorted(m.latency_s for m in found) == [1e-3, 2e-3]
    assert all(m.notes["registers"] > 0 for m in found)
    assert len(runs()) == 3


@needs_nvcc
@pytest.mark.slow
def test_builders_of_a_cluster_make_what_a_gpu_node_needs(builder_config):
    task = make_task(28)
    text = serialize_workload(task.mod)
    fields = json.dumps(dataclasses.asdict(builder_config) | {"references": ""})
    found = ray_node.reference(fields, task.workload_hash, text, 60.0)
    assert found["domain"] == "normal"
    assert [len(file) > 28 * 40 * 4 for file in found["references"].values()] == [True]  # one output of float32
    spec = {"task": task.workload_hash, "untuned": True}
    built = ray_node.build(fields, 1, {task.workload_hash: text}, [spec], 60.0)
    assert built["built"][0]["library"] in built["libraries"]


@needs_nvcc
def test_times_with_cold_caches_are_another_context(tmp_path):
    command = (sys.executable, str(FAKE), str(tmp_path))
    with CudaMeasurer(TARGET, devices=[0], workers=1, flush_l2=True, runner=command) as measurer:
        assert measurer.describe()["device"] == "a GPU of paper with L2 flushed"


class FakeDriver:
    """libcuda and NVML of a machine whose CUDA GPU 0 is NVML's second; `broken` fails, as on old GPUs."""

    def __init__(self, broken=""):
        self._broken = broken

    def __getattr__(self, name):
        known = getattr(type(self), f"_{name}", lambda *_: None)
        return lambda *arguments: name == self._broken or known(self, *arguments) or 0

    def _cuDeviceGetPCIBusId(self, text, size, index):
        text.value = b"0000:%02x:00.0" % (index + 7)

    def _nvmlDeviceGetHandleByPciBusId_v2(self, text, handle):
        handle._obj.value = 2 if text.value == b"0000:07:00.0" else 0

    def _nvmlDeviceGetClockInfo(self, handle, kind, value):
        value._obj.value = {1: 1980, 2: 2619}[kind] if handle.value == 2 else 0


def no_library(name):
    raise OSError(name)


def test_clocks_are_read_where_the_driver_tells_them():
    assert GpuClock(0, lambda _: FakeDriver()).read() == {"clock_mhz": 1980.0, "memory_clock_mhz": 2619.0}
    assert GpuClock(1, lambda _: FakeDriver()).read() == {"clock_mhz": 0.0, "memory_clock_mhz": 0.0}, "of another GPU"
    assert GpuClock(0, lambda _: FakeDriver("nvmlDeviceGetClockInfo")).read() == {}
    assert GpuClock(0, lambda _: FakeDriver("nvmlInit_v2")).read() == {}
    assert GpuClock(0, no_library).read() == {}


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind"), [("hang", "timeout"), ("die", "crash"), ("lost", "crash")], ids=["hang", "die", "lost"]
)
def test_a_fault_costs_its_process_and_its_candidate_only(fault, kind, tmp_path, plan, runs):
    task = make_task(24)
    command = (sys.executable, str(FAKE), str(tmp_path))
    with CudaMeasurer(TARGET, devices=[0], workers=1, timeout_s=2.0, runner=command) as measurer:
        plan("5e-3", fault, fault, "1e-3")  # it is tried twice: the device may be at fault
        found = measurer.measure(task, decisions_of(task, measurer, 2))
        assert measurer.losses == 2
    assert sorted(m.error for m in found) == ["", kind]
    assert min(m.latency_s for m in found) == 1e-3
    assert len({pid for pid, *_ in runs()}) == 3


def test_what_cannot_be_measured_is_refused(monkeypatch):
    with pytest.raises(InputError, match="cuda"):
        CudaMeasurer(tvm.target.Target("llvm"))
    monkeypatch.setattr(cuda, "gpu_count", lambda: 0)
    with pytest.raises(SetupError, match="compile-only"):
        CudaMeasurer(TARGET)


@needs_nvcc
def test_cubins_are_kept_by_source(tmp_path, monkeypatch):
    source = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] *= 2.0f; }'
    code, found = compile_cubin(source, "sm_90", tmp_path)
    assert code.startswith(b"\x7fELF")
    (kept,) = tmp_path.glob("*.cubin")
    kept.write_bytes(b"from the cache")
    assert compile_cubin(source, "sm_90", tmp_path) == (b"from the cache", found)
    with pytest.raises(ValueError, match="nvcc"):
        compile_cubin("not CUDA", "sm_90", tmp_path)


@pytest.mark.parametrize(("least_flops", "threads"), [(1e6, [2]), (1e9, [])], ids=["large", "small"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_references_of_large_contractions_are_made_on_all_cores(
    dtype, least_flops, threads, tmp_path, builder_config, monkeypatch
):
    monkeypatch.setenv("TVM_NUM_THREADS", "1")  # as builders start
    monkeypatch.setenv("TVM_BIND_THREADS", "1")
    monkeypatch.setattr(cuda_builder, "core_count", lambda: 2)
    monkeypatch.setattr(cuda_builder, "SLOW_FLOPS", least_flops)
    spaces = []
    monkeypatch.setattr(cuda_builder, "build_space", lambda mod, hw: spaces.append(hw.threads) or build_space(mod, hw))
    mod = tensor.matmul(96, 80, 128, dtype, "float32")
    task = workload_hash(mod)
    request = {"op": "reference", "task": task, "workloads": {task: serialize_workload(mod)}}
    assert CudaBuilder(builder_config).answer(request)["domain"] == "normal"
    assert spaces == threads
    assert (os.environ["TVM_NUM_THREADS"], os.environ["TVM_BIND_THREADS"]) == ("2", "0")
    inputs = random_inputs(Interface.of(mod["main"]), 0, task)
    a, b = (inputs[position].astype(np.float32) for position in (0, 1))
    np.testing.assert_allclose(np.load(tmp_path / f"{task}.2.npy"), np.maximum(a @ b, 0), rtol=1e-4, atol=1e-4)


@needs_nvcc
@pytest.mark.slow
def test_a_builder_that_made_a_reference_on_the_cpu_schedules_for_the_gpu(builder_config, monkeypatch):
    monkeypatch.setattr(cuda_builder, "SLOW_FLOPS", 1e6)  # scheduled for the CPU
    mod = tensor.matmul(96, 80, 128, "float16", "float32")
    task = workload_hash(mod)
    builder = CudaBuilder(builder_config)
    request = {"op": "reference", "task": task, "workloads": {task: serialize_workload(mod)}}
    assert builder.answer(request)["domain"] == "normal"
    space = build_space(mod, describe_gpu(TARGET))
    best = space.decision(Moves(space).sample(np.random.default_rng(0), 1)[0])
    spec = {"task": task, "decision": best.to_json()}
    (built,) = builder.answer({"op": "build", "batch": 1, "candidates": [spec], "workloads": {}})["built"]
    assert "error" not in built


def test_what_a_builder_cannot_run_on_the_cpu_is_an_answer(builder_config, monkeypatch):
    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr(cuda_builder._Cpu, "outputs", refuse)
    task = make_task(16)
    request = {"op": "reference", "task": task.workload_hash}
    request["workloads"] = {task.workload_hash: serialize_workload(task.mod)}
    assert CudaBuilder(builder_config).answer(request)["error"] == "out_of_memory"


@needs_nvcc
@pytest.mark.slow
def test_a_baseline_that_fails_says_so_once(measurer, plan, caplog):
    # TVM cannot pipeline what dlight makes of it.
    mod = tensor.matmul(128, 128, 128, "int8", "int32")
    task = Task(name="matmul", mod=mod, workload_hash=workload_hash(mod), calls=1, flops=1.0, bytes_moved=1.0)
    plan("1e-3")
    with caplog.at_level(logging.WARNING, "eqtune"):
        assert measurer.baseline([task]) == [math.inf]
        (found,) = measurer.measure(task, decisions_of(task, measurer, 1))
    assert found.error == ""
    assert "build_error" in measurer.baseline_failures[task.workload_hash]
    (said,) = caplog.messages
    assert said.startswith("matmul has no baseline: dlight's schedule fails (build_error: ")


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
def test_dlight_uses_tensor_cores_whatever_letter_an_arch_has(arch):
    target = tvm.target.Target(json.loads(target_json(TARGET)) | {"arch": arch})
    mod = tensor.matmul(128, 128, 128, "float16", "float32")
    assert "wmma" in default_schedule(mod, target)["main"].script()


def test_only_dlights_parser_goes_without_the_lines_of_its_callers():
    parser = importlib.import_module(PARSER)
    with ThreadPoolExecutor(1) as other, as_dlight_expects(TARGET):
        assert parser.inspect.stack()[0].code_context is None
        assert inspect.stack()[0].code_context
        assert other.submit(parser.inspect.stack).result()[0].code_context
    assert parser.inspect.stack()[0].code_context
    assert parser.inspect.stack()[0].function == inspect.currentframe().f_code.co_name


@needs_nvcc
def test_models_are_compiled_as_candidates_are(tmp_path, monkeypatch):
    monkeypatch.setenv("EQTUNE_CUBIN_CACHE", str(tmp_path))
    source = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] *= 2.0f; }'
    known = compile_cubin(source, str(TARGET.attrs["arch"]), tmp_path)[0]
    before = tvm_ffi.get_global_func(CALLBACK)
    built = []

    def build(*arguments, **named):
        built.append(bytes(tvm_ffi.get_global_func(CALLBACK)(source)))
        return relax_build(*arguments, **named)

    relax_build = relax.build
    monkeypatch.setattr(relax, "build", build)
    untuned_executable(product_and_softmax(), TARGET)
    assert built == [known]
    assert tvm_ffi.get_global_func(CALLBACK).same_as(before)
    monkeypatch.setattr(cuda_code, "find_compiler", lambda: Compiler("nvrtc", "cuda-bindings", ""))
    with cuda_code.compiling_as_measured(TARGET):
        assert tvm_ffi.get_global_func(CALLBACK).same_as(before)


@needs_nvcc
def test_models_of_several_threads_are_compiled_in_turn():
    before = tvm_ffi.get_global_func(CALLBACK)

    def compile_another():
        with cuda_code.compiling_as_measured(TARGET):
            pass

    with ThreadPoolExecutor(1) as other:
        with cuda_code.compiling_as_measured(TARGET):
            waiting = other.submit(compile_another)
            assert not wait([waiting], timeout=0.1).done
        waiting.result()
    assert tvm_ffi.get_global_func(CALLBACK).same_as(before)


def gpus(*found):
    """`tvm.cuda` of a machine with these, by name and compute capability."""
    known = [SimpleNamespace(exist=True, device_name=name, compute_version=version) for name, version in found]
    return lambda index: known[index] if index < len(known) else SimpleNamespace(exist=False)


def test_kernels_are_timed_on_gpus_like_the_first(monkeypatch):
    cards = [("NVIDIA L4", "8.9"), ("Tesla T4", "7.5"), ("NVIDIA L4", "8.9")]
    monkeypatch.setattr(tvm, "cuda", gpus(*cards))
    assert cuda.alike_gpus() == [0, 2]


@pytest.mark.parametrize(
    ("arch", "runs"),
    [("sm_90", True), ("sm_90a", True), ("sm_80", False), ("sm_100", False), ("sm_100a", False)],
)
def test_code_that_this_machines_gpu_does_not_run_is_refused(arch, runs, monkeypatch):
    monkeypatch.setattr(tvm, "cuda", gpus(("NVIDIA H200", "9.0")))
    monkeypatch.setattr(cuda, "find_compiler", lambda: None)  # asked for next
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    kind, said = (SetupError, "needs nvcc") if runs else (InputError, r"NVIDIA H200 \(sm_90\); give target")
    with pytest.raises(kind, match=said):
        CudaMeasurer(target)


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("flush_l2", [False, True])
def test_a_gpu_times_right_kernels(flush_l2):
    target, task = resolve_target("cuda"), make_task(1024)
    with CudaMeasurer(target, flush_l2=flush_l2) as measurer:
        found = measurer.measure(task, decisions_of(task, measurer, 4))
        assert [m.error for m in found] == [""] * 4
        assert 0 < min(m.latency_s for m in found) < 1e-3
        assert all(100 < m.notes["clock_mhz"] < 5000 for m in found)
        assert all(8 <= m.notes["registers"] < 256 for m in found)
        assert math.isfinite(measurer.baseline([task])[0])


ON_DEVICE = [pytest.mark.gpu, pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs an NVIDIA GPU")]


ON_TENSOR_CORES = {
    **{
        f"product_{dtype}_{sums}": lambda dtype=dtype, sums=sums: tensor.matmul(200, 136, 520, dtype, sums)
        for dtype, sums in [*tensor.DTYPES, ("bfloat16", "float32")]
    },
    "product_of_few_tiles": lambda: tensor.matmul(64, 64, 4096, "float16", "float32"),
    "convolution_float16_nhwc": tensor.convolution,
    "convolution_float16_nchw": lambda: tensor.convolution("NCHW"),
    "product_tf32": lambda: permit_tf32(tensor.matmul(200, 136, 520, "float32", "float32"), 3),
}

NORMALISATIONS = {
    "softmax": lambda: kernels.unary((64, 300), topi.nn.softmax),
    "many_short_rows": lambda: kernels.unary((512, 70), topi.nn.softmax),
}

ALL_KERNELS = kernels.KERNELS | ON_TENSOR_CORES | NORMALISATIONS


@pytest.fixture(scope="module")
def gpu():
    """One for many kernels: starting builders takes longer than a kernel's candidates."""
    with CudaMeasurer(resolve_target("cuda")) as made:
        yield made


@pytest.mark.parametrize("name", [pytest.param(name, marks=ON_DEVICE) for name in ALL_KERNELS])
def test_every_sketch_is_right_on_a_gpu(name, gpu):
    mod = ALL_KERNELS[name]()
    task = Task(name=name, mod=mod, workload_hash=workload_hash(mod), calls=1, flops=1.0, bytes_moved=1.0)
    gpu.baseline([task])
    decisions = decisions_of(task, gpu, 200)
    sketches = sorted({d.sketch for d in decisions})
    chosen = [d for s in sketches for d in [d for d in decisions if d.sketch == s][:6]]
    assert [(m.decision, m.detail) for m in gpu.measure(task, chosen) if m.error] == []


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs an NVIDIA GPU")
def test_an_empty_l2_makes_a_kernel_that_fits_in_it_slower():
    task, latencies_s = make_task(8192), []  # 2.6 MB in and out
    for flush_l2 in (False, True):
        with CudaMeasurer(resolve_target("cuda"), flush_l2=flush_l2) as measurer:
            measurer.baseline([task])
            latencies_s.append(min(m.latency_s for m in measurer.measure(task, decisions_of(task, measurer, 8))))
    assert latencies_s[1] > latencies_s[0]


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs an NVIDIA GPU")
def test_a_killed_gpu_process_is_replaced():
    task = make_task(512)
    with CudaMeasurer(resolve_target("cuda"), devices=[0]) as measurer:
        measurer.baseline([task])
        decisions = decisions_of(task, measurer, 2)
        assert not any(m.error for m in measurer.measure(task, decisions[:1]))
        for child in psutil.Process().children(recursive=True):
            if "eqtune.measure.cuda.worker" in child.cmdline():
                child.kill()
        assert not any(m.error for m in measurer.measure(task, decisions[1:]))
        assert measurer.losses == 1


WEIGHT = np.random.default_rng(0).standard_normal((96, 128)).astype("float32")


def product_and_softmax():
    return module((64, 96), lambda bb, x: relax.op.nn.softmax(bb.emit(relax.op.matmul(x, relax.const(WEIGHT)))))


class StandIn:
    """Runs models as numpy does, and takes half a millisecond."""

    def __init__(self) -> None:
        self.executables = []

    def load(self, executable):
        self.executables.append(executable)
        return self._run

    def run_once(self, model, inputs):
        return model(*inputs), 1e-3

    def time_s(self, models, inputs, budget_s=1.0, at_least=3, settle=False):
        return [5e-4] * len(models)

    def _run(self, x):
        powers = np.exp(x @ WEIGHT - (x @ WEIGHT).max(axis=1, keepdims=True))
        return [powers / powers.sum(axis=1, keepdims=True)]


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"trials": 4}, {"time_budget_s": 60, "trials": 4}], ids=["trials", "seconds"])
def test_a_model_is_tuned_and_resumed_as_on_a_gpu(tmp_path, monkeypatch, limits):
    stand_in = StandIn()
    monkeypatch.setattr(CudaMeasurer, "models", stand_in)

    def tune():
        measurer = CudaMeasurer(TARGET, devices=[0], workers=2, runner=(sys.executable, str(FAKE), str(tmp_path)))
        return eqtune.tune_model(
            product_and_softmax(), TARGET, measure=measurer, **limits, work_dir=tmp_path / "work", progress=False
        )

    result = tune()
    assert result.summary.context.device == "a GPU of paper"
    assert sum(task.trials for task in result.tasks) == 4
    assert result.max_rel_error < 1e-6
    assert {"cuda"} == {module.kind for made in stand_in.executables for module in cuda_modules(made)}
    with pytest.raises(eqtune.SetupError, match="device that is not here"):
        result.run(np.ones((64, 96), "float32"))
    assert sum(task.trials for task in tune().tasks) == 4, "nothing is left of the budget"


def cuda_modules(executable):
    return [module for library in executable.mod.imports for module in library.imports]


@pytest.mark.gpu
@pytest.mark.skipif(not tvm.cuda(0).exist, reason="needs an NVIDIA GPU")
def test_a_model_is_tuned_compared_and_run_on_a_gpu(tmp_path):
    result = eqtune.tune_model(
        product_and_softmax(), target="cuda", trials=16, work_dir=tmp_path / "work", progress=False
    )
    assert result.max_rel_error < 1e-4
    assert 0 < result.latency_s <= result.baseline_latency_s
    (outputs,) = result.run(np.ones((64, 96), "float32"))
    np.testing.assert_allclose(outputs.sum(axis=1), 1.0, rtol=1e-5)
