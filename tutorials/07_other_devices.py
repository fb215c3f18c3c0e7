# Measure on other devices
# ========================
#
# A model is best timed on the device that will run it, which is often not the machine that compiles. TVM's RPC tracker
# knows which devices are free; eqtune builds here, sends candidates to every server under one key, and in the end sends
# the whole model, untuned and tuned: its outputs and latencies are those of the device.
#
# **Warning.** TVM's RPC executes what it is sent, for everyone who can connect, and asks for no password. Everything
# below listens on 127.0.0.1, where only this machine can connect. Between machines, use a private network or an SSH
# tunnel, and never an interface that strangers can reach.
#
# On real devices the two processes below are started by hand, once (`pip install "eqtune[rpc]"`):
#
#     python -m tvm.exec.rpc_tracker --host 127.0.0.1 --port 9190
#     python -m eqtune.measure.rpc_server --tracker 127.0.0.1:9190 --key cpu        # on each device
#
# and the command line takes the same address: `eqtune tune model.onnx --measure rpc://127.0.0.1:9190/cpu`. For a device
# that is not like this machine, say what to compile for; a Raspberry Pi 4, for example, is
#
#     --target '{"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72", "num-cores": 4}'
#
# Nothing that is compiled for it is run here. Candidates are sent as object files, which the device links: it needs
# a C++ compiler, as TVM's RPC always does.

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tvm import relax

import eqtune
from eqtune.errors import SetupError
from eqtune.measure.rpc.tracker import RpcAddress, rpc_status

with socket.socket() as probe:  # a free port
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
url = f"rpc://127.0.0.1:{port}/cpu"


def start(module, *arguments):
    return subprocess.Popen([sys.executable, "-m", module, *arguments], start_new_session=True)


processes = [
    start("tvm.exec.rpc_tracker", "--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1), "--silent"),
    start("eqtune.measure.rpc_server", "--tracker", f"127.0.0.1:{port}", "--key", "cpu", "--threads", "1"),
]

# What would `eqtune tune` say without them? One error, which names what to start:

try:
    rpc_status(RpcAddress("127.0.0.1", 1, "cpu"))
except SetupError as error:
    print(error)

try:
    # The tracker is up after a few seconds. `rpc_status` counts the servers under a key, and those that are free.
    deadline = time.monotonic() + 120
    status = {"servers": 0}
    while not status["servers"] and time.monotonic() < deadline:
        time.sleep(0.2)
        try:
            status = rpc_status(RpcAddress.parse(url))
        except SetupError:
            continue
    print(status)

    # A small model: a dense layer with ReLU, and softmax. Everything is as in a local run, but `measure`. Records carry
    # the far device's name and the way to it, so that they are never mistaken for measurements made here.
    x = relax.Var("x", relax.TensorType((64, 256), "float32"))
    weight = relax.const(np.random.default_rng(0).standard_normal((256, 128)).astype("float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            dense = builder.emit(relax.op.nn.relu(builder.emit(relax.op.matmul(x, weight))))
            y = builder.emit_output(relax.op.nn.softmax(dense))
        builder.emit_func_output(y)
    work = Path(tempfile.mkdtemp())
    result = eqtune.tune_model(builder.get(), measure=url, threads=1, trials=24, work_dir=work / "work", progress=False)
    for task in result.tasks:
        print(f"{task.name}: untuned {task.baseline_latency_s * 1e6:.0f} us, tuned {task.latency_s * 1e6:.1f} us")
    before, after = result.baseline_latency_s, result.latency_s
    print(f"on {result.summary.context.device}: {before * 1e6:.0f} us before, {after * 1e6:.1f} us tuned")
    assert after < before

    # What was tuned for a device elsewhere is exported, and loaded there with `tvm.runtime.load_module`.
    print(result.export(work / "model.so").name)
finally:
    # Each with the processes that it has started: the tracker listens in a child.
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
