"""Identity of an answer: drawn for a client's request, given for one that the server asks itself.

The server asks its own routes for the lines of batches and, after its death, for the streams of a journal. Such a
request says in its scope whose answer it makes, and under which identity.
"""

from __future__ import annotations

import hashlib
import secrets
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlsys_serving.http import runtime_of
from mlsys_serving.http.middleware.gate import presented_keys
from starlette.requests import Request

from mlsys_orca.engine.streams import KnownAnswer

_SCOPE_KEY = "mlsys.orca.given"


@dataclass(frozen=True, slots=True)
class Identity:
    """All that an answer has by chance: given again, the same answer is made again."""

    key: str  # 32 hexadecimal digits, of the answer's id
    created: int  # seconds since the epoch
    seed: int  # of a request that has none
    known: Mapping[int, KnownAnswer] = field(default_factory=dict)  # by choice: what is known of it already

    @classmethod
    def draw(cls) -> Identity:
        """Return a new one."""
        return cls(uuid.uuid4().hex, int(time.time()), secrets.randbits(63))


@dataclass(frozen=True, slots=True)
class _Given:
    identity: Identity
    owner: str


def given(identity: Identity, owner: str) -> dict[str, Any]:
    """Return the items of the scope of a request that the server asks itself.

    Args:
        identity: The answer's.
        owner: Digest of a key; empty: the answer belongs to all.
    """
    return {_SCOPE_KEY: _Given(identity, owner)}


def identity_of(request: Request) -> Identity | None:
    """Return the identity that a request's answer is given; None: it is a client's, and one is drawn."""
    found: _Given | None = request.scope.get(_SCOPE_KEY)
    return None if found is None else found.identity


def owner_of(request: Request) -> str:
    """Return the digest of the API key that a request came with; empty if the server has no keys."""
    found: _Given | None = request.scope.get(_SCOPE_KEY)
    if found is not None:
        return found.owner
    known = {key.encode() for key in runtime_of(request.app).config.api_keys}
    held = [key for key in presented_keys(request.scope["headers"]) if key in known]
    return hashlib.sha256(b"mlsys-owner" + held[0]).hexdigest() if held else ""
