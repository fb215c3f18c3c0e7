"""Runs the CUDA that TVM writes on the CPU: barriers, asynchronous copies, shuffles and WMMA fragments included.

`gpu_on_cpu.py` checks what a schedule computes before it is lowered; this checks what is compiled for the GPU.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, tirx

from eqtune.measure.cuda.code import CONFIG
from eqtune.search.space.lowering import prepare_for_lowering

HEADER = Path(__file__).parent / "cuda_on_cpu.h"
FLAGS = ["-std=c++17", "-O1", "-w", "-fPIC", "-fno-strict-aliasing"]
FENCE_BYTES = 1 << 14
AXES = [f"{index}Idx.{axis}" for index in ("block", "thread") for axis in "xyz"]

_SIGNATURE = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\(\d+[^)]*\) )?(\w+)\(([^)]*)\) \{')
_COPY = re.compile(r"ptx_cp_async_legacy_(pred_)?c[ag]_(\d+)_(\d+)_(\d+)")
_LDMATRIX = re.compile(
    r"unsigned int addr = __cvta_generic_to_shared\((.*)\);\s*__asm__ __volatile__\(\s*"
    r'"ldmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?\.shared\.b16"[^:]*:([^;]*?)\);'
)
_MMA = re.compile(
    r'__asm__ __volatile__\(\s*"mma\.sync\.aligned\.m16n8k\d+\.row\.col\.(\w+)\.(\w+)\.\w+\.\w+"[^:]*:([^;]*?)\);'
)
_WARPGROUPS = re.compile(r"eqtune_wgmma_(float16|bfloat16|int8|uint8)_(\w+?)_(\d+)_(\d)(\d)")
_WARPGROUP_WAIT = re.compile(r"eqtune_wait_wgmma_(\w+?)_\d+_\d+")
_VECTOR = re.compile(r"\*\((\w+[248])\*\)\(")
_C_TYPES = {
    "float16": "half",
    "bfloat16": "nv_bfloat16",
    "float32": "float",
    "int32": "int",
    "int8": "signed char",
    "uint8": "uchar",
}
_PTX_TYPES = {"f16": "half", "bf16": "nv_bfloat16", "tf32": "machine::tf32", "s8": "signed char", "u8": "uchar"}
_PTX_SUMS = {"f16": "half", "f32": "float", "s32": "int"}
_WAIT = re.compile(r"\w*cp_async_wait_group\w*_(\d+)\(\)")


@dataclass(frozen=True)
class Launch:
    """A call of a kernel: places of its buffers, extents of blockIdx and threadIdx, dynamic shared memory in bytes."""

    kernel: str
    buffers: list[int]
    extents: list[int]
    shared_bytes: int


def run(schedule, target, arguments, directory, change=lambda source: source):
    """The last of `arguments` after the kernels of a schedule ran on them: thread 0 first, and thread 0 last.

    `change` may edit the CUDA source.
    """
    return [results[-1] for results in run_all(schedule, target, arguments, directory, 1, change)]


def run_all(schedule, target, arguments, directory, outputs, change=lambda source: source):
    """As `run`; the last `outputs` arguments each time."""
    source, launches, scratch = _compiled(prepare_for_lowering(schedule.mod["main"]), target)
    library = ctypes.CDLL(str(_compile(_as_cpp(change(source), launches), directory)))
    results = []
    for backwards in (0, 1):
        held = [_Fenced(a) for a in arguments]
        for output in held[-outputs:]:
            output.forget()
        held += [_Fenced(np.full(size, 0xFF, np.uint8)) for size in scratch]
        library.run((ctypes.c_void_p * len(held))(*(a.array.ctypes.data for a in held)), backwards)
        broken = [place for place, buffer in enumerate(held) if buffer.broken()]
        assert not broken, f"written out of bounds: {broken}"
        results.append([output.array.copy() for output in held[len(arguments) - outputs : len(arguments)]])
    return results


class _Fenced:
    """A copy of an array between bytes that nobody may change."""

    def __init__(self, array):
        self._bytes = np.full(array.nbytes + 2 * FENCE_BYTES, 0xA5, np.uint8)
        self.array = self._bytes[FENCE_BYTES : FENCE_BYTES + array.nbytes].view(array.dtype).reshape(array.shape)
        self.array[...] = array

    def forget(self):
        """What no kernel computes: not a number, or a large one."""
        self._bytes[FENCE_BYTES:-FENCE_BYTES] = 0x7F if self.array.dtype.kind in "iub" else 0xFF

    def broken(self):
        return bool((self._bytes[:FENCE_BYTES] != 0xA5).any() or (self._bytes[-FENCE_BYTES:] != 0xA5).any())


def _compiled(function, target):
    """The CUDA source of a scheduled PrimFunc, what launches its kernels, and bytes of each buffer between them.

    Places of buffers: the arguments come first, then what lies between kernels.
    """
    host = []

    @ir.instrument.pass_instrument
    class Watch:
        def run_after_pass(self, mod, info):
            if info.name == "tirx.SplitHostDevice":
                host.append(mod["k"])

    mod = tvm.IRModule({"k": function.with_attr("global_symbol", "k")})
    with target, tvm.transform.PassContext(opt_level=3, config=CONFIG, instruments=[Watch()]):
        library = tvm.compile(mod, target)
    (calls,) = host
    places = {parameter: place for place, parameter in enumerate(calls.params)}
    scratch, launches = [], []

    def allocate(statement):
        places[statement.buffer] = len(places)
        item = tvm_ffi.dtype(str(statement.buffer.dtype)).itemsize
        scratch.append(math.prod(int(extent) for extent in statement.buffer.shape) * item)

    def view(statement):
        places[statement.buffer] = places[statement.data.args[0]]

    def launch(statement):
        kernel, *rest = statement.value.args
        axes = [str(axis) for axis in statement.value.attrs.launch_params]
        extents = dict(zip(axes, map(int, rest[-len(axes) :]), strict=True))
        buffers = [places[pointer.args[0]] for pointer in rest[: -len(axes)]]
        shared = extents.get("tirx.use_dyn_shared_memory", 0)
        launches.append(Launch(str(kernel.value), buffers, [extents.get(axis, 1) for axis in AXES], shared))

    visits = [(tirx.AllocBuffer, allocate), (tirx.DeclBuffer, view), (tirx.Evaluate, launch)]
    tvm_ffi.structural_walk(calls.body, visits, order="pre")
    return "\n".join(str(module.inspect_source()) for module in library.mod.imports), launches, scratch


def _as_cpp(source, launches):
    kernels = source[source.index('extern "C" __global__') :]
    kernels = kernels.replace("extern __shared__ __align__(64) uchar", "extern uchar")
    kernels = re.sub(r"__shared__ (alignas\(\d+\))?", r"SHARED \1 static ", kernels)
    parts = [f'#include "{_machine() / HEADER.name}"']
    for name, predicated, size, to_bytes, from_bytes in {(m.group(), *m.groups()) for m in _COPY.finditer(kernels)}:
        last, zero = (", bool p", f"if (!p) {{ std::memset(t, 0, {size}); return; }}") if predicated else ("", "")
        parts.append(
            f"inline void {name}(void* to, int i, const void* from, int j{last})"
            f" {{ char* t = (char*)to + {to_bytes} * i;"
            f" {zero} machine::copy_later(t, (const char*)from + {from_bytes} * j, {size}); }}"
        )
    for name, dtype, sums, width, *along in {(m.group(), *m.groups()) for m in _WARPGROUPS.finditer(kernels)}:
        factor, sum_ = _C_TYPES[dtype], _C_TYPES[sums]
        issue = f"machine::issue_lines<{factor}, {sum_}, {width}, {', '.join(along)}>"
        parts.append(
            f"inline void {name}({sum_}* d, int place, const void* a, const void* b) {{ {issue}(d + place, a, b); }}"
        )
    for name, sums in {(m.group(), m.group(1)) for m in _WARPGROUP_WAIT.finditer(kernels)}:
        parts.append(f"inline void {name}({_C_TYPES[sums]}*) {{ machine::finish(); }}")
    kernels = _LDMATRIX.sub(_load_matrices, kernels)
    kernels = _MMA.sub(_multiply, kernels)
    kernels = _WAIT.sub(r"machine::wait(\1)", kernels)
    kernels = _VECTOR.sub(r"machine::aligned<\1>(", kernels)
    kernels = re.sub(r"\w*cp_async_commit_group\w*\(\)", "machine::commit()", kernels)
    parts += [kernels, 'extern "C" void run(void** given, int backwards_) {', "held = given, backwards = backwards_;"]
    signatures = dict(_SIGNATURE.findall(source))
    for launch in launches:
        types = [part.rpartition(" ")[0].replace("__restrict__", "") for part in signatures[launch.kernel].split(", ")]
        passed = ", ".join(f"({kind})held[{place}]" for kind, place in zip(types, launch.buffers, strict=True))
        bx, by, bz, tx, ty, tz = launch.extents
        shape = f"{{{bx}, {by}, {bz}}}, {{{tx}, {ty}, {tz}}}, {launch.shared_bytes}"
        parts.append(f"machine::launch({shape}, []() {{ {launch.kernel}({passed}); }});")
    return "\n".join([*parts, "}"])


def _load_matrices(match):
    row, transposed, operands = match.groups()
    return f"machine::load_matrices({_registers(operands)[0]}, {row}, {int(bool(transposed))});"


def _multiply(match):
    sums, dtype, operands = match.groups()
    d, a, b, c = _registers(operands)
    pointer = f"({_PTX_SUMS[sums]}*)"
    return f"machine::multiply<{_PTX_TYPES[dtype]}>({pointer}{d}, {a}, {b}, {pointer}{c});"


def _registers(operands):
    """What an instruction's runs of registers begin at."""
    parts = re.split(r'"=?[rf]"', operands)
    return [part.strip().rstrip(", :").strip()[1:-4] for part in parts if ")[0])" in part]


@functools.cache
def _machine():
    """A folder with the header, compiled too: most kernels would take g++ less time than to read it."""
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory)
    header = shutil.copy(HEADER, directory)
    _call_compiler("-x", "c++-header", header, "-o", f"{header}.gch")
    _call_compiler("-c", shutil.copy(HEADER.with_suffix(".cpp"), directory), "-o", str(directory / "machine.o"))
    return directory


def _compile(text, directory):
    file, library = directory / "k.cpp", directory / f"k{len(list(directory.iterdir()))}.so"
    file.write_text(text)
    _call_compiler("-shared", "-o", str(library), str(file), str(_machine() / "machine.o"))
    return library


def _call_compiler(*arguments):
    done = subprocess.run(["g++", *FLAGS, *arguments], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[:2000]
