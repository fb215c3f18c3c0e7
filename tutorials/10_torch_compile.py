# torch.compile with eqtune behind it
# ===================================
#
# PyTorch finds eqtune by its name, as a backend of `torch.compile`: what Dynamo captures is tuned when it is first
# called. Options are the arguments of `tune_model`, but for those that describe the model and the target; without a
# budget among them, each captured graph has 120 s, and without `threads`, as many as PyTorch has. It runs under
# `torch.inference_mode()` or `torch.no_grad()`: eqtune has nothing for gradients.

import tempfile
import time
from pathlib import Path

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 32, 3, stride=2, padding=1),
    torch.nn.BatchNorm2d(32),
    torch.nn.ReLU(),
    torch.nn.Conv2d(32, 64, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1),
    torch.nn.Flatten(),
    torch.nn.Linear(64, 10),
).eval()
image = torch.randn(1, 3, 112, 112)
work_dir = Path(tempfile.mkdtemp()) / "work"
options = {"time_budget_s": 10, "work_dir": work_dir, "progress": False}
fast = torch.compile(model, backend="eqtune", options=options)

with torch.inference_mode():
    started = time.monotonic()
    outputs = fast(image)
    print(f"the first call takes {time.monotonic() - started:.0f} s")
    expected = model(image)
    print(f"largest difference: {(outputs - expected).abs().max():.1e}")
    assert torch.allclose(outputs, expected, atol=1e-4)

    def seconds(run: object) -> float:
        best = float("inf")
        for _ in range(50):
            before = time.perf_counter()
            run(image)  # type: ignore[operator]
            best = min(best, time.perf_counter() - before)
        return best

    print(f"eager {seconds(model) * 1e3:.2f} ms, tuned {seconds(fast) * 1e3:.2f} ms")

# Weights are part of what was tuned. Each call looks whether they are still the same, and tunes again where they are
# not; the records in `work_dir` make that short.

with torch.inference_mode(False), torch.no_grad():
    model[-1].weight.mul_(2)
    assert torch.allclose(fast(image), model(image), atol=1e-4)

# Where a second size follows, Dynamo captures the model with an open one, and that is compiled once for all sizes,
# without measuring (`dynamic=False` tunes each size by itself).

with torch.inference_mode():
    for count in (2, 5):
        images = torch.randn(count, *image.shape[1:])
        assert torch.allclose(fast(images), model(images), atol=1e-4)

# What eqtune cannot tune stays with PyTorch, and a warning says why: graphs that need gradients, operators that are not
# known, numbers that differ from call to call, and what PyTorch takes less than 1.1 times as long for.
