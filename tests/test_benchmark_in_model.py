"""Kernels are found that take longer in a model than alone."""

from types import SimpleNamespace

import numpy as np
import tvm
from tvm import relax

from benchmarks.in_model import kernel_times, slower_kernels
from eqtune import zoo
from eqtune.compile.untuned import untuned_executable
from eqtune.machine import detect_target


def test_each_kernel_of_a_run_is_timed():
    executable = untuned_executable(zoo.relax("nasrnn"), detect_target(), plain=True)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    inputs = [tvm.runtime.tensor(np.asarray(array)) for array in zoo.inputs("nasrnn", seed=0).values()]
    times, calls = kernel_times(machine, inputs, runs=2)
    assert times.keys() == calls.keys()
    assert times
    assert min(times.values()) > 0
    assert max(calls.values()) > 1  # the same kernels in each of its steps


def test_what_memory_does_not_explain_is_lost():
    def task(name, latency_us, megabytes, trials=8):
        return SimpleNamespace(name=name, latency_s=latency_us * 1e-6, bytes_moved=megabytes * 1e6, trials=trials)

    tasks = [task("dense", 100, 0.1), task("add", 10, 2.0), task("norm", 30, 0.2, trials=0), task("relu", 5, 0.1)]
    times = {"dense_packed": 400e-6, "add": 40e-6, "norm": 140e-6, "relu": 6e-6, "routine": 9e-6}
    calls = {"dense_packed": 1, "add": 1, "norm": 13, "relu": 1, "routine": 1}
    found = slower_kernels("speech", tasks, times, calls, bandwidth_bytes_per_s=50e9, least_s=20e-6)
    assert [(row["kernel"], row["trials"]) for row in found] == [("norm", 0), ("dense_packed", 8)]
    assert abs(found[0]["lost_us"] - 13 * (140 - 30 - 1.5)) < 0.01
