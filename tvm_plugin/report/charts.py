"""Curves as inline SVG. Where everything goes is computed first (`layout`), as numbers; drawing only writes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from .curves import Curve
from .units import round_duration

__all__ = ["Layout", "Size", "curve_svg", "layout", "log_ticks"]


@dataclass(frozen=True)
class Size:
    """Width and height of a chart and its margins, in SVG units."""

    width: float = 720.0
    height: float = 260.0
    left: float = 84.0
    right: float = 14.0
    top: float = 14.0
    bottom: float = 38.0


@dataclass(frozen=True)
class Layout:
    """Where everything goes, in SVG units (y grows downwards).

    Attributes
    ----------
    path : tuple of (float, float)
        Corners of the step curve.
    baseline_y : float
        Height of the untuned time.
    y_ticks, x_ticks : tuple of (float, str)
        Position and label.
    """

    path: tuple[tuple[float, float], ...]
    baseline_y: float
    y_ticks: tuple[tuple[float, str], ...]
    x_ticks: tuple[tuple[float, str], ...]


def layout(curve: Curve, baseline_s: float, size: Size) -> Layout:
    """Lay out a best-so-far curve on a logarithmic time axis that also shows the untuned time.

    Parameters
    ----------
    curve : Curve
        At least one point.
    baseline_s : float
        The untuned time in seconds.
    size : Size
    """
    seconds = [latency_s for _, latency_s in curve] + [baseline_s]
    low, high = math.log10(min(seconds)), math.log10(max(seconds))
    pad = max(0.05 * (high - low), 0.02)
    low, high = low - pad, high + pad
    last = max(1, curve[-1][0])

    def x(trial: float) -> float:
        return round(size.left + (size.width - size.left - size.right) * trial / last, 2)

    def y(latency_s: float) -> float:
        part = (math.log10(latency_s) - low) / (high - low)
        return round(size.height - size.bottom - (size.height - size.top - size.bottom) * part, 2)

    path = [(x(curve[0][0]), y(curve[0][1]))]
    for trial, latency_s in curve[1:]:
        path.append((x(trial), path[-1][1]))
        path.append((x(trial), y(latency_s)))
    return Layout(
        path=tuple(path),
        baseline_y=y(baseline_s),
        y_ticks=tuple((y(tick), round_duration(tick)) for tick in log_ticks(10**low, 10**high)),
        x_ticks=tuple((x(tick), str(tick)) for tick in _even_ticks(last)),
    )


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten, or powers only) between `low` and `high`, at most `most`."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) <= most:
            return ticks
    return ticks[:: math.ceil(len(ticks) / most)]


def curve_svg(curve: Curve, baseline_s: float, title: str, size: Size | None = None) -> str:
    """An `<svg>` element that draws `layout`; colours come from the page's style. "" for an empty curve."""
    curve = tuple((trial, latency_s) for trial, latency_s in curve if math.isfinite(latency_s))
    if not curve:
        return ""
    size = size or Size()
    # Where nothing was run there is no untuned time.
    known = math.isfinite(baseline_s)
    drawn = layout(curve, baseline_s if known else curve[0][1], size)
    right, bottom = size.width - size.right, size.height - size.bottom
    corners = " ".join(f"{x:g},{y:g}" for x, y in drawn.path)
    parts = [
        f'<svg viewBox="0 0 {size.width:g} {size.height:g}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
    ]
    for y, label in drawn.y_ticks:
        parts.append(f'<line class="grid" x1="{size.left:g}" x2="{right:g}" y1="{y:g}" y2="{y:g}"/>')
        parts.append(f'<text class="tick" x="{size.left - 6:g}" y="{y + 4:g}" text-anchor="end">{label}</text>')
    for x, label in drawn.x_ticks:
        anchor = "end" if x > right - 12 else "middle"
        parts.append(f'<text class="tick" x="{x:g}" y="{size.height - 8:g}" text-anchor="{anchor}">{label}</text>')
    parts.append(f'<line class="axis" x1="{size.left:g}" x2="{right:g}" y1="{bottom:g}" y2="{bottom:g}"/>')
    level = f"{drawn.baseline_y:g}"
    if known:
        parts.append(f'<line class="untuned" x1="{size.left:g}" x2="{right:g}" y1="{level}" y2="{level}"/>')
    parts.append(f'<polyline class="tuned" points="{corners}"/>')
    end_x, end_y = drawn.path[-1]
    parts.append(f'<circle class="end" cx="{end_x:g}" cy="{end_y:g}" r="3.5"/></svg>')
    return "".join(parts)


def _even_ticks(last: int, most: int = 6) -> list[int]:
    step = 1
    while last / step > most:
        digit = int(str(step)[0])
        step = step * 2 if digit != 2 else step * 5 // 2
    return list(range(0, last + 1, step))
