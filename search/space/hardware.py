"""What a schedule must know about the machine it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = [
    "FAR_WEIGHTS",
    "MASKED_BYTES",
    "MEMORY_BYTES",
    "ONE_THREAD",
    "PAGE_BYTES",
    "Hardware",
    "known_hardware",
    "usable_by",
    "with_weights",
]

MASKED_BYTES = 32
"""Of a vector, from which CPUs load parts of one under a mask: AVX2, AVX-512."""

MEMORY_BYTES = 128 * 1024**2
"""Most that is copied to measure the bandwidth of memory; less where twice the last-level cache is less."""

PAGE_BYTES = 4096
"""Rows this far apart fall into the same set of the first-level cache."""

FAR_WEIGHTS = "far_weights"
"""Knob, without a choice: 1 where weights are asked for ahead, as those that are packed mostly are where
`Hardware.weights_are_far`."""

ONE_THREAD = "eqtune.one_thread"
"""Attribute of kernels that one thread computes: several threads each call one, for a part of something larger."""

READ_ALONE = 0.5
"""Of weights, the share that does not count in a bound by a copy's bandwidth, which is of bytes half of which are
written. One row times 512 x 512 was taken for done at 6.1 us; 3.9 are possible (a Xeon)."""


@dataclass(frozen=True)
class Hardware:
    """Limits and speeds of one device. Plain data: kept with the records, and every field may be overridden.

    Attributes
    ----------
    name : str
        What the machine calls itself, for example "AMD EPYC (znver4)".
    threads : int
        Threads that a kernel may use.
    vector_bytes : int
        Width of a vector register: 64 with AVX-512, 32 with AVX2, 16 with NEON.
    vector_registers : int
        How many of them the instruction set has: 32 with AVX-512 and NEON, 16 with AVX2.
    l1_bytes, l2_bytes, l3_bytes : int
        Data cache sizes; L1 and L2 of one core, L3 shared by all.
    cache_line_bytes : int
        Size of a cache line.
    peak_flops_per_s : float
        Measured float32 FMA peak of one thread, in FLOP/s (an FMA counts two).
    peak_flops_per_s_all : float
        The same for `threads` threads together.
    bandwidth_bytes_per_s : float
        Measured copy bandwidth from memory with `threads` threads (bytes read plus bytes written).
    cache_bandwidth_bytes_per_s : float
        Measured copy bandwidth of one thread at a working set that fits L2.
    parallel_overhead_s : float
        Measured cost of starting and joining one parallel region over `threads` threads.
    half_vector_rate : float
        Multiply-adds of half a vector register that take as long as one of a whole one: 2 where wide ones are computed
        in halves (Zen 4 with AVX-512), else 1.
    fmas_per_load : float
        Multiply-adds that take as long as one load from L1 of a whole vector, or of an element into all its lanes: 1
        where the core does as many of both in a cycle.
    dot_products : tuple of str
        Instructions that multiply and sum groups of small numbers, as LLVM names the features: "avx512vnni" and
        "avxvnni" for 8-bit integers, "avx512bf16" for bfloat16; "avx512bw", "avx2" and "sse2" for 16-bit integers;
        "amx-int8" and "amx-bf16" for matrix tiles of both.
    tile_flops_per_s : float
        Measured peak of one thread's products of bfloat16 tiles (a product and a sum count two); 0 without such tiles.
    slow_last_cache : bool
        Whether L3 is many times as slow as L2. By the processor's name, not measured: passes, which measure nothing,
        must see the same spaces as tuning.
    weights_in_memory : bool
        Whether a kernel's weights come from memory, or from a far last cache, in each call, as those of models do that
        have more of them than is near: not of the device, but of what it runs (`with_weights`).
    """

    name: str = "generic x86-64 with AVX-512"
    threads: int = 1
    vector_bytes: int = 64
    vector_registers: int = 32
    l1_bytes: int = 32 * 1024
    l2_bytes: int = 1024 * 1024
    l3_bytes: int = 32 * 1024 * 1024
    cache_line_bytes: int = 64
    peak_flops_per_s: float = 110e9
    peak_flops_per_s_all: float = 110e9
    bandwidth_bytes_per_s: float = 20e9
    cache_bandwidth_bytes_per_s: float = 80e9
    parallel_overhead_s: float = 3e-6
    half_vector_rate: float = 2.0
    fmas_per_load: float = 1.0
    dot_products: tuple[str, ...] = ()
    tile_flops_per_s: float = 0.0
    slow_last_cache: bool = False
    weights_in_memory: bool = False

    @property
    def weights_are_far(self) -> bool:
        """Whether kernels do better to ask for their weights ahead (contraction/prefetch.py)."""
        return self.weights_in_memory or self.last_cache_is_far

    @property
    def last_cache_is_far(self) -> bool:
        """Whether reading the last-level cache takes nearly as long as reading memory, or many times as long as L2."""
        return self.near_bytes < self.l3_bytes

    @property
    def near_bytes(self) -> int:
        """What is held so near that a kernel's calls in a model find it there without waiting.

        Where the last cache holds all that the bandwidth of memory is measured with, that is its own bandwidth, and the
        caches of the cores are what is near (Xeon, 480 MiB of L3: 30 GB/s a core from L3, 75 from L2). So they are
        where it is slow: a core of an Ice Lake Xeon reads 160 GB/s from L2, 31 from L3, 12 from memory; SqueezeNet (5
        MB of weights) and MobileNet-v2 (14 MB), tuned for near weights, took 2.77 and 4.68 ms, for far ones 2.50 and
        4.37.
        """
        is_far = self.slow_last_cache or self.l3_bytes >= MEMORY_BYTES
        return self.l2_bytes * self.threads if is_far else self.l3_bytes

    def lanes(self, dtype_bytes: int) -> int:
        """Elements of `dtype_bytes` bytes that fill one vector register."""
        return max(1, self.vector_bytes // dtype_bytes)

    def least_latency_s(self, flops: float, bytes_moved: float, weight_bytes: float = 0.0) -> float:
        """Seconds that no schedule beats. Peaks of one core times cores: a busy machine measures less for all.

        Of `bytes_moved`, `weight_bytes` are only read, which goes up to twice as fast as the copy that bandwidth is of.
        """
        in_cache = bytes_moved <= self.l3_bytes
        bandwidth = self.cache_bandwidth_bytes_per_s * self.threads if in_cache else self.bandwidth_bytes_per_s
        copied = bytes_moved - READ_ALONE * weight_bytes
        return max(flops / (self.peak_flops_per_s * self.threads), copied / bandwidth)

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Hardware:
        """The inverse of `to_json`, for GPUs too; raises TypeError for an unknown field."""
        fields = {**fields, "dot_products": tuple(fields.get("dot_products", ()))}
        if "warp_size" in fields:
            from .gpu.hardware import GpuHardware

            return GpuHardware(**fields)
        return Hardware(**fields)


def usable_by(mod: Any, hardware: Hardware) -> Hardware:
    """The machine as the kernel `mod["main"]` may use it: with one thread where it has the attribute `ONE_THREAD`."""
    return replace(hardware, threads=1) if ONE_THREAD in (mod["main"].attrs or {}) else hardware


def with_weights(hardware: Hardware, weight_bytes: int) -> Hardware:
    """The machine as the kernels of a model with so many bytes of weights find it."""
    return replace(hardware, weights_in_memory=weight_bytes > hardware.near_bytes)


_MAY_BE_ZERO = (
    "parallel_overhead_s",
    "shared_bytes_reserved",
    "slow_last_cache",
    "tile_flops_per_s",
    "weights_in_memory",
)


def known_hardware(fields: Mapping[str, Any]) -> Hardware | None:
    """`Hardware.from_json` of what a file holds: None where a field is missing, unknown, or not of its kind."""
    try:
        hardware = Hardware.from_json(dict(fields))
    except TypeError:
        return None
    defaults = type(hardware)().to_json()
    if fields.keys() != defaults.keys():
        return None
    is_sound = all(
        _is_like(fields[name], default) and (fields[name] != 0 or name in _MAY_BE_ZERO)
        for name, default in defaults.items()
    )
    return hardware if is_sound else None


def _is_like(value: Any, default: Any) -> bool:
    """Whether it is a text, a finite number from 0, or a list of such, as the default is; of a truth, the default."""
    if isinstance(default, tuple):
        return isinstance(value, list) and all(_is_like(item, default[0] if default else "") for item in value)
    if isinstance(default, str):
        return isinstance(value, str)
    if isinstance(default, bool):  # of what runs on the device
        return value is default
    return type(value) in (int, type(default)) and 0 <= value < 1e300
