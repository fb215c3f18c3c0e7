"""Passes under their Relay names, for `tvm.transform.Sequential` over a module that `from_text` made.

Each is a pass of Relax, or one of ours, that does for Relax what its namesake did for Relay, and takes the arguments of
its namesake so that pipelines run as they were written; where an argument only steered Relay's implementation, it says
so. A pass without a counterpart raises InputError and names the nearest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tvm import ir, relax, transform

from ..compile.lowering import LowerToKernels
from ..errors import InputError
from ..graph_pass import EqualitySaturation
from ..transform.batch_norm import FoldBatchNorm
from ..transform.fold_weights import FoldWeights
from ..transform.simplify_shapes import SimplifyShapes
from .activations import RecognizeActivations
from .mixed_precision import ToFloat16
from .unflatten import UnflattenProducts

__all__ = [
    "AutoSchedule",
    "BackwardFoldScaleAxis",
    "BatchingOps",
    "CanonicalizeCast",
    "CanonicalizeOps",
    "CombineParallelBatchMatmul",
    "CombineParallelConv2D",
    "CombineParallelDense",
    "ConvertLayout",
    "DeadCodeElimination",
    "DynamicToStatic",
    "EliminateCommonSubexpr",
    "EqualitySaturation",
    "FastMath",
    "FoldConstant",
    "FoldExplicitPadding",
    "FoldScaleAxis",
    "ForwardFoldScaleAxis",
    "FuseOps",
    "InferType",
    "Inline",
    "LambdaLift",
    "Legalize",
    "RemoveUnusedFunctions",
    "SimplifyExpr",
    "SimplifyInference",
    "ToANormalForm",
    "ToBasicBlockNormalForm",
    "ToMixedPrecision",
]

_KERNEL_LAYOUTS = {
    "NCW": "OIW",
    "NWC": "WIO",
    "NCHW": "OIHW",
    "NHWC": "HWIO",
    "NCDHW": "OIDHW",
    "NDHWC": "DHWIO",
}


def _sequence(name: str, *passes: Any) -> transform.Pass:
    return transform.Sequential(list(passes), name=name)


# Types and forms. Relax is always in A-normal form, and typed.


def InferType() -> transform.Pass:
    """Types are inferred when a module is converted; this normalises what was added since."""
    return _sequence("InferType", relax.transform.Normalize())


def ToANormalForm() -> transform.Pass:
    """Relax's own form."""
    return _sequence("ToANormalForm", relax.transform.Normalize())


def ToBasicBlockNormalForm() -> transform.Pass:
    """Relax's own form."""
    return _sequence("ToBasicBlockNormalForm", relax.transform.Normalize())


def CanonicalizeOps() -> transform.Pass:
    """Products over a flattened tensor become products over its axes, GELU and SiLU one operator each.

    What Relay's pass did, bias_add into add, is done at conversion.
    """
    return _sequence(
        "CanonicalizeOps", UnflattenProducts(), RecognizeActivations(), relax.transform.CanonicalizeBindings()
    )


def CanonicalizeCast() -> transform.Pass:
    """Common casts are computed once."""
    return _sequence("CanonicalizeCast", relax.transform.EliminateCommonSubexpr())


def DynamicToStatic() -> transform.Pass:
    """Shapes are static after conversion; what was computed from them is folded."""
    return _sequence("DynamicToStatic", FoldWeights(), relax.transform.Normalize())


def Inline() -> transform.Pass:
    """Calls of functions are inlined at conversion; private functions that were added since are inlined here."""
    return _sequence("Inline", relax.transform.InlinePrivateFunctions())


def LambdaLift() -> transform.Pass:
    """Closures become functions of the module."""
    return _sequence("LambdaLift", relax.transform.LambdaLift())


# Simplification


def SimplifyInference() -> transform.Pass:
    """Batch norms with constant statistics become a scale and a shift, inside the weights where there are some."""
    return _sequence("SimplifyInference", FoldBatchNorm(), relax.transform.DeadCodeElimination())


def FoldConstant(fold_qnn: bool = False) -> transform.Pass:
    """Everything that depends on weights alone is computed, with numpy.

    Parameters
    ----------
    fold_qnn
        Quantized operators are folded either way: they are plain ones since the conversion.
    """
    return _sequence("FoldConstant", FoldWeights(transposes=True), relax.transform.DeadCodeElimination())


def FoldScaleAxis() -> transform.Pass:
    """Scales of channels move into the weights of convolutions and products: batch norms at once, others by search."""
    return _fold_scales("FoldScaleAxis", *_SCALES_AFTER, *_SCALES_BEFORE)


def BackwardFoldScaleAxis() -> transform.Pass:
    """Scales after convolutions and products move into their weights."""
    return _fold_scales("BackwardFoldScaleAxis", *_SCALES_AFTER)


def ForwardFoldScaleAxis() -> transform.Pass:
    """Scales before convolutions and products move into their weights."""
    return _fold_scales("ForwardFoldScaleAxis", *_SCALES_BEFORE)


_SCALES_AFTER = ("scale-of-convolution", "scale-of-matmul")
_SCALES_BEFORE = ("convolution-of-scaled", "matmul-of-scaled")


def _fold_scales(name: str, *rules: str) -> transform.Pass:
    return _sequence(name, FoldBatchNorm(), FoldWeights(), _search(*rules, "multiply-weights"), FoldWeights())


def FoldExplicitPadding() -> transform.Pass:
    """A pad before a convolution or pooling becomes that operator's padding."""
    rules = ("convolution-of-padded", "average-of-padded", "max-pool-of-padded", "pad-pad", "pad-identity")
    return _sequence("FoldExplicitPadding", _search(*rules))


def SimplifyExpr() -> transform.Pass:
    """Reshapes, transposes and slices that cancel or merge disappear."""
    return _sequence("SimplifyExpr", SimplifyShapes(), relax.transform.CanonicalizeBindings())


def EliminateCommonSubexpr(fskip: None = None) -> transform.Pass:
    """Equal expressions are computed once.

    Parameters
    ----------
    fskip
        A function of Relay expressions cannot be asked about Relax: only None is taken.
    """
    if fskip is not None:
        raise InputError("EliminateCommonSubexpr with fskip; it is a function of Relay expressions, give None")
    return _sequence("EliminateCommonSubexpr", relax.transform.EliminateCommonSubexpr())


def DeadCodeElimination(inline_once: bool = False, ignore_impurity: bool = False) -> transform.Pass:
    """What no result needs is removed.

    Parameters
    ----------
    inline_once, ignore_impurity
        Without effect: functions are inlined at conversion, and nothing that is converted is impure.
    """
    return _sequence("DeadCodeElimination", relax.transform.DeadCodeElimination())


def RemoveUnusedFunctions(entry_functions: Sequence[str] | None = None) -> transform.Pass:
    """Functions that no entry function ("main") calls are removed."""
    entries = list(entry_functions or ["main"])
    return _sequence("RemoveUnusedFunctions", _OnlyPublic(entries), relax.transform.DeadCodeElimination(entries))


@transform.module_pass(opt_level=0, name="OnlyPublic")
class _OnlyPublic:
    """Make all functions private but for some: Relax keeps every function that has a symbol."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        functions = {
            var: function if var.name_hint in self._names else function.without_attr("global_symbol")
            for var, function in mod.functions_items()
        }
        return ir.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def FastMath() -> transform.Pass:
    """exp, tanh and erf are approximated."""
    return _sequence("FastMath", relax.transform.FastMathTransform())


# Merging. The graph search merges where it pays, by the rules of these names.


def CombineParallelConv2D(min_num_branches: int = 3) -> transform.Pass:
    """Convolutions of one input become one where that pays, however many (`min_num_branches` changes nothing)."""
    return _sequence("CombineParallelConv2D", _search("merge-conv2d-shared-input", "concat-of-slices-2"))


def CombineParallelDense(min_num_branches: int = 3, to_batch: bool = True) -> transform.Pass:
    """Products of one input with several weights become one where that pays.

    `min_num_branches` and `to_batch` change nothing: any number is tried, and a batch is never made, which is slower.
    """
    rules = ("merge-matmul-shared-input", "concat-of-matmuls-shared-input")
    return _sequence("CombineParallelDense", FoldWeights(), _search(*rules))


def CombineParallelBatchMatmul(min_num_branches: int = 3) -> transform.Pass:
    """As CombineParallelDense, `min_num_branches` included; batches are axes like others."""
    rules = ("merge-matmul-shared-input", "concat-of-matmuls-shared-input")
    return _sequence("CombineParallelBatchMatmul", FoldWeights(), _search(*rules))


def BatchingOps() -> transform.Pass:
    """All three of the above."""
    return _sequence("BatchingOps", CombineParallelConv2D(), CombineParallelDense(), CombineParallelBatchMatmul())


def _search(*rules: str) -> transform.Pass:
    from ..graph_search import GraphConfig

    # A pass that is asked for by its name does what it can, however little that gains.
    return EqualitySaturation(GraphConfig(rules=rules, verify=False, min_gain=0.0))


# Layouts, precision, lowering


def ConvertLayout(desired_layouts: Mapping[str, Sequence[str]]) -> transform.Pass:
    """Convert convolutions to other layouts: `{"nn.conv2d": ["NHWC", "default"]}`.

    Parameters
    ----------
    desired_layouts
        By operator: the layouts of data and weights; "default" is the weights' usual layout for that of the data.
    """
    wanted = {}
    for operator, layouts in desired_layouts.items():
        data, kernel = [*layouts, "default"][:2]
        if data not in _KERNEL_LAYOUTS:
            raise InputError(f"ConvertLayout to {data!r}; choose from {', '.join(_KERNEL_LAYOUTS)}")
        wanted[f"relax.{operator}"] = [data, _KERNEL_LAYOUTS[data] if kernel == "default" else kernel]
    return _sequence("ConvertLayout", relax.transform.ConvertLayout(wanted), FoldWeights())


def ToMixedPrecision(
    mixed_precision_type: str = "float16", missing_op_mode: int = 1, keep_orig_output_dtype: bool = False
) -> transform.Pass:
    """Compute convolutions, products and what lies between them in float16.

    Functions with branches stay as they are: Relax converts straight programs only.

    Parameters
    ----------
    mixed_precision_type
        Only "float16".
    missing_op_mode
        Without effect: what Relax does not know how to convert stays in float32.
    keep_orig_output_dtype
        Cast results back to float32. Else they have the type they were computed in, as Relay had it. There this was the
        option "relay.ToMixedPrecision.keep_orig_output_dtype" of PassContext, which TVM no longer knows.
    """
    if mixed_precision_type != "float16":
        raise InputError(f"ToMixedPrecision to {mixed_precision_type!r}; Relax has float16 only")
    convert = relax.transform.ToMixedPrecision(out_dtype="float16") if keep_orig_output_dtype else ToFloat16()
    return _sequence("ToMixedPrecision", convert)


def Legalize() -> transform.Pass:
    """Operators become calls of TensorIR functions."""
    return _sequence("Legalize", relax.transform.LegalizeOps())


def FuseOps(fuse_opt_level: int = -1, target: Any = None) -> transform.Pass:
    """Operators become fused kernels, unscheduled; graph passes must come before.

    Parameters
    ----------
    fuse_opt_level
        0: every operator is a kernel of its own. Any other: fuse.
    target
        A tvm.target.Target; the current one unless given.
    """
    return _sequence("FuseOps", relax.transform.LegalizeOps() if fuse_opt_level == 0 else LowerToKernels(target))


@transform.module_pass(opt_level=0, name="AutoSchedule")
class AutoSchedule:
    """Fuse, search the schedule of every kernel by measuring, and apply the best: `eqtune.tune_kernels` as a pass.

    Nothing but `tvm.compile` may follow. `eqtune.tune_model` does this and more: it compares layouts and graphs, and
    checks and times the result.

    Parameters
    ----------
    target : tvm.target.Target, optional
        The current target, or else this machine's CPU.
    trials : int, optional
        Measurements in all; until no kernel improves unless given.
    time_budget_s : float, optional
        Wall clock; whichever ends first.
    work_dir : path
        Records and logs; running again resumes.
    **options
        Others of `eqtune.tune_kernels`: strategy, cost_model, allocator, measure, threads, seed, progress.
    """

    def __init__(
        self,
        target: Any = None,
        trials: int | None = None,
        time_budget_s: float | None = None,
        work_dir: str | os.PathLike[str] = "eqtune-work",
        **options: Any,
    ) -> None:
        self._target = target
        self._options = {"trials": trials, "time_budget_s": time_budget_s, "work_dir": work_dir, **options}

    def transform_module(self, mod: ir.IRModule, _context: transform.PassContext) -> ir.IRModule:
        """Lower and tune. Raises what `eqtune.tune_kernels` raises."""
        from tvm.target import Target

        from ..machine import detect_target
        from ..tune import tune_kernels

        target = self._target or Target.current(allow_none=True) or detect_target(self._options.get("threads"))
        mod = transform.Sequential([FoldBatchNorm(), FoldWeights(), LowerToKernels(target)])(mod)
        return tune_kernels(mod, target=target, **self._options).mod


_NEAREST = {
    "AlterOpLayout": "ConvertLayout; eqtune.tune_model chooses layouts by measuring",
    "AnnotateSpans": "nothing: errors of from_text have lines and columns",
    "AnnotateTarget": "tvm.relax.transform.FuseOpsByPattern(patterns, annotate_codegen=True)",
    "CapturePostDfsIndexInSpans": "nothing: errors of from_text have lines and columns",
    "ChangeBatch": "from_text(..., shapes=...) of the program with ? for the batch",
    "CollagePartition": "tvm.relax.transform.FuseOpsByPattern",
    "Conv2dToSparse": "nothing: Relax has no sparse operators",
    "Conv2dToSparse2": "nothing: Relax has no sparse operators",
    "Defunctionalization": "nothing: functions are inlined at conversion",
    "DefuseOps": "run it before FuseOps",
    "DenseToSparse": "nothing: Relax has no sparse operators",
    "DivToMul": "EqualitySaturation",
    "EtaExpand": "nothing: functions are inlined at conversion",
    "FakeQuantizationToInteger": "convert the model with its qnn operators",
    "FirstOrderGradient": "tvm.relax.transform.Gradient",
    "FlattenAtrousConv": "nothing: conv2d has a dilation",
    "FoldConstantExpr": "FoldConstant, of a module",
    "FunctionPass": "tvm.relax.transform.FunctionPass",
    "InferTypeLocal": "InferType, of a module",
    "InlineCompilerFunctionsBoundTo": "tvm.relax.transform.InlinePrivateFunctions",
    "LazyGradientInit": "tvm.relax.transform.Gradient",
    "ManifestLifetimes": "tvm.relax.transform.KillAfterLastUse",
    "MarkCompilerFunctionsAsExtern": "tvm.relax.transform.RunCodegen",
    "MergeCompilerRegions": "tvm.relax.transform.MergeCompositeFunctions",
    "MergeComposite": "tvm.relax.transform.FuseOpsByPattern",
    "OutlineCompilerFunctionsWithExistingGlobalSymbols": "tvm.relax.transform.RunCodegen",
    "PartialEvaluate": "FoldConstant",
    "PartitionGraph": "tvm.relax.transform.MergeCompositeFunctions",
    "PlanDevices": "tvm.relax.transform.RealizeVDevice",
    "RemoveStandaloneReshapes": "tvm.relax.transform.RewriteDataflowReshape",
    "SimplifyFCTranspose": "FoldConstant, which transposes weights ahead of time",
    "SplitArgs": "nothing: kernels take as many arguments as they need",
    "ToANormalFormExpr": "ToANormalForm, of a module",
    "ToCPS": "Normalize",
    "ToGraphNormalForm": "nothing: Relax is always in A-normal form",
    "function_pass": "tvm.relax.transform.function_pass",
    "recast": "ToMixedPrecision",
}


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name not in _NEAREST:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")

    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise InputError(f"relay.transform.{name} has no counterpart for Relax; the nearest is: {_NEAREST[name]}")

    return refuse
