"""Passes over Relax modules, for any `tvm.transform.Sequential`.

`simplify.simplify` runs those down to `NarrowProducts`, in an order of its own; the pipeline "eqtune" runs all.

This folder holds those that make a graph of a graph. `EqualitySaturation` (`graph_pass.py`), `LowerToKernels` and
`ApplyTuned` (`compile`) are built on them, and only named here.

| pass | what becomes of a module |
|---|---|
| `KnownSlices` | slices whose bounds the symbols tell have a known length |
| `PadPooling` | `ceil_mode` of open images -> padding |
| `FakeQuantizationToInteger` | dequantize, a float operator, quantize -> sums of integers |
| `KeepNarrowWeights` | products of few rows read weights of 8 bits or fewer as they are stored |
| `TabulateBytes` | functions of quantised bytes -> tables of 256 |
| `FoldBatchNorm`, `FoldWeights` | batch norms, and whatever depends on constants alone, are computed once |
| `JoinParallelConvolutions` | convolutions of one tensor that are added up -> one |
| `SubPixelConvolution` | transposed convolutions -> convolutions whose channels are laid out as pixels |
| `TrimKernels` | convolutions without the taps that meet nothing but padding |
| `JoinNorms` | norms that are written out -> one operator |
| `AttentionAsProducts`, `AskMaximaForEmptyRows` | attention -> products and a softmax |
| `ScaleSmallerOperand`, `JoinSharedHeads` | no copy of a decoder's cache is scaled, or repeated for heads |
| `NarrowProducts` | products of bytes that were widened to 32 bits, in 8 or 16 bits again |
| `EqualitySaturation` | the graph search: an equal graph that is cheaper |
| `ChannelsLast` | convolutions in NHWC, without transposes between them |
| `SimplifyShapes` | fewer and cheaper copies |
| `LowerToKernels` | legalised and fused: a function for each kernel |
| `ApplyTuned` | kernels with the schedules of a tuning run, or by estimate; weights packed |
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .. import _checked  # noqa: F401 - refuses versions that cannot work

if TYPE_CHECKING:
    from ..compile.apply_tuned import ApplyTuned
    from ..compile.lowering import LowerToKernels
    from ..graph_pass import EqualitySaturation
    from .attention_as_products import AttentionAsProducts
    from .batch_norm import FoldBatchNorm
    from .byte_tables import TabulateBytes
    from .empty_rows import AskMaximaForEmptyRows
    from .fake_quantization import FakeQuantizationToInteger
    from .fold_weights import FoldWeights
    from .joined_norms import JoinNorms
    from .known_slices import KnownSlices
    from .layout import ChannelsLast
    from .narrow_products import NarrowProducts
    from .narrow_weights import KeepNarrowWeights
    from .pad_pooling import PadPooling
    from .parallel_convolutions import JoinParallelConvolutions
    from .scales import ScaleSmallerOperand
    from .shared_heads import JoinSharedHeads
    from .simplify_shapes import SimplifyShapes
    from .sub_pixel import SubPixelConvolution
    from .trim_kernels import TrimKernels

__all__ = [
    "ApplyTuned",
    "AskMaximaForEmptyRows",
    "AttentionAsProducts",
    "ChannelsLast",
    "EqualitySaturation",
    "FakeQuantizationToInteger",
    "FoldBatchNorm",
    "FoldWeights",
    "JoinNorms",
    "JoinParallelConvolutions",
    "JoinSharedHeads",
    "KeepNarrowWeights",
    "KnownSlices",
    "LowerToKernels",
    "NarrowProducts",
    "PadPooling",
    "ScaleSmallerOperand",
    "SimplifyShapes",
    "SubPixelConvolution",
    "TabulateBytes",
    "TrimKernels",
]

_HOMES = {
    "ApplyTuned": "..compile.apply_tuned",
    "AskMaximaForEmptyRows": ".empty_rows",
    "AttentionAsProducts": ".attention_as_products",
    "ChannelsLast": ".layout",
    "EqualitySaturation": "..graph_pass",
    "FakeQuantizationToInteger": ".fake_quantization",
    "FoldBatchNorm": ".batch_norm",
    "FoldWeights": ".fold_weights",
    "JoinNorms": ".joined_norms",
    "JoinParallelConvolutions": ".parallel_convolutions",
    "JoinSharedHeads": ".shared_heads",
    "KeepNarrowWeights": ".narrow_weights",
    "KnownSlices": ".known_slices",
    "LowerToKernels": "..compile.lowering",
    "NarrowProducts": ".narrow_products",
    "PadPooling": ".pad_pooling",
    "ScaleSmallerOperand": ".scales",
    "SimplifyShapes": ".simplify_shapes",
    "SubPixelConvolution": ".sub_pixel",
    "TabulateBytes": ".byte_tables",
    "TrimKernels": ".trim_kernels",
}


def __getattr__(name: str) -> Any:
    # One pass does not load the others: the graph search alone brings an e-graph engine and a solver.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
