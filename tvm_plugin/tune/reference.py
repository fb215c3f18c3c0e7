"""The untuned model: the baseline that must be beaten, and the outputs that must be met."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from numpy.typing import NDArray

from ..frontends import ImportedModel
from ..runtime import ModelRunner, time_side_by_side
from ..transform.apply_tuned import untuned_executable
from .workdir import WorkDirectory

__all__ = ["Reference"]

Outputs = list[NDArray[Any]]


@dataclass
class Reference:
    """The model as stock TVM compiles it. Slow to run: what it gave is kept in the work directory.

    Attributes
    ----------
    imported : ImportedModel
    target : tvm.target.Target
    work : WorkDirectory
    seed : int
        Of the inputs.
    context_key : str
        Where the latency is valid.
    threads : int
    """

    imported: ImportedModel
    target: Any
    work: WorkDirectory
    seed: int
    context_key: str
    threads: int

    @cached_property
    def inputs(self) -> list[NDArray[Any]]:
        """Random inputs, seeded."""
        return list(self.imported.random_inputs(self.seed))

    @cached_property
    def executable(self) -> Any:
        """Stock TVM's executable."""
        return untuned_executable(self.imported.mod, self.target)

    @cached_property
    def run(self) -> ModelRunner:
        """Runs it on numpy arrays."""
        return ModelRunner(self.executable, threads=self.threads)

    def latency_s(self) -> float:
        """Seconds of one untuned run: the minimum of two or more."""
        return self._measured[0]

    def outputs(self) -> Outputs:
        """What the outputs must be: the source framework's where the model came from one, else the untuned model's."""
        return self._measured[1]

    @cached_property
    def _measured(self) -> tuple[float, Outputs]:
        key = f"reference:{self.context_key}:{_fingerprint(self.imported.mod)}:{self.seed}"
        known, outputs = self.work.database.get_json(key), self.work.load_reference(key)
        if known is not None and outputs is not None:
            return float(known["latency_s"]), outputs
        outputs = self.run(*self.inputs)
        (latency_s,) = time_side_by_side([self.run], self.inputs, budget_s=0.5, at_least=1)
        if self.imported.reference is not None:
            outputs = self.imported.reference(*self.inputs)
        self.work.save_reference(key, outputs)
        self.work.database.put_json(key, {"latency_s": latency_s})
        return latency_s, outputs


def _fingerprint(mod: Any) -> str:
    """Of a module and the contents of its weights."""
    digest = hashlib.blake2b(str(tvm_ffi.structural_hash(mod, skip_tensor_content=True)).encode(), digest_size=16)
    constants: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, tvm.ir.GenericConst):
            constants.append(node)

    for function in mod.functions.values():
        if isinstance(function, tvm.relax.Function):
            tvm.relax.analysis.post_order_visit(function, visit)
    for constant in constants:
        digest.update(np.ascontiguousarray(np.from_dlpack(constant.value)).data.cast("B"))
    return digest.hexdigest()
