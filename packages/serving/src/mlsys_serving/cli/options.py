"""The groups of options, each a dataclass whose fields are options."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from mlsys_core.errors import InvalidInputError

if TYPE_CHECKING:
    from mlsys_serving.extensions import Extensions
    from mlsys_serving.http import BoundPort, ErrorFormat, HttpConfig, ServerAddress, TlsConfig
    from mlsys_serving.tracing import TraceConfig

_FORMATS = {"text": "console", "console": "console", "json": "json"}  # the second is an older name of the first


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of listening, access and limits: the same in every ``serve`` command.

    Example:
        >>> ServerOptions(request_timeout_s=60).http_config(title="words").request_timeout_s
        60
    """

    panel: ClassVar[str] = "Server"

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all networks of this machine.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that clients must send; repeat for several. None: open to all.")
    ] = None
    api_key_file: Annotated[Path | None, typer.Option(help="A file with a key on each line; # begins a comment.")] = (
        None
    )
    tls_certificate: Annotated[Path | None, typer.Option(help="The server's certificate chain (PEM): HTTPS.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's private key (PEM, no password).")] = None
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Serve only clients with a certificate that this authority signed (PEM).")
    ] = None
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="An origin whose web pages may use the server; repeat. *: all.")
    ] = None
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A name by which clients reach the server, beside its addresses; repeat.")
    ] = None
    max_body_bytes: Annotated[
        int | None, typer.Option(min=0, help="Largest body of a request; by default 16 MiB, 64 MiB for tensors.")
    ] = None
    max_bodies_bytes: Annotated[
        int | None, typer.Option(min=1, help="Bodies of all requests in work; more wait. By default 4 of the largest.")
    ] = None
    max_connections: Annotated[int, typer.Option(min=1, help="Connections at a time; one more gets 503.")] = 1000
    header_timeout_s: Annotated[float, typer.Option(help="Seconds until a request's headers must be there.")] = 10
    body_timeout_s: Annotated[float, typer.Option(help="Seconds until its body must be there, then.")] = 60
    write_timeout_s: Annotated[float, typer.Option(help="Seconds a client may take nothing of an answer.")] = 60
    keep_alive_timeout_s: Annotated[float, typer.Option(help="Seconds an idle connection is kept.")] = 75
    request_timeout_s: Annotated[
        float | None, typer.Option(help="Deadline of requests that bring none (X-Request-Timeout-S), and its cap.")
    ] = None
    drain_timeout_s: Annotated[float, typer.Option(min=0, help="Seconds running answers may take after SIGTERM.")] = 30
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="Address of an OpenTelemetry collector (OTLP over HTTP) that gets a trace of each request."),
    ] = None
    log_level: Annotated[
        str, typer.Option(help="debug, info (a line for each request), warning (only trouble) or error.")
    ] = "info"
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text"

    def http_config(self, *, base: HttpConfig | None = None, **more: Any) -> HttpConfig:
        """Return the settings of the HTTP front.

        Args:
            base: the front's own settings; these options go first.
            more: further settings of ``HttpConfig``, such as its title.

        Raises:
            InvalidInputError: an option's value is not allowed; the message names it.
        """
        from mlsys_serving.http import ConnectionLimits, HttpConfig

        if self.log_format not in _FORMATS:
            raise InvalidInputError(f"--log-format is text or json, not {self.log_format!r}")
        for option, values in (("--cors-origin", self.cors_origin), ("--allowed-host", self.allowed_host)):
            if "" in (values or ()):
                raise InvalidInputError(f"{option} is empty: leave it out, or give a value")
        if self.max_body_bytes is not None:
            more["max_body_nbytes"] = self.max_body_bytes
        if self.max_bodies_bytes is not None:
            more["max_bodies_nbytes"] = self.max_bodies_bytes
        with _naming_options(self):
            return replace(
                base or HttpConfig(),
                **more,
                api_keys=frozenset(self.keys()),
                tls=self._tls(),
                traces=self._traces(),
                cors_origins=tuple(self.cors_origin or ()),
                allowed_hosts=tuple(self.allowed_host or ()),
                connections=ConnectionLimits(
                    max_connections=self.max_connections,
                    header_timeout_s=self.header_timeout_s,
                    body_timeout_s=self.body_timeout_s,
                    write_timeout_s=self.write_timeout_s,
                    keep_alive_timeout_s=self.keep_alive_timeout_s,
                ),
                request_timeout_s=self.request_timeout_s,
                drain_timeout_s=self.drain_timeout_s,
                log_level=self.log_level,  # type: ignore[arg-type]  # checked there
                log_format=_FORMATS[self.log_format],  # type: ignore[arg-type]
            )

    def bind(self, config: HttpConfig, *, error_format: ErrorFormat | None = None, answers: bool = True) -> BoundPort:
        """Take the port before a model is loaded, and warn if it is open to a network.

        Args:
            config: settings of the later app.
            error_format: that of the later app.
            answers: answer early clients in a thread; otherwise they wait.

        Raises:
            InvalidInputError, ServingError: as :class:`mlsys_serving.http.BoundPort`.
        """
        from mlsys_serving.http import BoundPort

        bound = BoundPort(self.host, self.port, config=config, error_format=error_format, answers=answers)
        has_client_certificates = config.tls is not None and config.tls.client_ca is not None
        if not (bound.address.is_loopback or config.api_keys or has_client_certificates):
            warn(f"whoever reaches {self.host}:{bound.address.port} can use this server; --api-key asks for a key")
        return bound

    def keys(self) -> list[str]:
        """Return all keys: those given, and those in the file.

        Raises:
            InvalidInputError: the file cannot be read or holds no key.
        """
        keys = list(self.api_key or ())
        if self.api_key_file is not None:
            keys += _keys_of(self.api_key_file)
        return keys

    def _traces(self) -> TraceConfig | None:
        from mlsys_core.config import settings

        from mlsys_serving.tracing.config import trace_config

        config, warning = trace_config(self.otlp_endpoint, is_in_environment=settings().traces_in_environment)
        if warning is not None:
            warn(warning)
        return config

    def _tls(self) -> TlsConfig | None:
        from mlsys_serving.http import TlsConfig

        if self.tls_certificate is None and self.tls_key is None:
            if self.tls_client_ca is not None:
                raise InvalidInputError("--tls-client-ca needs --tls-certificate and --tls-key")
            return None
        if self.tls_certificate is None or self.tls_key is None:
            raise InvalidInputError("--tls-certificate and --tls-key go together: give both, or neither for plain HTTP")
        return TlsConfig(certificate=self.tls_certificate, key=self.tls_key, client_ca=self.tls_client_ca)


Instances = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=256,
        help="Worker processes of each model, which share the cores; one that dies is replaced. None: no processes.",
    ),
]


def announce(address: ServerAddress, extensions: Extensions) -> None:
    """Print where a server listens, in one form for all servers of models, and what its extensions have to say."""
    lines = [f"listening on {address.url}", *(f"  {note}" for note in extensions.notes(address.url))]
    typer.echo("\n".join(lines), err=True)


@contextmanager
def _naming_options(options: ServerOptions) -> Iterator[None]:
    """Name the option instead of the field that a message begins with."""
    try:
        yield
    except InvalidInputError as error:
        name, _, rest = str(error).partition(" ")
        if not any(name == field.name for field in fields(options)):
            raise
        raise InvalidInputError(f"--{name.replace('_', '-')} {rest}") from error


def warn(message: str) -> None:
    """Print one line of warning."""
    typer.echo(f"mlsys: warning: {message}", err=True)


def _keys_of(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidInputError(f"the keys in {path} cannot be read: {reason}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise InvalidInputError(f"there is no key in {path}; write one on each line")
    if stat.S_ISREG(mode) and mode & 0o077:
        warn(f"others may read the keys in {path}; chmod 600 {path}")
    return keys
