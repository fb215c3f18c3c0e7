"""The rules of the graph search: tables by subject. `rule.py` tells what a rule is and how to write one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from eqtune.errors import InputError

from .algebra import ALGEBRA_LAWS, ALGEBRA_RULES
from .attention import ATTENTION_RULES
from .blocked import BLOCKED_RULES
from .channels_last import CHANNELS_LAST_RULES
from .concat import CONCAT_LAWS, CONCAT_RULES
from .convolution import CONVOLUTION_LAWS, CONVOLUTION_RULES
from .kernels import KERNEL_LAWS, KERNEL_RULES
from .layout import LAYOUT_RULES
from .matmul import MATMUL_LAWS, MATMUL_RULES
from .pooling import POOLING_LAWS, POOLING_RULES
from .reduction import REDUCTION_RULES
from .rule import Group, Rule
from .winograd import WINOGRAD_RULES

__all__ = ["EXTENDED_RULES", "RULES", "Group", "Rule", "select"]

RULES: tuple[Rule | Group, ...] = (
    *MATMUL_RULES,
    *CONVOLUTION_RULES,
    *KERNEL_RULES,
    *WINOGRAD_RULES,
    *POOLING_RULES,
    *ATTENTION_RULES,
    *REDUCTION_RULES,
    *LAYOUT_RULES,
    *CONCAT_RULES,
    *ALGEBRA_RULES,
)
"""What the search uses unless told otherwise, in the order in which rules are reported."""

EXTENDED_RULES: tuple[Rule | Group, ...] = (
    *RULES,
    *CHANNELS_LAST_RULES,
    *BLOCKED_RULES,
    *MATMUL_LAWS,
    *CONVOLUTION_LAWS,
    *KERNEL_LAWS,
    *POOLING_LAWS,
    *CONCAT_LAWS,
    *ALGEBRA_LAWS,
)
"""Every rule. The additional ones are as right, but multiply terms: choose them by name, for small graphs or proofs."""


def select(names: Iterable[str] | None = None, *, fast_math: bool = False) -> tuple[Rule | Group, ...]:
    """The rules of these names in `EXTENDED_RULES`, or `RULES`; without `fast_math`, only the accurate ones of them.

    Raises InputError for an unknown name.
    """
    chosen = RULES
    if names is not None:
        wanted = set(names)
        unknown = wanted - {rule.name for rule in EXTENDED_RULES}
        if unknown:
            names = [rule.name for rule in EXTENDED_RULES]
            near = sorted({close for name in unknown for close in get_close_matches(name, names, 3, 0.4)})
            raise InputError(
                f"no rules named {sorted(unknown)} among the {len(names)} in EXTENDED_RULES"
                f"{f'; near: {near}' if near else ''}; `eqtune graph --list-rules` lists them"
            )
        chosen = tuple(rule for rule in EXTENDED_RULES if rule.name in wanted)
    return tuple(rule for rule in chosen if fast_math or not rule.fast_math)
