"""Windows over images with channels first that roll down the image: pooling, depthwise convolutions.

As in masked_windows.py, vectors are rows of the image under masks; but there are no tiles of rows (rolling_sums.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Knob
from ..marks import MASKED_LANES, ROLLING, ROLLING_STEP, WINDOW_ROW
from ..nest import parallelize, spatial_and_reduced
from .cost import Work
from .kernel import Kernel
from .masked_windows import MaskedWindowsSketch
from .sketch import Values, worker_counts

__all__ = ["RollingWindowsSketch"]

_MOST_TOGETHER = 8
_MOST_SUMS = 24  # in registers, beside a row of the image and some weights
_PASSES = 0.4  # what reading an image and writing its result in many passes costs, columns of vectors apart


class RollingWindowsSketch(MaskedWindowsSketch):
    """One reduction over a window of the last two axes, vectors along the last, the windows of a column in one loop.

    Knobs: `lanes` of the vectors, `together` vectors of a row side by side, `workers`.
    """

    family = "rolling_windows"
    family_index = 19

    @staticmethod
    def fits(kernel: Kernel, outputs: int = 1) -> bool:
        """Whether it is a masked window, of one output, that shares rows of the image with the one below it."""
        if outputs != 1 or not MaskedWindowsSketch.fits(kernel):
            return False
        stage = kernel.stages[0]
        column = len(stage.spatial) - 1
        image = next(read for read in stage.reads if read.strides[column] != 0)
        row, window_row = image.strides[column - 1] or 0, image.strides[-2] or 0
        return row > 0 < window_row and row % window_row == 0 and row // window_row < stage.extents[-2]

    def _knobs(self) -> tuple[Knob, ...]:
        lanes, *_ = super()._knobs()
        vectors = -(-self.width // max(lanes.values))
        together = {n for n in (1, 2, 3, 4, vectors) if n <= min(vectors, _MOST_TOGETHER)}
        return (
            lanes,
            Knob("together", tuple(sorted(together))),
            Knob("workers", worker_counts(self.hardware, self.images)),
        )

    def legal(self, values: Values) -> NDArray[np.bool_]:
        """Sums that fit registers."""
        return np.asarray(self._integer_columns(values)["together"] * self._ages() <= _MOST_SUMS)

    def _ages(self) -> int:
        """How many windows a row of the image counts in at most."""
        return -(-self.window[0] // int(self._row_step()))

    def _work(self, knobs: Mapping[str, Values]) -> Work:
        lanes, together = knobs["lanes"].astype(np.float64), knobs["together"].astype(np.float64)
        vectors = np.ceil(self.width / lanes)
        passes = np.ceil(vectors / together)
        # At both ends of a column, rows count in fewer windows.
        steps = self.images * vectors * (self.height + 0.5 * (self._ages() - 1.0))
        high, wide = self.window
        image_rows = self._row_step()
        sums = image_rows * (wide - 1) + high if self.separable else float(high * wide)
        work = 2.0 * max(sums, image_rows * self._loads_of_row()) * self._narrowness(lanes)
        step = work + 0.5 * self._stores()  # beside the sums of other vectors
        return Work(
            instructions=steps * step * (1.0 + _PASSES * (1.0 - 1.0 / passes)),
            lanes=lanes,
            efficiency=np.ones_like(lanes),
            unrolled=together * np.prod(self.window),
            workers=knobs["workers"].astype(np.float64),
            chunks=np.full_like(lanes, float(self.images)),
            scratch_bytes=np.zeros_like(lanes),
            run_bytes=np.full_like(lanes, float(self.width * self.image.item_bytes)),
            accumulators=together * self._ages(),
            variant=np.full_like(lanes, float(self.variant)),
        )

    def _schedule(self, schedule: Any, values: Mapping[str, int]) -> None:
        block, output = self._sum_and_output(schedule)
        *images, y, x = schedule.get_loops(output)
        parallelize(schedule, images, values["workers"], self.hardware.threads)
        x, lanes = schedule.split(x, [None, values["lanes"]])
        schedule.reorder(x, y, lanes)
        depth = len(schedule.get_loops(output)) - 1
        schedule.compute_at(block, y, preserve_unit_loops=True)
        schedule.annotate(x, ROLLING, values["together"])
        schedule.annotate(y, ROLLING_STEP, int(self._row_step()))
        schedule.annotate(lanes, MASKED_LANES, values["lanes"])
        (*others, lanes), reduced = spatial_and_reduced(schedule, block, schedule.get_loops(block)[depth:])
        schedule.reorder(*reduced, *others, lanes)
        schedule.annotate(reduced[-2], WINDOW_ROW, 1)
        schedule.annotate(lanes, MASKED_LANES, values["lanes"])
        schedule.decompose_reduction(block, reduced[0])
