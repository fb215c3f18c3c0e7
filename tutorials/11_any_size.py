# Models of any size
# ==================
#
# A prompt may have any number of words, a batch any number of rows. Where a model leaves such sizes open and no
# `shapes` are given, `tune_model` compiles it once for all of them. Kernels become loops over tiles of 64, 32, .. 1
# rows, which share weights that are packed ahead of time. Tiles that run where the model is timed are measured as any
# kernel is, while the budget lasts; the others have the schedules that the analytic model likes best.

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

result = eqtune.tune_model(program, sizes={"rows": 100}, work_dir=work_dir, trials=64, progress=False)
print(result)

# It was tuned and timed for 100 rows, and compared with PyTorch at 100, 101 and 200: tiles of 64, 32 and 4 rows are in
# the table. From the command line: `eqtune tune model.onnx --size rows=100`. Without sizes, those of the example count.
# (A .pt2 file no longer knows the names: an unknown one lists those that there are.)

for count in (1, 7, 64, 333):
    x = torch.randn(count, 256)
    (found,) = result.run(x)
    with torch.no_grad():
        difference = np.abs(found - model(x).numpy()).max()
    print(f"{count} rows: largest difference {difference:.1e}")
    assert difference < 1e-4

# With `shapes`, the same program is tuned for one size alone, and is a little faster there.

name = result.mod["main"].params[0].name
fixed = eqtune.tune_model(program, shapes={name: (64, 256)}, work_dir=work_dir, trials=32, progress=False)
print(repr(fixed))

# Images may have any height and width: convolutions and pooling are tiled, too, and what is resized to the size of
# another image is, as segmentation does.


class Segmentation(nn.Module):
    """Which of five kinds each pixel is, of 1/2 and 1/4 of the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.second = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.kinds = nn.Conv2d(32, 5, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[1, 3, height, width] -> [1, 5, height, width]."""
        kinds = self.kinds(self.second(self.first(image).relu()).relu())
        return nn.functional.interpolate(kinds, size=image.shape[2:], mode="bilinear")


pixels = {2: torch.export.Dim("height", min=32, max=2048), 3: torch.export.Dim("width", min=32, max=2048)}
segmentation, image = Segmentation().eval(), torch.randn(1, 3, 96, 128)
images = eqtune.tune_model(
    torch.export.export(segmentation, (image,), dynamic_shapes=(pixels,)),
    work_dir=work_dir,
    time_budget_s=1.0,  # no time to measure: all by estimate, as soon as it is compiled
    progress=False,
)
for size in ((33, 47), (200, 300)):
    image = torch.randn(1, 3, *size)
    with torch.no_grad():
        difference = np.abs(images.run(image)[0] - segmentation(image).numpy()).max()
    print(f"{size} pixels: largest difference {difference:.1e}")
    assert difference < 1e-4

# The pipeline "eqtune" does the same in TVM's own way: no comparison, no timing. As everywhere, set TVM_NUM_THREADS to
# the threads of the target where what comes out runs.

mod = eqtune.frontends.load_model(program, any_size=True).mod
target = eqtune.machine.detect_target()
executable = tvm.compile(mod, target, relax_pipeline=relax.get_pipeline("eqtune"))
machine = relax.VirtualMachine(executable, tvm.cpu())
print(machine["main"](tvm.runtime.tensor(np.ones((5, 256), np.float32))).shape)

shutil.rmtree(work_dir)
