"""What `python -m benchmarks.models` derives from records, and what it does with peers."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import replay
from benchmarks.convergence import reached_s, within_s
from benchmarks.output import table, write
from benchmarks.peers import timing
from benchmarks.peers.timing import PeerError, alternating, in_own_process
from eqtune.errors import InputError
from eqtune.records import Context, Record
from eqtune.report.summary import KernelRow, RunSummary
from eqtune.search.space import Hardware

HERE = Context(target="llvm", device="cpu", threads=1, tvm_version="0.27")


def record(workload: str, latency_s: float, timestamp_s: float, context: Context = HERE) -> Record:
    return Record(workload, "", "", context, (latency_s,), timestamp_s=timestamp_s)


def summary(*workloads: str) -> RunSummary:
    rows = [KernelRow(w, w, calls=1, flops=1, bytes_moved=1, baseline_s=9, tuned_s=1, trials=2) for w in workloads]
    return RunSummary("model", HERE, tuple(rows))


def test_seconds_until_nearly_as_fast_as_in_the_end() -> None:
    records = [
        record("a", 4.0, 101.0),
        record("other", 0.1, 102.0),
        record("a", 0.5, 103.0, replace(HERE, threads=2)),
        record("a", 1.02, 107.0),
        record("a", 1.0, 150.0),
    ]
    assert within_s(summary("a"), records, started_at=100.0) == 7.0
    assert within_s(summary("a"), records, started_at=200.0) == 0.0  # older records were enough
    assert within_s(summary("a", "other"), records, started_at=100.0) == 7.0
    assert within_s(summary("b"), records, started_at=100.0) is None

    late = [record("a", 1.0, 107.0), record("b", 1.01, 159.0)]
    assert within_s(summary("a", "b"), late, started_at=100.0) == 59.0
    a, b = summary("a", "b").kernels
    priced = replace(summary(), kernels=(a, replace(b, price_s=1.04)))  # as fast before the search looked at it
    assert within_s(priced, late, started_at=100.0) == 7.0
    fast = replace(summary(), kernels=(replace(a, price_s=1.04),))
    assert within_s(fast, records, started_at=100.0) == 1.0  # no later than the first trial


def test_seconds_until_as_fast_as_a_peer() -> None:
    records = [record("a", 4.0, 101.0), record("b", 3.0, 104.0), record("a", 1.0, 107.0)]
    assert reached_s(summary("a", "b"), records, started_at=100.0, latency_s=7.0) == 4.0
    assert reached_s(summary("a", "b"), records, started_at=100.0, latency_s=5.5) == 7.0
    assert reached_s(summary("a", "b"), records, started_at=100.0, latency_s=3.9) is None
    assert within_s(summary(), records, started_at=100.0) is None


def test_a_peer_that_fails_leaves_the_others_and_an_empty_column(monkeypatch, capsys, tmp_path) -> None:
    failed = []

    def fails() -> dict[str, float]:
        failed.append(True)
        raise PeerError("no compiler")

    monkeypatch.setattr(timing, "in_own_process", lambda *_, **__: {"parallel_start_ns": 100.0})
    timed = alternating({"bad": fails, "good": lambda: {"latency_s": 2.0}}, rounds=3, threads=1)
    assert timed["good"].latency_s == 2.0
    assert len(failed) == 1
    assert "no compiler" in capsys.readouterr().err
    rows = [{"model": "m", "bad_ms": timed["bad"].latency_s, "bad_start_ns": timed["bad"].start_ns, "trials": 3}]
    write(rows, str(tmp_path / "out.json"))
    written = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert written == [{"model": "m", "bad_ms": None, "bad_start_ns": None, "trials": 3}]
    assert "inf" not in table(rows)
    for unfit in ({"model": "m", "rules": ["a"]}, {"ms": 1.0}):
        with pytest.raises(ValueError, match="flat"):
            write([unfit], str(tmp_path / "out.json"))


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(PeerError, match="No module named"):
        in_own_process("benchmarks.peers.missing")


def test_a_peer_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(PeerError, match="stopped after 0 s"):
        in_own_process("benchmarks.peers.parallel_start", limit_s=0.01, threads=1)


@pytest.mark.parametrize(
    ("module", "given", "bound"),
    [
        ("torch_model", {}, True),
        ("onednn_kernel", {}, True),
        ("onnxruntime_model", {}, False),
        ("symbolic_model", {"runtime": "torch-compile"}, True),
        ("symbolic_model", {"runtime": "onnxruntime"}, False),
    ],
)
def test_threads_of_pytorch_have_a_core_each(monkeypatch, module, given, bound) -> None:
    environment: dict[str, str] = {}

    def run(_command, *, env, **_options):
        environment.update(env)
        return SimpleNamespace(returncode=0, stdout="{}\n")

    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    monkeypatch.setattr(timing.subprocess, "run", run)
    in_own_process(f"benchmarks.peers.{module}", threads=2, **given)
    assert environment["OMP_NUM_THREADS"] == "2"
    assert ("OMP_PROC_BIND" in environment) == bound


def test_latencies_of_two_machines_do_not_share_a_table(monkeypatch, tmp_path) -> None:
    def machine(name):
        return lambda *_, **__: SimpleNamespace(describe=lambda: {"device": name}, close=lambda: None)

    path = tmp_path / "replay.json.gz"
    for name in ("one", "one"):
        monkeypatch.setattr(replay, "LocalMeasurer", machine(name))
        with replay.RememberingMeasurer(path, None, Hardware(), measure=True) as measurer:
            measurer.save()
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(replay, "LocalMeasurer", machine("other"))
    with pytest.raises(InputError, match="was measured elsewhere"):
        replay.RememberingMeasurer(path, None, Hardware(), measure=True)
    assert replay.RememberingMeasurer(path, None, Hardware(), measure=False).describe() == {"device": "one"}


@pytest.mark.slow
@pytest.mark.peers
def test_metaschedule_tunes_one_kernel_and_leaves_the_others(tmp_path) -> None:
    library = str(tmp_path / "tuned.so")
    tiny = {"model": "nasrnn", "threads": 1, "library": library, "options": {"steps": 1, "hidden": 32}}
    module = "benchmarks.peers.metaschedule_model"
    found = in_own_process(module, **tiny, seconds=300.0, trials=2, round_trials=2)
    assert found["trials"] == 2
    assert found["untuned_kernels"] == found["kernels"] - 1
    assert found["rel_err"] < 1e-4
    assert 0.0 < in_own_process(module, **tiny, budget_s=0.1)["latency_s"] < 1.0
