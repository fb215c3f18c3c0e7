"""Every error that eqtune raises on purpose.

EqtuneError
├── InputError            what the caller gave cannot be used: a model, a target, an argument (exit code 2)
│   ├── MissingExtraError     an optional package is needed; the message names the extra to install
│   ├── UnsupportedModelError the model is readable but has something that cannot be tuned
│   └── RelayError            a Relay program cannot be read or does not type-check (`eqtune.relay`)
│       └── UnsupportedRelayError it has something that Relax has no counterpart for; also an UnsupportedModelError
├── SetupError            this installation or machine cannot work: versions, compiler, device, workers (exit code 1)
├── MismatchError         a program computes something else than it should; it is refused (exit code 1)
└── RecordError           the record database cannot be read or written (exit code 1)

A candidate that fails to build or run is not an error: it is a `Measurement` with an error kind.
"""

from __future__ import annotations

__all__ = [
    "EqtuneError",
    "InputError",
    "MismatchError",
    "MissingExtraError",
    "RecordError",
    "SetupError",
    "UnsupportedModelError",
]


class EqtuneError(Exception):
    """Base of all errors raised by eqtune. `exit_code` is what the command line returns for it."""

    exit_code = 1


class InputError(EqtuneError, ValueError):
    """What the caller gave cannot be used."""

    exit_code = 2


class MissingExtraError(InputError, ImportError):
    """An optional dependency is missing. The message names the extra: `pip install "eqtune[NAME]"`."""


class UnsupportedModelError(InputError):
    """The model can be read, but holds something that eqtune cannot tune (an unknown operator, a foreign dtype)."""


class SetupError(EqtuneError):
    """This installation or this machine cannot do what was asked."""


class MismatchError(EqtuneError):
    """Two programs that should be equal are not; nothing was accepted."""


class RecordError(EqtuneError):
    """The record database cannot be read or written."""
