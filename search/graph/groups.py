"""Groups: which of their members are merged together, and the keys of the rules that merge them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from .compile_rule import CompiledRule, Key

__all__ = ["group_key", "subsets"]

SUBSETS_UP_TO = 3
"""Groups of up to this many members are merged in all their subsets, larger ones only as a whole..."""

MOST = 64
"""... or so many at a time: egglog takes 2.5 s to read the rule of 200 members, and the cube of that for more."""


def subsets(members: list[Key]) -> Iterator[list[Key]]:
    """All subsets of two or more of a few members; many members only as a whole, hundreds in runs of equal length."""
    if len(members) > SUBSETS_UP_TO:
        runs = -(-len(members) // MOST)
        length = -(-len(members) // runs)
        yield from (members[start : start + length] for start in range(0, len(members) - 1, length))
    else:
        for count in range(2, len(members) + 1):
            yield from map(list, combinations(members, count))


def group_key(rule: CompiledRule, member: CompiledRule, keys: Sequence[Key]) -> Key:
    """The key of a group's rule from those of its members: a name is shared, or ends in the member's place."""
    operators = len(member.rule.before_nodes)
    numbers = [member.numbers(key) for key in keys]

    def number(name: str) -> int:
        if name[1:].isdigit():
            return numbers[int(name[1:])]["#0"]
        if name in numbers[0]:
            return numbers[0][name]
        stem = name.rstrip("0123456789")
        return numbers[int(name[len(stem) :]) - 1][stem]

    return (*(form for key in keys for form in key[:operators]), *map(number, rule.numbered))
