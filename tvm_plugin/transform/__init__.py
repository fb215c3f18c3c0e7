"""Passes over Relax modules, for any `tvm.transform.Sequential`."""

from .apply_tuned import ApplyTuned
from .batch_norm import FoldBatchNorm
from .equality_saturation import EqualitySaturation
from .fold_weights import FoldWeights
from .lowering import LowerToKernels
from .simplify_shapes import SimplifyShapes

__all__ = ["ApplyTuned", "EqualitySaturation", "FoldBatchNorm", "FoldWeights", "LowerToKernels", "SimplifyShapes"]
