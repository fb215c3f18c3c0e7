"""What all tests share."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
import tvm
from hypothesis import settings

# A shell starts what runs in its background with Ctrl-C ignored, which processes inherit; tests send it to theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: a test that fails, fails for everyone.
settings.register_profile("eqtune", derandomize=True, deadline=None)
settings.load_profile("eqtune")


def pytest_collection_finish() -> None:
    """What tests import stays: looking through it for garbage, again and again, was a twelfth of their time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def _kernels_as_they_are_measured() -> Iterator[None]:
    """What a test compiles itself does not check its arguments, as candidates and models do not: half of small kernels'
    code would be checks, and half of the time that LLVM takes for them."""
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}):
        yield
