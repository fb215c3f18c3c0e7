"""What every form of a model begins with: folded batch norms and weights, convolutions in their plain form."""

from __future__ import annotations

from typing import Any

from tvm import transform

from ..gpu_machine import is_gpu
from ..recurrent import fits_loop, with_steps_written_out
from .attention_as_products import AttentionAsProducts
from .batch_norm import FoldBatchNorm
from .byte_tables import TabulateBytes
from .empty_rows import AskMaximaForEmptyRows
from .fake_quantization import FakeQuantizationToInteger
from .fold_weights import FoldWeights
from .joined_norms import JoinNorms
from .known_slices import KnownSlices
from .narrow_products import NarrowProducts, product_bits
from .narrow_weights import KeepNarrowWeights
from .pad_pooling import PadPooling
from .parallel_convolutions import JoinParallelConvolutions
from .scales import ScaleSmallerOperand
from .shared_heads import JoinSharedHeads
from .sub_pixel import SubPixelConvolution
from .trim_kernels import TrimKernels

__all__ = ["simplify"]


def simplify(mod: Any, target: Any = None) -> Any:
    """Fold batch norms and all that depends on weights alone; write transposed convolutions as convolutions, and
    attention as products.

    Products of bytes, and the steps of recurrent layers, become as `target` likes them.
    """
    on_gpu = target is not None and is_gpu(target)
    mod = with_steps_written_out(mod, lambda call: on_gpu or not fits_loop(call))
    bits = 0 if target is None else product_bits(target)
    convolutions = [JoinParallelConvolutions(), SubPixelConvolution(), FoldWeights(), TrimKernels()]
    fold = [FoldWeights(), FoldBatchNorm(), *convolutions]
    products = [AttentionAsProducts(), AskMaximaForEmptyRows(), ScaleSmallerOperand(), JoinSharedHeads()]
    narrow = [NarrowProducts(bits)] if bits else []
    # Parameters of quantisation are constants only once they are folded.
    integers = [FoldWeights(), FakeQuantizationToInteger(products=bits > 0)]
    stored = [] if target is None or on_gpu else [KeepNarrowWeights()]
    tables = [] if target is None or on_gpu else [TabulateBytes(target)]
    return transform.Sequential(
        [KnownSlices(), PadPooling(), *stored, *integers, *tables, *fold, JoinNorms(), *products, *narrow]
    )(mod)
