"""Hosts of a run: who has the secret joins, all else is closed or refused in one line, and no byte does harm."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_orca.parallel.hosts.channel import TcpChannel
from mlsys_orca.parallel.hosts.handshake import Answer, Challenge, Listener, StrangerError, introduce, join, welcome
from mlsys_orca.parallel.hosts.secrets import Identity, Proofs, Seal, read_secret
from mlsys_serving.http.tls import TlsConfig
from mlsys_serving.processes import frame

from tests.certificates import make_certificates

SECRET = b"0123456789abcdef"
IDENTITY = Identity(version="1", recipe="r", model="m")


def meet(
    *, theirs: Identity = IDENTITY, secret: bytes = SECRET, ours: Identity = IDENTITY
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Run both parts of a handshake; the results of the listener and of who joins."""
    left, right = socket.socketpair()
    with ThreadPoolExecutor(2) as pool:
        listens = pool.submit(welcome, left, SECRET, ours, timeout_s=5)
        joins = pool.submit(introduce, right, secret, theirs, timeout_s=5)
    return listens.result, joins.result


def test_frames_go_both_ways_and_the_end_is_told() -> None:
    listens, joins = meet(theirs=msgspec.structs.replace(IDENTITY, name="0.1 up"))
    (found, left), (_, right) = listens(), joins()
    assert found.name == "0.1 up"
    payloads = [b"", b"x" * 300_000, b"y"]
    sender = threading.Thread(target=lambda: [right.send(payload) for payload in payloads])
    sender.start()
    assert [left.receive() for _ in payloads] == payloads
    sender.join()
    assert not right.is_waiting()
    left.send(b"back")
    assert right.is_waiting()
    assert right.receive() == b"back"
    left.close()
    assert right.is_waiting()
    assert right.receive() is None
    right.close()


def test_another_secret_is_no_secret() -> None:
    listens, joins = meet(secret=b"another secret..")
    with pytest.raises(StrangerError, match="did not prove the run's secret"):
        listens()
    with pytest.raises(StrangerError, match="both sides need the same secret"):
        joins()


@pytest.mark.parametrize("field", ["version", "recipe", "model"])
def test_other_code_or_another_model_is_named_on_both_sides(field: str) -> None:
    listens, joins = meet(theirs=msgspec.structs.replace(IDENTITY, **{field: "other"}))
    for result in (listens, joins):
        with pytest.raises(ServingError, match=f"it has {field} '.*' and this side '.*': install the same package"):
            result()


def test_a_mirror_proves_nothing() -> None:
    """An answer that is computed from what the listener itself would say is refused."""
    proofs = Proofs(SECRET, b"c" * 32, b"n" * 32, b"claims")
    assert not proofs.holds("joins", proofs.of("listens"))
    assert not Proofs(SECRET, b"d" * 32, b"n" * 32, b"claims").holds("joins", proofs.of("joins"))
    assert not Proofs(SECRET, b"c" * 32, b"n" * 32, b"others").holds("joins", proofs.of("joins"))
    assert proofs.holds("joins", proofs.of("joins"))


@given(
    payloads=st.lists(st.binary(max_size=40), min_size=1, max_size=5),
    data=st.data(),
)
def test_no_frame_is_changed_moved_or_doubled(payloads: list[bytes], data: st.DataObject) -> None:
    seal = Seal(b"key")
    sent = [seal.close(payload) for payload in payloads]
    at = data.draw(st.integers(0, len(sent) - 1))
    kind = data.draw(st.sampled_from(["change", "double", "drop"]))
    if kind == "change":
        spot = data.draw(st.integers(0, len(sent[at]) - 1))
        changed = bytearray(sent[at])
        changed[spot] ^= data.draw(st.integers(1, 255))
        sent[at] = bytes(changed)
    elif kind == "double":
        sent.insert(at, sent[at])
        at += 1
    else:
        del sent[at]
    reader = Seal(b"key")
    found = [reader.open(each) for each in sent]
    assert found[:at] == payloads[:at]
    if at < len(found):
        assert found[at] is None


@given(st.binary(max_size=200))
def test_a_listener_answers_nothing_to_noise(noise: bytes) -> None:
    left, right = socket.socketpair()
    right.sendall(noise)
    right.shutdown(socket.SHUT_WR)
    with pytest.raises(StrangerError):
        welcome(left, SECRET, IDENTITY, timeout_s=5)
    received = b""
    with contextlib.suppress(ConnectionResetError):  # the listener did not read all of the noise
        while more := right.recv(4096):
            received += more
        assert msgspec.msgpack.decode(received[4:], type=Challenge)  # and no more than that
    right.close()


@given(
    spot=st.integers(0, 10**6),
    flip=st.integers(1, 255),
)
def test_an_answer_with_one_changed_byte_is_a_stranger(spot: int, flip: int) -> None:
    left, right = socket.socketpair()

    def change() -> None:
        length = int.from_bytes(_exactly(right, 4), "little")
        challenge = msgspec.msgpack.decode(_exactly(right, length), type=Challenge)
        claims = msgspec.msgpack.encode(IDENTITY)
        proof = Proofs(SECRET, challenge.nonce, b"n" * 32, claims).of("joins")
        answer = bytearray(frame(msgspec.msgpack.encode(Answer(b"n" * 32, claims, proof))))
        answer[spot % len(answer)] ^= flip
        right.sendall(answer)
        right.shutdown(socket.SHUT_WR)

    with ThreadPoolExecutor(1) as pool:
        changed = pool.submit(change)
        with pytest.raises(StrangerError):
            welcome(left, SECRET, IDENTITY, timeout_s=5)
        changed.result()
    right.close()


def _exactly(end: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        data += end.recv(nbytes - len(data))
    return data


@given(st.binary(min_size=1, max_size=200))
def test_noise_on_an_open_channel_is_an_error_or_the_end(noise: bytes) -> None:
    left, right = socket.socketpair()
    channel = TcpChannel(left, Seal(b"a"), Seal(b"b"))
    right.sendall(noise)
    right.close()
    with contextlib.suppress(ServingError):
        assert channel.receive() is None
    channel.close()


def test_a_listener_closes_who_says_nothing_and_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlsys_orca.parallel.hosts.handshake.TIMEOUT_S", 0.3)
    listener = Listener("127.0.0.1", 0)
    silent = socket.create_connection(listener.address)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(join, *listener.address, SECRET, IDENTITY, timeout_s=20)
        theirs, channel = listener.accept(SECRET, IDENTITY, timeout_s=20)
        _, other = joined.result()
    assert theirs == IDENTITY
    channel.send(b"hello")
    assert other.receive() == b"hello"
    with pytest.raises(InvalidInputError, match="cannot be listened at: Address already in use; take another port"):
        Listener(*listener.address)
    with pytest.raises(ServingError, match=r"no other host joined at 127.0.0.1:\d+ within 0 s"):
        listener.accept(SECRET, IDENTITY, timeout_s=0.05)
    for each in (silent, channel, other, listener):
        each.close()
    with pytest.raises(ServingError, match="nobody can be joined"):
        join(*listener.address, SECRET, IDENTITY, timeout_s=2)


def test_tls_wraps_the_channel_and_an_unknown_authority_is_refused(tmp_path: Path) -> None:
    for name in ("ours", "another"):
        (tmp_path / name).mkdir()
    files, others = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "another")
    listener = Listener("127.0.0.1", 0, tls=TlsConfig(certificate=files.server, key=files.server_key))
    host, port = "localhost", listener.address[1]
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(listener.accept, SECRET, IDENTITY, timeout_s=20)
        with pytest.raises(StrangerError, match="TLS with the listener failed"):
            join(host, port, SECRET, IDENTITY, authority=others.ca)
        with pytest.raises(StrangerError, match="both TLS or neither"):
            join(host, port, SECRET, IDENTITY, timeout_s=1)
        _, channel = join(host, port, SECRET, IDENTITY, authority=files.ca)
        _, other = waiting.result()
        payload = b"x" * 1_000_000
        sent = [pool.submit(end.send, payload) for end in (channel, other)]  # at once, and each receives meanwhile
        assert channel.receive() == other.receive() == payload
        for each in sent:
            each.result()
    for each in (channel, other, listener):
        each.close()


def test_a_secret_is_its_owners_alone_and_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(InvalidInputError, match="cannot be read: No such file"):
        read_secret(path)
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o644)
    with pytest.raises(InvalidInputError, match="chmod 600"):
        read_secret(path)
    path.chmod(0o600)
    assert read_secret(path) == SECRET
    path.write_bytes(b"short")
    with pytest.raises(InvalidInputError, match="has 5 bytes; it needs 16 to 4096"):
        read_secret(path)
