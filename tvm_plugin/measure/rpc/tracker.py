"""TVM's RPC tracker, seen from the client: its address, and who has registered there.

The tracker pairs clients with servers that registered under a key. TVM's own client waits a minute for a tracker that
is not there, and for ever for a server that is not; these functions say at once what is missing.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import Any

from ...errors import InputError, SetupError

__all__ = ["RpcAddress", "connect_tracker", "rpc_status"]

CONNECT_LIMIT_S = 5.0

_URL = re.compile(r"rpc://(?P<host>\[[0-9a-fA-F:]+\]|[^/:\[\]\s]+):(?P<port>\d+)/(?P<key>[^/:\s]+)")


@dataclass(frozen=True)
class RpcAddress:
    """Where the tracker listens, and the key that servers registered under.

    Attributes
    ----------
    host : str
    port : int
    key : str
    """

    host: str
    port: int
    key: str

    @staticmethod
    def parse(url: str) -> RpcAddress:
        """Read "rpc://HOST:PORT/KEY". Raises InputError."""
        match = _URL.fullmatch(url)
        if match is None or not 0 < int(match["port"]) < 65536:
            raise InputError(
                f"{url!r} is no address of an RPC tracker: give rpc://HOST:PORT/KEY, for example "
                "rpc://127.0.0.1:9190/cpu, with a port from 1 to 65535 and a key without '/' and ':'"
            )
        return RpcAddress(match["host"].strip("[]"), int(match["port"]), match["key"])

    @property
    def how_to_start_tracker(self) -> str:
        """The command that starts the tracker."""
        return (
            f"python -m tvm.exec.rpc_tracker --host {self.host} --port {self.port} --port-end {self.port + 1} "
            "(needs the extra: pip install 'eqtune[rpc]')"
        )

    @property
    def how_to_start_server(self) -> str:
        """The command that starts a server."""
        return f"python -m eqtune.measure.rpc_server --tracker {self.host}:{self.port} --key {self.key}"


def connect_tracker(address: RpcAddress) -> Any:
    """A `tvm.rpc.TrackerSession`; its socket has no time limit.

    Raises
    ------
    SetupError
        When nothing listens there, or something else than a tracker.
    """
    from tvm import rpc
    from tvm.rpc.base import RPC_TRACKER_MAGIC

    advice = f"start it with: {address.how_to_start_tracker}"
    where = f"{address.host}:{address.port}"
    try:
        with socket.create_connection((address.host, address.port), timeout=CONNECT_LIMIT_S) as probe:
            probe.sendall(RPC_TRACKER_MAGIC.to_bytes(4, "little"))
            answer = probe.recv(4, socket.MSG_WAITALL)
        if int.from_bytes(answer, "little") != RPC_TRACKER_MAGIC:
            raise SetupError(f"what listens on {where} is no RPC tracker; choose another port and {advice}")
        return rpc.connect_tracker(address.host, address.port)
    except (OSError, UnicodeError) as error:  # the latter of what cannot be a name: a..b
        raise SetupError(f"no RPC tracker answers on {where} ({error}); {advice}") from error


def rpc_status(address: RpcAddress) -> dict[str, int]:
    """How many servers are registered under the key, and how many of them are free.

    Returns
    -------
    dict
        "servers" and "free".

    Raises
    ------
    SetupError
        As `connect_tracker`.
    """
    tracker = connect_tracker(address)
    try:
        tracker._sock.settimeout(CONNECT_LIMIT_S)
        summary = tracker.summary()
    except (OSError, RuntimeError) as error:
        raise SetupError(f"the RPC tracker on {address.host}:{address.port} does not answer ({error})") from error
    finally:
        tracker.close()
    queue = summary["queue_info"].get(address.key, {"free": 0})
    servers = sum(server["key"] == f"server:{address.key}" for server in summary["server_info"])
    return {"servers": servers, "free": int(queue["free"])}
