# Relay programs
# ==============
#
# TVM has no Relay any more; programs that were written or imported for it still run. Here is one as `mod.astext()`
# printed it, with its weights in a file of parameters.

import tempfile
from pathlib import Path

import numpy as np
import tvm
from tvm import relax

import eqtune
from eqtune import relay

program = """
#[version = "0.0.5"]
def @main(%data: Tensor[(1, 3, 16, 16), float32],
          %conv_weight: Tensor[(8, 3, 3, 3), float32],
          %gamma: Tensor[(8), float32], %beta: Tensor[(8), float32],
          %mean: Tensor[(8), float32], %var: Tensor[(8), float32],
          %dense_weight: Tensor[(10, 8), float32]) -> Tensor[(1, 10), float32] {
  %0 = nn.conv2d(%data, %conv_weight, padding=[1, 1, 1, 1], channels=8, kernel_size=[3, 3]);
  %1 = nn.batch_norm(%0, %gamma, %beta, %mean, %var);
  %2 = %1.0;
  %3 = nn.relu(%2);
  %4 = nn.global_avg_pool2d(%3);
  %5 = nn.batch_flatten(%4);
  nn.dense(%5, %dense_weight, units=10)
}
"""

folder = Path(tempfile.mkdtemp())
random = np.random.default_rng(0)
shapes = {"conv_weight": (8, 3, 3, 3), **dict.fromkeys(("gamma", "beta", "mean", "var"), (8,)), "dense_weight": (10, 8)}
weights = {name: random.uniform(0.1, 1.0, shape).astype("float32") for name, shape in shapes.items()}
(folder / "model.params").write_bytes(
    tvm.runtime.save_param_dict({name: tvm.runtime.tensor(array) for name, array in weights.items()})
)

# Read both. The result is a Relax module, in which the weights are constants.

params = relay.load_params((folder / "model.params").read_bytes())
mod = relay.from_text(program, params)
print("inputs:", [param.name for param in mod["main"].params])

# Pipelines of Relay passes work on it, under their names of old.

pipeline = tvm.transform.Sequential(
    [
        relay.transform.InferType(),
        relay.transform.SimplifyInference(),
        relay.transform.FoldConstant(),
        relay.transform.FoldScaleAxis(),
        relay.transform.EqualitySaturation(),
    ]
)
optimized = pipeline(mod)
executable = tvm.compile(optimized, "llvm")
data = random.standard_normal((1, 3, 16, 16)).astype("float32")
output = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(data)).numpy()
print("output:", output.shape)

# A Relax module is printed as Relay, and read back as the same program.

text, arrays = relay.astext_and_params(optimized)
print(text)
again = relay.from_text(text, arrays)
np.testing.assert_allclose(
    relax.VirtualMachine(tvm.compile(again, "llvm"), tvm.cpu())["main"](tvm.runtime.tensor(data)).numpy(),
    output,
    rtol=1e-5,
)

# Tuning takes the text as it takes any model; on the command line: eqtune tune model.relay --params model.params

result = eqtune.tune_model(program, params=params, trials=8, work_dir=folder / "work", progress=False)
np.testing.assert_allclose(result.run(data)[0], output, rtol=1e-4, atol=1e-4)
print(f"untuned {result.baseline_latency_s * 1e6:.0f} us, tuned {result.latency_s * 1e6:.0f} us")

# What is wrong with a program is said with its place.

try:
    relay.from_text(program.replace("nn.relu", "nn.reloo"))
except relay.RelayError as error:
    print(error)
