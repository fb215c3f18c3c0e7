"""What a schedule must know about a GPU, and a table of devices for machines that have none.

Sources: limits of each compute capability from NVIDIA's CUDA C++ Programming Guide (version 13, "Compute
Capabilities"); processors, clocks, bandwidth and peaks from the data sheets and architecture white papers of A100,
H100, H200, L4, T4, GeForce RTX 3090, 4090 and 5090. Peaks are dense, at boost clock; tensor peaks sum in float32
(int8: int32).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..hardware import Hardware

__all__ = ["ARCHITECTURES", "DEVICES", "STATIC_SHARED_BYTES", "Architecture", "Device", "GpuHardware"]

STATIC_SHARED_BYTES = 48 * 1024
"""What a kernel may declare, on every GPU; more must be dynamic."""

TENSOR_DTYPES = ("float16", "bfloat16", "tfloat32", "int8")
"""The order of `GpuHardware.tensor_flops_per_s`."""


@dataclass(frozen=True)
class GpuHardware(Hardware):
    """Limits and speeds of one NVIDIA GPU.

    The inherited fields keep their meaning with a multiprocessor for a core: `threads` counts multiprocessors,
    `peak_flops_per_s` is float32 FMA of one of them, `l1_bytes` its L1 and shared memory together, `l2_bytes` and
    `l3_bytes` are the device's L2, `cache_bandwidth_bytes_per_s` a multiprocessor's share of L2's, `vector_bytes` the
    widest load of a thread, `vector_registers` the 32-bit registers a thread may have, `parallel_overhead_s` a launch.

    Attributes
    ----------
    arch : str
        What the compiler is told: "sm_80"; for Hopper "sm_90a", which adds instructions that no later GPU has.
    warp_size : int
    threads_per_block, threads_per_multiprocessor, blocks_per_multiprocessor : int
        Most that can be resident.
    registers_per_multiprocessor : int
        32-bit registers.
    shared_bytes_per_block : int
        Most dynamic shared memory of a block; above 48 KiB a launch must ask for it, which TVM's runtime does.
    shared_bytes_per_multiprocessor : int
    shared_bytes_reserved : int
        What the driver takes of it for every block.
    clock_hz : float
        Boost clock.
    tensor_flops_per_s : tuple of float
        Peaks of the tensor cores for float16, bfloat16, tfloat32, int8; 0 where they lack the type.
    """

    name: str = "NVIDIA H100 SXM"
    threads: int = 132
    vector_bytes: int = 16
    vector_registers: int = 255
    cache_line_bytes: int = 128
    arch: str = "sm_90"
    warp_size: int = 32
    threads_per_block: int = 1024
    threads_per_multiprocessor: int = 2048
    blocks_per_multiprocessor: int = 32
    registers_per_multiprocessor: int = 65536
    shared_bytes_per_block: int = 227 * 1024
    shared_bytes_per_multiprocessor: int = 228 * 1024
    shared_bytes_reserved: int = 1024
    clock_hz: float = 1.98e9
    tensor_flops_per_s: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        # JSON has no tuples.
        object.__setattr__(self, "tensor_flops_per_s", tuple(self.tensor_flops_per_s))

    @property
    def multiprocessors(self) -> int:
        """The same as `threads`."""
        return self.threads

    @property
    def copies_asynchronously(self) -> bool:
        """Whether it has cp.async: from compute capability 8.0 on."""
        return int(self.arch.removeprefix("sm_").rstrip("af") or 0) >= 80

    @property
    def is_hopper(self) -> bool:
        """Whether it is of compute capability 9.0, whatever the compiler is told."""
        return self.arch.rstrip("af") == "sm_90"

    @property
    def has_warpgroups(self) -> bool:
        """Whether it has `wgmma`: compute capability 9.0 alone, and code for it is compiled for "sm_90a"."""
        return self.arch == "sm_90a"

    def tensor_peak(self, dtype: str) -> float:
        """FLOP/s of the tensor cores on inputs of `dtype`; 0 where they do not take it."""
        return self.tensor_flops_per_s[TENSOR_DTYPES.index(dtype)] if dtype in TENSOR_DTYPES else 0.0

    def least_latency_s(self, flops: float, bytes_moved: float, weight_bytes: float = 0.0) -> float:
        """Seconds that no schedule beats: the highest peak there is, whatever the dtype; L2's or DRAM's bandwidth.

        These are the device's and no copy's: weights count as other bytes do.
        """
        peak = max(self.peak_flops_per_s_all, *self.tensor_flops_per_s)
        in_cache = bytes_moved <= self.l2_bytes
        bandwidth = self.cache_bandwidth_bytes_per_s * self.threads if in_cache else self.bandwidth_bytes_per_s
        return max(flops / peak, bytes_moved / bandwidth)


@dataclass(frozen=True)
class Architecture:
    """Limits of one compute capability. Shared memory in KiB."""

    cores: int
    threads: int
    blocks: int
    shared_per_block: int
    shared_per_multiprocessor: int
    l1: int


ARCHITECTURES: Mapping[str, Architecture] = {
    "sm_75": Architecture(64, 1024, 16, 64, 64, 96),
    "sm_80": Architecture(64, 2048, 32, 163, 164, 192),
    "sm_86": Architecture(128, 1536, 16, 99, 100, 128),
    "sm_89": Architecture(128, 1536, 24, 99, 100, 128),
    "sm_90a": Architecture(128, 2048, 32, 227, 228, 256),
    "sm_100": Architecture(128, 2048, 32, 227, 228, 256),
    "sm_120": Architecture(128, 1536, 24, 99, 100, 128),
}
"""By what the compiler calls them. All have warps of 32, blocks of 1024 threads and 65536 registers."""

LAUNCH_S = 3e-6
"""What a kernel costs beyond its work when launched back to back."""

L2_OVER_DRAM = 3.0
"""L2's bandwidth over DRAM's, roughly, on all of them; white papers do not give it."""


@dataclass(frozen=True)
class Device:
    """One product. L2 in MiB, clock in GHz, bandwidth in GB/s, tensor peaks in TFLOP/s (float16, tfloat32, int8)."""

    name: str
    arch: str
    multiprocessors: int
    clock: float
    bandwidth: float
    l2: int
    tensor: tuple[float, float, float]

    def hardware(self) -> GpuHardware:
        """The full description."""
        limits = ARCHITECTURES[self.arch]
        peak = limits.cores * 2.0 * self.clock * 1e9
        float16, tfloat32, int8 = (1e12 * value for value in self.tensor)
        bfloat16 = 0.0 if self.arch == "sm_75" else float16
        return GpuHardware(
            name=self.name,
            threads=self.multiprocessors,
            l1_bytes=limits.l1 * 1024,
            l2_bytes=self.l2 * 1024**2,
            l3_bytes=self.l2 * 1024**2,
            peak_flops_per_s=peak,
            peak_flops_per_s_all=peak * self.multiprocessors,
            bandwidth_bytes_per_s=self.bandwidth * 1e9,
            cache_bandwidth_bytes_per_s=L2_OVER_DRAM * self.bandwidth * 1e9 / self.multiprocessors,
            parallel_overhead_s=LAUNCH_S,
            arch=self.arch,
            threads_per_multiprocessor=limits.threads,
            blocks_per_multiprocessor=limits.blocks,
            shared_bytes_per_block=limits.shared_per_block * 1024,
            shared_bytes_per_multiprocessor=limits.shared_per_multiprocessor * 1024,
            shared_bytes_reserved=0 if self.arch == "sm_75" else 1024,
            clock_hz=self.clock * 1e9,
            tensor_flops_per_s=(float16, bfloat16, tfloat32, int8),
        )


DEVICES: Mapping[str, Device] = {
    "nvidia/nvidia-h100": Device("NVIDIA H100 SXM", "sm_90a", 132, 1.98, 3350, 50, (989, 494, 1979)),
    "nvidia/nvidia-h200": Device("NVIDIA H200", "sm_90a", 132, 1.98, 4800, 50, (989, 494, 1979)),
    "nvidia/nvidia-a100": Device("NVIDIA A100 80GB SXM", "sm_80", 108, 1.41, 2039, 40, (312, 156, 624)),
    "nvidia/nvidia-l4": Device("NVIDIA L4", "sm_89", 58, 2.04, 300, 48, (121, 60, 242)),
    "nvidia/nvidia-t4": Device("NVIDIA T4", "sm_75", 40, 1.59, 320, 4, (65, 0, 130)),
    "nvidia/geforce-rtx-3090": Device("NVIDIA GeForce RTX 3090", "sm_86", 82, 1.695, 936, 6, (71, 35.6, 284)),
    "nvidia/geforce-rtx-4090": Device("NVIDIA GeForce RTX 4090", "sm_89", 128, 2.52, 1008, 72, (165.2, 82.6, 660.6)),
    "nvidia/geforce-rtx-5090": Device("NVIDIA GeForce RTX 5090", "sm_120", 170, 2.407, 1792, 96, (209.5, 104.8, 838)),
}
"""By target tag: TVM's where it has one, else named alike."""

ALIASES: Mapping[str, str] = {
    "nvidia/rtx-3090": "nvidia/geforce-rtx-3090",
    "nvidia/rtx-4090": "nvidia/geforce-rtx-4090",
    "nvidia/rtx-5090": "nvidia/geforce-rtx-5090",
    "nvidia/tesla-t4": "nvidia/nvidia-t4",
}
