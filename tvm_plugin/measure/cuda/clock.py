"""Which clock a GPU runs at, from NVIDIA's management library (NVML); nothing where there is none."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

__all__ = ["GpuClock"]

CLOCKS = {"clock_mhz": 1, "memory_clock_mhz": 2}
"""nvmlClockType_t of the multiprocessors and of the memory (nvml.h)."""

PCI_ID_BYTES = 32


class GpuClock:
    """The clocks of one GPU: a GPU that is hot, or saves power, runs slower, and its times say so only with them.

    Parameters
    ----------
    index : int
        Which GPU, as CUDA counts them; NVML, which knows nothing of CUDA_VISIBLE_DEVICES, counts others.
    load : callable
        Loads a shared library by name; raises OSError where there is none.
    """

    def __init__(self, index: int, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._nvml: Any = None
        self._device = ctypes.c_void_p()
        bus = ctypes.create_string_buffer(PCI_ID_BYTES)
        try:
            cuda, nvml = load("libcuda.so.1"), load("libnvidia-ml.so.1")
        except OSError:
            return
        failed = cuda.cuInit(0) or cuda.cuDeviceGetPCIBusId(bus, PCI_ID_BYTES, index) or nvml.nvmlInit_v2()
        if not (failed or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(self._device))):
            self._nvml = nvml

    def read(self) -> dict[str, float]:
        """Clocks in MHz by name ("clock_mhz", "memory_clock_mhz"); without those that the GPU does not tell."""
        found: dict[str, float] = {}
        value = ctypes.c_uint(0)
        for name, kind in CLOCKS.items() if self._nvml is not None else ():
            if not self._nvml.nvmlDeviceGetClockInfo(self._device, kind, ctypes.byref(value)):
                found[name] = float(value.value)
        return found
