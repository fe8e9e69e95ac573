"""Errors for models that Nimble refuses."""

from __future__ import annotations

from collections.abc import Callable
from traceback import walk_tb
from typing import Any

from mlsys_core.errors import MlsysError


class CaptureError(MlsysError):
    """Error for a model that no ahead-of-time schedule can hold; names the operator and the source line."""


class UnrepeatableError(CaptureError):
    """Error for a model whose Python code does something different at each call."""


class CaughtError(CaptureError):
    """Error for a model whose Python code catches an error of an operator; torch.compile does not keep its handlers."""


class InternalError(CaptureError):
    """Error for a fault of Nimble itself, not of the model; its cause is attached."""


class Caught:
    """Context that keeps the first error within it: a model whose own code catches it takes another branch for ever."""

    def __init__(self) -> None:
        self.first: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.first = self.first or error

    def check(self) -> None:
        """Raise the first error if it was caught.

        Raises:
            CaptureError: forward has gone on after an error.
        """
        if isinstance(self.first, CaptureError):
            raise self.first
        if self.first is not None:
            what = f"forward catches an error of an operator ({type(self.first).__name__}: {first_line(self.first)})"
            raise CaughtError(f"{what}. A replay would not: test before, or prepare with fallback='eager'.")


def refuse(what: str, source: str, advice: str) -> CaptureError:
    """Build the error for ``what``, asked for at ``source``; ``advice`` is the next step.

    Example:
        >>> str(refuse("aten.nonzero: its shape depends on data", "net.py:3, in forward: x.nonzero()", "Use a mask."))
        'aten.nonzero: its shape depends on data (net.py:3, in forward: x.nonzero()). Use a mask.'
    """
    where = f" ({source})" if source else ""
    return CaptureError(f"{what}{where}. {advice}")


def call_external(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call code of the model or of torch, whose errors are not faults of Nimble."""
    return function(*args, **kwargs)


def refuse_or_blame(error: Exception, what: str, advice: str) -> CaptureError:
    """Return the error to raise for an unexpected ``error``: a refusal of the model, or a fault of Nimble.

    It is a fault of Nimble unless Nimble's innermost frame is :func:`call_external`.

    Args:
        error: Exception with its traceback.
        what: Message for a model that is refused.
        advice: Next step for such a model.
    """
    said = f"({type(error).__name__}: {first_line(error)})"
    walked = [*walk_tb(error.__traceback__)]
    frames = [(frame, line) for frame, line in walked if _is_own(frame.f_globals.get("__name__", ""))]
    if not frames or frames[-1][0].f_code is call_external.__code__ or _is_out_of_memory(error):
        return refuse(f"{what} {said}", "", advice)
    frame, line = frames[-1]
    return InternalError(
        f"a fault of Nimble's own, not of the model, in {frame.f_globals['__name__']}, line {line} {said}. "
        "Please report it with its cause; prepare with fallback='eager' meanwhile."
    )


def first_line(error: BaseException) -> str:
    """Return an error's message in one line of at most 200 characters."""
    return (str(error).strip().splitlines() or [""])[0][:200]


def _is_own(module: str) -> bool:
    return module.startswith("mlsys_nimble.") and not module.startswith("mlsys_nimble.nets.")


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
