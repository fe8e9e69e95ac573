"""Errors for models that Nimble refuses."""

from __future__ import annotations

from mlsys_core.errors import MlsysError


class CaptureError(MlsysError):
    """Error for a model that no ahead-of-time schedule can hold; names the operator and the source line."""


class UnrepeatableError(CaptureError):
    """Error for a model whose Python code does something different at each call."""


def refuse(what: str, source: str, advice: str) -> CaptureError:
    """Build the error for ``what``, asked for at ``source``; ``advice`` is the next step.

    Example:
        >>> str(refuse("aten.nonzero: its shape depends on data", "net.py:3, in forward: x.nonzero()", "Use a mask."))
        'aten.nonzero: its shape depends on data (net.py:3, in forward: x.nonzero()). Use a mask.'
    """
    where = f" ({source})" if source else ""
    return CaptureError(f"{what}{where}. {advice}")
