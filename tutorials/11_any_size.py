# Models of any size
# ==================
#
# `tune_model` measures kernels of known shapes. A prompt may have any number of words, a batch any number of rows: such
# models are compiled once, for all sizes, by the pipeline "eqtune". Nothing is measured. Kernels become loops over
# tiles of 64, 32, .. 1 rows, whose schedules come from the analytic model, and which share weights that are packed
# ahead of time.

import numpy as np
import torch
import tvm
from torch import nn
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program

import eqtune

# A small network over rows, exported with a batch of any size. TVM imports it with that size as a symbol; models in
# ONNX come by `tvm.relax.frontend.onnx.from_onnx`, and `relax.frontend.nn` has symbols of its own.

model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256)).eval()
rows = torch.export.Dim("rows", min=1, max=4096)
program = torch.export.export(model, (torch.randn(8, 256),), dynamic_shapes=({0: rows},))
mod = from_exported_program(program, unwrap_unit_return_tuple=True)
print(mod["main"].params[0].ty)

# One compilation. As everywhere, run what comes out with `TVM_NUM_THREADS=` the threads of the target.

target = eqtune.machine.detect_target()
executable = tvm.compile(mod, target, relax_pipeline=relax.get_pipeline("eqtune"))
machine = relax.VirtualMachine(executable, tvm.cpu())

for count in (1, 7, 64, 333):
    x = torch.randn(count, 256)
    found = machine["main"](tvm.runtime.tensor(x.numpy())).numpy()
    with torch.no_grad():
        difference = np.abs(found - model(x).numpy()).max()
    print(f"{count} rows: largest difference {difference:.1e}")
    assert difference < 1e-4
