"""Which sketches TVM takes: it refuses some kernels, and some shapes, that an analysis accepts."""

from __future__ import annotations

import logging

import numpy as np
from tvm.s_tir import ScheduleError

from .base import Sketch

__all__ = ["applies", "best_apply"]

LOGGER = logging.getLogger(__name__)


def applies(sketch: Sketch) -> bool:
    """Whether a sketch can be applied with the first value of each knob."""
    try:
        sketch.apply({knob.name: knob.values[0] for knob in sketch.knobs})
    except ScheduleError:
        return False
    return True


def best_apply(sketch: Sketch, tried: int = 1, refusals: tuple[type[Exception], ...] = (ScheduleError,)) -> bool:
    """Whether the best legal points of a sketch, so many of them, and the worst can be applied.

    All points are enumerated. `refusals` are the errors by which TVM refuses one.
    """
    indices = np.indices([len(knob.values) for knob in sketch.knobs]).reshape(len(sketch.knobs), -1).T
    values = np.stack([np.asarray(k.values)[indices[:, c]] for c, k in enumerate(sketch.knobs)], axis=1)
    values = values[sketch.legal(values)]
    best = values[np.argsort(sketch.latency_s(values), kind="stable")]
    for row in (*best[:tried], *best[-1:]):
        decision = {knob.name: int(v) for knob, v in zip(sketch.knobs, row, strict=True)}
        try:
            sketch.apply(decision)
        except refusals:
            LOGGER.info("TVM refuses the sketch %r with %s: it is left out", sketch.name, decision)
            return False
    return len(best) > 0
