"""Passes over Relax modules, for any `tvm.transform.Sequential`."""

from .batch_norm import FoldBatchNorm
from .fold_weights import FoldWeights

__all__ = ["FoldBatchNorm", "FoldWeights"]
