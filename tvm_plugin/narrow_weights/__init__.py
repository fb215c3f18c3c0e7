"""Products by constant weights of 8 bits or fewer that stay so: one operator, one kernel."""

from .codes import NarrowWeights, narrow_weights
from .product import OPERATOR, narrow_product

__all__ = ["OPERATOR", "NarrowWeights", "narrow_product", "narrow_weights"]
