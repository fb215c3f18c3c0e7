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

result = eqtune.tune_model(directory / "bytes.onnx", work_dir=directory / "work", time_budget_s=15, progress=False)
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

# Weights alone
# -------------
#
# Language models mostly have weights of 4 bits and everything else in floats: what takes their time is to read weights.
# For one row, or up to 16, a product reads such weights as they are stored and computes in float32 with them.

from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

weights = np.random.default_rng(0).standard_normal((1024, 2048), dtype=np.float32)
graph = helper.make_graph(
    [helper.make_node("MatMul", ["row", "weights"], ["result"])],
    "product",
    [helper.make_tensor_value_info("row", TensorProto.FLOAT, (1, 1024))],
    [helper.make_tensor_value_info("result", TensorProto.FLOAT, (1, 2048))],
    [numpy_helper.from_array(weights, "weights")],
)
plain = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
quantizer = MatMulNBitsQuantizer(plain, bits=4, block_size=32, is_symmetric=True)
quantizer.process()
narrow = eqtune.tune_model(quantizer.model.model, work_dir=directory / "narrow", time_budget_s=8, progress=False)
print(f"4 bits: {narrow.latency_s * 1e6:.0f} us, {narrow.tasks[0].name}")
assert narrow.tasks[0].name == "narrow_product"
assert narrow.max_rel_error < 1e-5
