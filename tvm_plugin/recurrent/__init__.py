"""Recurrent layers, LSTM, GRU and RNN, as one operator: one kernel on a CPU, one product a step elsewhere."""

from .layer import ACTIVATIONS, CELLS, LANES, OPERATOR, Cell, Layer, in_blocks, recurrent
from .loop import fits_loop, recurrent_loop
from .steps import step_by_step, with_steps_written_out

__all__ = [
    "ACTIVATIONS",
    "CELLS",
    "LANES",
    "OPERATOR",
    "Cell",
    "Layer",
    "fits_loop",
    "in_blocks",
    "recurrent",
    "recurrent_loop",
    "step_by_step",
    "with_steps_written_out",
]
