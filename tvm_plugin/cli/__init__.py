"""The command line: `eqtune tune | kernels | graph | report | watch | records | doctor`.

Exit codes: 0 done, 1 failed, 2 bad arguments or input, 130 interrupted (all measurements are kept; during the search,
the best so far is applied and written, too).
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import logging
import sys
from collections.abc import Sequence
from typing import Any

from .. import __version__, _compat
from ..errors import EqtuneError
from ..measure.lean_import import without_torch

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """A command says itself what it does not know, with its own usage, and what may have been meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            close = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1, 0.75)
            meant = f"; did you mean {close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return found, unknown


def build_parser() -> argparse.ArgumentParser:
    """The argument parser with every subcommand."""
    from . import doctor, graph, kernels, records, report, tune, watch

    parser = _Parser(
        prog="eqtune",
        description="Make models compiled by Apache TVM faster: search equal graphs, then schedules of every kernel.",
        epilog="eqtune COMMAND --help tells each command's options. Start with: eqtune tune zoo:squeezenet --budget 60."
        " Exit codes: 0 done, 1 failed, 2 bad arguments or input, 130 interrupted: all measurements are"
        " kept, and during the search the best so far is applied and written.",
    )
    parser.add_argument("--version", action="version", version=f"eqtune {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (tune, kernels, graph, report, watch, records, doctor):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors of eqtune become one line on standard error."""
    from . import doctor

    args = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no text, as standard error knows
    try:
        if args.run is not doctor.run:  # which tells more
            _compat.check_versions()
        with contextlib.nullcontext() if _needs_torch(args) else without_torch():
            return int(args.run(args))
    except EqtuneError as error:
        print(f"eqtune: error: {error}", file=sys.stderr)
        logging.getLogger("eqtune").debug("failed", exc_info=True)
        return error.exit_code
    except KeyboardInterrupt:
        print("eqtune: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1


def _needs_torch(args: argparse.Namespace) -> bool:
    """Whether the command reads a file of torch's, or tells about it: loading it takes longer than loading TVM."""
    from . import doctor

    model = getattr(args, "model", None) or getattr(args, "source", None) or ""
    return args.run is doctor.run or model.endswith(".pt2")


if __name__ == "__main__":
    sys.exit(main())
