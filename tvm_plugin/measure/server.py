"""What a worker answers.

    {"op": "build", "batch": n, "workloads": {hash: text}, "candidates": [candidate, ...]}
        -> {"built": [{"program": key, "trace": text} or an error, ...]}; with "notes" where the compiler told
           something (`Measurement`); exported programs also say what `elsewhere/exported.py` needs to load them
    {"op": "run", "task": hash, "program": key, "domain": "normal", "effort": {...}, "best_s": seconds,
     "save": bool, "check": bool, "model_bytes": n}
        -> {"latencies_s": [...], "given_up": bool, "domain": ..., "disturbed": bool} or an error
    {"op": "untuned", "batch": n, "workloads": {hash: text}, "task": hash, "plain": bool}
        -> {"program": key, "latencies_s": [seconds of one call], "domain": ...} or an error; the outputs are saved.
           "plain" asks for a plain schedule, where there is one that compiles

A candidate is {"task": hash} with one of "decision", "trace" and "untuned", the last perhaps with "plain". An error is
{"error": kind, "detail": ...}.
A new batch number drops the programs of the batch before. "save" keeps the outputs as the reference for everyone;
without "check" they are not compared with it. "model_bytes" are those of all weights of the model between whose calls
the kernel is timed (`Bench.evaluate_cold`); 0: it is called again and again.
"disturbed" says that the cores were not at full speed before or after it (`gauge.py`).
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tvm

from ..records.traces import trace_to_json
from ..records.workload import deserialize_workload
from ..schedules.plain import plain_schedule
from ..search.space.amx.tiles import multiply_tiles
from ..search.space.base import Decision
from ..search.space.hardware import Hardware
from ..search.space.lowering import as_written, prepare_for_lowering
from ..search.space.marks import AHEAD_OF_TIME
from ..search.space.replay import replay_schedule
from .affinity import on_first_core, start_pool
from .arguments import Interface
from .base import last_line
from .bench import Bench
from .build import CANDIDATE_CONFIG, Packing, Program, compile_functions, program_key, split_packing
from .elsewhere.exported import export_programs
from .gauge import Gauge, multiply_adds
from .pool import Config
from .run import run_program
from .timing import ONCE

__all__ = ["Server"]

MOST_PACKERS = 64
"""Compiled packing functions that a worker keeps: compiling one takes half as long as compiling the kernel."""

KEPT_BYTES = 256 * 1024**2
"""Inputs, outputs and packed weights of kernels that a worker keeps for their next batch."""


@dataclass
class _Workload:
    mod: Any
    interface: Interface
    space: Any = None


@dataclass
class _Scheduled:
    key: str
    trace: str
    function: Any
    packing: Packing | None = None
    stock: bool = False

    @property
    def symbol(self) -> str:
        return f"kernel_{self.key}"

    @property
    def packing_symbol(self) -> str:
        return self.packing.symbol if self.packing else ""


class Server:
    """Holds kernels, the programs of the current batch, and the buffers of the kernel that is being run."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._target = tvm.target.Target(config.target)
        self._device = tvm.device(self._target.get_target_device_type(), 0)
        self._hardware = Hardware.from_json(config.hardware)
        module, _, name = config.space_builder.partition(":")
        self._build_space: Callable[[Any, Hardware], Any] = getattr(importlib.import_module(module), name)
        self._workloads: dict[str, _Workload] = {}
        self._programs: dict[str, Program] = {}
        self._packers: dict[str, Any] = {}
        self._batch = -1
        self._benches: dict[tuple[str, str], Bench] = {}
        # The first compilation takes longest: now, nobody waits. Where the target does not run, kernels will say so.
        if not config.export:
            with contextlib.suppress(Exception):
                _ = self._gauge

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one request."""
        try:
            if request["op"] == "build":
                return self._build(request)
            if request["op"] == "untuned":
                start_pool()
                return self._run_untuned(request)
            with on_first_core():
                disturbed = self._gauge.disturbed()
                answer = self._run(request)
                return answer | {"disturbed": self._gauge.disturbed() or disturbed}
        except Exception as error:  # noqa: BLE001 - TVM and generated code raise anything; it is the candidate's failure
            return _failure(error, "build_error" if request["op"] == "build" else "crash")

    @cached_property
    def _gauge(self) -> Gauge:
        return Gauge(multiply_adds(self._target, self._hardware))

    def _build(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["batch"] != self._batch:
            self._programs.clear()
            self._batch = request["batch"]
        for workload_hash, text in request["workloads"].items():
            mod = deserialize_workload(text)
            self._workloads[workload_hash] = _Workload(mod, Interface.of(mod["main"]))
        scheduled: list[_Scheduled | dict[str, Any]] = []
        for candidate in request["candidates"]:
            try:
                scheduled.append(self._schedule(candidate))
            except Exception as error:  # noqa: BLE001 - a sketch that does not fit raises anything
                scheduled.append(_failure(error, "build_error"))
        new = {s.key: s for s in scheduled if isinstance(s, _Scheduled) and s.key not in self._programs}
        results = self._compile(list(new.values()))
        if self.config.export:
            compiled = {
                s.key: self._programs[s.key] for s in scheduled if isinstance(s, _Scheduled) and s.key not in results
            }
            results |= export_programs(compiled, Path(self.config.references), self.config.export)
        return {"built": [s if isinstance(s, dict) else self._describe(s) | results.get(s.key, {}) for s in scheduled]}

    def _describe(self, scheduled: _Scheduled) -> dict[str, Any]:
        built = {"program": scheduled.key, "trace": scheduled.trace}
        program = self._programs.get(scheduled.key)
        return built | ({"notes": dict(program.notes)} if program is not None and program.notes else {})

    def _schedule(self, candidate: Mapping[str, Any]) -> _Scheduled:
        task = str(candidate["task"])
        workload = self._workloads[task]
        if candidate.get("untuned"):
            plain = plain_schedule(workload.mod["main"]) if candidate.get("plain") else None
            if plain is not None:
                return _Scheduled(f"{task}_plain", "", as_written(plain.mod["main"]), stock=True)
            return _Scheduled(f"{task}_untuned", "", as_written(workload.mod["main"]), stock=True)
        if "trace" in candidate:
            schedule = replay_schedule(candidate["trace"], workload.mod)
        else:
            if workload.space is None:
                workload.space = self._build_space(workload.mod, self._hardware)
            schedule = workload.space.apply(Decision.from_json(candidate["decision"]))
        function = schedule.mod["main"]
        result = _Scheduled(f"{task}_{program_key(function)}", trace_to_json(schedule.trace), function)
        if AHEAD_OF_TIME in result.trace:
            result.function, packing = split_packing(function, workload.interface)
            result.packing = packing and replace(packing, function=multiply_tiles(packing.function))
        result.function = prepare_for_lowering(result.function)
        return result

    def _compile(self, scheduled: Sequence[_Scheduled]) -> dict[str, dict[str, Any]]:
        """Compile into `_programs`; what fails is returned by its key."""
        functions = {s.symbol: s.function for s in scheduled if not s.stock}
        modules = compile_functions(functions, self._target, CANDIDATE_CONFIG)
        modules |= self._packers_of(scheduled)
        modules |= compile_functions({s.symbol: s.function for s in scheduled if s.stock}, self._target, {})
        failures = {}
        for s in scheduled:
            module, packing_module = modules[s.symbol], modules.get(s.packing_symbol)
            error = next((part for part in (module, packing_module) if isinstance(part, Exception)), None)
            if error is not None:
                failures[s.key] = _failure(error, "build_error")
                continue
            pack = packing_module.get_function(s.packing_symbol) if packing_module else None
            if not self.config.export:
                module.get_function(s.symbol)  # LLVM makes the code now, not when the others rest for a kernel to run
            self._programs[s.key] = Program(module, s.symbol, s.packing, pack, packing_module)
        return failures

    def _packers_of(self, scheduled: Sequence[_Scheduled]) -> dict[str, Any]:
        """Modules of packing functions by symbol. The latest are kept: tiles of one width share them."""
        wanted = {s.packing_symbol: s.packing.function for s in scheduled if s.packing}
        new = {symbol: function for symbol, function in wanted.items() if symbol not in self._packers}
        modules = self._packers | compile_functions(new, self._target, CANDIDATE_CONFIG)
        result = {symbol: modules[symbol] for symbol in wanted}
        for symbol, module in result.items():
            self._packers.pop(symbol, None)  # to the end
            if not isinstance(module, Exception):
                self._packers[symbol] = module
        for symbol in list(self._packers)[:-MOST_PACKERS]:
            del self._packers[symbol]
        return result

    def _run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        task = str(request["task"])
        return run_program(lambda domain: self._load(task, domain), self._programs[request["program"]], request)

    def _run_untuned(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Compile a kernel as it is and run it once, perhaps beside other workers: slow ones take seconds each."""
        candidate = {"task": request["task"], "untuned": True, "plain": request.get("plain", False)}
        (built,) = self._build({**request, "candidates": [candidate]})["built"]
        if "error" in built and candidate["plain"]:
            (built,) = self._build({**request, "candidates": [candidate | {"plain": False}]})["built"]
        if "error" in built:
            return dict(built)
        run = {"program": built["program"], "domain": "normal", "effort": asdict(ONCE), "best_s": math.inf}
        return built | self._run({**request, **run, "save": True, "check": True})

    def _load(self, task: str, domain: Any) -> Bench:
        """The buffers of a kernel. Those of the latest kernels are kept: their turns come again."""
        key = (task, domain)
        if key not in self._benches:
            interface = self._workloads[task].interface
            self._make_room(interface.nbytes)  # the old are freed before the new are made
            references = Path(self.config.references)
            self._benches[key] = Bench(task, interface, self._device, references, self.config.seed, domain)
        bench = self._benches[key] = self._benches.pop(key)
        return bench

    def _make_room(self, needed_bytes: int) -> None:
        while self._benches and needed_bytes + sum(bench.nbytes for bench in self._benches.values()) > KEPT_BYTES:
            del self._benches[next(iter(self._benches))]


def _failure(error: Exception, kind: str) -> dict[str, Any]:
    if isinstance(error, MemoryError) or "bad_alloc" in str(error) or "out of memory" in str(error).lower():
        kind = "out_of_memory"
    return {"error": kind, "detail": last_line(error)}
