"""Arrivals and lengths written as short text, for command lines: ``poisson``, ``closed:8``, ``uniform:32:512``, ...

Each kind is one row of a table: its name, its parameters as the help shows them, and its constructor.
"""

from __future__ import annotations

from collections.abc import Callable

from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import Poisson

from mlsys_bench.workload.arrivals import Arrivals, ClosedLoop
from mlsys_bench.workload.lengths import ORCA_OUTPUTS, ORCA_PROMPTS, Constant, Lengths, Uniform

_CLOSED = "CLIENTS[:THINK_S]"
_LENGTHS: dict[str, tuple[str, Callable[..., Lengths]]] = {
    "uniform": ("LOW:HIGH", lambda low, high: Uniform(_whole(low), _whole(high))),
    "constant": ("LENGTH", lambda length: Constant(_whole(length))),
    "orca-prompts": ("", lambda: ORCA_PROMPTS),
    "orca-outputs": ("", lambda: ORCA_OUTPUTS),
}


def parse_arrivals(text: str, *, rate: float | None) -> Arrivals:
    """Return the arrival process that ``text`` names.

    Args:
        text: ``poisson`` or ``closed:CLIENTS[:THINK_S]``.
        rate: Requests per second, of ``poisson``.

    Raises:
        InvalidInputError: no such process, wrong parameters, or a rate missing or out of place.

    Example:
        >>> parse_arrivals("poisson", rate=4.0)
        Poisson(rate=4.0)
    """
    name, _, rest = text.partition(":")
    if name not in ("poisson", "closed"):
        raise InvalidInputError(f"no arrival process {text!r}: allowed are poisson, closed:{_CLOSED}")
    if name == "closed":
        if rate is not None:
            raise InvalidInputError(f"arrivals {text!r} set their own rate: leave --rate out")
        clients, think_s = [*_split(text, rest, _CLOSED), "0"][:2]
        return ClosedLoop(_whole(clients), _real(think_s))
    _split(text, rest, "")
    if rate is None:
        raise InvalidInputError(f"arrivals {text!r} need a rate: add --rate REQUESTS_PER_SECOND")
    return Poisson(rate)


def parse_lengths(text: str) -> Lengths:
    """Return the length distribution that ``text`` names.

    Raises:
        InvalidInputError: no such distribution, or wrong parameters.

    Example:
        >>> parse_lengths("uniform:32:512")
        Uniform(low=32, high=512)
    """
    name, _, rest = text.partition(":")
    if name not in _LENGTHS:
        forms = ", ".join(_form(name, parameters) for name, (parameters, _) in _LENGTHS.items())
        raise InvalidInputError(f"no length distribution {text!r}: allowed are {forms}")
    parameters, make = _LENGTHS[name]
    return make(*_split(text, rest, parameters))


def _form(name: str, parameters: str) -> str:
    return f"{name}:{parameters}" if parameters else name


def _split(text: str, rest: str, parameters: str) -> list[str]:
    most = len(parameters.split(":")) if parameters else 0
    arguments = rest.split(":") if rest else []
    if not most - parameters.count("[") <= len(arguments) <= most:
        form = _form(text.partition(":")[0], parameters)
        raise InvalidInputError(f"{text!r} has {len(arguments)} parameters: write {form}")
    return arguments


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InvalidInputError(f"{text!r} is not a number") from error


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidInputError(f"{text!r} is not a whole number") from error
