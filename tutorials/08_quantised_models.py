# Quantised models
# ================
#
# A model in 8 bits is a quarter as large, and on CPUs with instructions for products of bytes several times as fast. It
# is quantised once, from a few typical inputs, by the framework that it comes from. Here: SqueezeNet by ONNX Runtime.
#
# What quantisers write is a model of float operators between `DequantizeLinear` and `QuantizeLinear` (QDQ). eqtune
# takes that apart again: sums of products of bytes in 32 bits, which are exact, and one rounding a layer. ONNX
# Runtime's older format (QLinearConv, QLinearAdd, ...), dynamic quantisation, and PyTorch models quantised for export
# (`torch.ops.quantized_decomposed`) are understood as well. Nothing has to be asked for.

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnxruntime import quantization

import eqtune
from eqtune import zoo
from eqtune.frontends import load_model
from eqtune.transform import FakeQuantizationToInteger, FoldWeights

directory = Path(tempfile.mkdtemp())
onnx.save(zoo.onnx("squeezenet"), directory / "float.onnx")


class Calibration(quantization.CalibrationDataReader):
    def __init__(self):
        self.left = [zoo.inputs("squeezenet", seed=seed) for seed in range(2)]

    def get_next(self):
        return self.left.pop() if self.left else None


quantization.quantize_static(directory / "float.onnx", directory / "bytes.onnx", Calibration(), per_channel=True)

# Tuning is as always.

result = eqtune.tune_model(directory / "bytes.onnx", work_dir=directory / "work", time_budget_s=30, progress=False)
print(f"untuned {result.baseline_latency_s * 1e3:.2f} ms, tuned {result.latency_s * 1e3:.2f} ms")

# A value that lies between two steps of a scale may be rounded to either, so that two runtimes' outputs can differ by a
# step or two of 256. eqtune permits 8 / 256 of the largest value for such models, or twice what ONNX Runtime's own
# outputs differ by when it computes operator by operator, at most 0.25; `result.summary.tolerance` tells. With unsigned
# activations (`activation_type=quantization.QuantType.QUInt8`), these would not differ by a bit.

print(f"largest difference from ONNX Runtime's outputs, relative: {result.max_rel_error:.1e}")
print(f"permitted: {result.summary.tolerance:.1e}")

# The passes can be used alone, on any Relax module with `quantize` and `dequantize`:

mod = FoldWeights()(FakeQuantizationToInteger()(load_model(directory / "bytes.onnx").mod))
text = mod.script()
print(text.count("R.nn.conv2d"), "convolutions,", text.count('out_dtype="int32"'), "of them in integers")

assert result.max_rel_error <= result.summary.tolerance
assert np.isfinite(result.run(*zoo.inputs("squeezenet").values())[0]).all()
assert "R.dequantize" not in text
