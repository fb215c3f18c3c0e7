"""Images sampled at any places (`grid_sample`), all channels of a pixel at once.

Four pixels around each place are read. With channels first, TVM computes and reads them one by one for every channel;
here the image is put in the order of channels last first, and each of the four is a few vectors.
"""

from __future__ import annotations

from typing import Any

from tvm import te, tirx
from tvm.script.ir_builder import tirx as T

from ..relax_ir.te_kernels import extern_kernel
from .workers import array, rest, share, variable, workers, worthwhile_threads

__all__ = ["LEAST_CHANNELS", "grid_sample"]

LEAST_CHANNELS = 8
"""With fewer, vectors would be short."""

BLOCK = 16
"""Pixels that are moved, or sampled, before the next channels: a line of the cache."""


def grid_sample(image: te.Tensor, grid: te.Tensor, corners: bool, border: bool, threads: int) -> te.Tensor:
    """[n, channels, height, width] at the places of [n, 2, rows, columns]: [n, channels, rows, columns].

    Places (x, y) between -1 and 1 lie in the image. With `corners`, these are the centres of its first and last pixels,
    else their outer edges. What lies outside is zero, or with `border` like the nearest pixel.
    """
    batch, channels, height, width = (int(extent) for extent in image.shape)
    rows, columns = (int(extent) for extent in grid.shape[2:])
    pixels, blocks = height * width, share(columns, BLOCK)
    threads = worthwhile_threads(threads, batch * channels * (pixels + rows * columns))
    nothing = batch * pixels  # behind the last pixel: zeros

    def place(of_grid: Any, extent: int) -> Any:
        """In pixels, and no further outside than where none of the four lies inside."""
        scaled = (of_grid + 1.0) * ((extent - 1) / 2) if corners else (of_grid + 1.0) * (extent / 2) - 0.5
        low, high = (0, extent - 1) if border else (-2, extent + 1)
        return tirx.min(tirx.max(scaled, tirx.FloatImm("float32", low)), tirx.FloatImm("float32", high))

    def body(given: Any, places: Any, result: Any) -> None:
        moved = array((nothing + 1) * channels, "float32")
        with T.serial(0, channels) as channel:
            moved[nothing * channels + channel] = tirx.FloatImm("float32", 0)
        with workers(batch * share(pixels, BLOCK), threads) as block:
            number, first = block // share(pixels, BLOCK), block % share(pixels, BLOCK) * BLOCK
            with T.serial(0, channels) as channel, T.serial(0, rest(pixels, first, BLOCK)) as pixel:
                at = number * pixels + first + pixel
                moved[at * channels + channel] = given[(number * channels + channel) * pixels + first + pixel]
        with workers(batch * rows, threads) as line:
            number, row = line // rows, line % rows
            sampled = array(BLOCK * channels, "float32")
            with T.serial(0, blocks) as block:
                own = rest(columns, block * BLOCK, BLOCK)
                with T.serial(0, own) as pixel:
                    at = (number * 2 * rows + row) * columns + block * BLOCK + pixel
                    x, y = place(places[at], width), place(places[at + rows * columns], height)
                    weights, sources = corner_pixels(number, x, y)
                    with T.serial(0, channels) as channel:
                        parts = [w[0] * moved[s[0] + channel] for w, s in zip(weights, sources, strict=True)]
                        sampled[pixel * channels + channel] = (parts[0] + parts[1]) + (parts[2] + parts[3])
                with T.serial(0, channels) as channel, T.serial(0, own) as pixel:
                    at = ((number * channels + channel) * rows + row) * columns + block * BLOCK + pixel
                    result[at] = sampled[pixel * channels + channel]

    def corner_pixels(number: Any, x: Any, y: Any) -> tuple[list[Any], list[Any]]:
        """Weights of the four, and where their channels begin."""
        lower_x, lower_y, beyond_x, beyond_y = (variable("float32") for _ in range(4))
        lower_x[0], lower_y[0] = tirx.floor(x), tirx.floor(y)
        beyond_x[0], beyond_y[0] = x - lower_x[0], y - lower_y[0]
        weights, sources = [], []
        for down in (0, 1):
            for right in (0, 1):
                weight, source = variable("float32"), variable("int64")
                of_line = beyond_y[0] if down else 1.0 - beyond_y[0]
                weight[0] = of_line * (beyond_x[0] if right else 1.0 - beyond_x[0])
                line, column = lower_y[0].astype("int64") + down, lower_x[0].astype("int64") + right
                inside = tirx.all(line >= 0, line < height, column >= 0, column < width)
                pixel = tirx.Select(inside, (number * height + line) * width + column, tirx.IntImm("int64", nothing))
                source[0] = pixel * channels
                weights.append(weight)
                sources.append(source)
        return weights, sources

    return extern_kernel("grid_sample", body, [image, grid], [((batch, channels, rows, columns), "float32")])
