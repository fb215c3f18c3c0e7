"""The rules of the graph search: tables by subject. `rule.py` tells what a rule is and how to write one."""

from __future__ import annotations

from collections.abc import Iterable

from eqtune.errors import InputError

from .concat import CONCAT_RULES
from .convolution import CONVOLUTION_RULES
from .layout import LAYOUT_RULES
from .matmul import MATMUL_RULES
from .rule import Group, Rule

__all__ = ["RULES", "Group", "Rule", "select"]

RULES: tuple[Rule | Group, ...] = (*MATMUL_RULES, *CONVOLUTION_RULES, *LAYOUT_RULES, *CONCAT_RULES)
"""Every rule, in the order in which they are reported."""


def select(names: Iterable[str] | None = None, *, fast_math: bool = False) -> tuple[Rule | Group, ...]:
    """The rules of these names, or all; without `fast_math`, only those that keep floating-point accuracy.

    Raises InputError for an unknown name.
    """
    chosen = RULES
    if names is not None:
        wanted = set(names)
        unknown = wanted - {rule.name for rule in RULES}
        if unknown:
            raise InputError(f"no rules named {sorted(unknown)}; there are {[rule.name for rule in RULES]}")
        chosen = tuple(rule for rule in RULES if rule.name in wanted)
    return tuple(rule for rule in chosen if fast_math or not rule.fast_math)
