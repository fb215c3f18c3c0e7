"""A model of `architecture_modules.py` in PyTorch, eager or compiled.

`python -m benchmarks.peers.torch_architecture JSON`.

Compiled means max-autotune with freezing, as for the models of the zoo (`torch_model.py`).
"""

from __future__ import annotations

import json
import sys

from benchmarks.architecture_modules import build
from benchmarks.peers.torch_model import timed


def main(
    name: str,
    threads: int,
    dtype: str,
    seed: int = 0,
    batch: int = 1,
    compiled: bool = False,
    budget_s: float = 2.0,
) -> dict[str, float]:
    """Latency in seconds."""
    return timed(*build(name, seed, dtype, batch), threads, compiled, budget_s)


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
