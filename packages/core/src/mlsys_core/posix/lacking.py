"""The refusal of what this system lacks."""

from __future__ import annotations

import sys

from mlsys_core.errors import MlsysError


class UnsupportedSystemError(MlsysError):
    """This system lacks what was asked for."""

    exit_code = 2


def lacks(what: str) -> UnsupportedSystemError:
    """Return the refusal of ``what``, a whole clause without the system's name.

    Example:
        >>> str(lacks("files cannot be locked")).startswith("files cannot be locked on ")
        True
    """
    return UnsupportedSystemError(f"{what} on {sys.platform}; use Linux (on Windows: WSL 2)")
