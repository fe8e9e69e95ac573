"""HTTPS with real certificates and a real client."""

from __future__ import annotations

import socket
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import BackgroundServer, ConnectionLimits, HttpConfig, TlsConfig, create_app
from mlsys_serving.http.tls import server_context

from tests.certificates import Certificates, make_certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls(certificates: Certificates) -> TlsConfig:
    return TlsConfig(certificate=certificates.server, key=certificates.server_key)


def trusting(certificates: Certificates) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificates.ca))


def test_a_client_that_trusts_the_authority_is_served(tls: TlsConfig, certificates: Certificates) -> None:
    with BackgroundServer(create_app(HttpConfig(tls=tls, drain_timeout_s=0))) as server:
        assert server.url.startswith("https://127.0.0.1:")
        for host in ("127.0.0.1", "localhost"):
            url = f"https://{host}:{server.address.port}/health/ready"
            assert httpx.get(url, verify=trusting(certificates)).json()["status"] == "ready"
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(f"{server.url}/health/ready")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url.replace('https', 'http')}/health/ready")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_old_protocols_are_refused(tls: TlsConfig, certificates: Certificates) -> None:
    context = trusting(certificates)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    assert server_context(tls).minimum_version == ssl.TLSVersion.TLSv1_2
    with BackgroundServer(create_app(HttpConfig(tls=tls, drain_timeout_s=0))) as server:
        url = f"{server.url}/health/ready"
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=context)


def test_with_a_client_authority_only_its_clients_are_served(tls: TlsConfig, certificates: Certificates) -> None:
    config = HttpConfig(tls=replace(tls, client_ca=certificates.ca), drain_timeout_s=0)
    context = trusting(certificates)
    with BackgroundServer(create_app(config)) as server:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health/ready", verify=context)
        context.load_cert_chain(certificates.client, certificates.client_key)
        assert httpx.get(f"{server.url}/health/ready", verify=context).status_code == 200


def test_a_client_that_never_shakes_hands_is_closed(tls: TlsConfig) -> None:
    config = HttpConfig(tls=tls, connections=ConnectionLimits(header_timeout_s=0.3), drain_timeout_s=0)
    with BackgroundServer(create_app(config)) as server:
        address = (server.address.host, server.address.port)
        with socket.create_connection(address, timeout=600) as sock:
            assert sock.recv(100) == b""


def test_unusable_input_is_refused_in_one_line(certificates: Certificates, tmp_path: Path) -> None:
    server, key = certificates.server, certificates.server_key
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"certificate": tmp_path / "none.pem"}, "certificate .*none.pem cannot be read: No such file"),
        ({"certificate": tmp_path}, "cannot be read: Is a directory"),
        ({"key": text}, "key .*text.pem is not PEM"),
        ({"certificate": broken}, "do not go together or are not PEM"),
        ({"key": certificates.other_key}, "do not go together .*(?i:key.values.mismatch)"),
        ({"key": certificates.encrypted_key}, "encrypted with a password"),
        ({"client_ca": text}, "client CA .*is not PEM"),
        ({"client_ca": broken}, "client CA .*holds no PEM certificate"),
    ]
    for changes, message in cases:
        with pytest.raises(InvalidInputError, match=message):
            server_context(replace(TlsConfig(certificate=server, key=key), **changes))
