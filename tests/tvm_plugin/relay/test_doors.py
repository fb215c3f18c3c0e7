"""Relay programs through the doors that every model takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm

import eqtune
from eqtune.cli import main
from eqtune.frontends import load_model
from eqtune.tasks import extract_tasks, lower_to_kernels
from eqtune.transform.simplify import simplify

TEXT = """#[version = "0.0.5"]
def @main(%x: Tensor[(16, 64), float32], %w: Tensor[(64, 64), float32]) -> Tensor[(16, 64), float32] {
  nn.relu(nn.dense(%x, %w, units=64))
}
"""
WEIGHT = np.random.default_rng(0).standard_normal((64, 64)).astype("float32")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    program, params = tmp_path / "layer.relay", tmp_path / "layer.params"
    program.write_text(TEXT)
    params.write_bytes(tvm.runtime.save_param_dict({"w": tvm.runtime.tensor(WEIGHT)}))
    return program, params


def test_a_file_and_its_text_are_loaded_alike(files: tuple[Path, Path]) -> None:
    printed = TEXT.partition("\n")[2]  # by print(mod), which leaves out the version line
    for model, name in ((TEXT, "relay"), (printed, "relay"), (files[0], "layer"), (str(files[0]), "layer")):
        loaded = load_model(model, params={"w": WEIGHT})
        assert (loaded.name, loaded.source) == (name, "relay")
        assert [info.name for info in loaded.inputs] == ["x"]


def test_a_byte_order_mark_is_no_part_of_the_program(tmp_path: Path) -> None:
    """Editors on Windows write one; it was refused as a character that starts nothing in Relay."""
    program = tmp_path / "layer.relay"
    program.write_text(TEXT, encoding="utf-8-sig")
    tvm.ir.assert_structural_equal(load_model(program).mod, load_model(TEXT).mod)


def test_shapes_fill_in_what_the_program_leaves_open() -> None:
    loaded = load_model(TEXT.replace("(16, 64)", "(?, 64)"), params={"w": WEIGHT}, shapes={"x": (3, 64)})
    assert loaded.inputs[0].shape == (3, 64)


def test_kernels_are_those_of_the_same_model_from_pytorch() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)).eval()
    text = """#[version = "0.0.5"]
    def @main(%x: Tensor[(1, 8, 32), float32],
              %v0.weight: Tensor[(64, 32), float32], %v0.bias: Tensor[(64), float32],
              %v2.weight: Tensor[(32, 64), float32], %v2.bias: Tensor[(32), float32]) {
      %0 = reshape(%x, newshape=[-1, 32]);
      %1 = reshape(nn.dense(%0, %v0.weight, units=64), newshape=[1, 8, 64]);
      %2 = add(%1, %v0.bias);
      %3 = multiply(%2, add(0.5f, multiply(erf(multiply(%2, 0.707106781f)), 0.5f)));
      %4 = reshape(nn.dense(reshape(%3, newshape=[-1, 64]), %v2.weight, units=32), newshape=[1, 8, 32]);
      add(%4, %v2.bias)
    }"""
    params = {f"v{name}": tensor.numpy() for name, tensor in module.state_dict().items()}
    kernels = []
    models = (
        load_model(text, params=params),
        load_model(module, example_inputs=[torch.zeros(1, 8, 32)]),
    )
    for model in models:
        lowered = lower_to_kernels(simplify(model.mod), tvm.target.Target("llvm"))
        kernels.append({task.workload_hash for task in extract_tasks(lowered)})
    assert len(kernels[0]) == 2
    assert kernels[0] == kernels[1]


@pytest.mark.slow
def test_tune_model_takes_relay_text(tmp_path: Path) -> None:
    result = eqtune.tune_model(
        TEXT, params={"w": WEIGHT}, trials=4, work_dir=tmp_path / "work", graph="off", threads=1, progress=False
    )
    data = np.random.default_rng(1).standard_normal((16, 64)).astype("float32")
    output = result.run(data)
    actual = output[0] if isinstance(output, list) else output
    np.testing.assert_allclose(actual, np.maximum(data @ WEIGHT.T, 0), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_command_line_takes_a_program_and_its_parameters(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, params = files
    options = ["--trials", "2", "--graph", "off", "--threads", "1", "--work-dir", str(tmp_path / "work")]
    assert main(["tune", str(program), "--params", str(params), "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"]


def test_a_program_with_a_mistake_is_bad_input_to_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "broken.relay"
    program.write_text(TEXT.replace("nn.relu", "nn.reloo"))
    assert main(["tune", str(program), "--work-dir", str(tmp_path / "work")]) == 2
    told = f"{program}: line 3, column 3: 1 operator cannot be converted to Relax: nn.reloo (1 time"
    assert told in capsys.readouterr().err


def test_help_names_relay_and_its_parameters() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eqtune", "tune", "--help"], capture_output=True, text=True, check=True
    )
    words = " ".join(done.stdout.split())
    assert ".relay (Relay text)" in words
    assert "relay.save_param_dict" in words
