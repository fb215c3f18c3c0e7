"""Numbers as people read them."""

from __future__ import annotations

import math

__all__ = [
    "about",
    "binary",
    "compared",
    "count",
    "counted",
    "duration",
    "number",
    "percent",
    "round_duration",
    "times",
]

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def duration(seconds: float) -> str:
    """A latency or a wall-clock time: 812 ns, 45.2 us, 2.31 ms, 58.1 s, 12 min 5 s."""
    if not math.isfinite(seconds):
        return "-"
    if seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale or (unit == "s" and seconds == 0):
            return f"{number(seconds / scale)} {unit}"
    return f"{number(seconds / 1e-9)} ns"


def round_duration(seconds: float) -> str:
    """A round latency without trailing zeros, for axes: 50 us, 1.5 ms."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale * (1 - 1e-9):
            return f"{seconds / scale:g} {unit}"
    return f"{seconds / 1e-9:g} ns"


def number(value: float) -> str:
    """Three significant digits, never in exponent form: 0.012, 4.56, 78.9, 1234."""
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"


def count(value: float) -> str:
    """A large number with a prefix: 5, 12.3 k, 1.80 G."""
    for scale, prefix in _PREFIXES:
        if value >= scale:
            return f"{number(value / scale)} {prefix}"
    return number(value)


def counted(many: int, what: str) -> str:
    """So many things: 1 kernel, 2 kernels."""
    return f"{many} {what}" if many == 1 else f"{many} {what}s"


def binary(size_bytes: float) -> str:
    """A memory size: 64 B, 48 KiB, 1.5 MiB."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes:.4g} B"


def percent(fraction: float | None) -> str:
    """A fraction as percent with one decimal; "-" when it is unknown."""
    return "-" if fraction is None or not math.isfinite(fraction) else f"{100 * fraction:.1f}"


def about(text: str, measured: bool) -> str:
    """A number that was not measured has a tilde: 45.2, ~45.2."""
    return text if measured or text == "-" else f"~{text}"


def times(ratio: float | None) -> str:
    """A speedup: 0.98x, 12.3x, 240x."""
    return "-" if ratio is None or not math.isfinite(ratio) else f"{number(ratio)}x"


def compared(ratio: float | None) -> str:
    """A speedup in words: 4.56x faster, 1.24x slower."""
    if ratio is None or not ratio:
        return "-"
    return f"{times(ratio)} faster" if ratio >= 1 else f"{times(1 / ratio)} slower"
