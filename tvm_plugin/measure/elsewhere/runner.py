"""Runs exported programs on one device, which may be in another process, or on another machine. See `exported.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..arguments import Domain, Interface
from ..bench import Bench
from ..build import Program
from ..run import run_program
from .exported import interface_of, load_program

__all__ = ["Runner"]


class Runner:
    """Holds the programs of the current batch, and the buffers of the kernel that is being run.

    A request has "task", "interface", "batch", "program" and "fields" (`export_programs`), and all of `run_program`.

    Parameters
    ----------
    device : tvm.runtime.Device
        Where programs run.
    load : callable
        The module of a library's path.
    references : Path
        Directory of the reference outputs.
    seed : int
        Of the inputs.
    """

    def __init__(self, device: Any, load: Callable[[str], Any], references: Path, seed: int) -> None:
        self._device = device
        self._load_module = load
        self._references = references
        self._seed = seed
        self._batch = -1
        self._modules: dict[str, Any] = {}
        self._programs: dict[str, Program] = {}
        self._bench: Bench | None = None
        self._round_trip_s = min(_seconds(device.sync) for _ in range(3))

    def load(self, request: Mapping[str, Any]) -> None:
        """Bring program and inputs to the device."""
        if request["batch"] != self._batch:
            self._programs.clear()
            self._modules.clear()
            self._batch = request["batch"]
        if request["program"] not in self._programs:
            self._programs[request["program"]] = load_program(request["fields"], self._module)
        self._bench_for(request, request["domain"])

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Call, check and time a program that was loaded."""
        program = self._programs[request["program"]]
        return run_program(lambda domain: self._bench_for(request, domain), program, request)

    def _module(self, path: str) -> Any:
        if path not in self._modules:
            self._modules[path] = self._load_module(path)
        return self._modules[path]

    def _bench_for(self, request: Mapping[str, Any], domain: Domain) -> Bench:
        task = str(request["task"])
        if self._bench is None or (self._bench.task, self._bench.domain) != (task, domain):
            self._bench = None  # freed before the next are made
            self._bench = self._make_bench(task, interface_of(request["interface"]), domain)
        return self._bench

    def _make_bench(self, task: str, interface: Interface, domain: Domain) -> Bench:
        return _FarBench(task, interface, self._device, self._references, self._seed, domain, self._round_trip_s)


class _FarBench(Bench):
    """Takes the way to the device and back off the first call, which is timed here; the others are timed there."""

    def __init__(
        self,
        task: str,
        interface: Interface,
        device: Any,
        references: Path,
        seed: int,
        domain: Domain,
        round_trip_s: float,
    ) -> None:
        super().__init__(task, interface, device, references, seed, domain)
        self._round_trip_s = round_trip_s

    def call(self, program: Program) -> float:
        """As `Bench.call`: one round trip for the call, one to wait for its end."""
        return max(super().call(program) - 2 * self._round_trip_s, 1e-9)


def _seconds(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
