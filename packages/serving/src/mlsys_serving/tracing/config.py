"""Settings of traces, checked before a model is loaded. Plain data; importing this imports no OpenTelemetry."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import urlsplit

from mlsys_core.errors import InvalidInputError

_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_PATH = "/v1/traces"  # of the protocol
INSTALL = "pip install 'mlsys-serving[otel]'"


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Destination of traces.

    Raises:
        InvalidInputError: the address is no HTTP address.

    Example:
        >>> TraceConfig("http://collector:4318").url
        'http://collector:4318/v1/traces'
    """

    endpoint: str | None = None  # base address of a collector; None: what OpenTelemetry's own variables say

    def __post_init__(self) -> None:
        if self.endpoint is None:
            return
        try:
            parts = urlsplit(self.endpoint)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            is_address = False
        if not is_address or parts.query or parts.fragment:
            raise InvalidInputError(
                f"{self.endpoint!r} is no address of an OTLP collector; write http://HOST:4318 or https://HOST:PORT"
            )

    @property
    def url(self) -> str | None:
        """Address that spans are posted to; None: the exporter reads it from the environment."""
        if self.endpoint is None:
            return None
        base = self.endpoint.rstrip("/")
        return base if base.endswith(_PATH) else base + _PATH


def is_installed() -> bool:
    """Return whether OpenTelemetry's SDK and its OTLP exporter are there."""
    try:
        return all(find_spec(name) is not None for name in _PACKAGES)
    except ModuleNotFoundError:  # a parent package is missing
        return False


def trace_config(endpoint: str | None, *, is_in_environment: bool) -> tuple[TraceConfig | None, str | None]:
    """Return the settings of traces, None for none, and a warning, if there is one.

    Args:
        endpoint: Of ``--otlp-endpoint``.
        is_in_environment: ``Settings.traces_in_environment``.

    Raises:
        InvalidInputError: the endpoint is no address, or is given and OpenTelemetry is not installed.
    """
    if endpoint is None and not is_in_environment:
        return None, None
    config = TraceConfig(endpoint)
    if is_installed():
        return config, None
    if endpoint is not None:
        raise InvalidInputError(f"--otlp-endpoint needs OpenTelemetry: {INSTALL}")
    # The variable may be meant for other programs of this machine: no reason not to serve.
    return None, f"OTEL_EXPORTER_OTLP_ENDPOINT is set, but no traces are sent without OpenTelemetry: {INSTALL}"
