"""Candidates to machine code, in memory. Runs in the workers.

A schedule may repack weights: such blocks are marked AHEAD_OF_TIME (`search/space/marks.py`) and run once in a deployed
model. TVM's own pass splits them off, the one that deployment uses, so what is timed is what will run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from .arguments import BufferSpec, Interface, specs

__all__ = ["Packing", "Program", "compile_functions", "program_key", "split_packing"]

CANDIDATE_CONFIG = {"tirx.disable_assert": True, "tirx.disable_cse_tir": True}
"""Halves the compile time of a candidate; neither pass changes what the kernel does."""


@dataclass(frozen=True)
class Packing:
    """The part of a schedule that repacks weights.

    Attributes
    ----------
    function : tvm.tirx.PrimFunc
        Reads the weights in their own layout, writes the packed ones.
    sources : tuple of int
        Which parameters of the kernel it reads, in order; the packed ones take their places.
    packed : tuple of BufferSpec
        The packed weights, in the same order.
    key : str
        Equal for equal functions on the same parameters.
    """

    function: Any
    sources: tuple[int, ...]
    packed: tuple[BufferSpec, ...]
    key: str

    @property
    def symbol(self) -> str:
        """Name of the compiled function."""
        return f"packing_{self.key}"

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(spec.nbytes for spec in self.packed)


@dataclass
class Program:
    """A compiled kernel.

    Attributes
    ----------
    module : tvm.runtime.Module
        Holds it, under `symbol`.
    symbol : str
        Its name.
    packing : Packing or None
        How its weights are repacked.
    pack : tvm.runtime.Function or None
        The compiled `packing.function`.
    pack_module : tvm.runtime.Module or None
        Holds `pack`.
    checked : bool
        Whether its outputs were compared with the reference.
    notes : mapping of str to float
        What the compiler told of it; see `Measurement`.
    """

    module: Any
    symbol: str
    packing: Packing | None = None
    pack: Any = None
    pack_module: Any = None
    checked: bool = False
    notes: Mapping[str, float] = field(default_factory=dict)


def program_key(function: Any) -> str:
    """Equal for equal scheduled functions: 16 hexadecimal digits, the same in every process."""
    return f"{tvm_ffi.structural_hash(function) & (2**64 - 1):016x}"


def split_packing(function: Any, interface: Interface) -> tuple[Any, Packing | None]:
    """Separate the repacking of weights from the kernel.

    Parameters
    ----------
    function : tvm.tirx.PrimFunc
        A scheduled kernel.
    interface : Interface
        Of the unscheduled kernel.

    Returns
    -------
    kernel : tvm.tirx.PrimFunc
        With packed weights as parameters.
    packing : Packing or None
        None when no weight is repacked.
    """
    builder = relax.BlockBuilder()
    kernel = builder.add_func(function, "kernel")
    variables = [
        relax.Var(f"p{i}", relax.TensorType(spec.shape, spec.dtype)) for i, spec in enumerate(interface.params)
    ]
    inputs = [variables[i] for i in interface.inputs]
    with builder.function("call", inputs):
        result = builder.emit(relax.call_tir(kernel, inputs, [variables[i].ty for i in interface.outputs]))
        builder.emit_func_output(result)
    mod = relax.transform.SplitLayoutRewritePreproc()(builder.get())
    names = {var.name_hint for var in mod.get_global_vars()}
    if "kernel_weight_prepack" not in names:
        return function, None
    packing = mod["kernel_weight_prepack"]
    sources = _packing_sources(mod["call"], interface)
    return mod["kernel_prepacked"], Packing(
        function=packing,
        sources=sources,
        packed=specs(packing)[len(sources) :],
        key="_".join([program_key(packing), *map(str, sources)]),
    )


def _packing_sources(call: Any, interface: Interface) -> tuple[int, ...]:
    for block in call.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.Call) and value.args[0].name_hint == "kernel_weight_prepack":
                params = list(call.params)
                return tuple(
                    interface.inputs[next(i for i, param in enumerate(params) if param.same_as(source))]
                    for source in value.args[1].fields
                )
    raise AssertionError("TVM split the packing off but does not call it")


def compile_functions(functions: Mapping[str, Any], target: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Compile PrimFuncs together in one module, and alone in smaller and smaller ones where that fails.

    Parameters
    ----------
    functions : mapping
        PrimFuncs by symbol.
    target : tvm.target.Target
        What to compile for.
    config : mapping
        Of the pass context.

    Returns
    -------
    dict
        By symbol: the `tvm.runtime.Module` that holds the function, or the exception of the function that cannot be
        compiled. One bad function does not spoil the others.
    """
    if not functions:
        return {}
    mod = tvm.IRModule({name: function.with_attr("global_symbol", name) for name, function in functions.items()})
    try:
        with tvm.transform.PassContext(opt_level=3, config=dict(config)):
            module = tvm.compile(mod, target).jit()
    except Exception as error:  # noqa: BLE001 - TVM raises many kinds; each becomes a failed candidate
        if len(functions) == 1:
            return {name: error for name in functions}
        names = list(functions)
        half = len(names) // 2
        result: dict[str, Any] = {}
        for part in (names[:half], names[half:]):
            result |= compile_functions({name: functions[name] for name in part}, target, config)
        return result
    return {name: module for name in functions}
