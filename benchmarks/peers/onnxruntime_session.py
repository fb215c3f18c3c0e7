"""How ONNX Runtime is run and timed.

All optimisations are on; inputs and outputs are bound, so that a call copies neither; threads have a core each, as
eqtune's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from benchmarks.peers.timing import minimum_s
from eqtune.measure.affinity import on_core, own_cores

__all__ = ["call_s", "timed_s"]


def timed_s(model: bytes | str | Path, feeds: Mapping[str, NDArray[Any]], threads: int, budget_s: float) -> float:
    """Seconds of one run of a model, given as bytes or by its path: the minimum over `budget_s` seconds."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    cores = own_cores(threads, os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) > 1:  # one for each thread but the caller; ONNX Runtime counts cores from 1
        affinities = ";".join(str(core + 1) for core in cores[1:])
        options.add_session_config_entry("session.intra_op_thread_affinities", affinities)
    session = ort.InferenceSession(model, options, ["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.asarray(value, order="C")))
    names = [output.name for output in session.get_outputs()]
    for name in names:
        binding.bind_output(name)
    session.run_with_iobinding(binding)  # outputs are allocated once, by the first run
    for name, value in zip(names, binding.get_outputs(), strict=True):
        binding.bind_ortvalue_output(name, value)
    with on_core(cores[0]) if cores else contextlib.nullcontext():
        return minimum_s(lambda: session.run_with_iobinding(binding), budget_s)


def call_s(threads: int) -> float:
    """Seconds of a call that computes nothing: of a model that hands on one number."""
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (1,)) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "empty", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return timed_s(model.SerializeToString(), {"x": np.zeros(1, np.float32)}, threads, budget_s=0.1)
