"""How many blocks a multiprocessor holds at once, and what follows from it: arrays of one number a candidate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .hardware import GpuHardware

__all__ = ["Array", "Launch", "Occupancy", "occupancy"]

Array = NDArray[np.float64]

REGISTER_GRANULE = 8
"""Registers are given to a thread in units of eight."""

SHARED_GRANULE = 128
"""Bytes."""


@dataclass(frozen=True)
class Launch:
    """What a launch asks for, arrays of shape [n]: blocks, threads of one, registers of a thread, shared bytes."""

    blocks: Array
    threads: Array
    registers: Array
    shared_bytes: Array


@dataclass(frozen=True)
class Occupancy:
    """What becomes of it, arrays of shape [n].

    Attributes
    ----------
    legal : bool
        Whether the device can launch it at all.
    resident : Array
        Blocks on one multiprocessor at once.
    share : Array
        Resident warps over the most there can be.
    waves : Array
        Blocks over the blocks that the whole device holds; below 1 when it is not filled.
    busy : Array
        Share of the device's multiprocessor-time that has work to do, tail of the last wave included.
    """

    legal: NDArray[np.bool_]
    resident: Array
    share: Array
    waves: Array
    busy: Array


def occupancy(hardware: GpuHardware, launch: Launch) -> Occupancy:
    """The limits of the CUDA C++ Programming Guide, section "Multiprocessor Level"."""
    warps = np.ceil(launch.threads / hardware.warp_size)
    registers = np.ceil(launch.registers / REGISTER_GRANULE) * REGISTER_GRANULE
    shared = np.ceil(launch.shared_bytes / SHARED_GRANULE) * SHARED_GRANULE + hardware.shared_bytes_reserved
    by_threads = hardware.threads_per_multiprocessor // (warps * hardware.warp_size)
    by_registers = hardware.registers_per_multiprocessor // (registers * warps * hardware.warp_size)
    by_shared = hardware.shared_bytes_per_multiprocessor // np.maximum(shared, 1)
    resident = np.minimum.reduce(
        [by_threads, by_registers, by_shared, by_threads * 0 + hardware.blocks_per_multiprocessor]
    )
    legal = (
        (resident >= 1)
        & (launch.threads <= hardware.threads_per_block)
        & (launch.registers <= hardware.vector_registers)
        & (launch.shared_bytes <= hardware.shared_bytes_per_block)
    )
    held = np.maximum(resident, 1.0) * hardware.multiprocessors
    waves = launch.blocks / held
    spread = launch.blocks / hardware.multiprocessors
    return Occupancy(
        legal=legal,
        resident=np.minimum(np.maximum(resident, 1.0), np.ceil(spread)),
        share=np.minimum(resident * warps * hardware.warp_size / hardware.threads_per_multiprocessor, 1.0),
        waves=waves,
        busy=spread / np.ceil(spread),
    )
