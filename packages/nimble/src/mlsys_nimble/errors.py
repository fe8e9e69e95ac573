"""What Nimble refuses, and how it says so."""

from __future__ import annotations

from mlsys_core.errors import MlsysError


class CaptureError(MlsysError):
    """A model asks for what no ahead-of-time schedule can hold; the message names the operator and the source line."""


class UnrepeatableError(CaptureError):
    """A model's Python code does something else at each call: no schedule can follow."""


def refuse(what: str, source: str, advice: str) -> CaptureError:
    """The error for ``what``, asked for at ``source``; ``advice`` is the next step.

    Example:
        >>> str(refuse("aten.nonzero: its shape depends on data", "net.py:3, in forward: x.nonzero()", "Use a mask."))
        'aten.nonzero: its shape depends on data (net.py:3, in forward: x.nonzero()). Use a mask.'
    """
    where = f" ({source})" if source else ""
    return CaptureError(f"{what}{where}. {advice}")
