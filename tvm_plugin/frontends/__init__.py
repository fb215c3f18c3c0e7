"""Front ends: PyTorch, ONNX, TFLite, Relax, Relay and zoo models become one checked Relax module.

`load.py` tells them apart, `imported.py` has the checks. What concerns one framework is in its folder; operators and
repairs that several share are here.
"""

from __future__ import annotations

from .. import _checked  # noqa: F401 - refuses versions that cannot work
from .imported import ImportedModel, InputInfo
from .load import check_model, load_model
from .open_size import OpenSize
from .params import load_params
from .verify import verify_import

__all__ = ["ImportedModel", "InputInfo", "OpenSize", "check_model", "load_model", "load_params", "verify_import"]
