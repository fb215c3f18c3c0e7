"""The command that a report prints does again what was done."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import pytest

from eqtune.cli import build_parser
from eqtune.cli.options import parse_shapes, parse_sizes, parse_target, search_arguments
from eqtune.tune.session import Settings
from eqtune.tune.summarize import command_line

CORTEX = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72", "num-cores": 4}


@pytest.mark.parametrize("fast_math", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(target=CORTEX, measure="rpc://127.0.0.1:9190/board", time_budget_s=300.0),
        Settings(target="nvidia/nvidia-h100", measure="compile-only", trials=64, threads=3, seed=7),
        Settings(strategy="annealing", cost_model="random", allocator="round-robin", work_dir="a folder"),
    ],
)
def test_the_command_means_the_same_settings(settings: Settings, fast_math: bool) -> None:
    given = {"shapes": {"x": (1, 3), "n": (2,)}, "function": "forward", "sizes": {"places": 5}}
    text = command_line("a model.onnx", settings, "off", fast_math, verify=fast_math, **given)  # type: ignore[arg-type]
    program, *words = shlex.split(text)
    assert program == "eqtune"
    args = build_parser().parse_args(words)
    assert (args.model, args.graph, args.fast_math) == ("a model.onnx", "off", fast_math)
    assert args.no_verify == (not fast_math)
    said = {"shapes": parse_shapes(args.shape), "function": args.function, "sizes": parse_sizes(args.size)}
    assert said == given
    assert Settings(**search_arguments(args)) == settings


def test_a_target_object_becomes_json() -> None:
    import tvm

    text = command_line("m.onnx", Settings(target=tvm.target.Target(CORTEX)), "saturate")
    words = shlex.split(text)
    again = parse_target(words[words.index("--target") + 1])
    assert str(tvm.target.Target(again)) == str(tvm.target.Target(CORTEX))


@pytest.mark.parametrize("unsayable", [{"measure": SimpleNamespace()}, {"strategy": SimpleNamespace()}])
def test_what_the_command_line_cannot_say_gives_no_command(unsayable: dict[str, object]) -> None:
    assert command_line("m.onnx", Settings(**unsayable), "saturate") == ""  # type: ignore[arg-type]
    assert command_line("m.onnx", Settings(), "saturate", params={"w": 1}) == ""
    assert command_line(object(), Settings(), "saturate") == ""
