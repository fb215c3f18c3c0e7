"""What the machine is said to be, and the speeds that are measured."""

from __future__ import annotations

import json
import platform

import pytest
import tvm

from eqtune import machine
from eqtune.errors import InputError, SetupError
from eqtune.machine import describe_machine, detect_target, device_name, is_host, runs_here, target_json
from eqtune.measure import peaks
from eqtune.search.space.gpu.hardware import GpuHardware
from eqtune.search.space.hardware import Hardware


def test_the_target_names_processor_and_cores():
    target = detect_target(1)
    assert is_host(target)
    assert int(target.attrs["num-cores"]) == 1
    assert str(target.attrs["mcpu"]) in device_name(target)
    assert json.loads(target_json(target))["kind"] == "llvm"
    assert target_json(tvm.target.Target(json.loads(target_json(target)))) == target_json(target)


@pytest.mark.parametrize(("threads", "says"), [(0, "at least 1"), (-1, "at least 1"), (100_000, "at most")])
def test_threads_must_be_what_this_machine_has(threads, says):
    with pytest.raises(InputError, match=f"threads must be {says}"):
        detect_target(threads)


@pytest.mark.slow
def test_measured_speeds_are_those_of_a_real_machine():
    hardware = describe_machine(detect_target(1))
    cycle = hardware.peak_flops_per_s / (2 * hardware.lanes(4))
    assert 0.5e9 < cycle < 12e9, "between half an FMA at 1 GHz and two at 6 GHz"
    assert hardware.peak_flops_per_s_all >= hardware.peak_flops_per_s
    assert 1e9 < hardware.bandwidth_bytes_per_s < 1e12
    assert hardware.cache_bandwidth_bytes_per_s > hardware.bandwidth_bytes_per_s / 2
    assert 0 <= hardware.parallel_overhead_s < 1e-2
    assert 1 <= hardware.half_vector_rate <= 2


def test_measuring_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(peaks, "_KNOWN", {})
    target = detect_target(1)
    assert describe_machine(target, limit_s=0.01) == describe_machine(target, measure=False)
    monkeypatch.setattr(peaks, "LIMIT_S", 0.01)
    with pytest.raises(SetupError, match=r"took more than 0\.01 s"):
        describe_machine(target)


def test_what_can_be_looked_up_is_instant_and_overridable():
    hardware = describe_machine(measure=False, l1_bytes=12345, threads=2)
    assert hardware.l1_bytes == 12345
    assert hardware.threads == 2
    assert hardware.peak_flops_per_s_all == 2 * hardware.peak_flops_per_s
    assert Hardware.from_json(json.loads(json.dumps(hardware.to_json()))) == hardware
    with pytest.raises(InputError, match="l9_bytes"):
        describe_machine(measure=False, l9_bytes=1)


@pytest.mark.parametrize(
    ("target", "vector_bytes", "vector_registers", "l2_bytes", "half_vector_rate"),
    [
        ({"kind": "llvm", "mcpu": "znver4", "num-cores": 8}, 64, 32, 1024 * 1024, 2),
        ({"kind": "llvm", "mcpu": "skylake-avx512"}, 64, 32, 1024 * 1024, 1),
        ({"kind": "llvm", "mcpu": "haswell"}, 32, 16, 256 * 1024, 1),
        ({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"}, 16, 32, 1024 * 1024, 1),
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64"}, 16, 16, 512 * 1024, 1),
    ],
)
def test_targets_that_run_elsewhere_come_from_the_table(
    target, vector_bytes, vector_registers, l2_bytes, half_vector_rate
):
    hardware = describe_machine(tvm.target.Target(target), here=False)
    assert hardware.name == target["mcpu"]
    assert (hardware.vector_bytes, hardware.vector_registers) == (vector_bytes, vector_registers)
    assert (hardware.l2_bytes, hardware.half_vector_rate) == (l2_bytes, half_vector_rate)
    assert hardware.threads == target.get("num-cores", hardware.threads)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs a target with fewer instructions than this machine")
def test_code_for_fewer_instructions_is_measured_where_it_runs(monkeypatch):
    """A peak from the table ended the search at a third of what SSE reaches here."""
    target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64", "num-cores": 1})
    assert runs_here(target)
    assert not is_host(target)
    assert device_name(target) == device_name(detect_target()).partition(" (")[0] + " (x86-64)"
    asked = []
    monkeypatch.setattr(peaks, "measure_speeds", lambda target, *_: asked.append(target) or {"peak_flops_per_s": 7e9})
    hardware = describe_machine(target)
    assert asked[0]["mcpu"] == "x86-64"
    assert hardware.peak_flops_per_s == 7e9
    assert hardware.l2_bytes == describe_machine(measure=False).l2_bytes
    assert hardware.name == device_name(target)


def test_a_last_cache_that_is_as_slow_as_memory_is_not_near():
    """Winograd's weights, four times as large, won by prices of warm ones and lost in the model."""
    assert Hardware(l3_bytes=32 << 20).near_bytes == 32 << 20
    assert Hardware(l3_bytes=480 << 20, l2_bytes=2 << 20, threads=2).near_bytes == 4 << 20


def test_without_system_files_the_table_answers(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CPU_DIRECTORY", tmp_path)
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")
    hardware = describe_machine(measure=False)
    assert hardware.name.startswith("CPU (")
    assert hardware.l1_bytes > 0
    assert hardware.cache_line_bytes == 64


def test_caches_are_read_from_the_system(monkeypatch, tmp_path):
    rows = [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K"), ("3", "Unified", "bad")]
    for index, (level, kind, size) in enumerate(rows):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size), ("coherency_line_size", "128")):
            (folder / name).write_text(text + "\n")
    monkeypatch.setattr(machine, "CPU_DIRECTORY", tmp_path)
    hardware = describe_machine(measure=False)
    assert (hardware.l1_bytes, hardware.l2_bytes, hardware.cache_line_bytes) == (48 * 1024, 2048 * 1024, 128)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="features of x86")
def test_the_target_says_what_this_cpu_has_beyond_others_of_its_name_or_lacks(monkeypatch):
    """In virtual machines, a Xeon with AMX is a Rocket Lake; others hide AVX-512 of a CPU whose name promises it."""
    monkeypatch.setattr("tvm.target.codegen.llvm_get_system_cpu", lambda: "rocketlake")
    named = machine._features_of("rocketlake")
    amx = {"amx-tile", "amx-int8", "amx-bf16"}

    def extras(found):
        monkeypatch.setattr(machine, "_host_features", lambda: found)
        return [str(feature) for feature in detect_target(1).attrs.get("mattr", [])]

    assert extras(named) == extras(set()) == ["-prefer-256-bit"]
    assert extras(named | amx) == ["+amx-bf16", "+amx-int8", "+amx-tile", "-prefer-256-bit"]
    assert "amx-bf16" in describe_machine(detect_target(1), measure=False).dot_products
    assert describe_machine(detect_target(1), measure=False).tile_flops_per_s > 1e12
    assert runs_here(detect_target(1))
    assert extras(named - {"avx512vnni"}) == ["-avx512vnni", "-prefer-256-bit"]
    assert "avx512vnni" not in describe_machine(detect_target(1), measure=False).dot_products
    with_amx = tvm.target.Target({"kind": "llvm", "mcpu": "sapphirerapids"})
    assert "amx-bf16" in machine.missing_here(with_amx)


def test_amx_that_the_system_forbids_is_none(monkeypatch):
    monkeypatch.setattr(machine, "_permits_tiles", lambda: False)
    assert not any(name.startswith("amx") for name in machine._host_features())


def test_weights_are_read_faster_than_a_copy_whose_bandwidth_a_cpu_is_known_by():
    cpu, gpu = Hardware(), GpuHardware()
    assert cpu.least_latency_s(0.0, 1e6, 1e6) == cpu.least_latency_s(0.0, 1e6) / 2
    assert cpu.least_latency_s(1e12, 1e6, 1e6) == cpu.least_latency_s(1e12, 1e6), "arithmetic takes longer"
    assert gpu.least_latency_s(0.0, 1e6, 1e6) == gpu.least_latency_s(0.0, 1e6)
