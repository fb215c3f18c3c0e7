# Measure on other devices
# ========================
#
# Kernels are best timed on the device that will run them, which is often not the machine that compiles. TVM's RPC
# tracker knows which devices are free; eqtune builds here, and sends candidates to every server under one key.
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
# and the command line takes the same address: `eqtune tune model.onnx --measure rpc://127.0.0.1:9190/cpu`.

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tvm import te

import eqtune
from eqtune.errors import SetupError
from eqtune.measure.rpc_tracker import RpcAddress, rpc_status

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

    # One kernel, a dense layer with ReLU. Everything is as in a local run, but `measure`. Records carry the far
    # device's name and the way to it, so that they are never mistaken for measurements made here.
    x, w = te.placeholder((64, 256), name="x"), te.placeholder((256, 128), name="w")
    k = te.reduce_axis((0, 256), name="k")
    dense = te.compute((64, 128), lambda i, j: te.sum(x[i, k] * w[k, j], k), name="dense")
    relu = te.compute(dense.shape, lambda i, j: te.max(dense[i, j], 0.0), name="relu")
    result = eqtune.tune_kernels(
        te.create_prim_func([x, w, relu]),
        measure=url,
        threads=1,
        trials=24,
        work_dir=Path(tempfile.mkdtemp()) / "work",
        progress=False,
    )
    for task in result.tasks:
        print(f"{task.name}: untuned {task.baseline_latency_s * 1e6:.0f} us, tuned {task.latency_s * 1e6:.1f} us")
        assert task.latency_s < task.baseline_latency_s
finally:
    # Each with the processes that it has started: the tracker listens in a child.
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
