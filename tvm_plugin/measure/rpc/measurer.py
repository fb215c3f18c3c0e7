"""Measure on other machines: `measure="rpc://HOST:PORT/KEY"`, through TVM's RPC tracker.

Candidates are built here, in the workers of `LocalMeasurer`, and sent to every server that registered under the key.

Warning: TVM's RPC executes what it is sent, for everyone who can connect, without a password. Keep tracker and servers
on the loopback interface (the default of `eqtune.measure.rpc_server`), or on a private network or an SSH tunnel.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import InputError, SetupError
from ...gpu_machine import is_gpu
from ...machine import core_count, describe_machine, is_host, target_json
from ...search.space.hardware import Hardware
from ..cuda.measurer import BUILDER
from ..elsewhere.built_here import BuiltHereMeasurer
from ..elsewhere.far_models import FarModels, transfer_limit_s
from ..elsewhere.fleet import DeviceLost, Fleet
from ..elsewhere.process_device import ProcessDevice
from ..trial import SPACE_BUILDER
from .tracker import RpcAddress, rpc_status
from .worker import RpcConfig, lifetime_s

__all__ = ["RpcMeasurer"]

CONNECT_LIMIT_S = 60.0
"""What opening a session may take once a server is free."""

LOAD_LIMIT_S = 10.0
"""What loading a program or a model may take beyond sending its bytes: round trips, and perhaps linking there."""

_COMMAND = (sys.executable, "-m", "eqtune.measure.rpc.worker")


class RpcMeasurer(BuiltHereMeasurer):
    """Measures on the servers that registered with TVM's RPC tracker under a key. A `Measurer`.

    Servers are used side by side, and must be alike. One that is lost, or hangs, is let go, and what it was running is
    run on another; servers that register later are used from the next batch on. Inputs are made from the seed here
    and uploaded, outputs are downloaded and compared here: exactly the checks of `LocalMeasurer`.

    Parameters
    ----------
    url : str
        "rpc://HOST:PORT/KEY" of the tracker.
    target : tvm.target.Target
        What to compile for: the servers' device.
    hardware : Hardware, optional
        What spaces are built from; by default, tables for `target`.
    threads : int, optional
        Threads that a kernel may use; by default, those of `hardware`. The servers must have been started for them.
    timeout_s : float
        How long a candidate may take to compile, and to run.
    seed : int
        Of the random inputs.
    wait_s : float
        How long to wait for a server: the first, or another once all are lost. One whose kernel hangs is waited for
        until its session ends, and as long again.
    workers : int, optional
        Processes that compile; by default, one a core.
    space_builder : str
        "module:function" that the workers import: (IRModule, Hardware) -> Space.

    Raises
    ------
    InputError
        For a malformed address, or numbers out of range.
    SetupError
        When there is no tracker, or no server under the key within `wait_s`, or none that can run `target`.
    """

    def __init__(
        self,
        url: str,
        target: Any,
        hardware: Hardware | None = None,
        threads: int | None = None,
        timeout_s: float = 10.0,
        seed: int = 0,
        wait_s: float = 30.0,
        workers: int | None = None,
        space_builder: str = SPACE_BUILDER,
    ) -> None:
        address = RpcAddress.parse(url)
        advice = f"start servers, one a device, with: {address.how_to_start_server}"
        super().__init__(target, Fleet(wait_s, advice), timeout_s, seed)
        if hardware is None:
            hardware = describe_machine(target, threads, measure=False, here=is_host(target))
        threads = hardware.threads if threads is None else threads
        workers = core_count() if workers is None else workers
        for name, value in (("threads", threads), ("workers", workers), ("wait_s", wait_s)):
            if not value > 0:
                raise InputError(f"{name} must be positive, got {value!r}")
        self._address = address
        self._advice = advice
        self._wait_for_server(wait_s)
        # Linked here where the linker knows the target, else there. Beside a GPU there is a CPU like this one.
        gpu = is_gpu(target)
        self._export = "so" if gpu or is_host(target) else "tar"
        builder = BUILDER if gpu else None
        self._start_builders(
            "rpc", workers, hardware, seed, self._export, 1 if gpu else threads, space_builder, builder
        )
        directory, plain_target = self._directory.name, json.loads(target_json(target))
        self._config = RpcConfig(
            address.host, address.port, address.key, wait_s, plain_target, threads, directory, seed
        )
        try:
            self._device = {"device": self._first_device(), "threads": threads}
            # Where connecting was given up, the session that it opened may last as long.
            self._fleet.patience_s += lifetime_s(timeout_s, LOAD_LIMIT_S)
        except BaseException:
            self.close()
            raise

    @cached_property
    def models(self) -> FarModels:
        """Where whole models run: on the servers."""
        directory = Path(self._directory.name) / "models"
        directory.mkdir()
        return FarModels(self._fleet, directory, self._export)

    def _refresh(self) -> None:
        super()._refresh()
        try:
            servers = rpc_status(self._address)["servers"]
        except SetupError:
            return  # sessions outlive their tracker; without any, the fleet will say so
        while len(self._fleet) < servers:
            self._add_device()

    def _wait_for_server(self, wait_s: float) -> None:
        end = time.monotonic() + wait_s
        while not rpc_status(self._address)["servers"]:
            if time.monotonic() >= end:
                raise SetupError(
                    f"no server has registered under the key {self._address.key!r} with the RPC tracker on "
                    f"{self._address.host}:{self._address.port} within {wait_s:g} s; {self._advice}"
                )
            time.sleep(min(0.5, wait_s))

    def _first_device(self) -> str:
        """Open one session; the device's name, with the way to it: records made here never pass for local ones."""
        self._add_device()
        return str(self._ask_first({"describe": True})["device"])

    def _add_device(self) -> None:
        log = Path(self._directory.name) / f"rpc-{len(self._fleet)}.log"
        self._fleet.add(_RpcDevice(self._config, self._timeout_s, log, self._device.get("device")))


class _RpcDevice(ProcessDevice):
    """A server, through a client (`worker.py`). A `Device`."""

    called = "the RPC client: "

    def __init__(self, config: RpcConfig, timeout_s: float, log: Path, expected: str | None) -> None:
        super().__init__(_COMMAND, asdict(config), log)
        self._config = config
        self._timeout_s = timeout_s
        self._expected = expected
        self._until_s = 0.0

    def open(self) -> None:
        super().open()
        message = {"op": "connect", "limit_s": self._timeout_s, "load_limit_s": LOAD_LIMIT_S}
        name = self.ask(message, self._config.wait_s + CONNECT_LIMIT_S)["device"]
        device = f"{name} over rpc, key {self._config.key}"
        if self._expected not in (None, device):
            raise DeviceLost("crash", f"a server under the key {self._config.key!r} is another device: {device}")
        self._until_s = time.monotonic() + lifetime_s(self._timeout_s, LOAD_LIMIT_S)
        self._expected = device

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "describe" in request:
            return {"device": self._expected}
        load, run = ("load_model", "run_model") if "model" in request else ("load", "run")
        load_limit_s = LOAD_LIMIT_S + transfer_limit_s(request)
        message = {**request, "load_limit_s": load_limit_s}
        try:
            failure = self.ask({**message, "op": load}, self._config.wait_s + CONNECT_LIMIT_S + load_limit_s)
            answer = failure or self.ask({**message, "op": run}, request["limit_s"])
        except DeviceLost as lost:
            if self._process is None:  # the client is gone, but what it had begun goes on
                lost.occupied_until_s = self._session_end_s(request["limit_s"], load_limit_s)
            raise
        self._until_s = self._session_end_s(request["limit_s"], load_limit_s)
        return answer

    def lost(self, detail: str) -> DeviceLost:
        """The client stays, and connects to another server."""
        return DeviceLost("crash", f"the RPC server was lost: {detail}")

    def _session_end_s(self, limit_s: float, load_limit_s: float) -> float:
        """When the session ends at the latest: it is the one before, or has been opened by now for these limits."""
        return max(self._until_s, time.monotonic() + lifetime_s(limit_s, load_limit_s))
