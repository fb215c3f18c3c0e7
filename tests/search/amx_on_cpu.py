"""Tile instructions in C, for machines without them: the functions of `eqtune.search.space.amx.code` by name."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import tvm_ffi
from tvm import tirx

from eqtune.search.space.amx.code import sum_name
from eqtune.search.space.amx.products import PRODUCTS

__all__ = ["load", "without_code"]

SHAPES = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (3, 1), (4, 1), (2, 2)]

COMMON = """
#include <stdint.h>
#include <string.h>
static union { int32_t i[16]; float f[16]; } sums[4][16];
static int height = -1;
void eqtune_amx_configure(int rows) { height = rows; }
void eqtune_amx_release(void) { height = -1; }
static float wide(uint16_t half) { uint32_t bits = (uint32_t)half << 16; float f; memcpy(&f, &bits, 4); return f; }
static uint16_t half_of(float f) {
  uint32_t bits; memcpy(&bits, &f, 4);
  return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
void eqtune_amx_split_row(float *p, float *q) {
  uint16_t hi[32], lo[32];
  for (int k = 0; k < 32; ++k) {
    float x = k < 16 ? p[k] : q[k - 16];
    hi[k] = half_of(x);
    lo[k] = half_of(x - wide(hi[k]));
  }
  memcpy(p, hi, 64);
  memcpy(q, lo, 64);
}
void eqtune_amx_split_panel(float *p, int tiles) {
  for (; tiles--; p += 512) for (int j = 0; j < 16; ++j) {
    uint16_t hi[32], lo[32];
    for (int k = 0; k < 32; ++k) { hi[k] = half_of(p[k * 16 + j]); lo[k] = half_of(p[k * 16 + j] - wide(hi[k])); }
    for (int k = 0; k < 16; ++k) {
      memcpy(p + k * 16 + j, hi + 2 * k, 4);
      memcpy(p + (16 + k) * 16 + j, lo + 2 * k, 4);
    }
  }
}
static int value(const char *p, int is_signed) { return is_signed ? *(const int8_t *)p : *(const uint8_t *)p; }
static void add(int t, const char *a, int step, const char *b, int kind, int a_signed, int b_signed) {
  for (int i = 0; i < height; ++i) for (int g = 0; g < 16; ++g) for (int j = 0; j < 16; ++j) {
    const char *x = a + i * step + 4 * g, *y = b + 64 * g + 4 * j;
    if (kind) for (int k = 0; k < 2; ++k) {
      uint16_t u, v; memcpy(&u, x + 2 * k, 2); memcpy(&v, y + 2 * k, 2);
      sums[t][i].f[j] += wide(u) * wide(v);
    } else for (int k = 0; k < 4; ++k) sums[t][i].i[j] += value(x + k, a_signed) * value(y + k, b_signed);
  }
}
"""


def load(directory: Path) -> None:
    """Compile them and let kernels of this process find them."""
    parts = [COMMON]
    for rows, columns in SHAPES:
        starts = "".join(f", char *r{row}" for row in range(rows))
        tiles = ", ".join(f"r{row}" for row in range(rows))
        parts.append(f"void eqtune_amx_zero_{rows}x{columns}(void) {{ memset(sums, 0, {rows * columns} * 1024); }}")
        parts.append(
            f"void eqtune_amx_store_{rows}x{columns}(int bytes, char *last{starts}) {{ char *r[] = {{{tiles}}};"
            f" for (int t = 0; t < {rows * columns}; ++t) for (int i = 0; i < height; ++i)"
            f" memcpy(r[t / {columns}] + i * bytes + 64 * (t % {columns}), sums[t][i].i, 64); }}"
        )
        for product in PRODUCTS:
            signs = int(product.left == "int8"), int(product.right == "int8")
            kind = int(product.sums == "float32")
            both = ((0, 0), (0, 1), (1, 0)) if product.halves else ((0, 0),)
            halves = "".join(f", char *h{row}" for row in range(rows)) if product.halves else ""
            all_tiles = f"{tiles}, {tiles.replace('r', 'h')}" if product.halves else tiles
            calls = "".join(
                f" add(t, r[t / {columns} + {rows * left}], step,"
                f" b + 1024 * ({product.parts} * (t % {columns}) + {right}), {kind}, {signs[0]}, {signs[1]});"
                for left, right in both
            )
            parts.append(
                f"void {sum_name(product, rows, columns)}(int step, char *b{starts}{halves}, char *x, char *y)"
                f" {{ char *r[] = {{{all_tiles}}}; for (int t = 0; t < {rows * columns}; ++t) {{{calls} }} }}"
            )
    source, library = directory / "amx.c", directory / "amx.so"
    source.write_text("\n".join(parts))
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def without_code(function: Any) -> Any:
    """The function without the LLVM code of AMX that it brings along: what it calls is looked for in the process."""

    def strip(attribute: Any) -> Any:
        emulated = attribute.attr_key == "pragma_import_llvm" and "llvm.x86" in attribute.value.value
        return attribute.body if emulated else attribute

    return function.with_body(tvm_ffi.structural_map(function.body, (tirx.AttrStmt, strip)))
