"""Which GPU is meant, without having one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import tvm

from eqtune import gpu_machine
from eqtune.errors import InputError
from eqtune.gpu_machine import describe_gpu, gpu_target, resolve_target
from eqtune.machine import describe_machine, device_name, target_json
from eqtune.search.space.gpu.hardware import ALIASES, ARCHITECTURES, DEVICES


@pytest.mark.parametrize("tag", [*DEVICES, *ALIASES])
def test_every_tag_gives_a_full_target(tag):
    target = resolve_target(tag)
    hardware = describe_machine(target)
    assert hardware.name == DEVICES[ALIASES.get(tag, tag)].name
    for limit in ("max_threads_per_block", "max_shared_memory_per_block", "thread_warp_size", "registers_per_block"):
        assert int(target.attrs[limit]) > 0
    assert device_name(target) == hardware.name
    assert target_json(resolve_target(tag)) == target_json(target)


@pytest.mark.parametrize(
    ("said", "bindings", "expected"), [(None, False, "nvcc"), (None, True, None), ("nvrtc", False, "nvrtc")]
)
def test_tvm_compiles_with_the_compiler_that_is_there(said, bindings, expected, monkeypatch):
    environment = {} if said is None else {"TVM_CUDA_COMPILE_MODE": said}
    monkeypatch.setattr(gpu_machine.os, "environ", environment)
    monkeypatch.setattr(gpu_machine, "_has_module", lambda name: bindings)
    monkeypatch.setattr(gpu_machine, "find_compiler", lambda: gpu_machine.Compiler("nvcc", "/usr/bin/nvcc", "13.0"))
    gpu_machine.let_tvm_compile()
    assert environment.get("TVM_CUDA_COMPILE_MODE") == expected


def test_peaks_agree_with_the_data_sheets():
    published = {
        "nvidia/nvidia-h100": 66.9,
        "nvidia/nvidia-a100": 19.5,
        "nvidia/nvidia-l4": 30.3,
        "nvidia/nvidia-t4": 8.1,
    }
    for tag, tflops in published.items():
        assert DEVICES[tag].hardware().peak_flops_per_s_all / 1e12 == pytest.approx(tflops, rel=0.02)
    assert all(device.arch in ARCHITECTURES for device in DEVICES.values())


def test_a_bare_arch_is_described_by_its_limits():
    hardware = describe_gpu(tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}))
    assert hardware.name == "generic sm_90"
    assert hardware.shared_bytes_per_block == 227 * 1024


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_listed_arch_is_described_though_no_product_has_it(arch):
    hardware = describe_gpu(tvm.target.Target({"kind": "cuda", "arch": arch}))
    assert hardware.arch == arch
    assert hardware.shared_bytes_per_block == ARCHITECTURES[arch].shared_per_block * 1024


def test_fields_can_be_overridden_and_unknown_ones_are_refused():
    target = resolve_target("nvidia/nvidia-h100")
    assert describe_machine(target, clock_hz=1e9).clock_hz == 1e9
    with pytest.raises(InputError, match="clock_hz"):
        describe_machine(target, speed=1)


def test_an_unknown_tag_lists_those_there_are():
    with pytest.raises(InputError, match="nvidia/nvidia-h200"):
        resolve_target("nvidia/unheard-of")


def test_cuda_without_a_gpu_is_refused_with_the_tags(monkeypatch):
    monkeypatch.setattr(gpu_machine, "local_gpu", lambda: None)
    with pytest.raises(InputError, match="give a tag"):
        resolve_target("cuda")


def test_cuda_is_this_machines_gpu(monkeypatch):
    own = replace(DEVICES["nvidia/nvidia-l4"].hardware(), clock_hz=1.5e9)
    monkeypatch.setattr(gpu_machine, "local_gpu", lambda: own)
    target = resolve_target("cuda")
    assert describe_gpu(target) == own
    assert target_json(target) == target_json(gpu_target(own))
    other = resolve_target("nvidia/geforce-rtx-4090")  # of the same architecture
    assert describe_gpu(other) == DEVICES["nvidia/geforce-rtx-4090"].hardware()


@pytest.mark.parametrize(
    ("tag", "is_here"),
    [
        ("nvidia/nvidia-h100", True),
        ("nvidia/nvidia-h200", False),
        ("nvidia/geforce-rtx-4090", False),
    ],
)
def test_the_tag_of_this_machines_product_means_this_very_gpu(tag, is_here, monkeypatch):
    own = replace(DEVICES["nvidia/nvidia-h100"].hardware(), name="NVIDIA H100 80GB HBM3", clock_hz=1.7e9)
    monkeypatch.setattr(gpu_machine, "local_gpu", lambda: own)
    target = resolve_target(tag)
    assert device_name(target) == (own.name if is_here else DEVICES[tag].name)
    assert (describe_gpu(target) == own) == is_here


def test_the_tag_of_a_sibling_does_not(monkeypatch):
    own = replace(DEVICES["nvidia/geforce-rtx-3090"].hardware(), name="NVIDIA GeForce RTX 3090 Ti")
    monkeypatch.setattr(gpu_machine, "local_gpu", lambda: own)
    assert device_name(resolve_target("nvidia/geforce-rtx-3090")) == "NVIDIA GeForce RTX 3090"
    assert device_name(tvm.target.Target("nvidia/geforce-rtx-3090-ti")) == "NVIDIA GeForce RTX 3090 Ti"


def gpu_of(capability, name="NVIDIA Something"):
    return SimpleNamespace(
        exist=True,
        device_name=name,
        compute_version=capability,
        max_clock_rate=1500000,
        multi_processor_count=20,
        warp_size=32,
        max_threads_per_block=1024,
        l2_cache_size_bytes=4 * 1024**2,
    )


@pytest.mark.parametrize(("capability", "alike"), [("8.7", "sm_86"), ("10.3", "sm_100"), ("7.0", "sm_75")])
def test_a_gpu_that_is_not_listed_has_what_its_driver_says_and_else_the_least(capability, alike, monkeypatch):
    monkeypatch.setattr(tvm, "cuda", lambda index: gpu_of(capability))
    monkeypatch.setattr(gpu_machine, "_driver_attributes", dict)
    found = gpu_machine.local_gpu.__wrapped__()
    assert found.arch == "sm_" + capability.replace(".", "")
    assert found.shared_bytes_per_block == ARCHITECTURES[alike].shared_per_block * 1024
    told = {"shared_bytes_per_block": 163 * 1024, "memory_clock_khz": 1000000, "memory_bus_bits": 256}
    monkeypatch.setattr(gpu_machine, "_driver_attributes", lambda: told)
    found = gpu_machine.local_gpu.__wrapped__()
    assert (found.shared_bytes_per_block, found.bandwidth_bytes_per_s) == (163 * 1024, 64e9)
