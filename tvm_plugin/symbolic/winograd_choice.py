"""Whether fast math makes a convolution of symbolic sizes faster by Winograd's minimal filtering, and in which form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import ir, tirx

from ..relax_ir.kernels import is_symbolic
from ..search.graph.attributes import WinogradData
from ..search.space.amx.halves import halves_permitted
from ..search.space.gpu.hardware import GpuHardware
from ..search.space.hardware import READ_ALONE, Hardware
from .inlined import with_cheap_stages_inlined
from .kernel import number_at, read_kernel
from .named_sizes import with_sizes_simplified
from .part import bytes_of
from .slices import with_slice_apart
from .winograd import Convolution, Pair, read_convolution

__all__ = ["WINOGRAD", "WinogradForm", "permit_winograd", "winograd_form", "winograd_gain", "winograd_weight_bytes"]

WINOGRAD = "eqtune.winograd_outputs"
"""Attribute of a kernel: rows and columns of the result that a tile gives."""

OUTPUTS: Mapping[Pair, tuple[Pair, ...]] = {(3, 3): ((2, 2), (4, 4)), (5, 5): ((4, 4),)}
"""By rows and columns of a weight. F(6 x 6, 3 x 3) is hardly faster than F(4 x 4), and five times less exact."""

EFFICIENCY = 0.9
"""Of the peak, that products reach."""

SHARED_WEIGHTS = 4
"""Of how many second-level caches the weights are read by each thread for itself. 256 channels of 14 x 14 with 9.4 MB
from memory take 284 us so, 173 where threads share them (Zen 5); with 2.4 MB, for 128 of 28 x 28, both take 223."""

SHORT_ROWS, LONG_ROWS, SHARED_ROWS = 24, 32, 64
"""Tiles of a block, whose data should stay in the second-level cache: with weights that fit it, with others, and where
threads share them. Within 5 % of the best of 16, 24, 32, 48 and 64 on Zen 5, for 64 to 512 channels."""


@dataclass(frozen=True)
class WinogradForm:
    """Arguments of `winograd_kernel`."""

    outputs: Pair
    rows: int
    shared: bool


def permit_winograd(mod: ir.IRModule, hardware: Any, sizes: Mapping[str, int], usual: int) -> ir.IRModule:
    """A module of kernels, not scheduled, in which those that win at these sizes have the attribute `WINOGRAD`.

    Parameters
    ----------
    mod : tvm.ir.IRModule
    hardware : Hardware
        On a GPU, none wins.
    sizes : mapping of str to int
        By the names of symbols.
    usual : int
        Of others.
    """
    result = mod.clone()
    if isinstance(hardware, GpuHardware):
        return result
    for variable, function in mod.functions_items():
        if isinstance(function, tirx.PrimFunc) and is_symbolic(function):
            outputs = _best_outputs(function, hardware, sizes, usual)
            if outputs is not None:
                result.update_func(variable, function.with_attr(WINOGRAD, list(outputs)))
    return result


def winograd_form(convolution: Convolution, hardware: Hardware) -> WinogradForm | None:
    """How a kernel with the attribute is computed; None without it."""
    permitted = _permitted(convolution.kernel.function)
    if permitted is None:
        return None
    weight_bytes = _weight_bytes(convolution, permitted)
    if hardware.threads > 1 and weight_bytes > SHARED_WEIGHTS * hardware.l2_bytes:
        return WinogradForm(permitted, SHARED_ROWS, True)
    return WinogradForm(permitted, SHORT_ROWS if weight_bytes <= hardware.l2_bytes else LONG_ROWS, False)


def winograd_weight_bytes(function: tirx.PrimFunc) -> float:
    """How much more the weights of a kernel with the attribute take than the direct one's; 0 without it."""
    permitted = _permitted(function)
    convolution = None if permitted is None else _read(function)
    if permitted is None or convolution is None:
        return 0.0
    return _weight_bytes(convolution, permitted) - bytes_of(convolution.weight)


def winograd_gain(function: tirx.PrimFunc, hardware: Hardware, sizes: Mapping[str, int], usual: int) -> float:
    """How many times as long the direct kernel takes, about; 1 without the attribute."""
    permitted = _permitted(function)
    convolution = None if permitted is None else _read(function)
    if permitted is None or convolution is None:
        return 1.0
    images = _Images(convolution, sizes, usual)
    return images.direct_s(hardware, halves=False) / images.winograd_s(permitted, hardware)


def _permitted(function: tirx.PrimFunc) -> Pair | None:
    outputs = (function.attrs or {}).get(WINOGRAD)
    if outputs is None:
        return None
    down, across = (int(count) for count in outputs)
    return down, across


def _read(function: tirx.PrimFunc) -> Convolution | None:
    sliced, _ = with_slice_apart(with_cheap_stages_inlined(with_sizes_simplified(function)))
    kernel = read_kernel(sliced)
    return None if kernel is None else read_convolution(kernel)


def _best_outputs(function: tirx.PrimFunc, hardware: Hardware, sizes: Mapping[str, int], usual: int) -> Pair | None:
    convolution = _read(function)
    if convolution is None:
        return None
    images = _Images(convolution, sizes, usual)
    seconds = {outputs: images.winograd_s(outputs, hardware) for outputs in OUTPUTS.get(convolution.taps, ())}
    best = min(seconds, key=lambda outputs: seconds[outputs], default=None)
    if best is None or seconds[best] >= images.direct_s(hardware, halves_permitted(function)):
        return None
    return best


def _weight_bytes(convolution: Convolution, outputs: Pair) -> float:
    return 4.0 * prod(WinogradData(outputs, convolution.taps).size) * prod(convolution.channels)


class _Images:
    """The images of a convolution at given sizes."""

    def __init__(self, convolution: Convolution, sizes: Mapping[str, int], usual: int) -> None:
        self._convolution = convolution
        self._count, *self._extents = (number_at(size.extent, sizes, usual) for size in convolution.places)

    def direct_s(self, hardware: Hardware, halves: bool) -> float:
        """Seconds of the convolution as it is; of three products of bfloat16 for each, if so permitted."""
        convolution = self._convolution
        peak = hardware.peak_flops_per_s * hardware.threads
        peak = max(peak, hardware.tile_flops_per_s * hardware.threads / 3) if halves else peak
        flops = 2.0 * self._count * prod(self._extents) * prod(convolution.taps) * prod(convolution.channels)
        return max(flops / peak / EFFICIENCY, _read_s(bytes_of(convolution.weight), hardware))

    def winograd_s(self, outputs: Pair, hardware: Hardware) -> float:
        """Seconds by tiles of so many outputs: products, transforms, and what crosses the caches between them."""
        convolution, threads = self._convolution, hardware.threads
        inputs, channels = convolution.channels
        matrices = prod(WinogradData(outputs, convolution.taps).size)
        tiles = self._count * prod(-(-extent // m) for extent, m in zip(self._extents, outputs, strict=True))
        peak = hardware.peak_flops_per_s * threads
        product_s = 2.0 * matrices * tiles * inputs * channels / peak / EFFICIENCY
        transform_s = 4.0 * tiles * (matrices * inputs + prod(outputs) * channels) / (peak / 2)
        scratch = 4.0 * matrices * tiles * (inputs + channels)
        traffic_s = scratch / (hardware.cache_bandwidth_bytes_per_s * threads)
        read_s = _read_s(_weight_bytes(convolution, outputs), hardware)
        return max(product_s, read_s) + transform_s + traffic_s


def _read_s(weight_bytes: float, hardware: Hardware) -> float:
    """Seconds that weights take to be read once."""
    is_far = hardware.weights_in_memory or weight_bytes > hardware.near_bytes / 2
    near = hardware.cache_bandwidth_bytes_per_s * hardware.threads / 4
    return weight_bytes * READ_ALONE / hardware.bandwidth_bytes_per_s if is_far else weight_bytes / near
