"""Term graphs as SVG, to look at what the search changed."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import Any

from .terms import TermGraph

__all__ = ["page", "svg"]

WIDTH, HEIGHT, GAP_X, GAP_Y = 150, 34, 16, 30
"""Pixels of a box, and between boxes."""

COLOURS = {"matmul": "#bcd7f5", "conv2d": "#bcd7f5", "opaque": "#ffffff", "leaf": "#d9f2d9"}
MOVES = frozenset({"permute", "reshape", "slice", "concat", "broadcast", "pad"})

Signature = tuple[Any, ...]


def page(title: str, before: TermGraph, after: TermGraph) -> str:
    """An HTML page with both graphs side by side; what one has and the other has not is outlined."""
    columns = "".join(
        f"<td><h2>{name}</h2>{svg(graph, other)}</td>"
        for name, graph, other in (("before", before, after), ("after", after, before))
    )
    style = "body{font-family:sans-serif} td{vertical-align:top;padding-right:3em}"
    return (
        f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
        f"<h1>{escape(title)}</h1><table><tr>{columns}</tr></table>\n"
    )


def svg(graph: TermGraph, other: TermGraph | None = None) -> str:
    """A graph in layers, operands above their users, without what depends on weights alone.

    Terms that `other` has fewer of (same operator, attributes and shapes) are outlined.
    """
    drawn = [index for index in graph.live() if not graph.constant[index]]
    place = _places(graph, drawn)
    spare = Counter[Signature]() if other is None else Counter(_signature(other, i) for i in other.live())
    edges, boxes = [], []
    for index in drawn:
        x, y = place[index]
        for operand in graph.terms[index].args:
            if operand in place:
                from_x, from_y = place[operand]
                edges.append(
                    f'<line x1="{from_x + WIDTH / 2:g}" y1="{from_y + HEIGHT}" x2="{x + WIDTH / 2:g}" y2="{y}"/>'
                )
        signature = _signature(graph, index)
        new = other is not None and spare[signature] == 0
        spare[signature] -= not new
        boxes.append(_box(graph, index, x, y, new))
    width = max((x for x, _ in place.values()), default=0) + WIDTH + 2
    height = max((y for _, y in place.values()), default=0) + HEIGHT + 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" font-family="sans-serif" '
        f'font-size="11"><g stroke="#999">{"".join(edges)}</g>{"".join(boxes)}</svg>'
    )


def _places(graph: TermGraph, drawn: list[int]) -> dict[int, tuple[float, float]]:
    """Left upper corner of each box: a layer below its lowest operand, near the mean of its operands."""
    layer: dict[int, int] = {}
    wished: dict[int, float] = {}
    place: dict[int, tuple[float, float]] = {}
    for index in drawn:
        operands = [operand for operand in graph.terms[index].args if operand in layer]
        layer[index] = 1 + max((layer[operand] for operand in operands), default=-1)
    for depth in range(1 + max(layer.values(), default=-1)):
        row = [index for index in drawn if layer[index] == depth]
        for index in row:
            above = [place[operand][0] for operand in graph.terms[index].args if operand in place]
            wished[index] = sum(above) / len(above) if above else 0.0
        right = 0.0
        for index in sorted(row, key=lambda index: (wished[index], index)):
            x = max(right, wished[index] if len(row) == 1 else right)
            place[index] = (x + 1, depth * (HEIGHT + GAP_Y) + 1)
            right = x + WIDTH + GAP_X
    return place


def _box(graph: TermGraph, index: int, x: float, y: float, new: bool) -> str:
    term = graph.terms[index]
    name = getattr(term.attrs, "name", "") or getattr(term.attrs, "kind", "") or term.op
    shape = "x".join(map(str, graph.types[index].shape)) or "scalar"
    fill = "#fdf0c4" if term.op in MOVES else COLOURS.get(term.op, "#e8e8e8")
    outline = 'stroke="#d33" stroke-width="2"' if new else 'stroke="#777"'
    details = escape(f"{term.op} {term.attrs}" if term.op != "opaque" else name, quote=True)
    middle = x + WIDTH / 2
    return (
        f'<g><title>{details}</title><rect x="{x:g}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4" fill="{fill}" '
        f'{outline}/><text x="{middle:g}" y="{y + 14}" text-anchor="middle">{escape(str(name))}</text>'
        f'<text x="{middle:g}" y="{y + 27}" text-anchor="middle" fill="#555">{shape}</text></g>'
    )


def _signature(graph: TermGraph, index: int) -> Signature:
    term = graph.terms[index]
    return (term.op, term.attrs, tuple(graph.types[operand] for operand in term.args))
