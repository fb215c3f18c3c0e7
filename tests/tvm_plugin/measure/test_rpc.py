"""Candidates are timed on servers elsewhere; servers come and go, and no candidate is lost."""

from __future__ import annotations

import math
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from tvm import relax, te

import eqtune
from eqtune import runtime
from eqtune.errors import InputError, SetupError
from eqtune.machine import detect_target
from eqtune.measure import LocalMeasurer, RpcMeasurer, create, rpc_server
from eqtune.measure.elsewhere import model_bench, process_device, runner
from eqtune.measure.elsewhere.far_models import transfer_limit_s
from eqtune.measure.elsewhere.fleet import DeviceLost
from eqtune.measure.rpc import measurer as rpc
from eqtune.measure.rpc import worker as rpc_worker
from eqtune.measure.rpc.tracker import RpcAddress, rpc_status
from eqtune.records.workload import as_workload, workload_hash
from eqtune.search.space.base import Decision
from eqtune.tasks.task import Task
from eqtune.tune import baselines

from ..small_models import module, weight

SPACE = "measure_spaces:build"
FAULTS = {"raises": 0, "run hangs": 4, "run crashes": 5, "wrong": 6}  # by position in measure_spaces.FAULTS


def matmul(size=64):
    a, b = te.placeholder((size, size), name="A"), te.placeholder((size, size), name="B")
    k = te.reduce_axis((0, size), name="k")
    c = te.compute((size, size), lambda i, j: te.sum(a[i, k] * b[k, j], k), name="C")
    mod = as_workload(te.create_prim_func([a, b, c]))
    return Task("matmul", mod, workload_hash(mod), calls=1, flops=1.0, bytes_moved=1.0)


def tiled(rows=4, columns=32, unused=0):
    return Decision("tiled", {"rows": rows, "columns": columns, "unused": unused})


def faulty(name):
    return Decision("faulty", {"fault": FAULTS[name]})


DECISIONS = [tiled(rows, columns) for rows in (2, 4, 8) for columns in (16, 32)]

SIZES = 8


class Farm:
    """A tracker and servers on the loopback interface, each a process."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"rpc://127.0.0.1:{self.port}/cpu"
        self.processes = []
        ports = ("--port", str(self.port), "--port-end", str(self.port + 1))
        self._start("tvm.exec.rpc_tracker", "--host", "127.0.0.1", *ports, "--silent")

    def add_server(self, key: str = "cpu") -> subprocess.Popen[bytes]:
        return self._start(
            "eqtune.measure.rpc_server", "--tracker", f"127.0.0.1:{self.port}", "--key", key, "--threads", "1"
        )

    def wait_for(self, servers: int, key: str = "cpu") -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                if rpc_status(RpcAddress("127.0.0.1", self.port, key))["servers"] >= servers:
                    return
            except SetupError:
                pass  # the tracker is not there yet
            time.sleep(0.1)
        raise TimeoutError(f"{servers} servers did not register")

    def close(self) -> None:
        for process in self.processes:
            kill(process)

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=subprocess.DEVNULL)
        self.processes.append(process)
        return process


def kill(process: subprocess.Popen[bytes]) -> None:
    """With the sessions that it has forked."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
    process.wait()


@pytest.fixture(scope="module")
def farm():
    farm = Farm()
    try:
        farm.add_server()
        farm.add_server()
        farm.wait_for(2)
        yield farm
    finally:
        farm.close()


@pytest.fixture(scope="module")
def spare(farm):
    """The address of a server that `measurer` does not hold."""
    farm.add_server("spare")
    farm.wait_for(1, "spare")
    return f"rpc://127.0.0.1:{farm.port}/spare"


@pytest.fixture(scope="module")
def measurer(farm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        with RpcMeasurer(
            farm.url, detect_target(1), threads=1, workers=2, timeout_s=2.0, space_builder=SPACE
        ) as measurer:
            yield measurer


def test_results_are_checked_and_ordered_as_local_ones_are(measurer):
    task = matmul()
    decisions = [*DECISIONS, faulty("wrong"), faulty("raises"), tiled(2, 16, unused=1)]
    (baseline_s,) = measurer.baseline([task])
    measured = measurer.measure(task, decisions)
    with LocalMeasurer(detect_target(1), threads=1, workers=1, space_builder=SPACE) as local:
        here = local.measure(task, decisions)
    assert [m.decision for m in measured] == decisions
    assert [m.error for m in measured] == [m.error for m in here] == [""] * 6 + ["wrong_result", "build_error", ""]
    assert [m.trace for m in measured] == [m.trace for m in here]
    assert measured[-1].latencies_s == measured[0].latencies_s, "the same program was run twice"
    assert min(m.latency_s for m in measured) < baseline_s < math.inf


def test_an_untuned_kernel_is_not_lost_with_its_builder(measurer, monkeypatch):
    send, killed = measurer._pool._send, []

    def instead(index, request):
        if not killed:
            killed.append(measurer._pool.pids[index])
            os.kill(killed[0], signal.SIGKILL)
        send(index, request)

    monkeypatch.setattr(measurer._pool, "_send", instead)
    (seconds,) = measurer.baseline([matmul(72)])
    assert killed
    assert math.isfinite(seconds)


def test_records_of_elsewhere_do_not_pass_for_local_ones(measurer):
    there = measurer.describe()
    with LocalMeasurer(detect_target(1), threads=1, workers=1) as local:
        here = local.describe()
    assert there.keys() == here.keys()
    assert there["device"] == f"{here['device']} over rpc, key cpu"
    assert (there["target"], there["threads"]) == (here["target"], here["threads"])


def test_finalists_are_timed_again(measurer):
    (once,) = measurer.measure(matmul(), [tiled()])
    first, bad = measurer.retime(matmul(), [tiled(), faulty("wrong")])
    assert len(first.latencies_s) > len(once.latencies_s)
    assert bad.error == "wrong_result"


def test_a_server_killed_in_the_middle_loses_no_candidate(farm, measurer):
    """And one that registers later joins in."""
    servers = farm.processes[1:3]
    deadline = time.monotonic() + 60
    while not all(psutil.Process(server.pid).children() for server in servers):
        assert time.monotonic() < deadline, "only one server is used"
        measurer.measure(matmul(64), DECISIONS)
        time.sleep(0.1)
    losses = measurer.losses
    killer = threading.Timer(0.3, kill, [servers[0]])
    killer.start()
    for size in range(96, 96 + 32 * SIZES, 32):
        measured = measurer.measure(matmul(size), DECISIONS)
        assert [m.decision for m in measured] == DECISIONS
        assert [m.error for m in measured] == [""] * len(DECISIONS)
        if measurer.losses > losses:
            break
    killer.join()
    assert measurer.losses > losses, "the server was killed while nothing ran"
    farm.add_server()
    farm.wait_for(2)
    assert [m.error for m in measurer.measure(matmul(64), DECISIONS)] == [""] * len(DECISIONS)


def test_a_price_needs_no_reference(measurer):
    task = matmul(80)
    price, none = measurer.price([(task, [faulty("raises"), DECISIONS[0]]), (matmul(192), [])])
    assert 0 < price.latency_s < 1e-2
    assert price.fastest == 1
    assert task.workload_hash not in measurer._baselines
    assert none.latency_s == math.inf


def test_rpc_status_counts_servers(farm, measurer):
    status = rpc_status(RpcAddress.parse(farm.url))
    assert status["servers"] == 2
    assert rpc_status(RpcAddress("127.0.0.1", farm.port, "other"))["servers"] == 0


def test_a_crash_and_a_hang_over_there_are_failed_candidates(measurer):
    """Both servers are lost to each of them, and come back. The last one: until then, none of them is occupied."""
    measured = measurer.measure(matmul(), [tiled(2), faulty("run crashes"), faulty("run hangs"), tiled(4)])
    assert [m.error for m in measured] == ["", "crash", "timeout", ""]
    (after,) = measurer.measure(matmul(64), [tiled(8, 16)])
    assert after.error == ""


@pytest.mark.parametrize(
    "url", ["rpc://", "rpc://localhost/cpu", "rpc://localhost:9190", "rpc://localhost:99999/cpu", "rpc:localhost:1/k"]
)
def test_a_malformed_address_is_refused(url):
    with pytest.raises(InputError, match="rpc://HOST:PORT/KEY"):
        create(url, target=detect_target(1))


def test_no_tracker_is_one_error_that_says_what_to_start():
    with pytest.raises(SetupError, match=r"python -m tvm.exec.rpc_tracker --host 127.0.0.1 --port 1 "):
        create("rpc://127.0.0.1:1/cpu", target=detect_target(1))


def test_a_host_that_cannot_be_a_name_is_one_error():
    with pytest.raises(SetupError, match=r"no RPC tracker answers on a\.\.b:9190"):
        rpc_status(RpcAddress.parse("rpc://a..b:9190/cpu"))


@pytest.mark.parametrize("tracker", ["9190", "localhost:", "localhost:0", "localhost:99999"])
def test_a_server_says_where_a_tracker_may_be(tracker, capsys, monkeypatch):
    monkeypatch.setattr(rpc_server, "serve", None)
    with pytest.raises(SystemExit, match="2"):
        rpc_server.main(["--tracker", tracker, "--key", "cpu"])
    assert f"--tracker takes HOST:PORT, with a port from 1 to 65535, got {tracker!r}" in capsys.readouterr().err


def test_what_is_no_tracker_is_recognised():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet():
            client, _ = other.accept()
            with client:
                client.sendall(b"SSH-2.0-")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(SetupError, match="no RPC tracker; choose another port and start it with: python -m"):
            rpc_status(RpcAddress("127.0.0.1", other.getsockname()[1], "cpu"))
        thread.join()


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def client(monkeypatch):
    """The far side's client, without a server: its clock, the seconds of each session, and what sending takes."""
    clock, sessions, sending_s = Clock(), [], []
    session = SimpleNamespace(device=lambda *_: None, get_function=lambda name: lambda: None)
    monkeypatch.setattr(rpc_worker, "time", clock)
    monkeypatch.setattr(rpc_worker, "_request_session", lambda _, seconds, __: sessions.append(seconds) or session)
    monkeypatch.setattr(rpc_worker, "_check_server", lambda *_: {"device": "a board"})

    class Bench:
        def __init__(self, *_: object) -> None: ...

        def load(self, request: object) -> None:
            clock.now_s += sending_s.pop(0) if sending_s else 0.0

        def run(self, request: object) -> dict[str, object]:
            return {"ran until": clock.now_s + request["limit_s"], "session until": sum(sessions)}

    monkeypatch.setattr(runner, "Runner", Bench)
    monkeypatch.setattr(model_bench, "ModelBench", Bench)
    config = rpc_worker.RpcConfig("127.0.0.1", 1, "key", 1.0, {"kind": "llvm"}, 1, "", 0)
    return rpc_worker._Client(config), clock, sessions, sending_s


@pytest.mark.parametrize("kind", ["", "_model"])
def test_a_session_lasts_as_long_as_sending_and_running_may_take(client, kind):
    talk, clock, sessions, sending_s = client
    limits = {"limit_s": 10.0, "load_limit_s": 100.0}
    talk.answer({"op": "connect", "limit_s": 10.0, "load_limit_s": 5.0})
    clock.now_s = sessions[0]  # of no use any more
    sending_s[:] = [100.0]
    assert talk.answer({"op": f"load{kind}", **limits}) == {}
    answer = talk.answer({"op": f"run{kind}", **limits})
    assert answer["ran until"] <= answer["session until"]


def test_what_was_sent_too_slowly_is_not_begun(client):
    """The server would end the session in the middle, which would pass for a crash."""
    talk, _, _, sending_s = client
    limits = {"limit_s": 10.0, "load_limit_s": 5.0}
    talk.answer({"op": "connect", **limits})
    sending_s[:] = [60.0]
    talk.answer({"op": "load", **limits})
    assert talk.answer({"op": "run", **limits}) == {"error": "timeout", "detail": "sending it took longer than 5 s"}


def test_a_session_that_is_renewed_is_with_an_equal_device(client, monkeypatch):
    talk, clock, sessions, _ = client
    limits = {"limit_s": 10.0, "load_limit_s": 10.0}
    assert talk.answer({"op": "connect", **limits}) == {"device": "a board"}
    clock.now_s = sessions[0]
    monkeypatch.setattr(rpc_worker, "_check_server", lambda *_: {"device": "another board"})
    lost = {"lost": "a server under the key 'key' is another device: another board"}
    assert talk.answer({"op": "load", **limits}) == lost


@pytest.mark.parametrize("op", ["connect", "load"])
def test_a_server_that_cannot_be_prepared_is_lost(client, monkeypatch, op):
    def refuse(*_: object) -> None:
        raise ValueError("processor 'new' is not known")

    talk, clock, sessions, _ = client
    limits = {"limit_s": 10.0, "load_limit_s": 10.0}
    talk.answer({"op": "connect", **limits})
    clock.now_s = sessions[0]
    monkeypatch.setattr(rpc_worker, "_check_server", refuse)
    assert talk.answer({"op": op, **limits}) == {"lost": "processor 'new' is not known"}


class Talk:
    """The client's process: what it answers, in order. An error instead of an answer comes at the limit."""

    def __init__(self, clock, answers):
        self._clock = clock
        self._answers = answers

    def send(self, message): ...

    def answer(self, limit_s):
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            self._clock.now_s += limit_s
            raise answer
        return answer

    def autopsy(self):
        return {"error": "crash", "detail": "the worker ended"}

    def end(self): ...


@pytest.fixture
def board(monkeypatch):
    """A server, seen from here: its clock, and what the client is going to answer."""
    clock, answers = Clock(), []
    monkeypatch.setattr(rpc, "time", clock)
    monkeypatch.setattr(rpc, "transfer_limit_s", lambda _: 0.0)
    monkeypatch.setattr(process_device, "spawn", lambda *_: Talk(clock, answers))
    config = rpc_worker.RpcConfig("127.0.0.1", 1, "key", 1.0, {"kind": "llvm"}, 1, "", 0)
    return rpc._RpcDevice(config, 10.0, Path("log"), None), clock, answers


CONNECTED = [{}, {"device": "a board"}]
RAN = [{}, {"latencies_s": [1.0]}]


@pytest.mark.parametrize("kind", [{}, {"model": "model.so"}])
@pytest.mark.parametrize("error", [TimeoutError("no result"), EOFError()])
def test_what_hangs_occupies_the_server_as_long_as_the_longest_session(board, kind, error):
    """The session may be the one that was made for a baseline, or for a model."""
    device, _, answers = board
    answers[:] = [*CONNECTED, *RAN, {}, error]
    device.open()
    device.run({"limit_s": 120.0, **kind})
    with pytest.raises(DeviceLost) as lost:
        device.run({"limit_s": 10.0})
    assert lost.value.occupied_until_s == rpc_worker.lifetime_s(120.0, rpc.LOAD_LIMIT_S)


def test_a_session_that_is_opened_after_a_hang_is_short_again(board):
    device, clock, answers = board
    answers[:] = [*CONNECTED, *RAN, {}, TimeoutError("no result"), *CONNECTED, {}, TimeoutError("no result")]
    device.open()
    device.run({"limit_s": 120.0})
    with pytest.raises(DeviceLost):
        device.run({"limit_s": 10.0})
    device.open()
    with pytest.raises(DeviceLost) as lost:
        device.run({"limit_s": 10.0})
    assert lost.value.occupied_until_s == clock.now_s + rpc_worker.lifetime_s(10.0, rpc.LOAD_LIMIT_S)


def test_sending_that_hangs_may_have_opened_a_session_just_before(board):
    device, clock, answers = board
    answers[:] = [*CONNECTED, TimeoutError("no result")]
    device.open()
    with pytest.raises(DeviceLost) as lost:
        device.run({"limit_s": 120.0})
    assert lost.value.occupied_until_s == clock.now_s + rpc_worker.lifetime_s(120.0, rpc.LOAD_LIMIT_S)


@pytest.mark.parametrize("before", [[], [{}]])
def test_nothing_occupies_a_server_that_is_gone(board, before):
    device, _, answers = board
    answers[:] = [*CONNECTED, *RAN, *before, {"lost": "the connection was closed"}]
    device.open()
    device.run({"limit_s": 120.0})
    with pytest.raises(DeviceLost) as lost:
        device.run({"limit_s": 10.0})
    assert lost.value.occupied_until_s == 0.0


def test_a_server_that_never_answers_who_connects_does_not_occupy_the_fleet_for_ever(board):
    device, _, answers = board
    answers[:] = [{}, TimeoutError("no result")]
    with pytest.raises(DeviceLost) as lost:
        device.open()
    assert lost.value.occupied_until_s == 0.0


@pytest.mark.parametrize("error", [RuntimeError("exited with -11"), OSError("no space left on device")])
def test_a_server_goes_on_after_a_session_that_failed(capfd, error):
    def fail(*_: object) -> None:
        raise error

    ours, theirs = socket.socketpair()
    with theirs:
        rpc_server._outlive_crashes(fail)(ours, "", {}, "")
    assert ours.fileno() == -1, "it is closed"
    assert f"{error}; going on" in capfd.readouterr().err


def test_a_server_whose_tracker_cannot_be_found_says_so():
    with pytest.raises(InputError, match=r"the tracker's host, 'a\.\.b', is not known here"):
        rpc_server.serve(("a..b", 9190), "cpu", threads=1)


@pytest.mark.parametrize("tracker", ["localhost", "localhost:0", "localhost:65536"])
def test_a_server_takes_the_address_of_a_tracker(capsys, tracker):
    with pytest.raises(SystemExit):
        rpc_server.main(["--tracker", tracker, "--key", "cpu"])
    assert "HOST:PORT, with a port from 1 to 65535" in capsys.readouterr().err


def test_large_inputs_may_take_longer_to_be_sent(tmp_path):
    library = tmp_path / "kernel.so"
    library.write_bytes(bytes(3_000_000))
    params = [[[1000, 1000], "float32"], [[1000, 1000], "float32"]]
    interface = {"params": params, "outputs": [1], "index_bound": None, "reduction": 1}
    seconds = transfer_limit_s({"fields": {"symbol": "k", "library": str(library)}, "interface": interface})
    assert seconds == pytest.approx(11.0), "1 MB a second"


def test_no_server_under_the_key_is_one_error_that_says_what_to_start(farm):
    url = f"rpc://127.0.0.1:{farm.port}/other"
    with pytest.raises(SetupError, match=rf"rpc_server --tracker 127.0.0.1:{farm.port} --key other"):
        RpcMeasurer(url, detect_target(1), wait_s=0.2)


def test_a_server_with_another_number_of_threads_is_refused(spare):
    with pytest.raises(SetupError, match="runs kernels on 1 threads, not on 2"):
        RpcMeasurer(spare, detect_target(2), threads=2, wait_s=1.0, timeout_s=1.0)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs a target that is not this machine, and runs here")
def test_a_model_for_another_cpu_is_compared_and_timed_there(farm, tmp_path, monkeypatch, capsys):
    """With SSE only, and as if no model compiled for it could run here."""
    farm.add_server("board")
    farm.wait_for(1, "board")
    monkeypatch.setattr(runtime.LocalModels, "load", None)
    monkeypatch.setattr(baselines, "UNTUNED_S_PER_OPERATION", 1.0)
    result = eqtune.tune_model(
        module((33, 64), lambda bb, x: relax.op.nn.softmax(bb.emit(relax.op.matmul(x, weight(64, 70))))),
        target={"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v2", "num-cores": 1},
        measure=f"rpc://127.0.0.1:{farm.port}/board",
        trials=8,
        time_budget_s=60,
        threads=1,
        work_dir=tmp_path / "work",
    )
    said = capsys.readouterr()
    assert "GB/s by a table of processors" in said.out + said.err
    assert result.max_rel_error < 1e-5
    assert 0 < result.latency_s <= result.baseline_latency_s < 1
    assert result.summary.plain_baseline, "boards are slow: untuned kernels would take most of the time"
    assert result.summary.context.device.endswith("over rpc, key board")
    assert sum(task.trials for task in result.tasks) > 0
    with pytest.raises(SetupError, match="device that is not here"):
        result.run(np.zeros(1, "float32"))
    library = result.export(tmp_path / "model.tar")
    assert library.stat().st_size > 0


def test_close_may_be_repeated_and_ends_everything(spare):
    before = set(psutil.Process().children())
    measurer = RpcMeasurer(spare, detect_target(1), threads=1, workers=1)
    assert set(psutil.Process().children()) - before
    measurer.close()
    measurer.close()
    deadline = time.monotonic() + 10
    while set(psutil.Process().children()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {p.pid for p in set(psutil.Process().children()) - before if p.status() != psutil.STATUS_ZOMBIE} == set()
