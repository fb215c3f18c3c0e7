"""Names of blocks, by which schedules find them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import s_tir

from ..search.space.statements import block_with

__all__ = ["rename_blocks"]


def rename_blocks(statement: Any, new_name: Callable[[str], str]) -> Any:
    """The statement with `new_name(name)` as the name of each of its blocks."""

    def rename(block: s_tir.SBlock) -> s_tir.SBlock:
        name = str(block.name_hint)
        if new_name(name) == name:
            return block
        return block_with(block, name_hint=new_name(name))

    return tvm_ffi.structural_map(statement, (s_tir.SBlock, rename))
