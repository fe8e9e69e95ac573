"""Certificates for tests of TLS, made by the ``openssl`` command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files in PEM: an authority, and what it signed."""

    ca: Path
    server: Path  # for 127.0.0.1 and localhost
    server_key: Path
    client: Path
    client_key: Path
    other_key: Path  # belongs to no certificate here
    encrypted_key: Path  # the server's, with a password


def make_certificates(folder: Path) -> Certificates:
    """Make an authority, a server's and a client's certificate, valid for a day."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req",
        "-x509",
        *new_key,
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
        "-days",
        "1",
        "-subj",
        "/CN=test authority",
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),  # Python 3.13 asks for it
    )
    for name, extension in (
        ("server", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
        ("client", "extendedKeyUsage=clientAuth"),
    ):
        (folder / f"{name}.ext").write_text(extension)
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1", "-extfile", f"{name}.ext")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", "other.key")
    openssl("pkey", "-in", "server.key", "-aes256", "-passout", "pass:secret", "-out", "encrypted.key")
    return Certificates(
        ca=folder / "ca.pem",
        server=folder / "server.pem",
        server_key=folder / "server.key",
        client=folder / "client.pem",
        client_key=folder / "client.key",
        other_key=folder / "other.key",
        encrypted_key=folder / "encrypted.key",
    )
