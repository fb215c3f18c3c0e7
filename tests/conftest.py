"""What all tests share."""

from __future__ import annotations

import signal

from hypothesis import settings

# A shell starts what runs in its background with Ctrl-C ignored, which processes inherit; tests send it to theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: a test that fails, fails for everyone.
settings.register_profile("eqtune", derandomize=True, deadline=None)
settings.load_profile("eqtune")
