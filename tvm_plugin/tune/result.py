"""What tuning gives back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax, tirx

from ..errors import InputError, SetupError
from ..files import as_path, replacing
from ..frontends import OpenSize
from ..report.summary import RunSummary
from ..report.table import closing_lines, kernel_table
from ..runtime import ModelRunner, export_library, first_line, linker_of

if TYPE_CHECKING:
    from ..graph_result import GraphResult

__all__ = ["KernelsResult", "Limit", "TaskResult", "TuneResult"]


@dataclass(frozen=True)
class TaskResult:
    """One distinct kernel.

    Attributes
    ----------
    name, workload_hash : str
    calls : int
        How often one run of the model calls it.
    flops, bytes_moved : float
        Of one call; operations of quantised layers' integers count as well.
    baseline_latency_s, latency_s : float
        Seconds of one call, untuned (or with a plain schedule, `RunSummary.plain_baseline`) and tuned. NaN where the
        budget was spent before anything was measured.
    trials, failed : int
        Candidates measured, and how many of them failed.
    trace : str
        The accepted schedule as TVM's trace JSON; "" when the untuned kernel was kept.
    decision : dict or None
        The accepted candidate by name, {"sketch": ..., "values": {...}}.
    measured : bool
        False where the budget did not reach the kernel: it has the fastest of the few candidates that it was priced
        by, or the one that the analytic estimate likes best, and `latency_s` is that price or estimate. Nobody compared
        its outputs alone; the model was compared and timed with it.
    price_s : float or None
        Seconds of one call with the schedule that it was priced by before the search; None where it was not.
    baseline_trace : str
        The plain schedule of the baseline, where it was kept or may be fallen back to; "" as TVM compiles it.
    """

    name: str
    workload_hash: str
    calls: int
    flops: float
    bytes_moved: float
    baseline_latency_s: float
    latency_s: float
    trials: int
    failed: int
    trace: str = field(repr=False)
    decision: Mapping[str, Any] | None = None
    measured: bool = True
    price_s: float | None = None
    baseline_trace: str = field(repr=False, default="")

    @property
    def untuned(self) -> TaskResult:
        """The same kernel as its baseline."""
        return replace(self, latency_s=self.baseline_latency_s, trace=self.baseline_trace, decision=None, measured=True)

    @property
    def tuned(self) -> bool:
        """Whether the kernel has a schedule of its own."""
        return bool(self.trace)


@dataclass
class KernelsResult:
    """What `tune_kernels` returns: a schedule for each distinct kernel.

    Attributes
    ----------
    mod : tvm.ir.IRModule
        The given module with each kernel's best schedule applied.
    tasks : list of TaskResult
    interrupted : bool
        True after Ctrl-C: the best so far was applied.
    """

    mod: tvm.IRModule = field(repr=False)
    tasks: list[TaskResult]
    interrupted: bool = False

    @property
    def schedules(self) -> dict[str, str]:
        """Workload hash to trace, for `eqtune.transform.ApplyTuned`."""
        return {task.workload_hash: task.trace for task in self.tasks if task.tuned}


@dataclass(frozen=True)
class Limit:
    """What an open size of an input may be."""

    input: int
    dimension: int
    size: OpenSize

    def check(self, shape: Sequence[int]) -> None:
        """Raise InputError where a shape has another size there. Other ranks are the virtual machine's to refuse."""
        if self.dimension < len(shape):
            self.size.check(shape[self.dimension])


@dataclass(repr=False)
class TuneResult:
    """What `tune_model` returns. Printed, it is the table of its kernels.

    Attributes
    ----------
    mod : tvm.ir.IRModule
        The tuned module: fused kernels with their schedules, weights packed. `tvm.compile` builds it. The model as it
        was given where nothing made it faster.
    latency_s, baseline_latency_s : float
        Seconds of one run of the whole model, tuned and untuned (the minimum of several). Where running it untuned
        would take more than 2 % of tuning, the baseline has plain schedules (`summary.plain_baseline`), which are 5 to
        50 times as fast.
    tasks : list of TaskResult
        One entry a distinct kernel.
    graph : GraphResult or None
        What the graph search did; None when it was off.
    max_abs_error, max_rel_error : float
        Largest difference of the tuned outputs from the reference, absolute, and relative to the largest reference
        value of that output. NaN when `verify=False`, and where the reference's outputs have no finite number.
    interrupted : bool
        True after Ctrl-C: this is the best so far.
    summary : RunSummary
        All that the report shows.
    """

    mod: tvm.IRModule
    latency_s: float
    baseline_latency_s: float
    tasks: list[TaskResult]
    graph: GraphResult | None
    max_abs_error: float
    max_rel_error: float
    interrupted: bool
    summary: RunSummary
    _target: Any = None
    _executable: Any = None
    _run: ModelRunner | None = None
    _limits: tuple[Limit, ...] = ()

    def __str__(self) -> str:
        return kernel_table(self.summary)

    def __repr__(self) -> str:
        return f"<TuneResult: {next(iter(closing_lines(self.summary)), self.summary.model)}>"

    def __reduce__(self) -> NoReturn:
        raise SetupError(
            "what tune_model returned holds compiled code, and can be neither pickled nor copied: give the other "
            "process the path of what `export` writes, for tvm.runtime.load_module; a forked one may use the result"
        )

    @property
    def measured(self) -> bool:
        """False after `measure="compile-only"`: latencies are estimates, nothing was run or compared."""
        return self.summary.context.measured

    @property
    def speedup(self) -> float:
        """How many times faster than untuned."""
        return self.baseline_latency_s / self.latency_s

    def compile(self) -> relax.VMExecutable:
        """The executable: give it to `relax.VirtualMachine`.

        The leanest way to run it: `relax.VirtualMachine(result.compile(), tvm.cpu())["main"]` adds a microsecond to the
        kernels, on TVM's tensors. Each thread needs such a machine of its own (they share the weights), and has as many
        threads as TVM_NUM_THREADS says, half of the logical cores unless it is set.

        Raises SetupError when the model was tuned without its device.
        """
        if self._executable is None:
            raise SetupError(
                "the model was tuned by compiling only, without its device: build `result.mod` where the device is, "
                "with tvm.compile(result.mod, target)"
            )
        return self._executable

    @cached_property
    def _input_names(self) -> list[str]:
        return [str(parameter.name) for parameter in self.mod["main"].params]

    def run(self, *inputs: NDArray[Any]) -> list[NDArray[Any]]:
        """Run the tuned model on numpy arrays; returns its outputs, in order.

        bfloat16 is that of `ml_dtypes`, or a tensor of PyTorch, which cannot make an array of it. Inputs are copied and
        never changed, and nothing writes into the outputs later.

        Any thread may call it, and any process that was forked while none did. Calls wait for one another, those of
        other results with as many threads, too: they run in a thread of eqtune's own, whose pool has these threads.
        That takes some 20 us a call, and copying 5 to 10 for each array: see `run_tensors` and `compile`.

        Raises SetupError when it was tuned for a device that is not here, InputError for another number of inputs than
        the model takes, what is no array, and arrays of other shapes or dtypes.
        """
        run = self._runner(len(inputs))
        arrays = [_as_array(name, given) for name, given in zip(self._input_names, inputs, strict=True)]
        self._check_sizes(arrays)
        with self._explained(arrays):
            return run(*arrays)

    def run_tensors(self, *inputs: Any) -> list[tvm.runtime.Tensor]:
        """Run the tuned model on tensors of any library that speaks DLPack, on its device, without copying them.

        Outputs are TVM's tensors, which the same libraries take, as `torch.from_dlpack(tensor)` does. Inputs are in C
        order and begin at multiples of 64 bytes, as PyTorch allocates them. They must not change meanwhile. An output
        may be an input, another output, or a constant of the model: copy it before writing into it.

        Raises SetupError and InputError as `run` does, InputError also for an input that begins or lies elsewhere.
        """
        run, tensors = self._runner(len(inputs)), []
        for name, given in zip(self._input_names, inputs, strict=True):
            try:
                tensors.append(tvm.runtime.from_dlpack(given))
            except Exception as error:  # each library raises its own
                raise InputError(f"the input {name} cannot be read without a copy: {first_line(error)}") from error
        self._check_sizes(tensors)
        with self._explained(tensors):
            return run.on_tensors(tensors)

    @contextlib.contextmanager
    def _explained(self, inputs: Sequence[Any]) -> Iterator[None]:
        """What the virtual machine refuses, which is looked at only then, because calls may take microseconds."""
        try:
            yield
        except (RuntimeError, ValueError, TypeError) as error:
            known: dict[str, tuple[int, str]] = {}
            for parameter, given in zip(self.mod["main"].params, inputs, strict=True):
                if not _fits(parameter.ty, given):
                    found = f"{given.dtype} of shape {tuple(given.shape)}"
                    raise InputError(f"the input {parameter.name} takes {parameter.ty}, not {found}") from error
                for name, size in _open_sizes(parameter.ty, given):
                    before, where = known.setdefault(name, (size, parameter.name))
                    if size != before:
                        message = f"the size {name} is {before} in the input {where} and {size} in {parameter.name}"
                        raise InputError(message) from error
            raise

    def _check_sizes(self, inputs: Sequence[Any]) -> None:
        for limit in self._limits:
            limit.check(inputs[limit.input].shape)

    def _runner(self, count: int) -> ModelRunner:
        if self._run is None:
            raise SetupError(
                "the model was tuned for a device that is not here: load what `export` writes there, with "
                "tvm.runtime.load_module, or build `result.mod` there"
            )
        if count != len(self._input_names):
            names = ", ".join(self._input_names)
            raise InputError(f"the model takes {len(self._input_names)} inputs ({names}), not {count}")
        return self._run

    def export(self, path: str | os.PathLike[str], compiler: str | None = None) -> Path:
        """Write the executable as a shared library that `tvm.runtime.load_module` loads. Returns the path.

        Whatever was at `path` stays until the new library is whole. Where the library runs, TVM's runtime uses half of
        the logical cores unless the environment says otherwise: set TVM_NUM_THREADS to the threads that the model was
        tuned for, `summary.context.threads`.

        Parameters
        ----------
        path : str or path
            Ends in ".so" (or ".tar": object files, linked where they are loaded).
        compiler : str, optional
            What links a .so: g++ for this machine, `TRIPLE-g++` for a target with another `mtriple`, unless given.

        Raises
        ------
        InputError
            For another name, or where it cannot be written.
        SetupError
            When the library cannot be linked, or nothing was compiled.
        """
        path = check_export_path(path)
        executable = self.compile()
        if compiler is None and self._target is not None:
            compiler = linker_of(self._target)
        with _linking(path), replacing(path) as temporary:
            _make_room(temporary, path)
            export_library(executable, temporary, compiler)
        return path

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained HTML page. Returns the path. Raises InputError when it cannot be written."""
        from ..report.html import write_html

        return write_html(self.summary, path)


def _as_array(name: str, value: Any) -> NDArray[Any]:
    """An input as an array. Raises InputError for what is none."""
    try:
        array = _converted(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors that need gradients
        raise InputError(f"the input {name} is no array: {first_line(error)}") from error
    if array.dtype.kind == "O":
        raise InputError(f"the input {name} is no array; give the tensors that it holds one by one")
    return array


def _converted(value: Any) -> NDArray[Any]:
    if isinstance(value, tvm.runtime.Tensor):
        return np.asarray(value.numpy())
    try:
        return np.asarray(value)
    except TypeError:
        if not hasattr(value, "__dlpack__"):
            raise
        return np.asarray(tvm.runtime.from_dlpack(value).numpy())


def _fits(ty: Any, given: Any) -> bool:
    """Whether an array or tensor has the dtype of a parameter, its rank, and its sizes where they are known."""
    if not isinstance(ty, relax.TensorType):
        return True
    if str(ty.dtype) != str(given.dtype) or (ty.ndim >= 0 and ty.ndim != len(given.shape)):
        return False
    sizes = ty.shape if isinstance(ty.shape, relax.ShapeExpr) else ()
    return all(
        not isinstance(size, tirx.IntImm) or int(size) == have for size, have in zip(sizes, given.shape, strict=False)
    )


def _open_sizes(ty: Any, given: Any) -> Iterator[tuple[str, int]]:
    """The names of a parameter's open sizes, and what they are in an array or tensor that fits it."""
    shape = ty.shape if isinstance(ty, relax.TensorType) else None
    for size, have in zip(shape if isinstance(shape, relax.ShapeExpr) else (), given.shape, strict=False):
        if isinstance(size, tirx.Var):
            yield size.name, int(have)


def _make_room(temporary: Path, path: Path) -> None:
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
    except OSError as error:
        raise InputError(f"the tuned model cannot be written to {str(path)!r}: {error.strerror}") from error


@contextlib.contextmanager
def _linking(path: Path) -> Iterator[None]:
    """What goes wrong while a library is written becomes one line."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise SetupError(
            f"the tuned model could not be linked to {str(path)!r} ({first_line(error)[:200]}); a .so needs g++, of "
            "the target where that is another machine, and space on the disk; a .tar needs no compiler"
        ) from error


def check_export_path(path: str | os.PathLike[str]) -> Path:
    """The path; raises InputError unless a library can be written under such a name."""
    path = as_path(path, "a library is exported to a path that ends in .so or .tar")
    if path.suffix not in {".so", ".tar"}:
        raise InputError(f"cannot export to {path.name!r}: the name must end in .so or .tar")
    if path.is_dir():
        raise InputError(f"cannot export to {str(path)!r}: it is a folder; name a file in it")
    return path


def schedules_of(tasks: Sequence[TaskResult]) -> dict[str, str]:
    """Workload hash to trace, of the kernels that have a schedule."""
    return {task.workload_hash: task.trace for task in tasks if task.tuned}
