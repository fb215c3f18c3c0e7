"""The object file with a library's weights, written as it is: LLVM would hold three copies of them.

TVM makes an LLVM module of an executable's constants, one array of bytes, and LLVM an object file of that, all in
memory: a model of 1.3 GB took 5.4 GB more to be exported.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import tvm

__all__ = ["NoElfError", "write_weights_object"]

NAME = b"__tvm_ffi__library_bin"
"""Where TVM's runtime looks for what a library carries beside its code."""

LARGE_BYTES = 1 << 30
"""x86-64's small code model reaches 2 GB of code and data; more is put behind both, where it is in nobody's way."""

_X86_64 = 62
_HEADER, _SECTION, _SYMBOL = "<16sHHIQQQIHHHHHH", "<IIQQQQIIQQ", "<IBBHQQ"
_PROGBITS, _SYMTAB, _STRTAB = 1, 2, 3
_ALLOC, _X86_64_LARGE = 0x2, 0x10000000


class NoElfError(Exception):
    """The library's code is no 64-bit ELF object: TVM is to write the weights its way."""


def write_weights_object(module: Any, is_system_lib: bool, prefix: str, directory: str) -> str:
    """What `tvm.runtime.Module.export_library` takes as `fpack_imports`; returns the path of the object file.

    Raises NoElfError where the code, which is in `directory` already, is of another format.
    """
    code = Path(directory, "lib0.o")
    if is_system_lib or prefix or not code.exists():
        raise NoElfError
    with code.open("rb") as file:
        start = file.read(64)
    if len(start) < 64 or not start.startswith(b"\x7fELF\x02\x01"):  # 64 bits, the least significant byte first
        raise NoElfError
    path = Path(directory, "devc.o")
    pack = tvm.get_global_func("runtime.ModulePackImportsToTensor")
    _write(path, np.from_dlpack(pack(module)), start)
    return str(path)


def _write(path: Path, data: Any, code_header: bytes) -> None:
    """One global symbol in one read-only section, for the machine and the flags of another object's header."""
    ident, _, machine, version, _, _, _, flags, *_ = struct.unpack(_HEADER, code_header)
    large = data.nbytes >= LARGE_BYTES and machine == _X86_64
    names = [b"", b".lrodata" if large else b".rodata", b".note.GNU-stack", b".symtab", b".strtab", NAME]
    strings = b"\0".join(names) + b"\0"
    name_at = [0, *(strings.index(b"\0" + name + b"\0") + 1 for name in names[1:])]
    symbols = bytes(24) + struct.pack(_SYMBOL, name_at[5], 0x11, 0, 1, 0, data.nbytes)  # a global object, section 1
    data_at = 64
    symbols_at = -(-(data_at + data.nbytes) // 8) * 8
    strings_at = symbols_at + len(symbols)
    sections_at = -(-(strings_at + len(strings)) // 8) * 8
    in_memory = _ALLOC | (_X86_64_LARGE if large else 0)
    sections = [
        bytes(64),
        struct.pack(_SECTION, name_at[1], _PROGBITS, in_memory, 0, data_at, data.nbytes, 0, 0, 64, 0),
        struct.pack(_SECTION, name_at[2], _PROGBITS, 0, 0, symbols_at, 0, 0, 0, 1, 0),  # its stack is no code
        struct.pack(_SECTION, name_at[3], _SYMTAB, 0, 0, symbols_at, len(symbols), 4, 1, 8, 24),
        struct.pack(_SECTION, name_at[4], _STRTAB, 0, 0, strings_at, len(strings), 0, 0, 1, 0),
    ]
    with path.open("wb") as file:
        file.write(struct.pack(_HEADER, ident, 1, machine, version, 0, 0, sections_at, flags, 64, 0, 0, 64, 5, 4))
        data.tofile(file)
        file.seek(symbols_at)
        file.write(symbols + strings)
        file.seek(sections_at)
        file.write(b"".join(sections))
