"""`tune_model`: from a model in any accepted form to a faster executable that computes the same."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm
from numpy.typing import NDArray
from tvm import ir, transform

from ..compile.executable import build_scheduled, scheduled
from ..errors import MismatchError
from ..frontends import ImportedModel, check_model, load_model
from ..gpu_machine import is_gpu
from ..runtime import Model, ModelRunner
from ..transform.fake_quantization import is_quantized
from ..transform.narrow_weights import KeepNarrowWeights
from .accuracy import TOLERANCE, Accuracy
from .advice import fast_math_advice
from .chosen_inputs import NOTHING_CHOSEN
from .estimate import estimated_result
from .forms import Form, Forms, check_graph, graph_config, model_forms
from .kernel_search import KernelSearch
from .loop import TuningLoop
from .open_sizes import tuned_for_any_size, typical_sizes
from .reference import Reference
from .result import TaskResult, TuneResult, schedules_of
from .session import FINISH_S, Session, Settings
from .summarize import command_line, summarize

if TYPE_CHECKING:
    import onnx
    import torch

    from ..cost_model import CostModel
    from ..graph_search import GraphConfig
    from ..measure import Measurer
    from ..search.allocation import Allocator
    from ..search.strategies import Strategy

__all__ = ["tune_model"]

LOGGER = logging.getLogger(__name__)

NOTHING_FINITE = "for random inputs, all outputs of the model are NaN or infinite: its numbers are NOT COMPARED"
"""Said where a comparison would tell nothing."""

NO_LITERT = (
    "ai-edge-litert is not installed: outputs are compared with those of the imported model, not with what LiteRT "
    'computes; pip install "eqtune[tflite]"'
)
"""Said where a TFLite model has no reference."""

INTERPRETER_S = 0.15e-6
"""What the virtual machine's interpreter takes for a call of a kernel, beyond what compiled code takes for it."""

INTERPRETED_SHARE = 0.05
"""Of a model's time: what it may wait for the interpreter. Compiling the calls of an LSTM takes a second..."""

MOST_COMPILED = 400
"""... with so many calls a few, but LLVM takes 11 s for 600 calls in one function and two minutes for 1200."""


def tune_model(
    model: ir.IRModule | torch.nn.Module | torch.export.ExportedProgram | onnx.ModelProto | str | Path,
    target: tvm.target.Target | Mapping[str, Any] | str | None = None,
    *,
    params: Mapping[str, Any] | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    trials: int | None = None,
    time_budget_s: float | None = None,
    work_dir: str | os.PathLike[str] = "eqtune-work",
    graph: str | GraphConfig = "saturate",
    strategy: str | Strategy = "annealed-evolution",
    cost_model: str | CostModel = "xgboost",
    allocator: str | Allocator = "gradient",
    measure: str | Measurer = "local",
    threads: int | None = None,
    seed: int = 0,
    verify: bool = True,
    progress: bool = True,
    shapes: Mapping[str, Sequence[int]] | None = None,
    fast_math: bool = False,
    function: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> TuneResult:
    """Make a model faster on a target: search equal graphs, then schedules of each kernel; apply, check and time.

    Whatever is found is timed against what was there before it is used: the result is never slower than the untuned
    model. Its outputs, for one set of random inputs, equal the reference's (see `verify`) within 1e-4 of the largest
    value, or within 8 roundings of the least precise dtype that it computes in (8e-3 for float16, 6e-2 for bfloat16).
    Models quantised to 8 bits: within 8/256 of the largest value, or twice what the reference's own outputs differ by
    when it computes operator by operator, at most 0.25.

    Parameters
    ----------
    model : IRModule, torch.nn.Module, torch.export.ExportedProgram, onnx.ModelProto, str or path
        A path ends in .onnx, .pt2 (`torch.export.save`), .tflite, .relay (the text of a Relay program) or .json (a
        saved Relax module, or a Relay module saved by TVM 0.8 to 0.19). A string may also be the text of a Relay
        program, or "zoo:NAME", a model of `eqtune.zoo`, with options as in "zoo:bert_base:sequence_length=128".
    target : tvm.target.Target, dict or str, optional
        What to compile for; this machine's CPU, fully described, unless given. A tag, such as "cuda" (this machine's
        GPU) or "nvidia/nvidia-h100", or fields, such as {"kind": "llvm", "mcpu": "x86-64-v3"}.
    params : mapping of str to array, optional
        Weights by parameter name, for a Relax module or a Relay program that takes them as parameters.
    example_inputs : sequence or mapping, optional
        Inputs for torch.export, positional or by keyword (what a tokenizer returns); needed for a torch.nn.Module.
    trials, time_budget_s : int, float, optional
        Measurements in all, and wall-clock seconds in all; whichever ends first. What earlier runs in the same
        `work_dir` spent on this model counts: to go on, give more. Neither: until no kernel improves. Kernels that the
        budget does not reach get the fastest of a few candidates, or what the estimate likes best
        (`TaskResult.measured` is False); without `verify`, they stay untuned.
    work_dir : str or path
        Records, log, report data. Running again resumes; nothing is measured twice.
    graph : str or GraphConfig
        "saturate", "off", or a configuration of the graph search. Of that, `tolerance` is what the whole model is
        compared with where it is below 1e-4; `cost`, `verify` and `seed` are not used, because prices are measured here
        and the tuned model is compared as a whole.
    strategy, cost_model, allocator, measure : str or instance
        Parts by name, or your own: `eqtune.search.strategies`, `eqtune.cost_model` and `eqtune.search.allocation` list
        theirs. `measure` is "local", "local:flush-l2" (a GPU), "rpc://HOST:PORT/KEY", "ray", "compile-only" (no GPU at
        hand), or a measurer; see `eqtune.measure.create`.
    threads : int, optional
        Threads that a kernel may use; unless given, all cores that this process may keep busy
        (`eqtune.machine.core_count`: two hardware threads of a core count once, a container's CPU quota is kept).
        TVM_NUM_THREADS and OMP_NUM_THREADS do not count here: set the former, to as many, where the model runs.
    seed : int
        Of every random choice.
    verify : bool
        Compare the tuned model's outputs with the reference: torch, ONNX Runtime or LiteRT where the model came from
        there, else the untuned model. `measure="compile-only"` compares nothing.
    progress : bool
        Show progress on standard error.
    shapes : mapping of str to sequence of int, optional
        Concrete shapes of inputs that the model leaves symbolic. Without them, on a CPU, Relax modules, programs of
        torch.export and ONNX models stay open: the result runs at any size. Its kernels are tiles of 64, 32, ..., 1
        places. Those that run at `sizes` are measured, the others scheduled by estimate, or all where the budget is
        over once the model is compiled; of both, what is faster at `sizes` is kept. It is compared there, and at two
        others. A model tuned for the one size that is needed is a little faster.
    fast_math : bool
        Permit the graph search rules that are equal over the reals but round differently: Winograd's convolutions, off
        by up to 1e-5 of the largest value of a layer where direct ones are off by 5e-7. On a GPU, permit three products
        of tfloat32 on tensor cores for one of float32, about as exact (5e-7 against 2e-7); on a CPU with AMX, three of
        bfloat16 (5e-6; infinities become NaN). What they make is used only where it is faster and the whole model's
        outputs still equal the reference's within 1e-4 (unless `verify` is False); else the form without them is. Such
        runs have a budget of their own and share all records. Where sizes are open, estimates decide which convolutions
        are Winograd's, at `sizes`: say those that matter. Needs `graph="saturate"` or a GraphConfig.
    function : str, optional
        Which function of a Relax module, where it has several; unless given "main", or the only one. The result's is
        "main".
    sizes : mapping of str to int, optional
        What open sizes are where the model is tuned, compared and timed, by the names that the model gives them. Unless
        given, those of torch.export's example, 1 for what is called a batch, 224 for the height and width of images
        with three channels, or 16 for others.

    Returns
    -------
    TuneResult

    Raises
    ------
    InputError
        A model, target or argument that cannot be used; the message says what is allowed.
    MissingExtraError
        An optional package is needed, to read the model or to measure; the message names the extra.
    UnsupportedModelError
        The model has something that cannot be tuned: shapes that depend on data, but for those behind ONNX's
        NonMaxSuppression (or, on a GPU, all dynamic ones), a foreign dtype, an unknown operator.
    MismatchError
        The tuned (or the imported) model computes something else; nothing is returned.
    SetupError
        This installation or machine cannot tune.
    RecordError
        The records in `work_dir` cannot be read or written.

    Examples
    --------
    >>> result = eqtune.tune_model("model.onnx", time_budget_s=300, work_dir="work")  # doctest: +SKIP
    >>> result = eqtune.tune_model(module.eval(), example_inputs=(image,), time_budget_s=300)  # doctest: +SKIP
    >>> print(result)  # doctest: +SKIP
    >>> result.export("model.so")  # doctest: +SKIP
    """
    settings = Settings(
        target, trials, time_budget_s, work_dir, strategy, cost_model, allocator, measure, threads, seed, progress
    )
    check_graph(graph, fast_math)
    check_model(model)  # before seconds are spent on describing the machine
    started = time.monotonic()
    with Session(settings) as session:
        config = graph_config(graph, fast_math)  # loads the graph search while the workers start
        fast_math = config is not None and config.fast_math
        any_size = session.runs and not is_gpu(session.target)
        imported = load_model(model, example_inputs, params, shapes, function, any_size)
        typical = typical_sizes(imported, sizes)
        command = command_line(model, settings, graph, fast_math, verify, shapes, params, function, sizes)
        session.progress.say(session.describe())
        if verify and session.runs and imported.source == "tflite" and imported.reference is None:
            session.progress.say(NO_LITERT)
        if typical:
            with_graph = config is not None
            return tuned_for_any_size(session, imported, typical, with_graph, fast_math, verify, started, command)
        return _tuned(session, imported, config, verify, started, command)


def _tuned(
    session: Session, imported: ImportedModel, config: GraphConfig | None, verify: bool, started: float, command: str
) -> TuneResult:
    """For the sizes that the model has: its forms, the schedules of their kernels, of what is right the fastest."""
    fast_math = config is not None and config.fast_math
    if imported.reference is not None and not is_gpu(session.target):
        # Untuned, too: to make floats of all weights takes longer than to tune. What they compute is known.
        imported = replace(imported, mod=transform.Sequential([KeepNarrowWeights()])(imported.mod))
    prices = session.graph_prices(imported.mod, fast_math)
    forms, graph_result = model_forms(imported.mod, session.target, config or "off", prices, seconds=session.graph_s)
    plain = not is_quantized(imported.mod) and not is_gpu(session.target)
    needs_advice = config is not None and not fast_math and plain
    advice = fast_math_advice(imported.mod, forms.given_operations, session.hardware) if needs_advice else ""
    reference = _reference(imported, forms, session, verify)
    session.identify(forms.given, permits="fast-math" if fast_math else "")
    limit = TOLERANCE if config is None else min(TOLERANCE, config.tolerance)
    accuracy = Accuracy(session, reference, verify, limit)
    forms = accuracy.not_refused(forms)
    forms = forms.shortlist(session.prices.guess_s, session.affords, session.prices.is_measured, session.winner())
    forms = accuracy.screened(forms)
    loop = session.search(forms.tasks, forms.variants, guess=verify)
    if not session.runs:
        results = session.accept([kernel for kernel in loop.kernels if kernel.status.calls])
        return estimated_result(session, imported.name, forms, loop, results, graph_result, started, command)
    tuned, latency_s = _fastest_right(forms, loop, session, accuracy, verify)
    session.remember_winner(tuned.form.digest, loop.trials)
    absolute, relative = accuracy.errors(tuned.run) if verify else (math.nan, math.nan)
    if verify and not relative <= accuracy.tolerance:
        raise MismatchError(
            f"the tuned model's outputs differ from the reference by {relative:.2e} relative, {absolute:.2e} "
            f"absolute, where {accuracy.tolerance:.0e} relative is allowed; nothing is returned. "
            f"{accuracy.excuse()}The records and the log are in {session.work.path}"
            + ("; graph='off' (--graph off) keeps the graph as it was given" if tuned.form.rewritten else "")
        )
    session.keep_unreached(tuned.tasks)
    latency_s, baseline_s = _beside_baseline(tuned, latency_s, reference, session)
    if latency_s > baseline_s:
        session.progress.say(f"tuned {latency_s:.3g} s, untuned {baseline_s:.3g} s: the untuned model is kept")
        tuned = _Built(Form("untuned", imported.mod, ()), [], imported.mod, reference.executable, reference.run)
        latency_s = baseline_s
        if verify:
            absolute, relative = accuracy.errors(tuned.run)
    if verify and not reference.tells:
        session.progress.say(NOTHING_FINITE)
        absolute = relative = math.nan
    session.save_spent()
    verdict = accuracy.verdict(tuned.form) if fast_math else advice
    summary = summarize(
        session,
        imported.name,
        tuned.tasks,
        wall_s=time.monotonic() - started,
        baseline_s=baseline_s,
        plain_baseline=reference.plain,
        tuned_s=latency_s,
        max_abs_error=absolute,
        max_rel_error=relative,
        tolerance=accuracy.tolerance if verify else None,
        graph={
            "form": tuned.form.name,
            **({"fast math": verdict} if verdict else {}),
            **({"choice": reference.choice} if verify and reference.choice else {}),
        },
        command=command,
        interrupted=loop.interrupted,
    )
    session.work.write_json("summary.json", summary.to_json())
    return TuneResult(
        mod=tuned.mod,
        latency_s=latency_s,
        baseline_latency_s=baseline_s,
        tasks=tuned.tasks,
        graph=graph_result,
        max_abs_error=absolute,
        max_rel_error=relative,
        interrupted=loop.interrupted,
        summary=summary,
        _target=session.target,
        _executable=tuned.executable,
        _run=tuned.run if isinstance(tuned.run, ModelRunner) else None,
    )


def _reference(imported: ImportedModel, forms: Forms, session: Session, verify: bool) -> Reference:
    """What the result is compared with; the time that its last steps will take is kept back from the search."""
    in_limited_time = session.budget.time_s is not None and session.runs
    layers = sum(forms.given.calls.values()) if is_quantized(imported.mod) else 0
    session.baselines.choose(forms.given_operations, session.budget, own_kernels=layers)
    reference = Reference(
        imported,
        session.target,
        session.work,
        session.settings.seed,
        session.context_key,
        session.models,
        plain=session.baselines.plain,
    )
    if verify and session.runs and imported.reference is not None:
        _ = reference.outputs  # what the source's framework cannot run is refused before the budget is spent
    if verify and session.runs and reference.choice == NOTHING_CHOSEN:
        session.progress.say(NOTHING_CHOSEN)
    finish_s = reference.prepare(len(forms.given.calls)) if in_limited_time else None
    session.keep_back(FINISH_S if finish_s is None else finish_s, len(forms.given.calls))
    if in_limited_time:
        session.baselines.s_per_operation = forms.untuned_s_per_operation(reference.rough_s)
    return reference


@dataclass(frozen=True)
class _Built:
    """A form with its schedules applied (`mod`), compiled."""

    form: Form
    tasks: list[TaskResult]
    mod: Any
    executable: Any
    run: Model


def _fastest_right(
    forms: Forms, loop: TuningLoop, session: Session, accuracy: Accuracy, verify: bool
) -> tuple[_Built, float]:
    """Of the forms still in the race and accurate enough, compiled, the fastest, and its latency in seconds."""
    contenders = _contenders(forms, loop, session)[: 1 if loop.interrupted else None]
    kernels = _kernels_of(contenders, loop)
    results = session.accept(kernels, guess=verify, look=not loop.interrupted)
    if not verify:
        session.tell_unreached(kernels)
    session.rest()
    accuracy.reference.make_room(session.untuned_timing_s)
    built = _built(contenders, results, session, accuracy)
    if not built:  # fast math was not accurate enough
        spare = forms.exact(loop.best_s)
        results = session.accept(_kernels_of([spare], loop), guess=verify, look=False)
        built = [_build(spare, results, session, accuracy)]
    return _fastest(built, accuracy.reference.inputs, session)


def _beside_baseline(tuned: _Built, latency_s: float, reference: Reference, session: Session) -> tuple[float, float]:
    """The latencies of the tuned model and of the baseline, in seconds; timed in turns where the tuned seems slower."""
    baseline_s = reference.time_s(session.untuned_timing_s)
    if latency_s <= baseline_s:
        return latency_s, baseline_s
    # Perhaps only because the machine was quieter when the baseline was timed.
    latency_s, baseline_s = session.models.time_s([tuned.run, reference.run], reference.inputs, session.timing_s)
    return latency_s, baseline_s


def _contenders(forms: Forms, loop: TuningLoop, session: Session) -> list[Form]:
    """The forms still in the race, best first; the winner of an earlier run alone, when nothing was measured since."""
    winner = session.winner(loop.trials)
    remembered = [form for form in forms.forms if form.digest == winner]
    if remembered:
        return remembered
    best = loop.best_s
    return forms.of(sorted(loop.variants, key=lambda variant: variant.latency_s(best)))


def _kernels_of(forms: Sequence[Form], loop: TuningLoop) -> list[KernelSearch]:
    needed = {workload for form in forms for workload in form.calls}
    return [kernel for kernel in loop.kernels if kernel.task.workload_hash in needed]


def _built(forms: Sequence[Form], results: Sequence[TaskResult], session: Session, accuracy: Accuracy) -> list[_Built]:
    """The forms that are accurate enough, compiled: the first, and what there is time for of the others."""
    built: list[_Built] = []
    for form in forms:
        started = time.monotonic()
        candidate = _build(form, results, session, accuracy)
        if not accuracy.permits(form, candidate.run):
            continue
        built.append(candidate)
        build_s = time.monotonic() - started
        left_s = session.budget.whole_seconds_left
        if left_s is not None and left_s < build_s + session.finish_s:
            break
    return built


def _build(form: Form, results: Sequence[TaskResult], session: Session, accuracy: Accuracy) -> _Built:
    """The form with its schedules; should it be wrong, without those that never ran, or else without all unmeasured."""
    calls = form.calls
    tasks = [replace(task, calls=calls[task.workload_hash]) for task in results if task.workload_hash in calls]
    unmeasured = {task.workload_hash for task in tasks if not task.measured}
    never_ran = {workload for workload in unmeasured if session.prices.priced_s(workload) is None}
    built = _compiled(form, tasks, session)
    for suspects in filter(None, (never_ran, unmeasured)):
        if accuracy.errors(built.run)[1] <= accuracy.tolerance:
            break
        session.progress.say(
            f"form {form.name!r} is wrong with {len(suspects)} kernels that were not measured: they stay untuned"
        )
        tasks = [task.untuned if task.workload_hash in suspects else task for task in tasks]
        built = _compiled(form, tasks, session)
    return built


def _compiled(form: Form, tasks: list[TaskResult], session: Session) -> _Built:
    mod = scheduled(form.mod, session.target, schedules_of(tasks))
    executable = build_scheduled(mod, session.target, calls_compiled=_calls_matter(tasks, session.target))
    return _Built(form, tasks, mod, executable, session.models.load(executable))


def _calls_matter(tasks: Sequence[TaskResult], target: Any) -> bool:
    """Whether many short calls, as of recurrent models, would wait for the virtual machine's interpreter."""
    calls = sum(task.calls for task in tasks)
    waiting_s = calls * INTERPRETER_S
    return (
        not is_gpu(target)
        and calls <= MOST_COMPILED
        and waiting_s > INTERPRETED_SHARE * sum(task.calls * task.latency_s for task in tasks)
    )


def _fastest(built: Sequence[_Built], inputs: Sequence[NDArray[Any]], session: Session) -> tuple[_Built, float]:
    """The fastest form and its latency in seconds, timed in turn."""
    runs = [candidate.run for candidate in built]
    latencies = session.models.time_s(runs, inputs, session.timing_s, settle=session.may_settle)
    index = min(range(len(built)), key=latencies.__getitem__)
    for candidate, latency_s in zip(built, latencies, strict=True):
        LOGGER.info("form %r takes %.4g s", candidate.form.name, latency_s)
    return built[index], latencies[index]
