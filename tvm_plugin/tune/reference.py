"""The untuned model: the baseline that must be beaten, and the outputs that must be met.

Stock TVM computes 0.5 to 2 GFLOP a second: VGG-19 takes 23 s to run once. Where that is too much of the tuning, plain
schedules give the same outputs (schedules/plain.py), and are the baseline, a harder one.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from numpy.typing import NDArray

from .. import __version__
from ..compile import side_by_side
from ..compile.executable import build_plain
from ..compile.untuned import untuned_module
from ..dtypes import epsilon
from ..frontends import ImportedModel
from ..frontends.chosen import computes_sizes
from ..frontends.verify import compare, sensitivity, undecided
from ..relax_ir.constants import array_of
from ..relax_ir.functions import constant_bytes, constants, operator, top_level_bindings
from ..runtime import Model, Models
from ..transform.byte_tables import TabulateBytes
from ..transform.fake_quantization import FakeQuantizationToInteger, is_quantized
from ..transform.fold_weights import FoldWeights
from .chosen_inputs import NOTHING_CHOSEN, inputs_that_choose
from .workdir import WorkDirectory

__all__ = ["Reference"]

LOGGER = logging.getLogger(__name__)

Outputs = list[NDArray[Any]]

LONG_S = 1.0
"""An untuned run that takes longer is timed at once and once, others after the search."""

DISTURBED_S = 3.0
"""A first run that takes no longer may have shared the cores with starting workers for much of it: one more tells."""

TIMING_S = 2.0
"""What timing a tuned model and the untuned one takes at least."""

UNTUNED_TIMING_S = 0.5
"""What timing the untuned model takes, unless told otherwise."""

COMPILE_RATIO, PLAIN_COMPILE_RATIO = 1.25, 1.7
"""A tuned model's code is larger than the untuned one's, and than that of plain schedules, which has no checks of
arguments: compiling it takes so many times as long, roughly."""

STEPS = 8
"""Of 256: what outputs of a quantised model may be off in any case. ONNX Runtime's own outputs differ by two for
MobileNet-v2, where it computes operator by operator, by nine for BERT-base..."""

MOST_APART = 0.25
"""... but by no more than this: an error of the import would be larger."""

_ORDERING = frozenset(
    f"relax.{name}" for name in ("argmax", "argmin", "argsort", "sort", "topk", "vision.all_class_non_max_suppression")
)

MANY_BYTES = 256 << 20
"""Weights whose copy in the untuned model is given back before the tuned model gets its own."""

WEIGHTS_BYTES_PER_S = 1e8
"""How fast weights are folded, packed and copied, all in all: each step touches fresh memory."""


@dataclass
class Reference:
    """The model as stock TVM compiles it, or with plain schedules. What it gave is kept in the work directory.

    Attributes
    ----------
    imported : ImportedModel
    target : tvm.target.Target
    work : WorkDirectory
    seed : int
        Of the inputs.
    context_key : str
        Where the latency is valid.
    models : Models
        Where it runs.
    plain : bool
        With plain schedules.
    kernels : int
        How many were compiled; 0 before.
    """

    imported: ImportedModel
    target: Any
    work: WorkDirectory
    seed: int
    context_key: str
    models: Models
    plain: bool = False
    kernels: int = field(default=0, init=False)

    @cached_property
    def inputs(self) -> list[NDArray[Any]]:
        """Random inputs, seeded: where the size of outputs depends on them, such that none is empty, if possible."""
        return self._inputs[0]

    @property
    def choice(self) -> str:
        """With what a model is compared the sizes of whose outputs depend on its inputs: for people; "" for others."""
        if not computes_sizes(self.imported.mod):
            return ""
        if not self._inputs[1]:
            return NOTHING_CHOSEN
        return "compared with outputs of " + ", ".join(" x ".join(map(str, array.shape)) for array in self.outputs)

    @cached_property
    def _inputs(self) -> tuple[list[NDArray[Any]], bool]:
        if not computes_sizes(self.imported.mod):
            return list(self.imported.random_inputs(self.seed)), True
        return inputs_that_choose(self.imported, self.imported.reference or self.run, self.seed)

    @cached_property
    def executable(self) -> Any:
        """Stock TVM's executable, or the plain one."""
        if self.plain:
            try:
                return self._built(untuned_module(self._with_shared_kernels(), self.target, plain=True))
            except Exception as error:  # noqa: BLE001 - LLVM raises anything; the stock kernels are still there
                LOGGER.warning("plain schedules do not compile, the untuned model is run: %s", error)
                self.plain = False  # what is timed now is to be called untuned
        return self._built(untuned_module(self.imported.mod, self.target))

    def _with_shared_kernels(self) -> tvm.IRModule:
        """A quantised model whose layers share kernels: as it is imported, TVM writes each one's scales into its own.

        BERT-base takes 9 instead of 22 s to compile. Where others compute the outputs that must be met, functions of
        bytes are tables here, too: EfficientNet-B0 takes half as long again.
        """
        if not is_quantized(self.imported.mod):
            return self.imported.mod
        passes = [FoldWeights(), FakeQuantizationToInteger(products=False)]
        tables = [] if self.imported.reference is None else [TabulateBytes(self.target)]
        return tvm.transform.Sequential([*passes, *tables])(self.imported.mod)

    def _built(self, mod: tvm.IRModule) -> Any:
        self.kernels = sum(isinstance(function, tvm.tirx.PrimFunc) for function in mod.functions.values())
        return build_plain(mod, self.target) if self.plain else side_by_side.build(mod, self.target, {})

    @cached_property
    def run(self) -> Model:
        """Runs it on numpy arrays."""
        return self.models.load(self.executable)

    @cached_property
    def first_run(self) -> tuple[Outputs, float]:
        """Outputs of the first run, and its seconds, which are all that is measured where they are many."""
        return self.models.run_once(self.run, self.inputs)

    @cached_property
    def rough_s(self) -> float:
        """Seconds of an untuned run, for planning only: whatever starts or runs at the same time makes it longer."""
        known_s = self._known_s
        if known_s is not None:
            return known_s
        _, first_s = self.first_run
        return first_s if first_s > LONG_S else min(first_s, self._run_once_more())

    def time_s(self, budget_s: float = UNTUNED_TIMING_S) -> float:
        """Seconds of an untuned run, to be called while nothing else runs: the minimum of two or more.

        Where one takes long, it is the one that was run already. What was found is kept in the work directory.
        """
        known_s = self._known_s
        if known_s is not None:
            return known_s
        _, latency_s = self.first_run
        if latency_s <= LONG_S:
            (latency_s,) = self.models.time_s([self.run], self.inputs, budget_s, at_least=1)
        elif latency_s <= DISTURBED_S:
            latency_s = min(latency_s, self._run_once_more())
        self.work.database.put_json(self.key, {"latency_s": latency_s})
        return latency_s

    def make_room(self, budget_s: float = UNTUNED_TIMING_S) -> None:
        """Where its weights are many: time the untuned model now, and forget it. Whoever runs it compiles it again."""
        if constant_bytes(self.imported.mod) >= MANY_BYTES:
            self.time_s(budget_s)
            for name in ("run", "executable"):
                self.__dict__.pop(name, None)

    @property
    def _known_s(self) -> float | None:
        return self.work.database.get_number(self.key, "latency_s")

    def _run_once_more(self) -> float:
        _, seconds = self.models.run_once(self.run, self.inputs)
        return seconds

    @cached_property
    def outputs(self) -> Outputs:
        """What the outputs must be: the source framework's where the model came from one, else the untuned model's."""
        outputs = self.work.load_reference(self.key)
        if outputs is None:
            if self.imported.reference is not None:
                outputs = self.imported.reference(*self.inputs)
            else:
                outputs, _ = self.first_run
            self.work.save_reference(self.key, outputs)
        return outputs

    @cached_property
    def tells(self) -> bool:
        """False where all numbers of the outputs are NaN or infinite: then anything equals them that is so, too."""
        told = [output for output in self.outputs if output.size]
        return not told or any(bool(np.isfinite(output.astype(np.float64)).any()) for output in told)

    @cached_property
    def orders(self) -> bool:
        """Whether the model puts values in order, or gives places of some."""
        return any(operator(binding.value) in _ORDERING for binding in top_level_bindings(self.imported.mod["main"]))

    def undecided(self, tolerance: float) -> list[NDArray[Any]]:
        """Places of the outputs that ties decide: see `frontends.verify.undecided`."""
        evaluate = self.imported.reference or self.run
        return undecided(evaluate, self.inputs, self.outputs, tolerance, self.seed)

    def sensitivity(self, tolerance: float) -> float:
        """How far roundings of the inputs move the outputs: see `frontends.verify.sensitivity`."""
        ties = self.undecided(tolerance) if self.orders else ()
        return sensitivity(self.imported.reference or self.run, self.inputs, self.outputs, ties, self.seed)

    @cached_property
    def epsilon(self) -> float:
        """Of the least precise floating-point type that the model computes anything in."""
        types = {str(getattr(binding.var.ty, "dtype", "")) for binding in top_level_bindings(self.imported.mod["main"])}
        return max(map(epsilon, types), default=0.0)

    @cached_property
    def roundings(self) -> float:
        """How far the outputs of a quantised model may be off, relative to the largest: 0 for other models.

        A value between two steps of a scale is rounded to one or the other, by whatever order its terms are added in,
        and the next layers make more of it. Where the source framework computes the model in two ways, twice what
        those are apart is permitted.
        """
        if not is_quantized(self.imported.mod):
            return 0.0
        apart = self.work.database.get_number(f"roundings:{self.key}", "apart")
        if apart is None:
            apart = 0.0
            if self.imported.unfused is not None:
                _, apart = compare(self.imported.unfused(*self.inputs), self.outputs)
            apart = min(apart, MOST_APART)
            self.work.database.put_json(f"roundings:{self.key}", {"apart": apart})
        return min(MOST_APART, max(STEPS / 2**8, 2.0 * apart))

    def prepare(self, kernels: int) -> float | None:
        """Compile and run the untuned model now, as a measure of the machine.

        Returns about how many seconds the same will take for a tuned model of so many kernels, None where an earlier
        run knows the latency and nothing was compiled. A quantised model as it is imported has more kernels than tuned:
        TVM writes the scales of each layer into its own.
        """
        if self._known_s is not None:
            return None
        started = time.monotonic()
        _, run_s = self.first_run
        compile_s = (time.monotonic() - started - run_s) * min(1.0, kernels / max(1, self.kernels))
        weights_s = constant_bytes(self.imported.mod) / WEIGHTS_BYTES_PER_S
        ratio = PLAIN_COMPILE_RATIO if self.plain else COMPILE_RATIO
        finish_s = ratio * compile_s + weights_s + TIMING_S
        if run_s <= LONG_S:
            return finish_s + 4 * run_s  # the untuned model twice again, the tuned one to be checked and warm
        # Kept now: what takes long is not run again, by a run that resumes this one either.
        _ = self.time_s(), self.imported.reference or self.outputs
        return finish_s

    @cached_property
    def key(self) -> str:
        """Names the model with the contents of its weights, the inputs, the context and the version of eqtune.

        What another version made of the untuned model may be what was wrong with it.
        """
        plain = ":plain" if self.plain else ""
        model, inputs = _fingerprint(self.imported.mod), _digest(self.inputs)
        return f"reference:{self.context_key}:{__version__}:{model}:{inputs}{plain}"


def _fingerprint(mod: Any) -> str:
    """Of a module and the contents of its weights."""
    structure = str(tvm_ffi.structural_hash(mod, skip_tensor_content=True))
    return _digest((array_of(constant) for constant in constants(mod)), structure)


def _digest(arrays: Iterable[NDArray[Any]], text: str = "") -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
