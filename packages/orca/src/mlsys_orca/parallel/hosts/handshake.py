"""Handshake of two hosts of one run: who joins proves the secret first, then who listens, then code and model compare.

Until the other side has proved the secret, a few kilobytes and a few seconds are all that it gets, and no answer but
the end of the connection. Nothing is unpickled: frames hold MessagePack of the types below.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import time
from pathlib import Path
from typing import TypeVar

import msgspec
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.posix import is_local
from mlsys_serving.http.tls import TlsConfig, read_pem, server_context
from mlsys_serving.processes import frame

from mlsys_orca.parallel.hosts.channel import TcpChannel, prepare
from mlsys_orca.parallel.hosts.secrets import NONCE_NBYTES, Identity, Proofs, Seal

TIMEOUT_S = 10.0  # of a whole handshake
_MOST_NBYTES = 4096  # of one side's part of it
_PROTOCOL = "mlsys orca hosts 1"
_JOINS, _LISTENS = "joins", "listens"  # roles


class Challenge(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """First message, of the side that listens."""

    protocol: str
    nonce: bytes


class Answer(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Second message, of the side that joins."""

    nonce: bytes
    claims: bytes  # an encoded Identity
    proof: bytes


class Welcome(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Third message, of the side that listens, to a side that has proved the secret."""

    proof: bytes
    claims: bytes  # an encoded Identity; sealed as the first frame, so nobody else wrote it


_encode = msgspec.msgpack.encode
_LENGTH = struct.Struct("<I")  # as frame() writes it
Message = TypeVar("Message", Challenge, Answer, Welcome)


class Listener:
    """A port at which the hosts of a run join.

    Args:
        host: Address to listen at.
        port: Port; 0: any free one.
        tls: Certificate and key, if control messages are to be encrypted.

    Raises:
        InvalidInputError: the port is in use, or the address is not this machine's.
    """

    def __init__(self, host: str, port: int, *, tls: TlsConfig | None = None) -> None:
        self._context = None if tls is None else server_context(tls)
        try:
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise InvalidInputError(
                f"{host}:{port} cannot be listened at: {_reason(error)}; take another port"
            ) from error
        self.address: tuple[str, int] = self._socket.getsockname()[:2]

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when somebody connects."""
        return self._socket.fileno()

    def accept(self, secret: bytes, ours: Identity, *, timeout_s: float) -> tuple[Identity, TcpChannel]:
        """Wait for a host that has the secret, and return what it says of itself and the channel to it.

        Connections that prove nothing are closed, and the wait goes on.

        Raises:
            ServingError: none came in time, or one that has the secret has other code or another model.
        """
        until_s = time.monotonic() + timeout_s
        while (left_s := until_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                end, _ = self._socket.accept()
            except TimeoutError:
                break
            try:
                return welcome(end, secret, ours, context=self._context, timeout_s=min(left_s, TIMEOUT_S))
            except StrangerError:
                continue
        raise ServingError(f"no other host joined at {self.address[0]}:{self.address[1]} within {timeout_s:.0f} s")

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._socket.close()


class StrangerError(ServingError):
    """The other side has not proved that it knows the run's secret."""


def welcome(
    end: socket.socket,
    secret: bytes,
    ours: Identity,
    *,
    context: ssl.SSLContext | None = None,
    timeout_s: float = TIMEOUT_S,
) -> tuple[Identity, TcpChannel]:
    """Do the listener's part of a handshake; the socket is closed where it fails.

    Raises:
        StrangerError: the other side proved nothing.
        ServingError: it has other code or another model; it is told so.
    """
    link = _Link(end, timeout_s)
    try:
        if context is not None:
            link.wrap(context)
        nonce = os.urandom(NONCE_NBYTES)
        link.send(Challenge(_PROTOCOL, nonce))
        answer = link.receive(Answer)
        proofs = Proofs(secret, nonce, answer.nonce, answer.claims)
        if len(answer.nonce) != NONCE_NBYTES or not proofs.holds(_JOINS, answer.proof):
            raise StrangerError("a connection did not prove the run's secret")
        theirs = msgspec.msgpack.decode(answer.claims, type=Identity)
        channel_out, channel_in = Seal(proofs.key(_LISTENS)), Seal(proofs.key(_JOINS))
        link.send(Welcome(proofs.of(_LISTENS), channel_out.close(_encode(ours))))
        difference = ours.difference(theirs)
        if difference is not None:
            raise ServingError(f"a host joined that does not fit: {difference}")
        return theirs, link.channel(channel_out, channel_in)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        link.close()
        raise StrangerError(f"a connection ended before it proved the run's secret: {error}") from error
    except ServingError:
        link.close()
        raise


def join(
    host: str,
    port: int,
    secret: bytes,
    ours: Identity,
    *,
    authority: Path | None = None,
    is_local: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> tuple[Identity, TcpChannel]:
    """Join the run whose listener is at an address.

    Args:
        host: Name or address.
        port: Port.
        secret: The run's.
        ours: Claims of this side.
        authority: PEM file with the authority of the listener's certificate; None: the listener takes no TLS.
        is_local: The listener is on this machine, and ``authority`` its certificate, whose name is not looked at: the
            secret proves who it is.
        timeout_s: Seconds for connection and handshake together.

    Raises:
        InvalidInputError: the authority's file is no PEM.
        ServingError: nobody listens there, it has another secret, or other code or another model.
    """
    context = None
    if authority is not None:
        read_pem(authority, "authority")
        context = ssl.create_default_context(cafile=str(authority))
        if is_local:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        end = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise ServingError(f"nobody can be joined at {host}:{port}: {_reason(error)}") from error
    return introduce(end, secret, ours, context=context, server_name=host, timeout_s=timeout_s)


def introduce(
    end: socket.socket,
    secret: bytes,
    ours: Identity,
    *,
    context: ssl.SSLContext | None = None,
    server_name: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> tuple[Identity, TcpChannel]:
    """Do the joining side's part of a handshake; the socket is closed where it fails.

    Raises:
        StrangerError: the listener has another secret, or is none.
        ServingError: it has other code or another model.
    """
    link = _Link(end, timeout_s)
    try:
        if context is not None:
            link.wrap(context, server_name)
        challenge = link.receive(Challenge)
        if challenge.protocol != _PROTOCOL or len(challenge.nonce) != NONCE_NBYTES:
            raise StrangerError(f"it speaks {challenge.protocol[:40]!r} and this side {_PROTOCOL!r}")
        nonce, claims = os.urandom(NONCE_NBYTES), _encode(ours)
        proofs = Proofs(secret, challenge.nonce, nonce, claims)
        link.send(Answer(nonce, claims, proofs.of(_JOINS)))
        answer = link.receive(Welcome)
        channel_out, channel_in = Seal(proofs.key(_JOINS)), Seal(proofs.key(_LISTENS))
        sealed = channel_in.open(answer.claims)
        if not proofs.holds(_LISTENS, answer.proof) or sealed is None:
            raise StrangerError("the listener did not prove the run's secret")
        theirs = msgspec.msgpack.decode(sealed, type=Identity)
        difference = ours.difference(theirs)
        if difference is not None:
            raise ServingError(f"the listener does not fit: {difference}")
        return theirs, link.channel(channel_out, channel_in)
    except ssl.SSLError as error:
        link.close()
        raise StrangerError(f"TLS with the listener failed: {error.reason or error}") from error
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        link.close()
        raise StrangerError(
            f"the listener ended the handshake ({error}): both sides need the same secret, and both TLS or neither"
        ) from error
    except ServingError:
        link.close()
        raise


class _Link:
    """A connection within a handshake: one message at a time, few bytes, one deadline for all."""

    def __init__(self, end: socket.socket, timeout_s: float) -> None:
        self._socket, self._until_s = end, time.monotonic() + timeout_s

    def wrap(self, context: ssl.SSLContext, server_name: str | None = None) -> None:
        self._limit()
        is_server = context.protocol == ssl.PROTOCOL_TLS_SERVER
        self._socket = context.wrap_socket(self._socket, server_side=is_server, server_hostname=server_name)

    def send(self, message: msgspec.Struct) -> None:
        self._limit()
        self._socket.sendall(frame(_encode(message)))

    def receive(self, kind: type[Message]) -> Message:
        """Return the next message, which must be of ``kind``; no byte behind it is taken."""
        (nbytes,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if nbytes > _MOST_NBYTES:
            raise StrangerError(f"a handshake of {nbytes} bytes; at most {_MOST_NBYTES} are read")
        return msgspec.msgpack.decode(self._take(nbytes), type=kind)

    def _take(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            self._limit()
            more = self._socket.recv(nbytes - len(data))
            if not more:
                raise ConnectionError("the other side hung up")
            data += more
        return data

    def channel(self, out: Seal, incoming: Seal) -> TcpChannel:
        if not is_local(self._socket):
            prepare(self._socket)
        return TcpChannel(self._socket, out, incoming)

    def close(self) -> None:
        self._socket.close()

    def _limit(self) -> None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it took too long")
        self._socket.settimeout(left_s)


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
