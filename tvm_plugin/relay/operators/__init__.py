"""Relay's operators, one row each: the arguments and attributes they take, and what they are in Relax."""

from .convolution import CONVOLUTION
from .detection import DETECTION
from .elementwise import ELEMENTWISE
from .image import IMAGE
from .indexing import INDEXING
from .nn import NN
from .operator import Operator
from .quantized import QUANTIZED
from .reduce import REDUCE
from .shape import SHAPE

__all__ = ["OPERATORS", "Operator"]

_TABLES = [ELEMENTWISE, CONVOLUTION, NN, SHAPE, REDUCE, INDEXING, IMAGE, DETECTION, QUANTIZED]

OPERATORS: dict[str, Operator] = {row.name: row for table in _TABLES for row in table}
"""By name."""
