"""Offer this machine for measuring: `python -m eqtune.measure.rpc_server --tracker HOST:PORT --key KEY`.

TVM's RPC server, with what measuring needs: it survives kernels that crash (TVM's own stops listening after the
first), runs them on all cores (TVM's takes half of the logical processors), tells the device's name, and listens on the
loopback interface unless told otherwise.

Warning: TVM's RPC executes what it is sent, for everyone who can connect, without a password. Never let tracker and
server listen on an interface that strangers can reach; across machines use a private network or an SSH tunnel.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..errors import InputError
from ..gpu_machine import let_tvm_compile
from ..machine import allowed_cores, core_count, detect_target, device_name, features_here
from .affinity import bind_pool
from .trial import worker_memory_bytes
from .worker import limit_memory, restore_crash_signals

__all__ = ["main", "serve"]

LOOPBACK = "127.0.0.1"
FIRST_PORT, LAST_PORT = 9390, 9490


def serve(tracker: tuple[str, int], key: str, threads: int | None = None, host: str = LOOPBACK) -> None:
    """Serve in this process, for ever.

    Parameters
    ----------
    tracker : tuple of str and int
        Host and port of the tracker; it may be started later.
    key : str
        What clients ask the tracker for; servers under one key must be alike.
    threads : int, optional
        Threads that kernels may use; by default, all cores.
    host : str
        Interface to listen on. See the warning above before giving another than the loopback interface.

    Raises
    ------
    InputError
        When `threads` is not positive, or nobody knows the tracker's host.
    """
    threads = core_count() if threads is None else threads
    if threads < 1:
        raise InputError(f"threads must be at least 1, got {threads}")
    try:
        socket.getaddrinfo(*tracker)  # TVM's server would try again at once, for ever
    except (OSError, UnicodeError) as error:  # the latter of what cannot be a name: a..b
        raise InputError(f"the tracker's host, {tracker[0]!r}, is not known here ({error})") from error
    os.environ["TVM_NUM_THREADS"] = str(threads)  # the only way to more threads than TVM's default
    let_tvm_compile()  # kernels for a GPU that were built where there is none arrive as source
    from tvm.rpc import server

    _offer_functions()
    server._serving = _outlive_crashes(server._serving)
    state = server.PopenRPCServerState(
        host,
        FIRST_PORT,
        LAST_PORT,
        tracker_addr=tracker,
        key=key,
        # Clients reach it where it listens; what the tracker would guess is the address the server came from.
        custom_addr=None if host in ("0.0.0.0", "::") else host,
        silent=True,
    )
    print(f"serving {key} on {host}:{state.port}, {threads} threads, tracker {tracker[0]}:{tracker[1]}", flush=True)
    state.thread.join()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m eqtune.measure.rpc_server",
        description="Offer this machine to `eqtune tune --measure rpc://HOST:PORT/KEY`.",
        epilog="Warning: TVM's RPC executes what it is sent, without a password. Listen only on the loopback interface "
        "or on a private network.",
    )
    parser.add_argument("--tracker", required=True, metavar="HOST:PORT", help="where the tracker listens")
    parser.add_argument("--key", required=True, help="what clients ask for; servers under one key must be alike")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a kernel (default: all cores)")
    parser.add_argument("--host", default=LOOPBACK, help=f"interface to listen on (default: {LOOPBACK})")
    options = parser.parse_args(arguments)
    host, _, port = options.tracker.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        parser.error(f"--tracker takes HOST:PORT, with a port from 1 to 65535, got {options.tracker!r}")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process, which has nothing to tidy up, at once
    try:
        serve((host.strip("[]"), int(port)), options.key, options.threads, options.host)
    except InputError as error:
        parser.error(str(error))


def _outlive_crashes(serve_one: Callable[..., None]) -> Callable[..., None]:
    """TVM's server raises where a session's process crashed or could not start: the thread that listens would end."""

    def serve_and_go_on(sock: Any, addr: Any, opts: Any, load_library: Any) -> None:
        directory = os.getcwd()
        try:
            serve_one(sock, addr, opts, load_library)
        except Exception as error:  # noqa: BLE001 - a full disk, no memory to fork: the next session may fare better
            print(f"{error}; going on", file=sys.stderr, flush=True)
        finally:
            sock.close()
            os.chdir(directory)

    return serve_and_go_on


def _offer_functions() -> None:
    """What `rpc/worker.py` asks for besides TVM's own functions. Sessions are forked and find them, too."""
    import tvm_ffi

    name = device_name(detect_target())
    features = " ".join(sorted(features_here()))
    cores = allowed_cores()
    tvm_ffi.register_global_func("eqtune.device_name", lambda: name, override=True)
    tvm_ffi.register_global_func("eqtune.cpu_features", lambda: features, override=True)
    tvm_ffi.register_global_func("eqtune.prepare_session", lambda: _prepare_session(cores), override=True)


def _prepare_session(cores: Collection[int]) -> None:
    """The same conditions as in a local worker, for the rest of the session, on these cores of the server."""
    import tvm

    restore_crash_signals()
    limit_memory(worker_memory_bytes())
    if hasattr(os, "sched_setaffinity"):  # as `affinity.on_first_core`, with the threads that the client has asked for
        threads = int(tvm.get_global_func("runtime.NumThreads")())
        os.sched_setaffinity(0, {bind_pool(threads, cores, workers=int(os.environ["TVM_NUM_THREADS"]))})


if __name__ == "__main__":
    main()
