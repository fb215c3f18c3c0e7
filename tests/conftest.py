"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# The same examples in every run: a test that fails, fails for everyone.
settings.register_profile("eqtune", derandomize=True, deadline=None)
settings.load_profile("eqtune")
