# Models of any size
# ==================
#
# A prompt may have any number of words, a batch any number of rows. Where a model leaves such sizes open and no
# `shapes` are given, `tune_model` compiles it once for all of them. Kernels become loops over tiles of 64, 32, .. 1
# rows, whose schedules come from the analytic model, and which share weights that are packed ahead of time; none is
# measured.

import shutil
import tempfile

import numpy as np
import torch
import tvm
from torch import nn
from tvm import relax

import eqtune

work_dir = tempfile.mkdtemp()

# A small network over rows, exported with a batch of any size. ONNX models with dynamic dimensions and Relax modules
# with symbolic ones are given just so.

model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256)).eval()
rows = torch.export.Dim("rows", min=1, max=4096)
program = torch.export.export(model, (torch.randn(8, 256),), dynamic_shapes=({0: rows},))

result = eqtune.tune_model(program, work_dir=work_dir, progress=False)
print(result)

# It was compared with PyTorch at the 8 rows of the example, at 9, and at 16, and timed at 8. Other sizes are given by
# name: `sizes={"rows": 100}`, or `eqtune tune model.onnx --size rows=100`. (A .pt2 file no longer knows the name: an
# unknown one lists those that there are.)

for count in (1, 7, 64, 333):
    x = torch.randn(count, 256)
    (found,) = result.run(x)
    with torch.no_grad():
        difference = np.abs(found - model(x).numpy()).max()
    print(f"{count} rows: largest difference {difference:.1e}")
    assert difference < 1e-4

# With `shapes`, the same program is tuned for one size alone: its kernels are measured, and it is faster there.

name = result.mod["main"].params[0].name
fixed = eqtune.tune_model(program, shapes={name: (64, 256)}, work_dir=work_dir, trials=32, progress=False)
print(repr(fixed))

# The pipeline "eqtune" does the same in TVM's own way: no comparison, no timing. As everywhere, run what comes out with
# `TVM_NUM_THREADS=` the threads of the target; and let the virtual machine keep no memory ("naive"), as `result.run`
# does: it would keep what it has allocated for each size that it meets.

mod = eqtune.frontends.load_model(program, any_size=True).mod
target = eqtune.machine.detect_target()
executable = tvm.compile(mod, target, relax_pipeline=relax.get_pipeline("eqtune"))
machine = relax.VirtualMachine(executable, tvm.cpu(), memory_cfg="naive")
print(machine["main"](tvm.runtime.tensor(np.ones((5, 256), np.float32))).shape)

shutil.rmtree(work_dir)
