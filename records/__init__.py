"""Records of what was measured: where, with which versions, how fast. Importing this package never loads TVM.

`RecordDatabase` keeps them in one SQLite file. `workload` and `traces` turn kernels and schedules into text and back;
`metaschedule` exchanges records with MetaSchedule's JSON database.
"""

if __name__ != "eqtune.records":
    raise ImportError(
        f"import this package as 'eqtune.records', not as {__name__!r}: "
        "a second copy of its classes would break isinstance"
    )

from .database import RecordDatabase
from .record import Context, Record, Workload

__all__ = ["Context", "Record", "RecordDatabase", "Workload"]
