"""`eqtune doctor` says whether tuning works here, and its exit code agrees."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest

from eqtune import _compat, cgroup, gpu_machine, machine
from eqtune.cli import doctor
from eqtune.errors import SetupError
from eqtune.measure.peaks import BUSY_START_S
from eqtune.search.space.hardware import Hardware


def run(*arguments):
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    args = parser.parse_args(["doctor", *arguments])
    return args.run(args)


@pytest.mark.slow
def test_a_working_machine_is_fine(capsys):
    assert run("--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["works"] is True
    checks = {finding["check"]: finding["status"] for finding in said["findings"]}
    needed = ("versions", "compiler", "target", "threads", "machine", "speeds", "worker")
    assert {checks[name] for name in needed} == {"ok"}


def test_what_limits_the_threads_is_told(monkeypatch):
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(machine, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(machine, "allowed_cores", lambda: set(range(64)))
    monkeypatch.setattr(machine, "memory_bytes", lambda: 2 << 30)
    (finding,) = doctor._limits()
    assert finding.detail == "1 unless told otherwise, of 64 logical cores and a CPU quota of 1.5; 2 GiB of memory"


@pytest.mark.parametrize(("overhead_s", "told"), [(5e-6, False), (BUSY_START_S, True)])
def test_a_busy_machine_is_told(monkeypatch, overhead_s, told):
    hardware = Hardware(parallel_overhead_s=overhead_s)
    monkeypatch.setattr(machine, "describe_machine", lambda: hardware)
    (advice,) = (finding.advice for finding in doctor._machine() if finding.check == "speeds")
    assert ("keeps the cores busy" in advice) == told


def test_every_extra_is_looked_for(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", doctor._extras)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert run() == 0
    said = capsys.readouterr().out
    for extra in ("torch", "onnx", "tflite", "ray", "rpc"):
        assert f'pip install "eqtune[{extra}]"' in said


def test_an_egglog_that_cannot_be_loaded_is_said_in_a_line(tmp_path):
    (tmp_path / "egglog").mkdir()
    (tmp_path / "egglog" / "__init__.py").write_text("import what_egglog_needs")
    command = [sys.executable, "-c", "import sys; from eqtune.cli import main; sys.exit(main())", "graph", "zoo:nasrnn"]
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "what_egglog_needs" in line
    assert "--graph off" in line


def test_a_bad_installation_is_a_problem_with_advice(capsys, monkeypatch):
    def refuse():
        raise SetupError("apache-tvm is not installed; run: pip install apache-tvm")

    monkeypatch.setattr(_compat, "check_versions", refuse)
    assert run() == 1
    said = capsys.readouterr().out
    assert "problem" in said
    assert "pip install apache-tvm" in said
    assert said.strip().endswith("tuning does not work on this machine")


def test_nvrtc_alone_does_not_tune(monkeypatch):
    monkeypatch.setattr(gpu_machine, "local_gpu", lambda: None)
    monkeypatch.setattr(gpu_machine, "find_compiler", lambda: gpu_machine.Compiler("nvrtc", "cuda-bindings", ""))
    assert "CUDA toolkit" in {finding.check: finding.advice for finding in doctor._gpu()}["nvcc"]
