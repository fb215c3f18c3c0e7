"""AMX as functions of LLVM, inlined into the kernels that call them.

Tile registers are used by number: 0 to 3 hold sums, 4 and 5 tiles of the left operand, 6 and 7 of the right one. LLVM
does not move such instructions across each other, or across stores.

Linux lets a process use tiles only after it asked (arch_prctl, ARCH_REQ_XCOMP_PERM). The kernel asks itself, once, so
that an exported library works wherever it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable

from .products import TILE_ROW_BYTES, TILE_ROWS, TileProduct

__all__ = [
    "CONFIGURE",
    "RELEASE",
    "SPLIT_PANEL",
    "SPLIT_ROW",
    "configuration_code",
    "split_code",
    "store_name",
    "sum_name",
    "tile_code",
    "zero_name",
]

LEFT, RIGHT, SLOTS = (4, 5), (6, 7), 8
"""Tile registers of the operands, and how many there are."""

HALF_PRODUCTS = (1, 0), (0, 0), (0, 1)
"""Which halves of the left and the right operand are multiplied: neighbours in this order share one of them."""

ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""Linux's number of the system call, ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA."""

CONFIGURE, RELEASE = "eqtune_amx_configure", "eqtune_amx_release"
"""Functions of nothing but the rows of sums (i32), and of nothing."""

SPLIT_ROW, SPLIT_PANEL = "eqtune_amx_split_row", "eqtune_amx_split_panel"
"""Functions that split floats in two bfloat16 each, in place: 32 of a row, of pointers to its first 16 and to the
others; and columns of 32 in so many (i32) tiles of 32 x 16, of a pointer."""


def zero_name(rows: int, columns: int) -> str:
    """The function that sets `rows` x `columns` tiles of sums to zero."""
    return f"eqtune_amx_zero_{rows}x{columns}"


def store_name(rows: int, columns: int) -> str:
    """The function that stores those tiles: of the bytes between rows (i32), the last element and each row of tiles."""
    return f"eqtune_amx_store_{rows}x{columns}"


def sum_name(product: TileProduct, rows: int, columns: int) -> str:
    """The function that adds products: of the bytes between rows of the left operand (i32), a pointer to the tiles of
    the right one, which follow each other, pointers to those of the left one, second halves after the first ones, and
    both buffers.
    """
    return f"eqtune_amx_{product.instruction}{'_halves' if product.halves else ''}_{rows}x{columns}"


def configuration_code() -> str:
    """A module with the functions that configure and release registers."""
    return _module(_configuration())


def tile_code(product: TileProduct, rows: int, columns: int) -> str:
    """A module with the functions for `rows` x `columns` tiles of sums."""
    return _module([_zero(rows, columns), _sum(product, rows, columns), _store(rows, columns)])


def split_code() -> str:
    """A module with the functions that split floats."""
    return _module([_split_row(), _split_panel()])


def _module(functions: Iterable[str]) -> str:
    return "\n".join([_DECLARATIONS, *functions, _ATTRIBUTES])


_DECLARATIONS = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8 immarg)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbusd(i8 immarg, i8 immarg, i8 immarg)
declare void @llvm.x86.tdpbsud(i8 immarg, i8 immarg, i8 immarg)
declare void @llvm.x86.tdpbssd(i8 immarg, i8 immarg, i8 immarg)
declare void @llvm.x86.tdpbuud(i8 immarg, i8 immarg, i8 immarg)
declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)
declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)
declare <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float>)
@eqtune_amx_permitted = internal global i8 0
"""

_ATTRIBUTES = """
attributes #0 = { alwaysinline nounwind
  "target-features"="+avx512f,+avx512bw,+avx512bf16,+amx-tile,+amx-int8,+amx-bf16" }
"""


def _function(name: str, parameters: str, body: Iterable[str]) -> str:
    return "\n".join([f"define void @{name}({parameters}) #0 {{", *(f"  {line}" for line in body), "  ret void", "}"])


def _configuration() -> list[str]:
    """Rows and bytes a row of all registers; asks for the permission when a flag says that nobody did."""
    ask = 'asm sideeffect "syscall", "={rax},{rax},{rdi},{rsi},~{rcx},~{r11},~{memory}"'
    heights = ", ".join(["i32 0"] * RIGHT[0] + [f"i32 {SLOTS}"] * len(RIGHT))
    configure = f"""
define void @{CONFIGURE}(i32 %rows) #0 {{
entry:
  %config = alloca [64 x i8], align 64
  %known = load i8, ptr @eqtune_amx_permitted
  %asked = icmp ne i8 %known, 0
  br i1 %asked, label %permitted, label %ask
ask:
  %answer = call i64 {ask}(i64 {ARCH_PRCTL}, i64 {REQUEST_PERMISSION}, i64 {TILE_DATA})
  store i8 1, ptr @eqtune_amx_permitted
  br label %permitted
permitted:
  store <16 x i32> zeroinitializer, ptr %config, align 64
  store i8 1, ptr %config
  %bytes = getelementptr i8, ptr %config, i64 16
  store <8 x i16> splat (i16 {TILE_ROW_BYTES}), ptr %bytes
  %heights = getelementptr i8, ptr %config, i64 48
  %height = trunc i32 %rows to i8
  %one = insertelement <8 x i8> poison, i8 %height, i32 0
  %all = shufflevector <8 x i8> %one, <8 x i8> splat (i8 {TILE_ROWS}), <8 x i32> <{heights}>
  store <8 x i8> %all, ptr %heights
  call void @llvm.x86.ldtilecfg(ptr %config)
  ret void
}}"""
    return [configure, _function(RELEASE, "", ["call void @llvm.x86.tilerelease()"])]


def _zero(rows: int, columns: int) -> str:
    body = [f"call void @llvm.x86.tilezero(i8 {tile})" for tile in range(rows * columns)]
    return _function(zero_name(rows, columns), "", body)


def _store(rows: int, columns: int) -> str:
    body = ["%step = zext i32 %bytes to i64"]
    for row in range(rows):
        for column in range(columns):
            tile = row * columns + column
            body.append(f"%p{tile} = getelementptr i8, ptr %row{row}, i64 {64 * column}")
            body.append(f"call void @llvm.x86.tilestored64(i8 {tile}, ptr %p{tile}, i64 %step)")
    parameters = ["i32 %bytes", "ptr %last", *(f"ptr %row{row}" for row in range(rows))]
    return _function(store_name(rows, columns), ", ".join(parameters), body)


def _sum(product: TileProduct, rows: int, columns: int) -> str:
    """Loads and products, in an order for which two registers an operand suffice."""
    lines = ["%step = zext i32 %step_bytes to i64"]
    loaded: dict[int, tuple[str, int, int]] = {}

    def load(register: int, side: str, number: int, part: int) -> None:
        if loaded.get(register) == (side, number, part):
            return
        loaded[register] = (side, number, part)
        name = f"%t{len(lines)}"
        if side == "left":
            start, offset, step = f"%row{number}_{part}", "0", "%step"
        else:
            tile_bytes = TILE_ROWS * TILE_ROW_BYTES
            start, offset, step = "%right", str(tile_bytes * (number * product.parts + part)), str(TILE_ROW_BYTES)
        lines.append(f"{name} = getelementptr i8, ptr {start}, i64 {offset}")
        lines.append(f"call void @llvm.x86.tileloadd64(i8 {register}, ptr {name}, i64 {step})")

    def multiply(row: int, column: int, left: int, right: int) -> None:
        sums = row * columns + column
        lines.append(f"call void @llvm.x86.{product.instruction}(i8 {sums}, i8 {left}, i8 {right})")

    if product.halves and max(rows, columns) > 2:  # one row or column of tiles: both halves of its operand stay
        for row in range(rows):
            for column in range(columns):
                for part in (0, 1):
                    load(LEFT[part], "left", row, part)
                    load(RIGHT[part], "right", column, part)
                for left, right in HALF_PRODUCTS:
                    multiply(row, column, LEFT[left], RIGHT[right])
    else:
        for left_part, right_part in HALF_PRODUCTS if product.halves else ((0, 0),):
            for row in range(rows):
                for column in range(columns):
                    load(LEFT[row % 2], "left", row, left_part)
                    load(RIGHT[column % 2], "right", column, right_part)
                    multiply(row, column, LEFT[row % 2], RIGHT[column % 2])
    starts = [f"ptr %row{row}_{part}" for part in range(product.parts) for row in range(rows)]
    parameters = ["i32 %step_bytes", "ptr %right", *starts, "ptr", "ptr"]
    return _function(sum_name(product, rows, columns), ", ".join(parameters), lines)


def _split_row() -> str:
    """32 floats: the first halves of all, then the second ones."""
    pair = "call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    body = [
        "%a = load <16 x float>, ptr %p, align 4",
        "%b = load <16 x float>, ptr %q, align 4",
        f"%hi = {pair}(<16 x float> %b, <16 x float> %a)",
        "%bits = bitcast <32 x bfloat> %hi to <32 x i16>",
    ]
    for name, first in (("a", 0), ("b", 16)):
        places = ", ".join(f"i32 {first + lane}" for lane in range(16))
        body += [
            f"%{name}0 = shufflevector <32 x i16> %bits, <32 x i16> poison, <16 x i32> <{places}>",
            *_rest(name, f"%{name}0"),
        ]
    body += [
        f"%lo = {pair}(<16 x float> %b_rest, <16 x float> %a_rest)",
        "store <32 x bfloat> %hi, ptr %p, align 4",
        "store <32 x bfloat> %lo, ptr %q, align 4",
    ]
    return _function(SPLIT_ROW, "ptr %p, ptr %q", body)


def _rest(name: str, half: str) -> list[str]:
    """What the first half of `%name`, 16 bits each, leaves: `%name_rest`."""
    return [
        f"%{name}1 = zext <16 x i16> {half} to <16 x i32>",
        f"%{name}2 = shl <16 x i32> %{name}1, {_all(16)}",
        f"%{name}3 = bitcast <16 x i32> %{name}2 to <16 x float>",
        f"%{name}_rest = fsub <16 x float> %{name}, %{name}3",
    ]


def _split_panel() -> str:
    """Columns of 32 floats: pairs of first halves as 16 rows of words, then pairs of second ones."""
    convert = "call <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512"
    lines = []
    for row in range(32):
        name = f"r{row}_"
        lines += [
            f"%p{row} = getelementptr i8, ptr %tile, i64 {TILE_ROW_BYTES * row}",
            f"%{name} = load <16 x float>, ptr %p{row}, align 4",
            f"%{name}h = {convert}(<16 x float> %{name})",
            f"%{name}0 = bitcast <16 x bfloat> %{name}h to <16 x i16>",
            *_rest(name, f"%{name}0"),
            f"%{name}l = {convert}(<16 x float> %{name}_rest)",
            f"%{name}4 = bitcast <16 x bfloat> %{name}l to <16 x i16>",
            f"%{name}5 = zext <16 x i16> %{name}4 to <16 x i32>",
        ]
    for pair in range(TILE_ROWS):
        even, odd = f"%r{2 * pair}_", f"%r{2 * pair + 1}_"
        lines += [
            f"%h{pair} = or <16 x i32> {even}1, {odd}2",
            f"%s{pair} = shl <16 x i32> {odd}5, {_all(16)}",
            f"%l{pair} = or <16 x i32> {even}5, %s{pair}",
            f"store <16 x i32> %h{pair}, ptr %p{pair}, align 4",
            f"store <16 x i32> %l{pair}, ptr %p{pair + TILE_ROWS}, align 4",
        ]
    body = "\n".join(f"  {line}" for line in lines)
    return f"""
define void @{SPLIT_PANEL}(ptr %panel, i32 %count) #0 {{
entry:
  br label %loop
loop:
  %i = phi i32 [ 0, %entry ], [ %next, %loop ]
  %tile = phi ptr [ %panel, %entry ], [ %after, %loop ]
{body}
  %after = getelementptr i8, ptr %tile, i64 {2 * TILE_ROWS * TILE_ROW_BYTES}
  %next = add i32 %i, 1
  %more = icmp ult i32 %next, %count
  br i1 %more, label %loop, label %end
end:
  ret void
}}"""


def _all(value: int) -> str:
    return f"<{', '.join([f'i32 {value}'] * 16)}>"
