"""What was good for one kernel, tried on another that is like it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..space.base import Decision, Points, Sketch, Space
from .moves import Moves

__all__ = ["nearest_point"]


def nearest_point(space: Space, decision: Decision) -> Points | None:
    """The legal point of `space` that is most like a decision made in another space, shape [1 + knobs].

    Every knob takes its value that is nearest by ratio. Where these together are not legal, the nearest legal point
    that is one step or one exchange away; of several, the one that the space estimates to be fastest.

    Returns
    -------
    Points or None
        None when the space has no sketch of that name with those knobs, or nothing legal is near.
    """
    for row, sketch in enumerate(space.sketches):
        if sketch.name == decision.sketch and {knob.name for knob in sketch.knobs} == decision.values.keys():
            point = np.zeros((1, 1 + space.cardinalities.shape[1]), dtype=np.int16)
            point[0, 0] = row
            point[0, 1 : 1 + len(sketch.knobs)] = _nearest_values(sketch, decision.values)
            if space.legal(point)[0]:
                return point[0]
            near = Moves(space).neighbours(point)
            if not len(near):
                return None
            steps = np.abs(near - point).sum(axis=1)
            return near[np.lexsort((space.latency_s(near), steps))[0]]
    return None


def _nearest_values(sketch: Sketch, values: Mapping[str, int]) -> list[int]:
    """For each knob the index of its value nearest by ratio (plus one: values may be 0)."""
    return [
        int(np.argmin(np.abs(np.log((1.0 + np.asarray(knob.values)) / (1.0 + values[knob.name])))))
        for knob in sketch.knobs
    ]
