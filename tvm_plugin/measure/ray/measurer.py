"""Measure on a Ray cluster: `measure="ray"`. Builders are tasks, each device is an actor. Needs the extra "ray"."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import InputError, MissingExtraError, SetupError
from ...gpu_machine import is_gpu
from ...machine import describe_machine, is_host, target_json
from ...search.space.hardware import Hardware
from ..base import MAX_DETAIL
from ..elsewhere.exported import libraries_of
from ..elsewhere.far_models import FarModels, transfer_limit_s
from ..elsewhere.fleet import DeviceLost, Fleet
from ..elsewhere.measurer import ElsewhereMeasurer, FarTrial
from ..pool import START_LIMIT_S, Config, worker_environment
from ..scratch import Scratch
from ..trial import SPACE_BUILDER

__all__ = ["RayMeasurer", "ray_available"]

ADVICE = "add a node with `ray start --address=HOST:PORT`"

TRANSFER_LIMIT_S = 60.0

TIDY_LIMIT_S = 1.0
"""An actor may take so long to delete its files; what it leaves goes when another measurer begins on its node."""


def ray_available() -> bool:
    """Whether the extra "ray" is installed."""
    return find_spec("ray") is not None


class RayMeasurer(ElsewhereMeasurer):
    """Builds as tasks, and measures in one actor a device, on a Ray cluster. A `Measurer`.

    The cluster is the one this program is connected to, or that Ray finds (RAY_ADDRESS, or one started on this
    machine), or else a local one. A CPU target uses one device a node, another target one a GPU; they must be alike.
    When an actor or a node is lost, what it was running is run on another device; nodes that join are used from the
    next batch on. eqtune must be installed on all nodes.

    Parameters
    ----------
    target : tvm.target.Target
        What to compile for: the nodes' device.
    hardware : Hardware, optional
        What spaces are built from; by default, tables for `target`.
    threads : int, optional
        Threads that a kernel may use; by default, those of `hardware`.
    timeout_s : float
        How long a candidate may take to compile, and to run.
    seed : int
        Of the random inputs.
    wait_s : float
        How long to go on without any device, or any CPU to build on.
    space_builder : str
        "module:function" that the builders import: (IRModule, Hardware) -> Space.

    Raises
    ------
    MissingExtraError
        Without the extra "ray".
    InputError
        For numbers out of range.
    SetupError
        When Ray does not start or its cluster does not answer, or no node has such a device.
    """

    def __init__(
        self,
        target: Any,
        hardware: Hardware | None = None,
        threads: int | None = None,
        timeout_s: float = 10.0,
        seed: int = 0,
        wait_s: float = 60.0,
        space_builder: str = SPACE_BUILDER,
    ) -> None:
        if not ray_available():
            raise MissingExtraError("measuring on a Ray cluster needs the extra: pip install 'eqtune[ray]'")
        import ray

        super().__init__(target, Fleet(wait_s, ADVICE), timeout_s, seed)
        if hardware is None:
            hardware = describe_machine(target, threads, measure=False, here=is_host(target))
        threads = hardware.threads if threads is None else threads
        if not threads > 0 or not wait_s > 0:
            raise InputError(f"threads and wait_s must be positive, got {threads!r} and {wait_s!r}")
        own = not ray.is_initialized()
        if own:
            try:
                ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
            except (OSError, RuntimeError, ValueError) as error:
                raise SetupError(
                    f"Ray does not start, or its cluster does not answer ({_said(error)}); see `ray status`, and the "
                    "environment variable RAY_ADDRESS"
                ) from error
        self._directory = Scratch("ray")
        self._close = weakref.finalize(self, _close, self._fleet, own, self._directory)
        self._seed = seed
        self._environment = {"env_vars": _changed(worker_environment(threads))}
        self._libraries: dict[str, bytes] = {}
        self._references: dict[str, Any] = {}
        self._files: dict[str, Any] = {}
        self._places: set[tuple[str, int]] = set()
        self._export = "so" if is_gpu(target) or is_host(target) else "tar"
        self._config = json.dumps(
            asdict(
                Config(
                    target=json.loads(target_json(target)),
                    hardware=hardware.to_json(),
                    space_builder=space_builder,
                    seed=seed,
                    references="",
                    memory_bytes=0,
                    export=self._export,
                )
            )
        )
        try:
            self._device = {"device": self._first_device(), "threads": threads}
        except BaseException:
            self.close()
            raise

    @cached_property
    def models(self) -> FarModels:
        """Where whole models run: in the actors."""
        return FarModels(self._fleet, Path(self._directory.name), self._export)

    @property
    def actors(self) -> list[Any]:
        """Handles of the actors, one a device."""
        return [device._actor for device in self._fleet.devices if isinstance(device, _RayDevice)]

    @property
    def _builders(self) -> int:
        import ray

        return max(1, int(ray.cluster_resources().get("CPU", 1)))

    def _build_all(self, chunks: Sequence[Sequence[FarTrial]], limit_s: float) -> list[dict[str, Any]]:
        import ray

        from . import node

        task = ray.remote(num_cpus=1, max_retries=0, runtime_env=self._environment)(node.build)
        pending = [
            task.remote(
                self._config,
                self._batch,
                {trial.task: self._workloads[trial.task] for trial in chunk},
                [trial.spec for trial in chunk],
                limit_s,
            )
            for chunk in chunks
        ]
        answers = _collect(pending, limit_s, self._fleet.patience_s)
        for answer in answers:
            self._libraries |= answer.pop("libraries", {})
        return answers

    def _make_references(self, hashes: Sequence[str], limit_s: float) -> list[dict[str, Any]]:
        import ray

        from . import node

        task = ray.remote(num_cpus=1, max_retries=0, runtime_env=self._environment)(node.reference)
        pending = [task.remote(self._config, h, self._workloads[h], limit_s) for h in hashes]
        answers = _collect(pending, limit_s, self._fleet.patience_s)
        for workload_hash, answer in zip(hashes, answers, strict=True):
            self._references[workload_hash] = ray.put(answer.pop("references", {}))
        return answers

    def _refresh(self) -> None:
        self._libraries.clear()
        for place in self._find_places() - self._places:
            self._add_device(place)

    def _find_places(self) -> set[tuple[str, int]]:
        """Node and number of each device in the cluster."""
        import ray

        cpu = str(self.target.kind.name) == "llvm"
        nodes = [node for node in ray.nodes() if node["Alive"]]
        counts = {node["NodeID"]: 1 if cpu else int(node["Resources"].get("GPU", 0)) for node in nodes}
        return {(node, index) for node, count in counts.items() for index in range(count)}

    def _first_device(self) -> str:
        places = self._find_places()
        if not places:
            raise SetupError(f"no node of the Ray cluster has a device for the target {self.target.kind.name}")
        for place in sorted(places):
            self._add_device(place)
        return str(self._ask_first({"describe": True})["device"])

    def _add_device(self, place: tuple[str, int]) -> None:
        self._places.add(place)
        self._fleet.add(_RayDevice(self, place[0]))


class _RayDevice:
    """A device, through an actor on its node. A `Device`."""

    def __init__(self, measurer: RayMeasurer, node: str) -> None:
        # Only what it needs: a reference to the measurer would keep it from being collected.
        self._target = measurer.target
        self._seed = measurer._seed
        self._environment = measurer._environment
        self._libraries = measurer._libraries
        self._references = measurer._references
        self._files = measurer._files
        self._node = node
        self._actor: Any = None
        self._busy = False
        self._name = ""

    def open(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from . import node

        gpus = 0 if str(self._target.kind.name) == "llvm" else 1
        actor_class = ray.remote(node.DeviceActor).options(
            num_cpus=0,  # builders and runs take turns; holding the cores would leave builders none
            num_gpus=gpus,
            runtime_env=self._environment,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self._node, soft=False),
        )
        self._actor = actor_class.remote(json.loads(target_json(self._target)), self._seed)
        name = f"{self._ask('describe', START_LIMIT_S)} on ray"
        if self._name and name != self._name:
            self.close()
            raise DeviceLost("crash", f"the node has another device now: {name}")
        self._name = name

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        import ray

        if "describe" in request:
            return {"device": self._name}
        if "model" in request:
            return self._run_model(request)
        libraries = {path: self._libraries[path] for path in libraries_of(request["fields"])}
        references = self._references.get(request["task"], {})
        failure: dict[str, Any] = self._ask("load", TRANSFER_LIMIT_S, request, libraries, references)
        if failure:
            return failure
        answer: dict[str, Any] = self._ask("run", request["limit_s"], request)
        if "references" in answer:
            self._references[request["task"]] = ray.put(answer.pop("references"))
        return answer

    def _run_model(self, request: Mapping[str, Any]) -> dict[str, Any]:
        import ray

        needed = (request["model"], request["inputs"])
        for path in needed:
            if path not in self._files:
                self._files[path] = ray.put(Path(path).read_bytes())
        limit_s = TRANSFER_LIMIT_S + transfer_limit_s(request)
        failure: dict[str, Any] = self._ask("load_model", limit_s, request, *(self._files[path] for path in needed))
        if failure:
            return failure
        answer: dict[str, Any] = self._ask("run_model", request["limit_s"], request)
        for path, data in answer.pop("files", {}).items():
            Path(path).write_bytes(data)
        return answer

    def close(self) -> None:
        import ray

        actor = self._actor  # the device's own thread may release it meanwhile
        if actor is not None and ray.is_initialized():
            if not self._busy:
                ray.wait([actor.tidy.remote()], timeout=TIDY_LIMIT_S)
            ray.kill(actor)

    def release(self) -> None:
        self._actor = None

    def _ask(self, method: str, limit_s: float, *arguments: Any) -> Any:
        import ray

        self._busy = True
        try:
            answer = ray.get(getattr(self._actor, method).remote(*arguments), timeout=limit_s)
        except ray.exceptions.GetTimeoutError as error:
            self.close()
            raise DeviceLost("timeout", f"no result after {limit_s:g} s") from error
        except ray.exceptions.RayError as error:
            raise DeviceLost("crash", f"the Ray actor was lost: {_said(error)}"[:MAX_DETAIL]) from error
        self._busy = False
        return answer


def _collect(pending: Sequence[Any], limit_s: float, patience_s: float) -> list[dict[str, Any]]:
    """What builders answer, in order; an error where one died. Raises SetupError without a CPU for `patience_s`."""
    import ray

    started = last_cpu_s = time.monotonic()
    answers: dict[Any, dict[str, Any]] = {}
    waiting = list(pending)
    while waiting:
        done, waiting = ray.wait(waiting, timeout=1.0)
        for task in done:
            try:
                answers[task] = ray.get(task)
            except ray.exceptions.RayError as error:
                late = time.monotonic() - started >= limit_s
                detail = f"the builder died, or took longer than {limit_s:g} s: {_said(error)}"[:MAX_DETAIL]
                answers[task] = {"error": "timeout" if late else "crash", "detail": detail}
        if done or ray.cluster_resources().get("CPU"):
            last_cpu_s = time.monotonic()
        elif time.monotonic() - last_cpu_s > patience_s:
            for task in waiting:
                ray.cancel(task, force=True)
            raise SetupError(f"the Ray cluster has had no CPU to build on for {patience_s:g} s; {ADVICE}")
    return [answers[task] for task in pending]


def _said(error: Exception) -> str:
    """The line of Ray's error that says what happened: the last where it is a traceback of a node, else the first."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if "ray::" in lines[0] else 0]


def _changed(environment: Mapping[str, str]) -> dict[str, str]:
    """What a kernel's process needs beside the node's own environment."""
    wanted = ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_DEVICE_BACKEND_AUTOLOAD")
    return {name: environment[name] for name in wanted}


def _close(fleet: Fleet, own: bool, directory: Scratch) -> None:
    import ray

    fleet.close()
    if own:
        ray.shutdown()
    directory.cleanup()
