"""Run whole executables: where, and on this machine with how many threads.

TVM's thread pool belongs to the Python thread that first runs a parallel kernel, and counts half of the logical
processors unless told otherwise. Models therefore run in a thread of their own, whose pool has the size asked for;
whatever the caller runs with TVM in other threads keeps its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax
from tvm.support import cc
from tvm.target import codegen

from .errors import InputError
from .machine import allowed_cores, core_count
from .measure.affinity import bind_pool
from .measure.gauge import Gauge
from .weights_object import NoElfError, write_weights_object

__all__ = [
    "LocalModels",
    "Model",
    "ModelRunner",
    "Models",
    "can_link",
    "export_library",
    "first_line",
    "flat_tensors",
    "linker_of",
    "time_side_by_side",
]

Model = Callable[..., list[NDArray[Any]]]
"""An executable where it can run: numpy arrays in, numpy arrays out; tuples of outputs are flattened."""

ENOUGH_ROUNDS, ENOUGH_SHARE = 200, 0.3
"""More runs than this seldom find a lower minimum, where they take so much of the budget: a model of 0.1 ms had run 200
times within one bad moment of the machine, and was timed at 0.38."""

PATIENCE = 3.0
"""So many times as long as otherwise, at most, while the cores are not at full speed."""

_SILENCE = threading.Lock()
"""File descriptors are the process's: two threads that replace one in turns would leave it replaced."""


class Models(Protocol):
    """Where whole models run."""

    def load(self, executable: Any) -> Model:
        """The function "main" of an executable."""

    def run_once(self, model: Any, inputs: Sequence[NDArray[Any]]) -> tuple[list[NDArray[Any]], float]:
        """The outputs of a model that `load` gave, and the seconds of the run, without the way to the device."""

    def time_s(
        self,
        models: Sequence[Any],
        inputs: Sequence[NDArray[Any]],
        budget_s: float = 1.0,
        at_least: int = 3,
        settle: bool = False,
    ) -> list[float]:
        """Seconds of one run of each of `models`, which `load` gave: the minimum of several, in turn.

        Parameters
        ----------
        models : sequence of Model
        inputs : sequence of arrays
        budget_s : float
            Seconds to spend on all together, about.
        at_least : int
            Runs of each, however long they take, after one to warm up.
        settle : bool
            Go on for a while where the cores are not at full speed, and that can be told.
        """


class LocalModels:
    """Runs models in this process. A `Models`.

    Parameters
    ----------
    threads : int
        Threads of TVM's pool.
    device : tvm.runtime.Device, optional
        The CPU unless given.
    make_gauge : callable, optional
        The gauge of the cores; without one, nothing tells whether they are at full speed.
    """

    def __init__(self, threads: int, device: Any = None, make_gauge: Callable[[], Gauge] | None = None) -> None:
        self._threads = threads
        self._device = device
        self._make_gauge = make_gauge

    def load(self, executable: Any) -> ModelRunner:
        """See `Models`."""
        return ModelRunner(executable, self._device, self._threads)

    def run_once(self, model: Any, inputs: Sequence[NDArray[Any]]) -> tuple[list[NDArray[Any]], float]:
        """See `Models`."""
        started = time.monotonic()
        outputs: list[NDArray[Any]] = model(*inputs)
        return outputs, time.monotonic() - started

    def time_s(
        self,
        models: Sequence[Any],
        inputs: Sequence[NDArray[Any]],
        budget_s: float = 1.0,
        at_least: int = 3,
        settle: bool = False,
    ) -> list[float]:
        """See `Models`."""
        gauge = self._make_gauge() if settle and self._make_gauge is not None else None
        return time_side_by_side(models, inputs, budget_s, at_least, gauge)


class ModelRunner:
    """The function "main" of an executable, on numpy arrays.

    Parameters
    ----------
    executable : relax.VMExecutable
    device : tvm.runtime.Device, optional
        The CPU unless given.
    threads : int, optional
        Threads of TVM's pool; all cores unless given (`eqtune.machine.core_count`).

    Raises
    ------
    InputError
        It is a path: `tvm.runtime.load_module` makes an executable of an exported library.
    """

    def __init__(self, executable: Any, device: Any = None, threads: int | None = None) -> None:
        if isinstance(executable, str | os.PathLike):
            path = os.fspath(executable)
            raise InputError(f"{path!r} is a path, no executable; load it with tvm.runtime.load_module({path!r})")
        self._device = tvm.cpu() if device is None else device
        self._threads = threads or core_count()
        machine = self._pool.submit(lambda: relax.VirtualMachine(executable, self._device))
        self._main = machine.result()["main"]

    def __call__(self, *inputs: NDArray[Any]) -> list[NDArray[Any]]:
        """Outputs in order; tuples of outputs are flattened."""
        return [tensor.numpy() for tensor in self.on_tensors(self.prepare(inputs))]

    def on_tensors(self, tensors: Sequence[Any]) -> list[Any]:
        """The outputs as tensors on the device, of inputs that `prepare` could have given."""
        return self._pool.submit(lambda: flat_tensors(self._main(*tensors))).result()

    def prepare(self, inputs: Sequence[NDArray[Any]]) -> list[Any]:
        """The inputs as tensors on the device."""
        return [tvm.runtime.tensor(np.asarray(value, order="C"), self._device) for value in inputs]

    @property
    def _pool(self) -> ThreadPoolExecutor:
        """Looked up by each run: it may be another process than the last one's."""
        return _thread_with_pool(self._threads)

    def time_s(self, arguments: Sequence[Any]) -> float:
        """Seconds of one run on prepared arguments."""
        return self._pool.submit(self._timed, arguments).result()

    def disturbed(self, gauge: Gauge | None) -> bool:
        """What the gauge says where models run; False without one."""
        return gauge is not None and self._pool.submit(gauge.disturbed).result()

    def _timed(self, arguments: Sequence[Any]) -> float:
        started = time.perf_counter()
        self._main(*arguments)
        self._device.sync()
        return time.perf_counter() - started


def time_side_by_side(
    runners: Sequence[ModelRunner],
    inputs: Sequence[NDArray[Any]],
    budget_s: float = 1.0,
    at_least: int = 3,
    gauge: Gauge | None = None,
) -> list[float]:
    """Seconds of one run of each: the minimum of several, taken in turn so that drift hits all alike.

    Parameters
    ----------
    runners : sequence of ModelRunner
    inputs : sequence of arrays
    budget_s : float
        Seconds to spend on all together, about.
    at_least : int
        Runs of each, however long they take, after one to warm up.
    gauge : Gauge, optional
        Of the cores: up to three times the budget is spent until each has run between two moments of full speed.
    """
    prepared = [runner.prepare(inputs) for runner in runners]
    for runner, arguments in zip(runners, prepared, strict=True):
        runner.time_s(arguments)
    best = [float("inf")] * len(runners)
    settled = [False] * len(runners)
    started, rounds = time.monotonic(), 0
    while True:
        spent_s = time.monotonic() - started
        many = rounds >= ENOUGH_ROUNDS and spent_s >= ENOUGH_SHARE * budget_s
        enough = rounds >= at_least and (spent_s >= budget_s or many)
        if enough and (all(settled) or spent_s >= PATIENCE * budget_s):
            return best
        for index, (runner, arguments) in enumerate(zip(runners, prepared, strict=True)):
            disturbed = runner.disturbed(gauge)
            best[index] = min(best[index], runner.time_s(arguments))
            settled[index] |= not (disturbed or runner.disturbed(gauge))
        rounds += 1


_POOLS: dict[int, ThreadPoolExecutor] = {}
"""By number of threads."""


def _thread_with_pool(threads: int) -> ThreadPoolExecutor:
    """The same one for all callers, also for two that ask for the first time at once: they may share a machine."""

    def configure() -> None:
        core = bind_pool(threads, allowed_cores())
        # Its own core, for good. After the others were started, because they have their starter's cores where TVM does
        # not bind them.
        if hasattr(os, "sched_setaffinity"):  # Linux
            os.sched_setaffinity(0, {core})

    if threads not in _POOLS:
        pool = ThreadPoolExecutor(1, thread_name_prefix=f"eqtune-run-{threads}", initializer=configure)
        return _POOLS.setdefault(threads, pool)  # another one, perhaps; this one has no thread yet
    return _POOLS[threads]


if hasattr(os, "register_at_fork"):  # no thread lives on in a forked process, which would wait for ever
    os.register_at_fork(after_in_child=_POOLS.clear)


def flat_tensors(value: Any) -> list[Any]:
    """The tensors of a result that may be a tuple of tuples."""
    if isinstance(value, tvm.runtime.Tensor):
        return [value]
    return [tensor for part in value for tensor in flat_tensors(part)]


def export_library(executable: Any, path: Path, compiler: str | None = None) -> None:
    """Write an executable as a library, linked by a C++ compiler. Raises what TVM and its linker raise."""
    if compiler is None and path.suffix == ".so" and not can_link():  # TVM would call a program named None
        raise FileNotFoundError("there is no C++ compiler")
    link = None if compiler is None or path.suffix != ".so" else cc.cross_compiler(compiler)
    with _quiet_native_stderr():
        try:
            executable.export_library(str(path), fcompile=link, fpack_imports=write_weights_object)
        except NoElfError:
            executable.export_library(str(path), fcompile=link)


def can_link(compiler: str | None = None) -> bool:
    """Whether there is this C++ compiler; unless given, one for this machine."""
    return cc.get_cc() is not None if compiler is None else shutil.which(compiler) is not None


def linker_of(target: Any) -> str | None:
    """The C++ compiler that links for a target's machine; None where that is this one's own."""
    triple = str(target.attrs.get("mtriple", "")) if str(target.kind.name) == "llvm" else ""
    here = str(codegen.llvm_get_system_triple()).partition("-")[0]
    return f"{triple}-g++" if triple and triple.partition("-")[0] != here else None


def first_line(error: Exception) -> str:
    """What a failure says first, behind a heading as "Compilation error:"; its name where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = 2 if lines and lines[0].endswith(":") else 1
    return " ".join(lines[:said]) or type(error).__name__


@contextlib.contextmanager
def _quiet_native_stderr() -> Iterator[None]:
    """TVM's C++ prints a line for every weight that it saves; nothing that Python can switch off. One at a time."""
    with _SILENCE:
        sys.stderr.flush()
        kept = os.dup(2)
        silence = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(silence, 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(silence)
            os.close(kept)
