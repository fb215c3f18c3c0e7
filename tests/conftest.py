"""What all tests share."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
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


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """Before a fixture is made, see `_in_one_environment`."""
    _in_one_environment()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    """Before a test is called, see `_in_one_environment`."""
    _in_one_environment()


def _in_one_environment() -> None:
    """Take back that pytest tells processes which test they belong to: the process that forks workers serves who
    measures next only where the environment is the same, and starting one takes seconds."""
    os.environ["PYTEST_CURRENT_TEST"] = "any"


class _AnyCallable:
    """In the place of `typing.Callable` in annotations, of which nothing is remembered."""

    def __getitem__(self, _: Any) -> _AnyCallable:
        return self

    def __instancecheck__(self, value: Any) -> bool:
        return callable(value)


@pytest.fixture(scope="session", autouse=True)
def _composites_are_found_once() -> Iterator[None]:
    """Whenever PyTorch decomposes a program, it asks all operators whether they are composites, and makes twenty
    functions with annotations for each that is: half of what it takes to import a small module."""
    programs, operators = (sys.modules.get(f"torch.{name}") for name in ("export.exported_program", "_ops"))
    find: Any = getattr(programs, "_collect_all_valid_cia_ops", None)
    with pytest.MonkeyPatch.context() as patch:
        if operators and find:
            torch, known = sys.modules["torch"], {}

            def found() -> Any:
                registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
                key = (*torch.ops._dir, *registered)
                if key not in known:
                    known.clear()
                    known[key] = find()
                return known[key]

            patch.setattr(programs, "_collect_all_valid_cia_ops", found)
            patch.setattr(operators, "Callable", _AnyCallable())
        yield


@pytest.fixture(autouse=True)
def _nobody_waits_for_quiet_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other tests, no core is at full speed for long. Tuning would wait for that, so that its times are exact:
    only tests of measuring, and those that run alone, ask for it."""
    if request.node.get_closest_marker("alone") or request.path.parent.name == "measure":
        return
    session, local = (sys.modules.get(f"eqtune.{name}") for name in ("tune.session", "measure.local"))
    if session is not None:
        monkeypatch.setattr(session, "TIMING_S", 0.3)
        monkeypatch.setattr(session.Session, "may_settle", False)
    if local is not None:
        monkeypatch.setattr(local, "PATIENCE", 0.0)
        monkeypatch.setattr(local, "RETIME_PATIENCE", 1)


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
