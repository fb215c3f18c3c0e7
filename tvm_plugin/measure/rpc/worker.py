"""Holds one RPC session, for one parent process: `python -m eqtune.measure.rpc.worker`.

A process of its own, because a call over RPC cannot be given up: when a server hangs, this process is killed. The
protocol is that of `../worker.py`: the first line is `RpcConfig`; then

    {"op": "connect"}                 -> {"device": name}
    {"op": "load", a runner request}  -> {}
    {"op": "run", the same request}   -> as `../server.py`'s "run"
    {"op": "load_model", a request of `elsewhere/model_bench.py`} -> {}
    {"op": "run_model", the same request}               -> as `ModelBench.run`

All but "connect" may be answered by an error, each by {"lost": reason} when there is no server, or no more. Each says
in "limit_s" what a run may take, and in "load_limit_s" what loading may take before it: the session lasts longer.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import last_line
from ..worker import Answer, serve
from .tracker import RpcAddress

__all__ = ["RpcConfig", "lifetime_s", "main"]

AFFINITY_BIG_CORES = 1
LIFETIME_FACTOR = 2.0
MIN_LIFETIME_S = 10.0
"""A server ends a session after this long: only so does it get rid of a kernel that hangs after its client has gone."""

SPARE_S = 2.0
"""What a session must have left beyond the limits of loading and running."""


@dataclass(frozen=True)
class RpcConfig:
    """What the process is told when it starts.

    Attributes
    ----------
    host, port, key
        As `RpcAddress`.
    wait_s : float
        How long to wait for a free server.
    target : dict
        What was compiled for.
    threads : int
        Threads that a kernel may use.
    references : str
        Directory of the reference outputs, on this machine.
    seed : int
        Of the inputs.
    """

    host: str
    port: int
    key: str
    wait_s: float
    target: dict[str, Any]
    threads: int
    references: str
    seed: int


class _Unsuitable(Exception):
    """The server cannot run what is compiled for the target."""


class _Client:
    """The session, and the runner that works through it."""

    def __init__(self, config: RpcConfig) -> None:
        import tvm

        self._config = config
        self._target = tvm.target.Target(config.target)
        self._session: Any = None
        self._runner: Any = None
        self._models: Any = None
        self._description: dict[str, Any] = {}
        self._until_s = 0.0

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one request."""
        operations: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "connect": self._connect,
            "load": self._load,
            "run": lambda request: self._run(self._runner, request),
            "load_model": self._load_model,
            "run_model": lambda request: self._run(self._models, request),
        }
        try:
            return operations[request["op"]](request)
        except _Unsuitable as error:
            self._drop()
            return {"lost": str(error)}
        except Exception as error:  # noqa: BLE001 - the far side raises anything: its own faults and the candidates'
            text = last_line(error)
            if self._runner is None or not self._alive():  # there is none where connecting failed
                self._drop()
                return {"lost": text}
            return {"error": "crash" if request["op"].startswith("run") else "build_error", "detail": text}

    def _connect(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from ..elsewhere.model_bench import ModelBench
        from ..elsewhere.runner import Runner

        self._drop()
        config = self._config
        address = RpcAddress(config.host, config.port, config.key)
        seconds = lifetime_s(request["limit_s"], request["load_limit_s"])
        self._session = _request_session(address, seconds, config.wait_s)
        self._until_s = time.monotonic() + seconds
        kind = str(self._target.kind.name)
        device = self._session.device("cpu" if kind == "llvm" else kind, 0)
        self._description = _check_server(self._session, device, self._target, config.threads)
        self._runner = Runner(device, self._module, Path(config.references), config.seed)
        self._models = ModelBench(device, self._module)
        return self._description

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._renew(request)
        self._runner.load(request)
        return {}

    def _load_model(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._renew(request)
        self._models.load(request)
        return {}

    def _renew(self, request: Mapping[str, Any]) -> None:
        """Another session, unless what is asked for will be done before this one ends: an equal device's."""
        if self._until_s - time.monotonic() >= request["load_limit_s"] + request["limit_s"] + SPARE_S:
            return
        known = self._description
        if self._connect(request) != known:
            raise _Unsuitable(
                f"a server under the key {self._config.key!r} is another device: {self._description['device']}"
            )

    def _run(self, bench: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._until_s - time.monotonic() < request["limit_s"]:  # the server would end the session in the middle
            return {"error": "timeout", "detail": f"sending it took longer than {request['load_limit_s']:.3g} s"}
        return dict(bench.run(request))

    def _module(self, path: str) -> Any:
        self._session.upload(path)
        return self._session.load_module(Path(path).name)

    def _alive(self) -> bool:
        try:
            self._session.get_function("runtime.NumThreads")()
        except Exception:  # noqa: BLE001 - whatever it is, the session is of no use
            return False
        return True

    def _drop(self) -> None:
        """End the session: it lasts as long as anything refers to it, as a model's virtual machine does, in a cycle."""
        self._runner = None
        self._models = None
        self._session = None
        gc.collect()


def main() -> None:
    """Serve until the parent closes the pipe."""
    serve(_start)


def _start(fields: Mapping[str, Any]) -> Answer:
    return _Client(RpcConfig(**fields)).answer


def lifetime_s(limit_s: float, load_limit_s: float) -> float:
    """Seconds after which the server ends a session where a run may take `limit_s`, and loading the other before it."""
    return max(MIN_LIFETIME_S, LIFETIME_FACTOR * (limit_s + SPARE_S)) + load_limit_s


def _request_session(address: RpcAddress, session_s: float, wait_s: float) -> Any:
    from tvm import rpc

    tracker = rpc.connect_tracker(address.host, address.port)
    try:
        tracker._sock.settimeout(wait_s)  # TVM's client would wait for ever
        return tracker.request(address.key, session_timeout=session_s, max_retry=1)
    except RuntimeError as error:
        if "timed out" in str(error):
            raise RuntimeError(f"no server under the key {address.key!r} was free within {wait_s:g} s") from error
        raise
    finally:
        tracker.close()


def _check_server(session: Any, device: Any, target: Any, threads: int) -> dict[str, Any]:
    """What the server calls its device. Raises _Unsuitable when it cannot run what is compiled for `target`."""
    if str(target.kind.name) != "llvm":
        if not device.exist:
            raise _Unsuitable(f"the server has no {target.kind.name} device")
        return {"device": str(device.device_name)}
    from ...machine import missing_instructions

    cpu = str(_optional(session, "target.llvm_get_system_cpu") or "")
    features = str(_optional(session, "eqtune.cpu_features") or "").split()
    missing = missing_instructions(cpu, target, features) if cpu else []
    if missing:
        raise _Unsuitable(
            f"the server's CPU, {cpu}, lacks {', '.join(missing[:5])} of the target {target.attrs.get('mcpu', '')}; "
            f'give its own: --target \'{{"kind": "llvm", "mcpu": "{cpu}"}}\''
        )
    session.get_function("runtime.config_threadpool")(AFFINITY_BIG_CORES, threads)
    found = int(session.get_function("runtime.NumThreads")())
    if found != threads:
        raise _Unsuitable(
            f"the server runs kernels on {found} threads, not on {threads}: start it with TVM_NUM_THREADS={threads}, "
            f"or ask for --threads {found}"
        )
    _optional(session, "eqtune.prepare_session")
    return {"device": str(_optional(session, "eqtune.device_name") or cpu or target.attrs.get("mcpu", "cpu"))}


def _optional(session: Any, name: str) -> Any:
    """What the server's function returns; None where the server does not have it."""
    try:
        return session.get_function(name)()
    except AttributeError:
        return None


if __name__ == "__main__":
    main()
