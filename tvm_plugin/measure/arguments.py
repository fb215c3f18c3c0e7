"""What a kernel is called with: seeded random inputs, poisoned outputs.

Runs in the workers. Every worker, and every run with the same seed, makes the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..dtypes import numpy_dtype

__all__ = ["BufferSpec", "Domain", "Interface", "as_comparable", "poison", "random_inputs"]

Domain = Literal["normal", "positive"]
"""How floating-point inputs are drawn: "positive" is for kernels that give NaN or infinity on normal ones."""

_BLOCK = 1_048_573
"""Values drawn for one input; longer inputs repeat them. Prime, so that the repeats line up with no tile or row."""


@dataclass(frozen=True)
class BufferSpec:
    """Shape and dtype of one parameter."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Interface:
    """What a kernel takes and gives.

    Attributes
    ----------
    params : tuple of BufferSpec
        All parameters in order, inputs and outputs.
    outputs : tuple of int
        Positions of the parameters that the kernel writes.
    index_bound : int or None
        Smallest extent of a dimension that the kernel indexes by a loaded value (gather, scatter); None without any.
    reduction : int
        Longest reduction: the product of the reduction extents of one block, the largest of all blocks.
    factors : str
        What factors of float32 may be rounded to: "tfloat32", or "bfloat16x2" for the sum of two; "" for nothing.
    weights : tuple of int
        Positions of the parameters that are constants of the model.
    quantizes : bool
        Whether integers are written that derive from a sum of floats, or from the sum of a product, which compilers
        make one operation where both are in one loop: by the order of roundings, a value between two integers is
        rounded to one or the other.
    """

    params: tuple[BufferSpec, ...]
    outputs: tuple[int, ...]
    index_bound: int | None
    reduction: int
    factors: str = ""
    weights: tuple[int, ...] = ()
    quantizes: bool = False

    @staticmethod
    def of(function: Any) -> Interface:
        """Read it off a `tvm.tirx.PrimFunc` with static shapes, before it is scheduled."""
        import tvm_ffi
        from tvm import s_tir, tirx
        from tvm.ir.expr import TensorLoad

        from ..search.space.amx.halves import halves_permitted
        from ..search.space.expressions import constant_extent
        from ..search.space.gpu.tf32 import permitted_products

        stores: list[Any] = []
        loads: list[Any] = []
        blocks: list[Any] = []
        additions: list[Any] = []
        products: list[Any] = []
        tvm_ffi.structural_walk(
            function.body,
            [
                (tirx.BufferStore, stores.append),
                (TensorLoad, loads.append),
                (s_tir.SBlock, blocks.append),
                (tirx.Add, additions.append),
                (tirx.Sub, additions.append),
                (tirx.Mul, products.append),
            ],
            order="post",
        )
        accesses = [(store.buffer, store.indices) for store in stores]
        accesses += [(load.source, load.indices) for load in loads]
        bounds = [
            int(extent)
            for buffer, indices in accesses
            for extent, index in zip(buffer.shape, indices, strict=True)
            if _has_load(index)
        ]
        reductions = [
            math.prod(constant_extent(v) for v in block.iter_vars if v.iter_type == tirx.IterVar.CommReduce)
            for block in blocks
        ]
        written = [p for p in function.params if any(p.same_as(store.buffer) for store in stores)]
        sums_floats = any(
            "float" in str(region.source.dtype)
            for block in blocks
            if any(v.iter_type == tirx.IterVar.CommReduce for v in block.iter_vars)
            for region in block.writes
        )
        contracts = all(any("float" in str(e.ty.dtype) for e in found) for found in (additions, products))
        return Interface(
            params=specs(function),
            outputs=tuple(
                index for index, param in enumerate(function.params) if any(param.same_as(p) for p in written)
            ),
            index_bound=min(bounds, default=None),
            reduction=max(reductions, default=1),
            factors="bfloat16x2" if halves_permitted(function) else "tfloat32" * (permitted_products(function) == 1),
            weights=tuple(int(position) for position in function.attrs.get("layout_free_buffers", ())),
            quantizes=(sums_floats or contracts) and any("int" in str(p.dtype) for p in written),
        )

    @property
    def nbytes(self) -> int:
        """Size of all parameters in bytes."""
        return sum(spec.nbytes for spec in self.params)

    @property
    def inputs(self) -> tuple[int, ...]:
        """Positions of the parameters that the kernel only reads."""
        return tuple(index for index in range(len(self.params)) if index not in self.outputs)


def specs(function: Any) -> tuple[BufferSpec, ...]:
    """The parameters of a `tvm.tirx.PrimFunc` with static shapes."""
    return tuple(BufferSpec(tuple(int(extent) for extent in p.shape), str(p.dtype)) for p in function.params)


def random_inputs(
    interface: Interface, seed: int, workload_hash: str, domain: Domain = "normal"
) -> Mapping[int, NDArray[Any]]:
    """Inputs by parameter position; the same for the same arguments, in every process.

    Floating-point values are standard normal ("normal") or uniform in [0.5, 1.5) ("positive"). Integers that index
    something lie inside it, those of 8 bits where no others can be what indexes; integers of 8 and 16 bits are spread
    around 0 (signed) or above it; other integers are small and positive. Words of 32 bits without a sign are any.
    """
    integers = [spec for spec in (interface.params[i] for i in interface.inputs) if "int" in spec.dtype]
    bytes_index = interface.index_bound is not None and all(numpy_dtype(s.dtype).itemsize == 1 for s in integers)
    return {
        position: _random(
            interface.params[position],
            np.random.default_rng([seed, int(workload_hash, 16), position]),
            interface.index_bound,
            bytes_index,
            domain,
        )
        for position in interface.inputs
    }


def poison(spec: BufferSpec) -> NDArray[Any]:
    """What an output holds before a checked run: values that no right kernel leaves behind, shape `spec.shape`."""
    dtype = numpy_dtype(spec.dtype)
    if dtype.kind in "iu":
        return np.full(spec.shape, np.iinfo(dtype).max, dtype)
    if dtype.kind == "b":
        return np.ones(spec.shape, dtype)
    ones = np.full(math.prod(spec.shape) * dtype.itemsize, 0xFF, np.uint8)  # NaN in every floating-point type
    return ones.view(dtype).reshape(spec.shape)


def as_comparable(array: NDArray[Any]) -> NDArray[Any]:
    """The array in a dtype that `numpy.save` can keep: small floating-point types become float32."""
    return array if array.dtype.kind in "iub" or array.dtype == np.float64 else array.astype(np.float32, copy=False)


def _has_load(index: Any) -> bool:
    import tvm_ffi
    from tvm.ir.expr import TensorLoad

    found: list[Any] = []
    tvm_ffi.structural_walk(index, (TensorLoad, found.append), order="post")
    return bool(found)


def _random(
    spec: BufferSpec, rng: np.random.Generator, index_bound: int | None, bytes_index: bool, domain: Domain
) -> NDArray[Any]:
    dtype = numpy_dtype(spec.dtype)
    size = math.prod(spec.shape)
    count = min(size, _BLOCK)
    block: NDArray[Any]
    if dtype.kind == "b":
        block = rng.integers(0, 2, count).astype(dtype)
    elif dtype.kind in "iu" and not bytes_index and dtype.itemsize <= (2 if index_bound is None else 1):
        block = rng.integers(-8 if dtype.kind == "i" else 0, 8, count).astype(dtype)
    elif dtype == np.uint32 and index_bound is None:  # words of weights in fewer bits
        block = rng.integers(0, 2**32, count, dtype)
    elif dtype.kind in "iu":
        low, high = (1, 8) if index_bound is None else (0, index_bound)
        block = rng.integers(low, min(high, int(np.iinfo(dtype).max) + 1), count).astype(dtype)
    elif domain == "positive":
        block = (rng.random(count, dtype=np.float32) + 0.5).astype(dtype)
    else:
        block = rng.standard_normal(count, dtype=np.float32).astype(dtype)
    return np.resize(block, spec.shape)
