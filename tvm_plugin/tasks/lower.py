"""From Relax operators to fused, unscheduled kernels."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import tvm_ffi
from tvm import ir, relax, s_tir, tirx, transform
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.relax.pipeline import library_dispatch_passes

from ..gpu_machine import is_gpu
from ..machine import thread_count
from ..relax_ir.constants import is_static_tensor
from ..relax_ir.functions import map_functions, operator, rewrite_calls
from ..relax_ir.kernels import KERNEL_CALLS, is_scheduled
from ..relax_ir.tensors import extents
from ..repairs.batch_statistics import with_batch_statistics
from ..repairs.bounded_indices import with_bounded_indices
from ..repairs.plain_sizes import with_plain_sizes
from ..repairs.wide_norms import with_norms_of_bfloat16, with_norms_of_doubles
from ..search.space.byte_tables import BYTE_TABLES, has_table, looks_up_elements
from ..transform.byte_tables import table_instructions
from ..transform.joined_norms import JoinNorms
from ..transform.simplify_shapes import SimplifyShapes
from .attention import legalize_attention
from .block_names import rename_blocks
from .channel_norms import legalize_channel_norms
from .choices import write_choices
from .concat import CONCAT_AXIS, write_concats_in_place
from .depthwise_bytes import pad_in_depthwise_convolutions
from .fusion import ELEMENTWISE, OPAQUE
from .half_precision import with_float32_arithmetic, with_functions_that_gpus_have
from .legalize import legalize_ops
from .neighbours import scatter_what_is_gathered
from .norms import legalize_norms
from .pad import write_pads_by_limits
from .permuted_products import legalize_permuted_products
from .repeated_channels import repeat_channels
from .routines import write_routines
from .slices import join_slices
from .spread import keep_spreads_apart
from .stacks import write_stacks_as_copies
from .turned import keep_turns_apart

__all__ = ["lower_to_kernels"]

_NAMED_AFTER_INPUT = re.compile(r".+_(sum|mean|red_temp|red)(?:_?\d+)?")
"""Blocks that TVM's operator library names after the variable that they read: lv24_var_sum, x_red_1."""


def lower_to_kernels(mod: ir.IRModule, target: Any, concat_in_place: bool = True) -> ir.IRModule:
    """Legalise and fuse a Relax module, as TVM's default pipeline does, without scheduling anything.

    Parameters
    ----------
    mod : tvm.ir.IRModule
        Simplified (FoldBatchNorm, FoldWeights): constants are not folded here.
    target : tvm.target.Target
    concat_in_place : bool
        Let kernels write their results into their slices of a concatenation (concat.py): 4 to 5 % of SqueezeNet.

    Returns
    -------
    tvm.ir.IRModule
        The Relax functions, whose work is now `call_tir` of kernels, and the kernels. Constants stay arguments; the
        attribute `layout_free_buffers` of a kernel lists the positions of arguments that are constants at all of its
        calls and that a reduction reads. Equal kernels are one function, named after what it does. Reshapes are views.
    """
    on_cpu = not is_gpu(target)  # sketches for GPUs read operands as they come
    with target:
        if on_cpu:
            mod = write_choices(mod, thread_count(target))
        # The routine of scatter_nd for CPUs leaves out what lies outside.
        mod = with_bounded_indices(with_batch_statistics(mod), leave=["relax.scatter_nd"] if on_cpu else ())
        mod = transform.Sequential(
            [
                SimplifyShapes(),
                relax.transform.DecomposeOpsForInference(),
                relax.transform.CanonicalizeBindings(),
                JoinNorms(),  # over channels, which may be last by now
            ]
        )(mod)
        if on_cpu:
            mod = pad_in_depthwise_convolutions(repeat_channels(mod))
            mod = legalize_channel_norms(with_float32_arithmetic(mod, target), thread_count(target))
            mod = legalize_norms(mod)
            mod = scatter_what_is_gathered(mod, thread_count(target))
            mod = write_routines(write_stacks_as_copies(legalize_attention(mod, target)), thread_count(target))
        else:
            mod = legalize_norms(with_norms_of_bfloat16(with_functions_that_gpus_have(mod)))
        mod = with_norms_of_doubles(with_norms_of_bfloat16(mod))  # those that are left
        mod = legalize_permuted_products(mod, activations=on_cpu)
        mod = with_plain_sizes(write_pads_by_limits(mod))
        mod = transform.Sequential(
            [
                *library_dispatch_passes(target),
                legalize_ops(),
                relax.transform.AnnotateTIROpPattern(),
            ]
        )(mod)
        mod = _with_attribute(mod, looks_up_elements, "op_pattern", ELEMENTWISE)  # TVM sees it in no loads
        mod = relax.transform.RewriteDataflowReshape()(_fused(keep_turns_apart(keep_spreads_apart(mod))))
        mod = _reshape_outputs(mod)
        if on_cpu:
            mod = _with_attribute(join_slices(mod), has_table, BYTE_TABLES, table_instructions(target))
        mod = _attach_layout_free(mod)
        if concat_in_place:
            mod = write_concats_in_place(mod)
    return _tidy(mod)


def _fused(mod: ir.IRModule) -> ir.IRModule:
    """Kernels joined as TVM does, but for scheduled ones; where that fails, without those that take sizes as numbers.

    FuseTIR writes a size twice into a kernel that needs it as a number and for its own shapes.
    """
    fuse = transform.Sequential([relax.transform.FuseOps(), relax.transform.FuseTIR()])
    mod = _with_attribute(mod, is_scheduled, "op_pattern", OPAQUE)
    try:
        return fuse(mod)
    except RuntimeError:
        return fuse(_with_attribute(mod, _takes_numbers, "op_pattern", OPAQUE))


def _takes_numbers(kernel: tirx.PrimFunc) -> bool:
    return not all(hasattr(one.ty, "shape") for one in kernel.params)


def _with_attribute(
    mod: ir.IRModule, which: Callable[[tirx.PrimFunc], bool], name: str, value: int | str
) -> ir.IRModule:
    """A module in which some kernels have an attribute."""
    result = mod.clone()
    for variable, kernel in mod.functions_items():
        if isinstance(kernel, tirx.PrimFunc) and which(kernel):
            result.update_func(variable, kernel.with_attr(name, value))
    return result


def _reshape_outputs(mod: ir.IRModule) -> ir.IRModule:
    """What RewriteDataflowReshape does, for the results of dataflow blocks, which it leaves alone."""
    builder = relax.BlockBuilder()

    def view(binding: relax.VarBinding) -> relax.VarBinding:
        value = binding.value
        if isinstance(binding.var, relax.DataflowVar) or operator(value) != "relax.call_tir":
            return binding
        arguments: list[Any] = list(value.args[1].fields)
        # A view of a parameter, or of another result, would make the caller's tensors share memory.
        if len(arguments) != 1 or not isinstance(arguments[0], relax.DataflowVar):
            return binding
        source = arguments[0]
        if not is_static_tensor(value.ty) or not is_static_tensor(source.ty):
            return binding
        if math.prod(extents(value.ty)) != math.prod(extents(source.ty)):
            return binding
        if not relax.analysis.has_reshape_pattern(mod[value.args[0]]):
            return binding
        return relax.VarBinding(binding.var, builder.normalize(relax.op.reshape(source, value.ty.shape)))

    return map_functions(mod, lambda function: rewrite_calls(function, view))


def _attach_layout_free(mod: ir.IRModule) -> ir.IRModule:
    """Tell each kernel which of its arguments are constants, where it is called outside of branches.

    TVM's pass takes the parameters after `num_input` for constants, too, and loses symbolic sizes of kernels that it
    has as routines (cumsum).
    """
    builder = relax.BlockBuilder(mod)

    def attach(binding: relax.VarBinding) -> relax.VarBinding:
        call = binding.value
        if operator(call) not in KERNEL_CALLS:
            return binding
        name, arguments = call.args[0].name_hint, call.args[1]
        free = [place for place, argument in enumerate(arguments.fields) if isinstance(argument, ir.GenericConst)]
        if not free:
            return binding
        kernel = builder.add_func(mod[name].with_attr("layout_free_buffers", free), name)
        value = relax.Call(call.op, [kernel, *call.args[1:]], call.attrs, call.ty_args)
        return relax.VarBinding(binding.var, builder.normalize(value))

    result = map_functions(mod, lambda function: rewrite_calls(function, attach), builder)
    return mod if result is mod else relax.transform.DeadCodeElimination()(result)


def _tidy(mod: ir.IRModule) -> ir.IRModule:
    """Merge equal kernels, drop those that nothing calls any more (concat.py), and name each after what it does:
    fused_conv2d12_add5_relu51 -> conv2d_add_relu3. Those that others may call keep their names, and take them first; no
    kernel gets the name of a function."""
    builder, called = relax.BlockBuilder(), _called(mod)
    found = [(variable.name_hint, f) for variable, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)]
    # The builder appends numbers, so that it is names without them that must differ.
    others = {_plain_name(v.name_hint) for v, f in mod.functions_items() if not isinstance(f, tirx.PrimFunc)}

    def new_name(name: str) -> str:
        plain = _plain_name(name)
        return f"{plain}_kernel" if plain in others else plain

    kernels = {
        name: builder.add_func(_without_leftovers(function), name if _is_public(function) else new_name(name))
        for name, function in sorted(found, key=lambda item: not _is_public(item[1]))
        if name in called or _is_public(function)
    }
    rename = _Rename(kernels)
    functions = dict(builder.get().functions_items())
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            functions[variable] = rename.visit_expr(function)
        elif not isinstance(function, tirx.PrimFunc):
            functions[variable] = function
    return ir.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _called(mod: ir.IRModule) -> set[str]:
    """Names of what the functions of a module call."""
    names: set[str] = set()
    for function in mod.functions.values():
        if isinstance(function, relax.Function | tirx.PrimFunc):
            tvm_ffi.structural_walk(function.body, (ir.GlobalVar, lambda variable: names.add(variable.name_hint)))
    return names


def _is_public(function: tirx.PrimFunc) -> bool:
    """Whether others may call it by its name."""
    return "global_symbol" in (function.attrs or {})


def _without_leftovers(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """Without the attributes and names that would tell apart kernels that are equal.

    A constant that no reduction reads (a bias, a state that happens to be constant) is read once: to choose its layout
    gains nothing.
    """
    for name in ("op_pattern", CONCAT_AXIS):
        if name in kernel.attrs:
            kernel = kernel.without_attr(name)
    if "layout_free_buffers" in kernel.attrs:
        reduced = _reduced_arguments(kernel)
        free = [int(position) for position in kernel.attrs["layout_free_buffers"] if int(position) in reduced]
        kernel = kernel.with_attr("layout_free_buffers", free) if free else kernel.without_attr("layout_free_buffers")
    return _with_plain_blocks(kernel)


def _with_plain_blocks(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """Block names without those of the model's variables, so that what is known of a kernel holds in every model."""
    names: dict[str, str] = {}
    counts: dict[str, int] = {}

    def collect(block: s_tir.SBlock) -> None:
        found = _NAMED_AFTER_INPUT.fullmatch(str(block.name_hint))
        if found is not None:
            count = counts[found[1]] = counts.get(found[1], -1) + 1
            names[str(block.name_hint)] = f"T_{found[1]}_{count}" if count else f"T_{found[1]}"

    tvm_ffi.structural_walk(kernel.body, (s_tir.SBlock, collect))
    if not names:
        return kernel
    return kernel.with_body(rename_blocks(kernel.body, lambda name: names.get(name, name)))


def _reduced_arguments(kernel: tirx.PrimFunc) -> set[int]:
    """Positions of the arguments that blocks with a reduction axis read."""
    reads: list[Any] = []

    def collect(block: s_tir.SBlock) -> None:
        if any(int(axis.iter_type) == tirx.IterVar.CommReduce for axis in block.iter_vars):
            reads.extend(region.source for region in block.reads)

    tvm_ffi.structural_walk(kernel.body, (s_tir.SBlock, collect))
    return {i for i, parameter in enumerate(kernel.params) if any(parameter.same_as(read) for read in reads)}


def _plain_name(name: str) -> str:
    words = name.removeprefix("fused_").split("_")
    # A number at a word's end tells copies apart; the 2 of conv2d stays.
    return "_".join(re.sub(r"(?<=[a-z])\d+$", "", word) for word in words if word != "tir")


@mutator
class _Rename(PyExprMutator):
    def __init__(self, variables: Mapping[str, ir.GlobalVar]) -> None:
        super().__init__()
        self._variables = variables

    def visit_global_var_(self, variable: ir.GlobalVar) -> Any:
        return self._variables.get(variable.name_hint, variable)
