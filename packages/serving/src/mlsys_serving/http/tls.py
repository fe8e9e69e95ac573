"""Certificates: checked once when the server starts, for HTTPS and gRPC alike."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mlsys_core.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Certificate, key and client authority of a server, as PEM files.

    Example:
        >>> TlsConfig(certificate=Path("server.pem"), key=Path("server.key")).client_ca is None
        True
    """

    certificate: Path  # the server's, then those between it and its root
    key: Path  # its private key, without a password
    client_ca: Path | None = None  # clients must show a certificate that one of these signed; None: they need none


def server_context(tls: TlsConfig) -> ssl.SSLContext:
    """Return a server's TLS context with these files: TLS 1.2 or later.

    Raises:
        InvalidInputError: a file cannot be read, is not PEM or is encrypted, or the key is not the certificate's.
    """
    for name, path in (("certificate", tls.certificate), ("key", tls.key), ("client CA", tls.client_ca)):
        if path is not None:
            read_pem(path, name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.certificate, tls.key, password=_refuse_password)
    except ssl.SSLError as error:
        raise InvalidInputError(
            f"the TLS certificate {tls.certificate} and key {tls.key} do not go together or are not PEM "
            f"({error.reason or error}); give the certificate chain and the unencrypted key that belongs to it"
        ) from error
    if tls.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(tls.client_ca)
        except ssl.SSLError as error:
            raise InvalidInputError(f"the client CA {tls.client_ca} holds no PEM certificate ({error})") from error
    return context


def read_pem(path: Path, name: str) -> bytes:
    """Return the bytes of a PEM file.

    Raises:
        InvalidInputError: it cannot be read, or holds no PEM block.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"the TLS {name} {path} cannot be read: {error.strerror or error}") from error
    if b"-----BEGIN " not in content:
        raise InvalidInputError(f"the TLS {name} {path} is not PEM: there is no line '-----BEGIN ...-----' in it")
    return content


def _refuse_password() -> NoReturn:
    raise InvalidInputError(
        "the TLS key is encrypted with a password; give an unencrypted one that only the server's user may read "
        "(openssl pkey -in KEY -out PLAIN)"
    )
