# Tune a model
# ============
#
# `tune_model` takes a Relax module, a torch module with example inputs, an ONNX or TFLite file, a Relay program, or a
# model of the zoo, and gives back a faster executable that computes the same. Here: NasRNN from the zoo, with a budget
# of a quarter of a minute.

import tempfile
from pathlib import Path

import eqtune
from eqtune import zoo

work_dir = Path(tempfile.mkdtemp()) / "work"
result = eqtune.tune_model("zoo:nasrnn", work_dir=work_dir, time_budget_s=15, progress=False)

# The result holds the times before and after, and what the check against the untuned model found.

print(f"untuned {result.baseline_latency_s * 1e3:.2f} ms, tuned {result.latency_s * 1e3:.2f} ms")
print(f"largest difference, relative: {result.max_rel_error:.1e}")
for task in sorted(result.tasks, key=lambda task: -task.calls * task.latency_s):
    print(f"  {task.calls:3d} x {task.latency_s * 1e6:7.1f} us  {task.name[:60]}")

# Run it on arrays, keep it as a shared library, or write the report.

outputs = result.run(*zoo.inputs("nasrnn").values())
print("output", outputs[0].shape)
print("library", result.export(work_dir / "nasrnn.so").name)
print("report", result.report(work_dir / "report.html").name)

assert result.latency_s < result.baseline_latency_s
assert result.max_rel_error < 1e-4
