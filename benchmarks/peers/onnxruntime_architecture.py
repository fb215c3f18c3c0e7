"""A model of `architecture_modules.py` in ONNX Runtime, all optimisations on, exported by PyTorch.

`python -m benchmarks.peers.onnxruntime_architecture JSON`.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

import onnx
import torch
from torch.utils import _pytree as pytree

from benchmarks.architecture_modules import build
from benchmarks.peers.onnxruntime_session import timed_s


def main(name: str, threads: int, dtype: str, seed: int = 0, batch: int = 1, budget_s: float = 2.0) -> dict[str, float]:
    """Latency in seconds."""
    module, inputs = build(name, seed, dtype, batch)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.onnx"
        with contextlib.redirect_stdout(io.StringIO()):
            torch.onnx.export(module, inputs, path, dynamo=True, verbose=False)
        names = [given.name for given in onnx.load(path, load_external_data=False).graph.input]
        feeds = {key: leaf.numpy() for key, leaf in zip(names, pytree.tree_leaves(inputs), strict=True)}
        return {"latency_s": timed_s(path, feeds, threads, budget_s)}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
