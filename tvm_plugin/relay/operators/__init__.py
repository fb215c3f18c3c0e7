"""Relay's operators, one row each: the arguments and attributes they take, and what they are in Relax."""

from .elementwise import ELEMENTWISE
from .image import IMAGE
from .nn import NN
from .operator import Operator
from .quantized import QUANTIZED
from .reduce import REDUCE
from .shape import SHAPE

__all__ = ["OPERATORS", "Operator"]

OPERATORS: dict[str, Operator] = {row.name: row for row in [*ELEMENTWISE, *NN, *SHAPE, *REDUCE, *IMAGE, *QUANTIZED]}
"""By name."""
