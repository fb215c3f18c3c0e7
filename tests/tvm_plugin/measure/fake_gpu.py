"""Speaks as `cuda/worker.py` and `rpc/worker.py` do, without a GPU: `python fake_gpu.py DIRECTORY`.

Every run appends a line to DIRECTORY/runs. Faults come from DIRECTORY/plan, one word a run, used up line by line:
"hang", "die", "lost", or a latency in seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

directory = Path(sys.argv[1])
config = json.loads(sys.stdin.readline())


def reply(message):
    print(json.dumps(message), flush=True)


def planned():
    plan = directory / "plan"
    lines = plan.read_text().split() if plan.exists() else []
    plan.write_text("\n".join(lines[1:]))
    return lines[0] if lines else "1e-3"


reply({"ready": True})
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] in ("describe", "connect", "load"):
        reply({} if request["op"] == "load" else {"device": "a GPU of paper", "clock_khz": 1})
        continue
    what = planned()
    with (directory / "runs").open("a") as log:
        log.write(f"{os.getpid()} {config.get('index', 0)} {request['program']} {what}\n")
    assert Path(request["fields"]["library"]).exists()
    if what == "hang":
        time.sleep(60)
    elif what == "die":
        os.abort()
    elif what == "lost":
        reply({"lost": "an illegal memory access was encountered"})
    else:
        notes = {"clock_mhz": 1980.0}
        reply({"latencies_s": [float(what)], "given_up": False, "domain": request["domain"], "notes": notes})
