"""What the machine is said to be, and the speeds that are measured."""

from __future__ import annotations

import json
import math
import platform

import psutil
import pytest
import tvm

from eqtune import cgroup, machine
from eqtune.errors import InputError, SetupError
from eqtune.machine import describe_machine, detect_target, device_name, is_host, runs_here, target_json
from eqtune.measure import LocalMeasurer, peaks
from eqtune.search.space.gpu.hardware import GpuHardware
from eqtune.search.space.hardware import Hardware, with_weights


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


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")


@pytest.fixture
def group(monkeypatch, tmp_path):
    """Puts this process, on a machine of eight cores with two hardware threads each, into a control group."""
    cpus = {f"cpu/cpu{core}/topology/thread_siblings_list": f"{core % 8},{core % 8 + 8}" for core in range(16)}
    write(tmp_path, cpus)
    monkeypatch.setattr(machine, "CPUS", tmp_path / "cpu")
    monkeypatch.setattr(machine, "allowed_cores", lambda: set(range(16)))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)
    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "membership")

    def enter(membership, files):
        write(tmp_path, {"membership": membership, **{f"cgroup/{name}": text for name, text in files.items()}})

    return enter


@pytest.mark.parametrize(
    ("membership", "files", "quota", "threads"),
    [
        ("", {}, math.inf, 8),
        ("0::/", {"cpu.max": "max 100000"}, math.inf, 8),
        ("0::/", {"cpu.max": "250000 100000"}, 2.5, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 0.5, 1),
        ("0::/", {"cpu.max": "1200000 100000"}, 12, 8),
        ("0::/pod/box", {"cpu.max": "max 100000", "pod/cpu.max": "300000 100000", "pod/box/cpu.max": "max 1"}, 3, 3),
        ("0::/../elsewhere", {"cpu.max": "400000 100000"}, 4, 4),
        (
            "5:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n0::/",
            {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "50000"},
            3,
            3,
        ),
        ("4:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, math.inf, 8),
        ("no line of this kind", {"cpu.max": "much"}, math.inf, 8),
    ],
)
def test_a_container_gets_as_many_threads_as_its_quota(group, membership, files, quota, threads):
    """More than that are stopped in the middle of each kernel; TVM's pool would have half of the machine's cores."""
    group(membership, files)
    assert cgroup.cpu_quota() == quota
    assert machine.core_count() == threads
    assert int(detect_target().attrs["num-cores"]) == describe_machine(measure=False).threads == threads
    assert machine.logical_count() == max(1, min(16, math.floor(min(quota, 16))))
    assert int(detect_target(1).attrs["num-cores"]) == 1, "threads that were asked for are not looked up"


@pytest.mark.parametrize(("allowed", "cores"), [({0, 8}, 1), ({0, 1}, 2), ({0, 1, 8, 9}, 2), ({2, 3, 8}, 3)])
def test_two_threads_of_a_core_count_once_where_only_some_cores_are_allowed(monkeypatch, group, allowed, cores):
    monkeypatch.setattr(machine, "allowed_cores", lambda: allowed)
    assert machine.core_count() == cores
    assert machine.logical_count() == len(allowed)


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/", {"memory.max": 1 << 30}),
        ("0::/pod", {"memory.max": "max", "pod/memory.max": 1 << 30}),
        ("3:memory:/docker/1", {"memory/memory.limit_in_bytes": 1 << 30}),
    ],
)
def test_a_worker_takes_a_share_of_its_containers_memory(monkeypatch, group, membership, files):
    """Of the machine's, it might take so much that the system kills the container."""
    group(membership, files)
    assert machine.memory_bytes() == 1 << 30
    told = []
    monkeypatch.setattr("eqtune.measure.local.WorkerPool.configure", lambda _, config: told.append(config.memory_bytes))
    with LocalMeasurer(detect_target(1), describe_machine(measure=False), threads=1, workers=1):
        assert told == [int(0.6 * (1 << 30))]


def test_without_a_limit_there_is_all_memory(group):
    group("3:memory:/", {"memory/memory.limit_in_bytes": 2**63 - 4096})
    assert machine.memory_bytes() == psutil.virtual_memory().total


@pytest.mark.slow
def test_measured_speeds_are_those_of_a_real_machine():
    hardware = describe_machine(detect_target(1))
    cycle = hardware.peak_flops_per_s / (2 * hardware.lanes(4))
    assert 0.5e9 < cycle < 12e9, "between half an FMA at 1 GHz and two at 6 GHz"
    assert hardware.peak_flops_per_s_all >= hardware.peak_flops_per_s
    assert 1e9 < hardware.bandwidth_bytes_per_s < 1e12
    assert hardware.cache_bandwidth_bytes_per_s > hardware.bandwidth_bytes_per_s / 2
    assert 0 <= hardware.parallel_overhead_s <= peaks.BUSY_START_S
    assert 1 <= hardware.half_vector_rate <= 2
    assert 1 <= hardware.fmas_per_load < 4


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
    assert not Hardware(l3_bytes=48 << 20).last_cache_is_far
    slow = Hardware(l3_bytes=48 << 20, l2_bytes=1280 << 10, threads=2, slow_last_cache=True)
    assert slow.last_cache_is_far
    assert with_weights(slow, 5 << 20).weights_in_memory
    assert not with_weights(slow, 2 << 20).weights_in_memory


@pytest.mark.parametrize(("cpu", "slow"), [("icelake-server", True), ("znver3", False)])
def test_slow_loads_and_a_slow_last_cache_are_known_without_measuring(cpu, slow):
    """Passes measure nothing, and build the spaces that a model was tuned with."""
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu})
    hardware = describe_machine(target, measure=False, here=False)
    assert hardware.slow_last_cache == slow
    assert (hardware.fmas_per_load > 1) == slow


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
