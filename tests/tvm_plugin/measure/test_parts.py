"""How long to time, what counts as wrong, whether the cores are disturbed, how processes end, replaying records."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from tvm import te

from eqtune.errors import InputError
from eqtune.gpu_machine import Compiler
from eqtune.machine import detect_target
from eqtune.measure import ReplayMeasurer
from eqtune.measure.arguments import BufferSpec, Interface, poison, random_inputs
from eqtune.measure.check import ONE_OFF, mismatch, relative_tolerance
from eqtune.measure.cuda import code as cuda_code
from eqtune.measure.gauge import LOOKS, Gauge, multiply_adds, multiply_adds_at_peak_s
from eqtune.measure.process import spawn
from eqtune.measure.scratch import LOCK
from eqtune.measure.timing import BASELINE, QUICK, time_kernel
from eqtune.records.record import Context, Record
from eqtune.search.space.base import Decision
from eqtune.search.space.hardware import Hardware
from eqtune.tasks.task import Task


class Clock:
    """A kernel that always takes the same time."""

    def __init__(self, latency_s):
        self.latency_s = latency_s
        self.calls = 0

    def __call__(self, number, repeat):
        self.calls += 1 + number * repeat
        return [self.latency_s] * repeat


@pytest.mark.parametrize("latency_s", [1e-7, 1e-6, 1e-4, 1e-3, 1e-2])
def test_fast_kernels_are_called_often_enough_and_slow_ones_not_too_long(latency_s):
    clock = Clock(latency_s)
    latencies_s, given_up = time_kernel(clock, first_s=latency_s)
    assert not given_up
    assert len(latencies_s) >= QUICK.min_repeats
    assert 3 * QUICK.min_repeat_s <= clock.calls * latency_s <= 0.08


@pytest.mark.parametrize(("first_s", "calls"), [(0.03, 2), (0.1, 0), (3.0, 0)])
def test_slow_untuned_kernels_run_once_or_twice(first_s, calls):
    clock = Clock(first_s)
    assert time_kernel(clock, first_s, BASELINE) == ((first_s,), False)
    assert clock.calls == calls


def test_a_slow_first_call_alone_gives_up_only_far_above_the_best():
    cold = Clock(2e-3)
    assert time_kernel(cold, first_s=6e-3, best_s=2e-3)[1] is False, "the first call is cold"
    hopeless = Clock(2e-3)
    assert time_kernel(hopeless, first_s=15e-3, best_s=2e-3) == ((15e-3,), True)
    assert hopeless.calls == 0
    good = Clock(8e-5)
    latencies_s, given_up = time_kernel(good, first_s=2e-3, best_s=7e-5)
    assert (min(latencies_s), given_up) == (8e-5, False), "a busy machine adds milliseconds to any first call"
    slower = Clock(4e-3)
    assert time_kernel(slower, first_s=4e-3, best_s=2e-3)[1] is True
    assert slower.calls <= 4


def test_the_gauge_compares_with_the_fastest_it_saw():
    seconds = iter([2.0, 1.0, 1.1, *[1.7] * LOOKS, 1.0])
    gauge = Gauge(lambda: next(seconds))
    assert [gauge.disturbed() for _ in range(5)] == [False, False, False, True, False]


def test_a_tenant_who_was_there_first_is_seen_where_the_full_speed_is_known():
    assert Gauge(lambda: 1.7, best_s=1.0).disturbed()
    assert not Gauge(lambda: 1.1, best_s=1.0).disturbed()


def test_a_core_that_wakes_up_is_not_disturbed():
    seconds = iter([1.0, 1.9, 1.5, 1.1])
    gauge = Gauge(lambda: next(seconds))
    assert [gauge.disturbed() for _ in range(2)] == [False, False]


def test_multiply_adds_are_timed_on_every_thread():
    for threads in (1, 2):
        hardware = Hardware(threads=threads)
        assert 1e-6 < multiply_adds(detect_target(threads), hardware)() < 1e-2
        assert 1e-6 < multiply_adds_at_peak_s(hardware) < 1e-3


def test_rounding_is_right_and_a_missing_term_is_wrong():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 64, 512), dtype=np.float32)
    exact = (a.astype(np.float64) @ b.T.astype(np.float64)).astype(np.float32)
    tolerance = relative_tolerance("float32", 512)
    assert mismatch(a @ b.T, exact, tolerance) == ""
    assert "elements are wrong" in mismatch(a[:, 1:] @ b.T[1:], exact, tolerance)
    half = a.astype(np.float16) @ b.T.astype(np.float16)
    assert mismatch(half.astype(np.float32), exact, relative_tolerance("float16", 512)) == ""


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_is_wrong_unless_the_reference_has_it(bad):
    reference = np.ones(8, np.float32)
    got = reference.copy()
    got[3] = bad
    assert mismatch(got, reference, 1e-3) != ""
    assert mismatch(got, got, 1e-3) == ""
    assert mismatch(reference, got, 1e-3) != ""


def test_what_is_too_large_to_be_squared_is_compared_all_the_same():
    reference = np.array([1e200, 2e200, 1.0])
    assert mismatch(reference.copy(), reference, relative_tolerance("float64", 1)) == ""
    assert "1 of 3 elements are wrong" in mismatch(reference * [1.0, 3.0, 1.0], reference, 1e-3)


def test_integers_must_be_equal_and_a_poisoned_output_never_passes():
    assert mismatch(np.arange(4), np.arange(4), 0.0) == ""
    assert "first at (2,)" in mismatch(np.array([0, 1, 3, 3]), np.arange(4), 0.0)
    spec = BufferSpec((4, 4), "float32")
    assert mismatch(poison(spec), np.zeros((4, 4), np.float32), relative_tolerance("float32", 10**6)) != ""


def test_a_few_rounded_sums_may_be_the_next_integer_and_no_more():
    reference = np.arange(200, dtype=np.uint8)
    got = reference.copy()
    got[17] -= 1
    assert mismatch(got, reference, 0.0) != ""
    assert mismatch(got, reference, 0.0, ONE_OFF) == ""
    got[18:20] += 1
    assert "3 of 200 elements differ" in mismatch(got, reference, 0.0, ONE_OFF)
    far = reference.copy()
    far[17] = 19
    assert mismatch(far, reference, 0.0, ONE_OFF) != ""
    unwritten = poison(BufferSpec((200,), "uint64"))
    written = np.zeros(200, np.uint64)
    written[17] = unwritten[17]
    assert mismatch(written, np.zeros(200, np.uint64), 0.0, ONE_OFF) != "", "the largest is not next to 0"


def test_integers_that_are_rounded_sums_of_floats_are_known():
    a, b = (te.placeholder((8, 8), "float32", name=name) for name in "ab")
    k = te.reduce_axis((0, 8), name="k")
    sums = te.compute((8, 8), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k))
    rounded = te.compute((8, 8), lambda i, j: te.nearbyint(sums[i, j]).astype("int8"))
    assert Interface.of(te.create_prim_func([a, b, rounded])).quantizes
    assert not Interface.of(te.create_prim_func([a, b, sums])).quantizes
    alone = te.compute((8, 8), lambda i, j: te.nearbyint(a[i, j]).astype("int8"))
    assert not Interface.of(te.create_prim_func([a, alone])).quantizes
    scaled = te.compute((8, 8), lambda i, j: te.nearbyint(a[i, j] * 0.1).astype("int8"))
    assert not Interface.of(te.create_prim_func([a, scaled])).quantizes


def test_integers_that_are_rounded_sums_of_products_may_differ_by_one():
    """Two scaled tensors are added by one rounding or by two, as loops are joined: all candidates were refused."""
    a, b = (te.placeholder((8, 8), "float32", name=name) for name in "ab")
    scaled = te.compute((8, 8), lambda i, j: a[i, j] * 0.1)
    rounded = te.compute((8, 8), lambda i, j: te.nearbyint(scaled[i, j] + b[i, j]).astype("int8"))
    assert Interface.of(te.create_prim_func([a, b, rounded])).quantizes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "int16", "uint8", "int64", "bool"])
def test_inputs_exist_for_every_dtype(dtype):
    bound = 2 if dtype == "int64" else None
    interface = Interface((BufferSpec((3, 5), dtype), BufferSpec((3,), dtype)), (1,), index_bound=bound, reduction=1)
    (array,) = random_inputs(interface, 0, "0123456789abcdef").values()
    assert array.shape == (3, 5)
    assert np.unique(array.astype(np.float64)).size > 1
    if dtype == "int64":
        assert array.min() >= 0
        assert array.max() < 2
    if dtype in ("int8", "int16"):
        assert array.min() < 0 < array.max(), "a sign that is lost must show"


@pytest.mark.parametrize(
    ("dtype", "bound", "largest"), [("int8", 4, 3), ("uint8", 4, 3), ("int8", 500, 127), ("int16", 99999, 2**15 - 1)]
)
def test_narrow_integers_that_index_lie_inside(dtype, bound, largest):
    data, places = BufferSpec((bound, 2), "float32"), BufferSpec((9000,), dtype)
    interface = Interface((data, places, BufferSpec((9000, 2), "float32")), (2,), index_bound=bound, reduction=1)
    drawn = random_inputs(interface, 0, "0123456789abcdef")[1]
    assert drawn.min() >= 0
    assert largest // 2 < drawn.max() <= largest


def test_bytes_beside_wider_integers_are_no_indices():
    specs = (BufferSpec((4, 2), "int8"), BufferSpec((9,), "int64"), BufferSpec((9, 2), "int8"))
    weights, places = random_inputs(Interface(specs, (2,), index_bound=4, reduction=1), 0, "0123456789abcdef").values()
    assert weights.min() < 0
    assert places.min() >= 0


def wait_for_end(pid):
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it outlived what had started it"
        time.sleep(0.01)


@pytest.mark.parametrize("grace_s", [0.0, 1.0])
def test_what_a_dead_worker_had_started_ends_with_it(tmp_path, grace_s):
    """Closed in the middle of compiling, say: the compiler goes on by itself."""
    script = """sleep 1000 >/dev/null & printf '{"child": %d}\\n' $!; kill -9 $$"""
    worker = spawn(["sh", "-c", script], {"PATH": os.environ["PATH"]}, tmp_path / "log")
    child = worker.receive()["child"]
    if grace_s:
        assert worker.autopsy()["error"] == "out_of_memory"
    worker.end(grace_s)
    wait_for_end(child)


def test_messages_that_arrive_together_are_answers_one_by_one(tmp_path):
    script = """printf '{"number": 1}\n{"number": 2}\n'; sleep 1000"""
    worker = spawn(["sh", "-c", script], {"PATH": os.environ["PATH"]}, tmp_path / "log")
    assert [worker.answer(10.0)["number"] for _ in range(2)] == [1, 2]
    with pytest.raises(TimeoutError):
        worker.answer(0.01)
    worker.end()


def test_nvcc_that_takes_too_long_is_killed_with_what_it_started(tmp_path, monkeypatch):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\nsleep 1000 & echo $! > {tmp_path}/child; wait; true\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(cuda_code, "COMPILE_LIMIT_S", 0.5)
    with pytest.raises(ValueError, match=r"nvcc took longer than 0.5 s"):
        cuda_code.compile_kernels("", "sm_90", Compiler("nvcc", str(nvcc), "1"))
    wait_for_end(int((tmp_path / "child").read_text()))


def test_what_nvcc_leaves_when_its_builder_is_killed_is_removed_later(tmp_path):
    """Its files are in a directory with a lock, also the temporary ones: a build that takes too long is killed."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n'
        f'[ "$TMPDIR/kernels.cubin" = "$2" ] && [ -e "$TMPDIR/{LOCK}" ] && printf code > "$2"\n'
    )
    nvcc.chmod(0o755)
    assert cuda_code.compile_kernels("", "sm_90", Compiler("nvcc", str(nvcc), "1")) == (b"code", {})


def test_a_cache_that_cannot_be_written_to_only_costs_time(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nprintf code > "$2"\n')
    nvcc.chmod(0o755)
    (tmp_path / "file").write_text("in the way")
    compiler = Compiler("nvcc", str(nvcc), "1")
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        assert cuda_code.compile_kernels("", "sm_90", compiler, cache) == (b"code", {})
    assert cuda_code.compile_kernels("", "sm_90", compiler, tmp_path / "cache") == (b"code", {})
    nvcc.unlink()
    assert cuda_code.compile_kernels("", "sm_90", compiler, tmp_path / "cache") == (b"code", {})


CONTEXT = Context("{}", "machine", 1, "0.27.0")
TASK = Task("k", None, "00" * 8, 1, 1.0, 1.0)


def record(tile, *latencies_s, error="", context=CONTEXT):
    decision = json.dumps(Decision("s", {"tile": tile}).to_json())
    return Record(TASK.workload_hash, decision, f"trace {tile}", context, latencies_s, error)


def test_replay_answers_what_was_recorded():
    replay = ReplayMeasurer([record(1, 3.0, 2.0), record(1, 1.5), record(2, error="timeout"), record(4, 8.0)])
    decisions = [Decision("s", {"tile": tile}) for tile in (4, 2, 1, 3)]
    measured = replay.measure(TASK, decisions)
    assert [m.latency_s for m in measured] == [8.0, math.inf, 1.5, math.inf]
    assert [m.error for m in measured] == ["", "timeout", "", "build_error"]
    assert measured[0].trace == "trace 4"
    assert replay.baseline([TASK]) == [16.0]
    assert replay.describe()["device"] == "machine"
    assert ReplayMeasurer([], {TASK.workload_hash: 5.0}).baseline([TASK]) == [5.0]
    assert ReplayMeasurer([record(2, error="timeout")]).baseline([TASK]) == [math.inf], "nothing to go by"


def test_replay_refuses_records_that_cannot_be_compared():
    other = Context("{}", "machine", 2, "0.27.0")
    with pytest.raises(InputError, match="2 contexts"):
        ReplayMeasurer([record(1, 1.0), record(1, 0.5, context=other)])


LATE = """
from eqtune.measure.lean_import import leave_out
leave_out()
import sys
import tvm
import tvm_ffi
assert "torch" not in [name for name, module in sys.modules.items() if module is not None]
assert tvm.get_global_func("relax.op.add") and callable(tvm.relax.op._ffi_api.add)
tvm_ffi.register_global_func("late.double", lambda x: 2 * x)
tvm_ffi.init_ffi_api("late", "__main__")
print(double(21))
"""


def test_what_is_registered_after_tvm_s_import_is_bound_all_the_same() -> None:
    assert subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True).stdout == "42\n"


COMMAND = """
import sys
from eqtune.cli import main
assert main(["kernels", "zoo:nasrnn", "--list"]) == 0
assert "tvm" in sys.modules
assert "torch" not in sys.modules
import torch
print("loaded")
"""


def test_commands_load_torch_for_its_own_files_only() -> None:
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("loaded\n")
