"""What all tests share."""

from __future__ import annotations

import gc
import importlib
import signal
from collections.abc import Iterator
from typing import Any

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


@pytest.fixture(autouse=True)
def _code_as_it_is_written(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests marked `unoptimised`, LLVM leaves what TVM wrote as it is: a third to half of the time it takes."""
    if request.node.get_closest_marker("unoptimised") is None:
        return
    build = importlib.import_module("tvm.tirx.build")
    optimised = build.codegen_build

    def unoptimised(mod: Any, target: Any) -> Any:
        if target.kind.name == "llvm":
            target = tvm.target.Target({**target.export(), "opt-level": 0})
        return optimised(mod, target)

    monkeypatch.setattr(build, "codegen_build", unoptimised)
