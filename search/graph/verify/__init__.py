"""Verification of rewrite rules, those of the library and a user's own: `verify_rule(rule)` gives a `Verdict`."""

from __future__ import annotations

from .verify import Counterexample, Verdict, instances_of, verify_rule

__all__ = ["Counterexample", "Verdict", "instances_of", "verify_rule"]
