# Insert the passes into your own pipeline
# ========================================
#
# Everything eqtune does to a module is an ordinary `tvm.transform` pass. Here the weight-only work of NasRNN is folded
# (batch norms too, in a model that has some), its kernels are fused, and schedules from earlier records are applied,
# between passes that belong to TVM.

import tempfile
from pathlib import Path

import numpy as np
import tvm
from tvm import relax

import eqtune
from eqtune import zoo

work_dir = Path(tempfile.mkdtemp()) / "work"
target = eqtune.machine.detect_target()
mod = zoo.relax("nasrnn")

# Some records to apply; in practice they come from an earlier run, perhaps on another model.

eqtune.tune_model(mod, target=target, work_dir=work_dir, trials=48, graph="off", progress=False)

pipeline = tvm.transform.Sequential(
    [
        eqtune.transform.FoldBatchNorm(),
        eqtune.transform.FoldWeights(),
        relax.transform.CanonicalizeBindings(),
        eqtune.transform.LowerToKernels(target),
        eqtune.transform.ApplyTuned(records=work_dir),
    ]
)
with target:
    tuned = pipeline(mod)
executable = tvm.compile(tuned, target)

machine = relax.VirtualMachine(executable, tvm.cpu())
inputs = [tvm.runtime.tensor(value) for value in zoo.inputs("nasrnn").values()]
output = machine["main"](*inputs)
print("output", output.shape)
assert np.isfinite(output.numpy()).all()
