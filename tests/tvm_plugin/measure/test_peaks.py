"""Speeds of a machine that other processes keep busy."""

from __future__ import annotations

import io
import json
import sys

import pytest

from eqtune.machine import core_count
from eqtune.measure import peaks
from eqtune.search.space.hardware import Hardware


def test_a_peak_that_a_busy_neighbour_halved_is_not_believed() -> None:
    assert peaks._peak_of_all(100e9, 98e9, threads=1, cores=2) == 100e9
    assert peaks._peak_of_all(100e9, 200e9, threads=2, cores=2) == 200e9
    assert peaks._peak_of_all(100e9, 102e9, threads=2, cores=2) == 200e9
    assert peaks._peak_of_all(100e9, 160e9, threads=2, cores=2) == 160e9
    assert peaks._peak_of_all(100e9, 100e9, threads=4, cores=2) == 100e9  # hardware threads share cores


def test_cores_are_counted_before_the_process_is_bound_to_one(monkeypatch, capsys) -> None:
    asked = {"target": {"kind": "llvm"}, "hardware": Hardware(threads=1).to_json()}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asked)))
    monkeypatch.setattr(peaks, "leave_out", lambda: None)
    monkeypatch.setattr(peaks, "_measure", lambda target, hardware, cores: {"cores": cores})
    peaks.main()
    assert json.loads(capsys.readouterr().out) == {"cores": core_count()}


def test_threads_that_wait_for_a_core_do_not_look_like_slow_ones() -> None:
    seconds = {"parallel": 3.3e-3, "serial": 1e-6}
    assert peaks._overhead(seconds) == peaks.BUSY_START_S
    assert peaks._overhead({"parallel": 4e-6, "serial": 1e-6}) == pytest.approx(3e-6)
    assert peaks._overhead({"parallel": 1e-6, "serial": 2e-6}) == 0
