"""Arrays and named parameters in TVM's binary format.

An array: magic u64, reserved u64, device (i32 type, i32 id), i32 rank, dtype (u8 code, u8 bits, u16 lanes), i64
extents, i64 size in bytes, data. A parameter file: magic u64, reserved u64, the names (u64 count, then u64 length and
bytes of each), u64 count, the arrays. Little-endian throughout; unchanged from TVM 0.4 to this day.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dtypes import numpy_dtype
from .errors import RelayError

__all__ = ["array_to_bytes", "load_params", "read_array"]

_ARRAY_MAGIC = 0xDD5E40F096B4A13F
_LIST_MAGIC = 0xF7E58D4F05049CB7
_MAX_RANK = 32
_MAX_NAME_BYTES = 1 << 16
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}
_BITS = {"float": (16, 32, 64), "bfloat": (16,)}
_CODES = {"i": 0, "u": 1, "f": 2, "bfloat16": 4, "b": 6}


class _Reader:
    """Reads a buffer from front to back, and says when it ends too early."""

    def __init__(self, buffer: bytes | memoryview, what: str, offset: int = 0) -> None:
        self._buffer = memoryview(buffer)
        self._what = what
        self.offset = offset

    def unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(f"<{layout}", self.take(struct.calcsize(f"<{layout}")))

    def take(self, size: int) -> memoryview:
        end = self.offset + size
        if size < 0 or end > len(self._buffer):
            raise self.error(f"it is truncated: {size} bytes expected, {len(self._buffer) - self.offset} left")
        chunk = self._buffer[self.offset : end]
        self.offset = end
        return chunk

    def error(self, message: str) -> RelayError:
        return RelayError(f"{self._what}, byte {self.offset}: {message}")


def load_params(data: bytes) -> dict[str, NDArray[Any]]:
    """Weights by name, from what `relay.save_param_dict` (now `tvm.runtime.save_param_dict`) returned.

    Parameters
    ----------
    data
        The bytes of a .params file. The arrays share its memory and cannot be written to.

    Raises
    ------
    RelayError
        It is something else, or truncated.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise RelayError(
            f"load_params takes the bytes of a .params file, not {type(data).__name__}: open(path, 'rb').read()"
        )
    reader = _Reader(data, "parameters")
    magic, _ = reader.unpack("QQ") if len(data) >= 16 else (0, 0)
    if magic != _LIST_MAGIC:
        raise RelayError("these are not parameters that relay.save_param_dict wrote: the first eight bytes differ")
    names = []
    for _ in range(_count(reader)):
        (length,) = reader.unpack("Q")
        if length > _MAX_NAME_BYTES:
            raise reader.error(f"a name of {length} bytes; {_MAX_NAME_BYTES} are allowed")
        try:
            names.append(str(reader.take(length), "utf-8"))
        except UnicodeDecodeError as error:
            raise reader.error("a name is not UTF-8") from error
    count = _count(reader)
    if count != len(names):
        raise reader.error(f"{len(names)} names, but {count} arrays")
    return {name: _read(reader) for name in names}


def _count(reader: _Reader) -> int:
    """How many entries follow. Each takes bytes, so that a wrong count ends as "truncated"."""
    (count,) = reader.unpack("Q")
    return count


def read_array(data: bytes, what: str) -> NDArray[Any]:
    """One array. Raises RelayError, naming `what`, when it is none."""
    return _read(_Reader(data, what))


def _read(reader: _Reader) -> NDArray[Any]:
    magic, _, _, _, rank = reader.unpack("QQiii")
    if magic != _ARRAY_MAGIC:
        raise reader.error("no array starts here")
    code, bits, lanes = reader.unpack("BBH")
    if not 0 <= rank <= _MAX_RANK:
        raise reader.error(f"an array of rank {rank}; {_MAX_RANK} is the most")
    shape = reader.unpack(f"{rank}q")
    (size,) = reader.unpack("q")
    dtype = _dtype(code, bits, lanes)
    if dtype is None:
        raise reader.error(f"dtype code {code} with {bits} bits and {lanes} lanes; only plain numbers can be read")
    if any(extent < 0 for extent in shape) or math.prod(shape) * dtype.itemsize != size:
        raise reader.error(f"an array of shape {shape} and dtype {dtype} in {size} bytes")
    return np.frombuffer(reader.take(size), dtype).reshape(shape)


def _dtype(code: int, bits: int, lanes: int) -> np.dtype[Any] | None:
    kind = _KINDS.get(code)
    if lanes != 1 or kind is None:
        return None
    if kind == "bool" or (kind == "uint" and bits == 1):  # TVM's bool, today and before 0.20
        return np.dtype(bool)
    if bits not in _BITS.get(kind, (8, 16, 32, 64)):
        return None
    return numpy_dtype(f"{kind}{bits}")


def array_to_bytes(array: NDArray[Any]) -> bytes:
    """The inverse of `read_array`, as TVM 0.8 to 0.19 wrote it: bool is a uint of one bit."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    kind = "bfloat16" if str(array.dtype) == "bfloat16" else array.dtype.kind  # numpy has no kind for it
    code, bits = (1, 1) if kind == "b" else (_CODES[kind], array.dtype.itemsize * 8)
    head = struct.pack("<QQiii", _ARRAY_MAGIC, 0, 1, 0, array.ndim) + struct.pack("<BBH", code, bits, 1)
    return head + struct.pack(f"<{array.ndim}qq", *array.shape, array.nbytes) + array.tobytes()
