"""Distributions written as short text, for command lines: ``poisson``, ``steps:10@2,20@8``, ``uniform:32:512``, ...

Each kind is one row of a table: its name, its parameters as the help shows them, and its constructor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import Poisson

from mlsys_bench.workload.arrivals import Arrivals, ClosedLoop, ConstantRate, Replay, Stepping
from mlsys_bench.workload.lengths import (
    ORCA_OUTPUTS,
    ORCA_PROMPTS,
    WMT_SENTENCES,
    Constant,
    Empirical,
    Lengths,
    LogNormal,
    Uniform,
)
from mlsys_bench.workload.results import LatencyBounds
from mlsys_bench.workload.trace import read_trace


def _steps(text: str) -> Stepping:
    steps = []
    for step in text.split(","):
        duration_s, separator, rate = step.partition("@")
        if not separator:
            raise InvalidInputError(f"step {step!r}: write SECONDS@RATE, like 10@2")
        steps.append((_real(duration_s), _real(rate)))
    return Stepping(tuple(steps))


def _replay(path: str) -> Replay:
    return Replay(tuple(item.arrival_s for item in read_trace(Path(path))))


# name -> (parameters, whether --rate belongs to it, maker of (rate, *parameters))
_ARRIVALS: dict[str, tuple[str, bool, Callable[..., Arrivals]]] = {
    "poisson": ("", True, Poisson),
    "constant": ("", True, ConstantRate),
    "steps": ("SECONDS@RATE,...", False, _steps),
    "closed": ("CLIENTS[:THINK_S]", False, lambda clients, think_s="0": ClosedLoop(_whole(clients), _real(think_s))),
    "replay": ("TRACE", False, _replay),
}
_LENGTHS: dict[str, tuple[str, Callable[..., Lengths]]] = {
    "uniform": ("LOW:HIGH", lambda low, high: Uniform(_whole(low), _whole(high))),
    "constant": ("LENGTH", lambda length: Constant(_whole(length))),
    "lognormal": (
        "MEAN:P99[:MAX]",
        lambda mean, p99, high=None: LogNormal.from_mean_p99(_real(mean), _real(p99), high=high and _whole(high)),
    ),
    "file": ("PATH", lambda path: Empirical.from_file(Path(path))),
    "orca-prompts": ("", lambda: ORCA_PROMPTS),
    "orca-outputs": ("", lambda: ORCA_OUTPUTS),
    "wmt": ("", lambda: WMT_SENTENCES),
}


def _form(name: str, parameters: str) -> str:
    return f"{name}:{parameters}" if parameters else name


ARRIVAL_FORMS = ", ".join(_form(name, row[0]) for name, row in _ARRIVALS.items())
LENGTH_FORMS = ", ".join(_form(name, row[0]) for name, row in _LENGTHS.items())


def parse_arrivals(text: str, *, rate: float | None) -> Arrivals:
    """Return the arrival process that ``text`` names.

    Args:
        text: one of :data:`ARRIVAL_FORMS`.
        rate: requests per second, for the processes that have one.

    Raises:
        InvalidInputError: no such process, wrong parameters, or a rate missing or out of place.

    Example:
        >>> parse_arrivals("constant", rate=4.0)
        ConstantRate(rate=4.0)
    """
    name, _, rest = text.partition(":")
    if name not in _ARRIVALS:
        raise InvalidInputError(f"no arrival process {text!r}: allowed are {ARRIVAL_FORMS}")
    parameters, takes_rate, make = _ARRIVALS[name]
    if takes_rate and rate is None:
        raise InvalidInputError(f"arrivals {text!r} need a rate: add --rate REQUESTS_PER_SECOND")
    if not takes_rate and rate is not None:
        raise InvalidInputError(f"arrivals {text!r} set their own rate: leave --rate out")
    arguments = _split(text, rest, parameters)
    return make(rate, *arguments) if takes_rate else make(*arguments)


def parse_lengths(text: str) -> Lengths:
    """Return the length distribution that ``text`` names, one of :data:`LENGTH_FORMS`.

    Raises:
        InvalidInputError: no such distribution, or wrong parameters.

    Example:
        >>> parse_lengths("uniform:32:512")
        Uniform(low=32, high=512)
    """
    name, _, rest = text.partition(":")
    if name not in _LENGTHS:
        raise InvalidInputError(f"no length distribution {text!r}: allowed are {LENGTH_FORMS}")
    parameters, make = _LENGTHS[name]
    return make(*_split(text, rest, parameters))


def _split(text: str, rest: str, parameters: str) -> list[str]:
    most = len(parameters.split(":")) if parameters else 0
    least = most - parameters.count("[")
    arguments = [rest] if most == 1 and rest else rest.split(":") if rest else []  # a lone path may hold colons
    if not least <= len(arguments) <= most:
        form = _form(text.partition(":")[0], parameters)
        raise InvalidInputError(f"{text!r} has {len(arguments)} parameters: write {form}")
    return arguments


def parse_bounds(text: str) -> LatencyBounds:
    """Parse latency bounds in milliseconds: ``500``, or any of ``latency=500,ttft=200,itl=50,normalized=40``.

    Raises:
        InvalidInputError: an unknown bound, or a value that is no number above 0.

    Example:
        >>> parse_bounds("ttft=200").ttft_s
        0.2
    """
    fields = {"latency": "latency_s", "ttft": "ttft_s", "itl": "itl_s", "normalized": "normalized_latency_s"}
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, separator, value = part.rpartition("=")
        name = name.strip() if separator else "latency"
        if name not in fields:
            raise InvalidInputError(f"no latency bound {name!r}: allowed are {', '.join(fields)} (in milliseconds)")
        bounds[fields[name]] = _real(value) / 1e3
    return LatencyBounds(**bounds)


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
