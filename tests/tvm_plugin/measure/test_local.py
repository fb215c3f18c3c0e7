"""Candidates are built, checked and timed in workers; whatever one of them does, the others and the parent go on."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from tvm import te

from eqtune.errors import InputError, SetupError
from eqtune.machine import describe_machine, detect_target
from eqtune.measure import LocalMeasurer, create, pool, template
from eqtune.measure.affinity import start_pool
from eqtune.measure.arguments import Interface, random_inputs
from eqtune.measure.base import NO_REFERENCE
from eqtune.measure.timing import WORTH_GIVING_UP_S
from eqtune.records.workload import as_workload, workload_hash
from eqtune.search.space import build_space
from eqtune.search.space.base import Decision
from eqtune.search.strategies.moves import Moves
from eqtune.tasks.task import Task
from eqtune.tune.session import Session, Settings

SIZE = 64
SPACE = "measure_spaces:build"
FAULTS = (
    "raises",
    "build hangs",
    "build crashes",
    "does not compile",
    "run hangs",
    "run crashes",
    "wrong",
    "too large",
)


def make_task(name, tensors):
    mod = as_workload(te.create_prim_func(tensors))
    return Task(name, mod, workload_hash(mod), calls=1, flops=1.0, bytes_moved=1.0)


def matmul(size=SIZE):
    a, b = te.placeholder((size, size), name="A"), te.placeholder((size, size), name="B")
    k = te.reduce_axis((0, size), name="k")
    return make_task("matmul", [a, b, te.compute((size, size), lambda i, j: te.sum(a[i, k] * b[k, j], k), name="C")])


def tiled(rows=4, columns=32, unused=0):
    return Decision("tiled", {"rows": rows, "columns": columns, "unused": unused})


def faulty(name):
    return Decision("faulty", {"fault": FAULTS.index(name)})


@pytest.fixture(scope="module")
def measurer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        with LocalMeasurer(
            detect_target(1), threads=1, workers=2, timeout_s=1.5, space_builder=SPACE, memory_bytes=1 << 30
        ) as it:
            yield it


def test_idle_workers_leave_the_cores_to_the_compiler(monkeypatch):
    a = te.placeholder((1 << 20,), name="A")
    task = make_task("copy", [a, te.compute(a.shape, lambda i: a[i] + 1.0, name="B")])
    target = detect_target(2)
    space = build_space(task.mod, describe_machine(target, threads=2, measure=False))
    points = [space.decision(point) for point in Moves(space).sample(np.random.default_rng(0), 64)]
    parallel = [decision for decision in points if decision.values.get("workers", 1) > 1][:2]
    assert len(parallel) == 2

    def processor_s_after_measuring() -> float:
        with LocalMeasurer(target, threads=2, workers=2) as measurer:
            assert all(m.error == "" for m in measurer.measure(task, parallel))
            workers = [psutil.Process(pid) for pid in measurer.worker_pids]
            before_s = sum(sum(worker.cpu_times()[:2]) for worker in workers)
            time.sleep(1.0)
            return sum(sum(worker.cpu_times()[:2]) for worker in workers) - before_s

    # What looking for work once costs depends on the machine; beside TVM's own number there is no doubt.
    idle_s = processor_s_after_measuring()
    monkeypatch.setattr(pool, "SPINS", 300_000)
    assert idle_s < processor_s_after_measuring() / 3


def test_every_candidate_is_timed_in_order_and_keeps_its_trace(measurer):
    task = matmul()
    decisions = [tiled(rows, columns) for rows in (2, 4, 8) for columns in (16, 32)]
    (baseline_s,) = measurer.baseline([task])
    measured = measurer.measure(task, decisions)
    assert [m.decision for m in measured] == decisions
    assert all(m.error == "" and 0 < m.latency_s < 1e-3 and "TransformLayout" in m.trace for m in measured)
    assert min(m.latency_s for m in measured) < baseline_s
    assert measurer.overheads.build_s > 0
    assert measurer.overheads.run_s > 0


def test_a_trace_is_measured_like_the_decision_that_made_it(measurer):
    task = matmul()
    (by_decision,) = measurer.measure(task, [tiled()])
    (by_trace,) = measurer.measure(task, [by_decision.trace])
    assert by_trace.error == ""
    assert by_trace.latency_s == by_decision.latency_s, "the same program was run twice"


def test_decisions_that_give_the_same_program_are_run_once(measurer):
    first, second = measurer.measure(matmul(), [tiled(2, 16, unused=0), tiled(2, 16, unused=1)])
    assert first.latencies_s == second.latencies_s
    assert first.decision != second.decision


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("raises", "build_error"),
        ("build hangs", "timeout"),
        ("build crashes", "crash"),
        ("does not compile", "build_error"),
        ("run hangs", "timeout"),
        ("run crashes", "crash"),
        ("wrong", "wrong_result"),
        ("too large", "out_of_memory"),
    ],
)
def test_a_fault_is_one_failed_candidate(measurer, fault, kind):
    decisions = [tiled(2), faulty(fault), tiled(4), tiled(8)]
    measured = measurer.measure(matmul(), decisions)
    assert [m.error for m in measured] == ["", kind, "", ""]
    failed = measured[1]
    assert failed.latencies_s == ()
    assert math.isinf(failed.latency_s)
    assert 0 < len(failed.detail) <= 300


def test_what_is_far_slower_than_the_best_is_given_up(measurer):
    task = matmul(512)
    (slow,) = measurer.measure(task, [tiled(2, 16)], best_s=1e-9)
    (again,) = measurer.measure(task, [tiled(8, 16)])
    assert slow.error == ""
    assert slow.latency_s >= WORTH_GIVING_UP_S, "faster kernels are repeated in any case"
    assert slow.given_up
    assert not again.given_up


def test_retiming_repeats_more(measurer):
    task = matmul()
    (once,) = measurer.measure(task, [tiled()])
    first, second, bad = measurer.retime(task, [tiled(), tiled(8, 16), faulty("wrong")])
    assert len(first.latencies_s) > len(once.latencies_s)
    assert second.error == ""
    assert bad.error == "wrong_result"


def disturb(measurer, monkeypatch, runs):
    """The first `runs` candidates seem to take 2 ms, on cores that were not at full speed, all others 1 ms."""
    run, count = measurer._run, iter(range(10**9))

    def instead(*arguments, **options):
        answer = run(*arguments, **options)
        disturbed = next(count) < runs
        return answer | {"disturbed": disturbed, "latencies_s": [2e-3 if disturbed else 1e-3]}

    monkeypatch.setattr(measurer, "_run", instead)
    return count


def test_what_ran_on_disturbed_cores_and_may_be_best_runs_again(measurer, monkeypatch):
    task, decisions = matmul(2 * SIZE), [tiled(4, 16), tiled(4, 32), tiled(8, 32)]
    measurer.baseline([task])
    count = disturb(measurer, monkeypatch, runs=2)
    measured = measurer.measure(task, decisions)
    assert [m.latency_s for m in measured] == [1e-3] * 3
    assert next(count) == 5, "the third was not disturbed"


def test_a_crash_of_a_repeat_is_not_what_the_program_does(measurer, monkeypatch):
    task, decisions = matmul(3 * SIZE), [tiled()]
    measurer.baseline([task])
    quiet = {"disturbed": False}
    crash = quiet | {"error": "crash", "detail": "from outside"}
    run, answers = measurer._run, iter([{"disturbed": True}, crash, quiet])
    monkeypatch.setattr(measurer, "_run", lambda *some, **more: run(*some, **more) | next(answers))
    assert [m.error for m in measurer.measure(task, decisions)] == ["crash"]
    assert [m.error for m in measurer.measure(task, decisions)] == [""]


def test_finalists_go_on_while_cores_are_disturbed(measurer, monkeypatch):
    task = matmul()
    measurer.baseline([task])
    disturb(measurer, monkeypatch, runs=7)
    (measured,) = measurer.retime(task, [tiled()])
    assert measured.latencies_s == (2e-3,) * 7 + (1e-3,)


def test_disturbed_prices_are_asked_again(measurer, monkeypatch):
    disturb(measurer, monkeypatch, runs=1)
    (price,) = measurer.price([(matmul(), [tiled()])])
    assert price.latency_s == 1e-3


def test_a_worker_killed_while_idle_is_replaced(measurer):
    measurer.baseline([matmul()])
    os.kill(measurer.worker_pids[0], signal.SIGKILL)
    time.sleep(0.1)
    measured = measurer.measure(matmul(), [tiled(2, 32), tiled(4, 16)])
    assert [m.error for m in measured] == ["", ""]


def test_workers_killed_with_what_forks_them_are_replaced(measurer):
    measurer._pool.wait_ready()
    before = measurer.worker_pids
    os.kill(measurer._pool._template.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(map(running, before)):
        assert time.monotonic() < deadline, "they outlived it"
        time.sleep(0.01)
    assert [m.error for m in measurer.measure(matmul(), [tiled(2, 64), tiled(4, 64)])] == ["", ""]
    assert not set(before) & set(measurer.worker_pids)


def test_a_candidate_that_is_lost_with_what_forks_workers_did_not_run_out_of_memory(measurer, monkeypatch):
    measurer._pool.wait_ready()
    send, template = measurer._pool._send, measurer._pool._template

    def instead(index, request):
        os.kill(measurer.worker_pids[index], signal.SIGSTOP)  # or it is done before a busy machine goes on here
        send(index, request)
        os.kill(template.pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(measurer._pool, "_send", instead)
        (measured,) = measurer.measure(matmul(), [tiled(2, 32, unused=1)])
    assert (measured.error, measured.detail[:30]) == ("crash", "what forks workers was lost: t")


def test_an_exit_code_may_be_asked_for_again(measurer):
    measurer._pool.wait_ready()
    (pid, _), template = measurer.worker_pids, measurer._pool._template
    assert template.wait(pid, 0.0) is None
    os.kill(pid, signal.SIGTERM)
    assert [template.wait(pid, 5.0) for _ in range(2)] == [-signal.SIGTERM] * 2
    assert measurer.measure(matmul(), [tiled(2, 16, unused=1)])[0].error == ""


def test_workers_that_cannot_start_say_so_each_time():
    with LocalMeasurer(detect_target(1), threads=1, workers=1, space_builder="no_such_module:build") as measurer:
        for _ in range(2):
            with pytest.raises(SetupError, match=r"does not start: .*no_such_module"):
                measurer.baseline([matmul()])


def running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_worker_whose_asker_was_interrupted_is_not_taken_for_another(measurer, monkeypatch, tmp_path):
    """Ctrl-C while a worker is being forked: its answer arrives when the next one is asked for."""
    measurer._pool.wait_ready()
    template = measurer._pool._template

    def interrupted(number, limit_s):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(template, "_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            template.fork(tmp_path / "log")
    os.kill(measurer.worker_pids[0], signal.SIGKILL)
    time.sleep(0.1)
    assert [m.error for m in measurer.measure(matmul(), [tiled(8, 64), tiled(16, 64)])] == ["", ""]


def reference_of(measurer, task):
    """What the untuned kernel computed in a worker."""
    (file,) = Path(measurer._directory.name).glob(f"{task.workload_hash}.*.npy")
    return np.load(file)


def test_index_inputs_stay_in_range_and_odd_domains_are_found(measurer):
    table, rows = te.placeholder((5, 16), name="table"), te.placeholder((7,), "int64", name="rows")
    gather = make_task("gather", [table, rows, te.compute((7, 16), lambda i, j: table[rows[i], j])])
    x = te.placeholder((32,), name="x")
    root = make_task("root", [x, te.compute((32,), lambda i: te.log(te.sqrt(x[i])))])
    assert all(math.isfinite(seconds) for seconds in measurer.baseline([gather, root]))
    table_of, chosen = random_inputs(Interface.of(gather.mod["main"]), 0, gather.workload_hash).values()
    np.testing.assert_array_equal(reference_of(measurer, gather), table_of[chosen])
    assert [measurer._domains[task.workload_hash] for task in (gather, root)] == ["normal", "positive"]
    assert np.isfinite(reference_of(measurer, root)).all()


def larger_than_memory():
    x = te.placeholder((1 << 14, 1 << 14), name="x")
    return make_task("large", [x, te.compute(x.shape, lambda i, j: x[i, j] + 1.0)])


def test_a_kernel_without_reference_fails_every_candidate(measurer):
    large = larger_than_memory()
    assert measurer.baseline([large]) == [math.inf]
    (measured,) = measurer.measure(large, [tiled()])
    assert measured.error == NO_REFERENCE
    assert "the untuned kernel failed" in measured.detail


def lose_worker(measurer, monkeypatch, op):
    """The first worker that is asked for this operation is killed, as the system does when memory runs out."""
    send, killed = measurer._pool._send, []

    def instead(index, request):
        if request.message["op"] == op and not killed:
            killed.append(measurer.worker_pids[index])
            os.kill(killed[0], signal.SIGKILL)
        send(index, request)

    monkeypatch.setattr(measurer._pool, "_send", instead)
    return killed


@pytest.mark.parametrize("op", ["untuned", "run"])
def test_an_untuned_kernel_is_not_lost_with_its_worker(measurer, monkeypatch, op):
    killed = lose_worker(measurer, monkeypatch, op)
    small, other = matmul(SIZE + 8 + len(op)), matmul(SIZE + 16 + len(op))
    assert all(math.isfinite(seconds) for seconds in measurer.baseline([small, other]))
    assert killed


def test_kernels_are_measured_together_as_apart(measurer):
    small, large, odd = matmul(), matmul(4 * SIZE), larger_than_memory()
    requests = [
        (small, [tiled(4), faulty("wrong")], math.inf),
        (odd, [tiled()], math.inf),
        (large, [tiled(8)], math.inf),
    ]
    together = measurer.measure_together(requests)
    assert [[m.error for m in of_kernel] for of_kernel in together] == [["", "wrong_result"], [NO_REFERENCE], [""]]
    assert [[m.decision for m in of_kernel] for of_kernel in together] == [decisions for _, decisions, _ in requests]
    assert together[2][0].latency_s > together[0][0].latency_s


@pytest.mark.parametrize("module", ["worker", "peaks"])
def test_a_process_that_measures_starts_without_tvm_so_that_tvm_need_not_import_torch(module):
    code = f"import sys, eqtune.measure.{module}; sys.exit('tvm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_close_ends_all_workers_and_may_be_repeated(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    measurer = LocalMeasurer(detect_target(1), threads=1, workers=1, space_builder=SPACE)
    measurer.measure(matmul(), [tiled()])
    (pid,) = measurer.worker_pids
    measurer.close()
    measurer.close()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("end", ["interrupt", "kill"])
def test_no_worker_outlives_its_parent(tmp_path, end):
    """Ctrl-C while a worker hangs, and kill -9 of the parent."""
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from eqtune.machine import detect_target
            from eqtune.measure import LocalMeasurer
            from test_local import SPACE, faulty, matmul, tiled
            with LocalMeasurer(detect_target(1), threads=1, workers=1, timeout_s=600, space_builder=SPACE) as measurer:
                measurer.measure(matmul(), [tiled()])
                print(*measurer.worker_pids, flush=True)
                try:
                    measurer.measure(matmul(), [faulty("run hangs")])
                except KeyboardInterrupt:
                    print(measurer.measure(matmul(), [tiled(8)])[0].error == "", flush=True)
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment, text=True) as parent:
        try:
            pid = int(parent.stdout.readline())
            worker = psutil.Process(pid)
            busy_s = worker.cpu_times().user
            while worker.cpu_times().user < busy_s + 2:  # by then it has built the candidate, and hangs
                time.sleep(0.05)
            parent.send_signal(signal.SIGINT if end == "interrupt" else signal.SIGKILL)
            said, _ = parent.communicate(timeout=60)
        finally:
            parent.kill()
    if end == "interrupt":
        assert said.strip() == "True", "measuring goes on after an interrupt"
        assert parent.returncode == 0
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_threads_reach_the_kernel():
    """TVM's thread pool reads the number from the environment; describe() tells it to the records."""
    for threads in (1, 2):
        with LocalMeasurer(detect_target(threads), threads=threads, workers=1) as measurer:
            measurer.baseline([matmul()])
            environment = psutil.Process(measurer.worker_pids[0]).environ()
            assert environment["TVM_NUM_THREADS"] == str(threads)
            assert measurer.describe()["threads"] == threads


def test_the_same_seed_gives_the_same_inputs():
    task = matmul()
    interface = Interface.of(task.mod["main"])
    first, again = (random_inputs(interface, 3, task.workload_hash) for _ in range(2))
    other = random_inputs(interface, 4, task.workload_hash)
    assert interface.outputs == (2,)
    assert sorted(first) == [0, 1]
    np.testing.assert_array_equal(first[1], again[1])
    assert not np.array_equal(first[1], other[1])
    assert not np.array_equal(first[0], first[1])


def test_the_seed_reaches_the_workers():
    task, seed = matmul(), 5
    with LocalMeasurer(detect_target(1), threads=1, workers=1, seed=seed) as measurer:
        measurer.baseline([task])
        a, b = random_inputs(Interface.of(task.mod["main"]), seed, task.workload_hash).values()
        np.testing.assert_allclose(reference_of(measurer, task), a @ b, rtol=1e-4, atol=1e-4)


def test_create_knows_names_and_instances(measurer):
    assert create(measurer) is measurer
    with pytest.raises(InputError, match=r"'remote'; give local, local:flush-l2, rpc://HOST:PORT/KEY"):
        create("remote")
    with pytest.raises(InputError, match="no baseline"):
        create(object())  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"not a class: give LocalMeasurer\(...\)"):
        create(LocalMeasurer)  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["threads", "workers", "timeout_s"])
def test_numbers_must_be_positive(argument):
    with pytest.raises(InputError, match=argument):
        LocalMeasurer(detect_target(1), **{argument: 0})


def test_who_was_closed_says_so() -> None:
    """What had forked its workers may work for another one."""
    unused, used = (LocalMeasurer(detect_target(1), threads=1, workers=1) for _ in range(2))
    used.baseline([matmul()])
    for closed in (unused, used):
        closed.close()
        with pytest.raises(InputError, match=r"closed.*make another one"):
            closed.measure(matmul(2 * SIZE), [tiled()])


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs Linux, and two cores")
def test_threads_that_tvm_does_not_bind_may_run_on_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were started from the first core, and stayed there: all shared it."""
    monkeypatch.setenv("TVM_BIND_THREADS", "0")
    with LocalMeasurer(detect_target(2), threads=2, workers=1) as measurer:
        measurer.baseline([matmul()])
        threads = os.listdir(f"/proc/{measurer.worker_pids[0]}/task")
        assert len(threads) > 1
        assert [os.sched_getaffinity(int(thread)) for thread in threads] == [os.sched_getaffinity(0)] * len(threads)


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs Linux, and two cores")
def test_who_starts_threads_keeps_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM would bind it to as many cores as there are threads; it compiles, too."""
    monkeypatch.setenv("TVM_NUM_THREADS", "1")

    def cores_before_and_after() -> tuple[set[int], set[int]]:
        cores = os.sched_getaffinity(0)
        start_pool()
        return cores, os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as thread:  # each has a pool of its own
        before, after = thread.submit(cores_before_and_after).result()
    assert before == after


def test_after_a_ctrl_c_between_two_signals_no_worker_stays_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[signal.Signals] = []

    def interrupted(pid: int, number: signal.Signals) -> None:
        sent.append(number)
        if number == signal.SIGSTOP:
            raise KeyboardInterrupt

    with LocalMeasurer(detect_target(1), workers=2, threads=1) as measurer:
        measurer.baseline([matmul()])
        monkeypatch.setattr(pool, "_signal", interrupted)
        with pytest.raises(KeyboardInterrupt), measurer._pool._others_stopped(0):
            pass
    assert sent == [signal.SIGSTOP, signal.SIGCONT]


def test_a_session_that_cannot_start_leaves_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def fail(self: Session) -> None:
        started.append(self.measurer._pool._template.pid)  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "_cost_model", fail)
    with pytest.raises(KeyboardInterrupt):
        Session(Settings(detect_target(1), threads=1, work_dir=tmp_path, progress=False))
    (pid,) = started
    assert not psutil.pid_exists(pid)


def template_after_measuring(threads: int = 1) -> psutil.Process:
    """What had forked the worker of a measurer that has measured and is closed now."""
    with LocalMeasurer(detect_target(threads), threads=threads, workers=1) as measurer:
        measurer.baseline([matmul()])
        return psutil.Process(measurer._pool._template.pid)


def test_who_measures_next_need_not_load_tvm_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = template_after_measuring()
    deadline = time.monotonic() + 10
    while first.status() != psutil.STATUS_SLEEPING:  # it says that it rests just before it does
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert template_after_measuring() == first
    with LocalMeasurer(detect_target(1), threads=1, workers=1) as measurer, ThreadPoolExecutor(1) as thread:
        measurer.baseline([matmul()])
        assert measurer._pool._template.pid == first.pid
        assert thread.submit(template_after_measuring).result() != first
    assert template_after_measuring(2) != first, "workers with another number of threads"
    moved = template_after_measuring(2)
    monkeypatch.chdir(tmp_path)
    assert template_after_measuring(2) != moved, "a measuring worker imports from where its parent is"
    wait_until_gone(first, moved)


def test_what_rests_ends_by_itself_or_by_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = template_after_measuring()
    killed.kill()
    monkeypatch.setattr(template, "REST_S", 0.05)
    late = template_after_measuring()
    assert late != killed
    wait_until_gone(late)
    monkeypatch.setattr(template, "REST_S", 1e-6)
    assert all(template_after_measuring() for _ in range(2)), "it ends at the moment at which it is needed"


def test_a_fork_of_this_process_leaves_what_rests_alone() -> None:
    resting = template_after_measuring()
    child = os.fork()
    if not child:
        vars(template._RESTING).clear()  # finalizes it in the child
        os._exit(0)
    os.waitpid(child, 0)
    assert template_after_measuring() == resting


def test_a_fork_of_this_process_leaves_the_measurer_alone() -> None:
    with LocalMeasurer(detect_target(1), threads=1, workers=1) as measurer:
        measurer.baseline([matmul()])
        workers = measurer._pool.pids
        child = os.fork()
        if not child:
            measurer.close()
            measurer._directory._finalizer()
            os._exit(0)
        os.waitpid(child, 0)
        assert Path(measurer._directory.name).exists()
        assert measurer._pool.pids == workers
        assert all(running(pid) for pid in workers)


def wait_until_gone(*processes: psutil.Process) -> None:
    deadline = time.monotonic() + 10
    while any(running(process.pid) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.01)
