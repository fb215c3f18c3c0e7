"""What passes and importers are written with: functions, tensors, constants and kernels of Relax modules."""

import tvm_ffi

from .. import _checked, errors  # noqa: F401 - the first refuses versions that cannot work

# What a pass raises inside a Sequential goes through C++, which makes a RuntimeError of any class it does not know.
for _name in errors.__all__:
    tvm_ffi.register_error(f"eqtune.{_name}", getattr(errors, _name))
# Ctrl-C, too: as a RuntimeError it would pass for a module that TVM cannot fuse, import or build, and be lost.
tvm_ffi.register_error("KeyboardInterrupt", KeyboardInterrupt)
