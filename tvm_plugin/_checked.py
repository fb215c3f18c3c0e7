"""Checks versions when it is imported: by packages that load TVM, which may be asked for without asking `eqtune`."""

from ._compat import check_versions

check_versions()
