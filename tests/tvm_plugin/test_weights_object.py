"""Exporting a model writes its weights as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from eqtune import weights_object
from eqtune.runtime import ModelRunner, export_library

from .small_models import module, weight

EXPORT = """
import resource, sys
from pathlib import Path
import numpy as np, tvm
from tvm import relax
from eqtune.runtime import export_library

x = relax.Var("x", relax.TensorType([1, 25_000_000], "float32"))
builder = relax.BlockBuilder()
with builder.function("main", [x]):
    with builder.dataflow():
        y = builder.emit_output(relax.op.add(x, relax.const(np.ones((1, 25_000_000), "float32"))))
    builder.emit_func_output(y)
executable = relax.build(builder.get(), tvm.target.Target("llvm"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export_library(executable, Path(sys.argv[1]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 100e6)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory in kB, and ELF")
def test_a_large_model_is_exported_without_many_copies_of_its_weights(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", EXPORT, str(tmp_path / "model.so")], check=True, capture_output=True)
    assert float(done.stdout) < 3.0


@pytest.mark.parametrize("suffix", ["so", "tar"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_what_is_exported_computes_the_same(
    suffix: str, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(weights_object, "LARGE_BYTES", 0)
    mod = module((3, 64), lambda _, x: relax.op.matmul(x, weight(64, 70)))
    executable = relax.build(mod, tvm.target.Target("llvm"))
    x = np.random.default_rng(0).standard_normal((3, 64)).astype("float32")
    export_library(executable, tmp_path / f"model.{suffix}")
    loaded = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / f"model.{suffix}")), tvm.cpu())
    got = loaded["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_array_equal(got, ModelRunner(executable, threads=1)(x)[0])
