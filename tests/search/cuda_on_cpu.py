"""Runs the CUDA that TVM writes on the CPU: barriers, asynchronous copies, shuffles and WMMA fragments included.

`gpu_on_cpu.py` checks what a schedule computes before it is lowered; this checks what is compiled for the GPU.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np
import tvm_ffi
from tvm import tirx

from eqtune.measure.cuda_code import cuda_source
from eqtune.search.space.lowering import prepare_for_lowering

HEADER = Path(__file__).parent / "cuda_on_cpu.h"
SCRATCH_BYTES = 1 << 22
FENCE_BYTES = 1 << 14

_SIGNATURE = re.compile(r'extern "C" __global__ void __launch_bounds__\(\d+[^)]*\) (\w+)\(([^)]*)\) \{')
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


def run(schedule, target, arguments, directory, change=lambda source: source):
    """The last of `arguments` after the kernels of a schedule ran on them: thread 0 first, and thread 0 last.

    `change` may edit the CUDA source.
    """
    function = prepare_for_lowering(schedule.mod["main"])
    source = change(cuda_source({"k": function}, target))
    library = ctypes.CDLL(str(_compile(_as_cpp(source, _launches(function)), directory)))
    names = [str(parameter.name) for parameter in function.params]
    given = {f"{name}_ptr": _Fenced(a) for name, a in zip(names, arguments, strict=True)}
    output = given[f"{names[-1]}_ptr"].array
    results = []
    for backwards in (0, 1):
        output[...] = np.nan if output.dtype.kind == "f" else np.iinfo(output.dtype).max
        scratch = np.full(SCRATCH_BYTES, 0xFF, np.uint8)
        held = [given.setdefault(name, _Fenced(scratch)) for name in _buffers(source)]
        library.run((ctypes.c_void_p * len(held))(*(a.array.ctypes.data for a in held)), backwards)
        broken = [name for name, buffer in given.items() if buffer.broken()]
        assert not broken, f"written out of bounds: {broken}"
        results.append(output.copy())
    return results


class _Fenced:
    """A copy of an array between bytes that nobody may change."""

    def __init__(self, array):
        self._bytes = np.full(array.nbytes + 2 * FENCE_BYTES, 0xA5, np.uint8)
        self.array = self._bytes[FENCE_BYTES : FENCE_BYTES + array.nbytes].view(array.dtype).reshape(array.shape)
        self.array[...] = array

    def broken(self):
        return bool((self._bytes[:FENCE_BYTES] != 0xA5).any() or (self._bytes[-FENCE_BYTES:] != 0xA5).any())


def _launches(function):
    """Extents of blockIdx and threadIdx of each kernel, in order: x, y, z of both."""
    body = function.body.block.body
    axes = [f"{index}Idx.{axis}" for index in ("block", "thread") for axis in "xyz"]
    found = []
    for nest in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        extents = {}

        def visit(loop, extents=extents):
            if loop.thread_binding is not None:
                extents[str(loop.thread_binding.thread_tag)] = int(loop.extent)

        tvm_ffi.structural_walk(nest, (tirx.For, visit))
        found.append([extents.get(axis, 1) for axis in axes])
    return found


def _buffers(source):
    """Names of all pointers that kernels take, each once."""
    return list(
        dict.fromkeys(name for _, parameters in _SIGNATURE.findall(source) for name, _ in _pointers(parameters))
    )


def _pointers(parameters):
    found = [part.strip().rpartition(" ") for part in parameters.split(",")]
    return [(name, kind.replace("__restrict__", "").strip()) for kind, _, name in found]


def _as_cpp(source, launches):
    kernels = source[source.index('extern "C" __global__') :]
    kernels = kernels.replace("extern __shared__ __align__(64) uchar", "extern uchar")
    kernels = re.sub(r"__shared__ (alignas\(\d+\))?", r"\1 static ", kernels)
    parts = [f'#include "{HEADER}"']
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
    kernels = re.sub(r"\w*cp_async_commit_group\w*\(\)", "machine::commit()", kernels)
    buffers = _buffers(source)
    parts += [
        kernels,
        "static void** given;",
        'extern "C" void run(void** arguments, int backwards) { given = arguments;',
    ]
    signatures = _SIGNATURE.findall(source)
    assert len(signatures) == len(launches), (signatures, launches)
    for (name, parameters), extents in zip(signatures, launches, strict=True):
        passed = ", ".join(f"({kind})given[{buffers.index(p)}]" for p, kind in _pointers(parameters))
        bx, by, bz, tx, ty, tz = extents
        launch = (
            f"machine::launch({{{bx}, {by}, {bz}}}, {{{tx}, {ty}, {tz}}}, backwards, []() {{ {name}({passed}); }});"
        )
        parts.append(launch)
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


def _compile(text, directory):
    file, library = directory / "k.cpp", directory / f"k{len(list(directory.iterdir()))}.so"
    file.write_text(text)
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fno-strict-aliasing"]
    done = subprocess.run(["g++", *flags, "-o", str(library), str(file)], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[:2000]
    return library
