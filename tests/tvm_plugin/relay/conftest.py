"""Relay functions compiled by TVM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import tvm
from numpy.typing import NDArray
from tvm import relax

from eqtune import relay

Array = NDArray[Any]


TARGET = tvm.target.Target({"kind": "llvm", "opt-level": 0})
"""What operators compute is asked, which LLVM does not decide."""


def definition(name: str, body: str, inputs: tuple[Array, ...]) -> str:
    types = [
        f"Tensor[({', '.join(map(str, array.shape))}), {array.dtype}]" if array.shape else str(array.dtype)
        for array in inputs
    ]
    params = ", ".join(f"%{letter}: {ty}" for letter, ty in zip("abcdefgh", types, strict=False))
    return f"def @{name}({params}) {{ {body} }}\n"


@pytest.fixture(scope="session")
def convert_cases() -> Callable[..., tvm.IRModule]:
    """One module of functions case0, case1, ... from cases with `body` and `inputs`."""

    def convert_all(cases: Mapping[str, Any], metadata: str = "") -> tvm.IRModule:
        text = [definition(f"case{i}", case.body, case.inputs) for i, case in enumerate(cases.values())]
        return relay.from_text('#[version = "0.0.5"]\n' + "".join(text) + metadata)

    return convert_all


@pytest.fixture(scope="session")
def compile_cases(convert_cases: Callable[..., tvm.IRModule]) -> Callable[..., dict[str, Callable[..., Array]]]:
    """The same as functions of numpy arrays by name: the module is compiled once."""

    def compile_all(cases: Mapping[str, Any], metadata: str = "") -> dict[str, Callable[..., Array]]:
        machine = relax.VirtualMachine(tvm.compile(convert_cases(cases, metadata), TARGET), tvm.cpu())

        def runner(index: int) -> Callable[..., Array]:
            return lambda *inputs: machine[f"case{index}"](*map(tvm.runtime.tensor, inputs)).numpy()

        return {name: runner(index) for index, name in enumerate(cases)}

    return compile_all
