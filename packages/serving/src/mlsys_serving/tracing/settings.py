"""Settings of traces that clients may change while a server runs (Triton's extension). Used from one event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlsys_core.errors import InvalidInputError

_ON, _OFF = "TIMESTAMPS", "OFF"
_FIXED = {"trace_mode": "opentelemetry", "log_frequency": "0", "trace_file": ""}


class TraceSettings:
    """Decision which requests are traced, beside OpenTelemetry's own sampler.

    Example:
        >>> settings = TraceSettings()
        >>> settings.update({"trace_rate": ["2"], "trace_count": ["1"]})
        >>> [settings.takes() for _ in range(4)]
        [False, True, False, False]
        >>> settings.shown()["trace_count"]
        '0'
    """

    def __init__(self) -> None:
        self._is_on, self._rate, self._num_left = True, 1, -1  # -1: without end
        self._num_seen = 0

    def takes(self) -> bool:
        """Count a request; return whether it is traced."""
        if not self._is_on or self._num_left == 0:
            return False
        self._num_seen += 1
        if self._num_seen % self._rate:
            return False
        self._num_left -= self._num_left > 0
        return True

    def update(self, wanted: Mapping[str, Sequence[str] | None]) -> None:
        """Change settings, all or none; None, or no value, sets one back.

        Raises:
            InvalidInputError: one that cannot be changed here, or a value that is not allowed.
        """
        is_on, rate, num_left = self._is_on, self._rate, self._num_left
        for name, values in wanted.items():
            match name:
                case "trace_level":
                    unknown = sorted(set(values or ()) - {_ON, _OFF})
                    if unknown:
                        raise InvalidInputError(f"trace_level is {_ON} or {_OFF}, not {unknown[0][:40]!r}")
                    is_on = _OFF not in values if values else True
                case "trace_rate":
                    rate = _whole(name, values, default=1, least=1)
                case "trace_count":
                    num_left = _whole(name, values, default=-1, least=-1)
                case _:
                    given = list(values or ())
                    if name not in _FIXED or given not in ([], [_FIXED[name]]):
                        changed = "trace_level, trace_rate and trace_count"
                        raise InvalidInputError(
                            f"trace setting {name[:40]!r} cannot be changed here, only {changed}: traces go to the "
                            "collector that --otlp-endpoint names"
                        )
        self._is_on, self._rate, self._num_left = is_on, rate, num_left
        self._num_seen = 0

    def shown(self) -> dict[str, str | list[str]]:
        """Return all settings, in Triton's words."""
        level = [_ON if self._is_on else _OFF]
        return {"trace_level": level, "trace_rate": str(self._rate), "trace_count": str(self._num_left), **_FIXED}


NOT_TRACED: Mapping[str, str | list[str]] = {"trace_level": [_OFF], "trace_rate": "1", "trace_count": "0", **_FIXED}


def _whole(name: str, values: Sequence[str] | None, *, default: int, least: int) -> int:
    if not values:
        return default
    try:
        found = int(values[0])
    except ValueError:
        found = least - 1
    if found < least or len(values) > 1:
        raise InvalidInputError(f"{name} is a whole number from {least} on, got {str(list(values))[:40]}")
    return found
