"""The secret of a run: read from a file, proved in a handshake, and the key of every frame's code. No sockets.

Nobody sends the secret. Each side proves that it has it by a code (HMAC-SHA256) over random numbers of both, its role
and what it says of itself, so that a proof cannot be used again, mirrored, or carried to other claims. The keys of a
connection's frames follow from the same numbers, one for each direction.
"""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path

import msgspec
from mlsys_core.errors import InvalidInputError

NONCE_NBYTES = 32
CODE_NBYTES = 16  # of a frame's code
_LEAST_NBYTES = 16  # of a secret
_MOST_NBYTES = 4096


class Identity(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Claims of one side about itself; unequal code or models do not work together."""

    version: str  # of this package
    recipe: str  # of the compiled kernels; empty: there are none
    model: str  # digest of the model's configuration and the form of its weights
    name: str = ""  # of the channel: which of a group's channels this connection becomes

    def difference(self, theirs: Identity) -> str | None:
        """Return what keeps the two from working together, in one line; None: nothing does.

        Example:
            >>> ours = Identity(version="0.1.0", recipe="", model="a")
            >>> ours.difference(Identity(version="0.2.0", recipe="", model="a"))
            "it has version '0.2.0' and this side '0.1.0': install the same package and model on all hosts"
        """
        for what in ("version", "recipe", "model"):
            if (own := getattr(self, what)) != (other := getattr(theirs, what)):
                return f"it has {what} {other!r} and this side {own!r}: install the same package and model on all hosts"
        return None


def read_secret(path: Path) -> bytes:
    """Return the secret in a file, without white space around it.

    Raises:
        InvalidInputError: it cannot be read, others may read it, or it is too short or too long.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(_MOST_NBYTES + 1).strip()
    except OSError as error:
        raise InvalidInputError(f"the secret file {path} cannot be read: {error.strerror or error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidInputError(f"others than its owner have rights to the secret file {path}: chmod 600 {path}")
    if not _LEAST_NBYTES <= len(secret) <= _MOST_NBYTES:
        raise InvalidInputError(
            f"the secret in {path} has {len(secret)} bytes; it needs {_LEAST_NBYTES} to {_MOST_NBYTES}, such as of "
            f"openssl rand -hex 32 > {path}"
        )
    return secret


class Proofs:
    """Codes that both sides of one connection can compute, and nobody else.

    Args:
        secret: The run's.
        challenge: Random number of the side that listens.
        counter: Random number of the side that joins.
        claims: Encoded :class:`Identity` of the side that joins.
    """

    def __init__(self, secret: bytes, challenge: bytes, counter: bytes, claims: bytes) -> None:
        self._secret, self._context = secret, challenge + counter + claims

    def of(self, role: str) -> bytes:
        """Return the proof of the side ``role``: 32 bytes."""
        return hmac.digest(self._secret, f"mlsys orca proof {role}\0".encode() + self._context, "sha256")

    def holds(self, role: str, proof: bytes) -> bool:
        """Return whether a proof is that of ``role``, in a time that does not depend on where it differs."""
        return hmac.compare_digest(self.of(role), proof)

    def key(self, role: str) -> bytes:
        """Return the key for frames that ``role`` sends."""
        return hmac.digest(self._secret, f"mlsys orca frames {role}\0".encode() + self._context, "sha256")


class Seal:
    """Codes of one direction's frames: each covers the frame's number, so none can be dropped, doubled or moved.

    Example:
        >>> sealed = Seal(b"key").close(b"payload")
        >>> Seal(b"key").open(sealed), Seal(b"other").open(sealed)
        (b'payload', None)
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def close(self, payload: bytes) -> bytes:
        """Return the next frame with its code."""
        return self._code(payload) + payload

    def open(self, sealed: bytes) -> bytes | None:
        """Return the next frame's payload; None: it is not what the other side sent."""
        payload = sealed[CODE_NBYTES:]
        return payload if hmac.compare_digest(self._code(payload), sealed[:CODE_NBYTES]) else None

    def _code(self, payload: bytes) -> bytes:
        number, self._number = self._number, self._number + 1
        return hmac.digest(self._key, number.to_bytes(8, "little") + payload, "sha256")[:CODE_NBYTES]
