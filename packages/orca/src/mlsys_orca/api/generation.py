"""Parameters of a generation in no protocol's words, the identity of its answer, and its running answers.

An identity is drawn for a client's request, and given for one that the server asks itself: for lines of batches and,
after its death, for the streams of a journal. Such a request says in its scope whose answer it makes.
"""

from __future__ import annotations

import hashlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlsys_serving.http import runtime_of
from mlsys_serving.http.middleware.gate import presented_keys
from starlette.requests import Request

from mlsys_orca.api.text_stream import TextDelta, TextOptions
from mlsys_orca.engine.streams import KnownAnswer, TokenStream
from mlsys_orca.scheduling.batch import SamplingParams
from mlsys_orca.scheduling.images import PlacedImage
from mlsys_orca.scheduling.request import GenerationRequest
from mlsys_orca.text.guides import Grammar

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParameters:
    """Parameters of a generation, in no protocol's words."""

    prefix: str  # of the answer's id
    model: str  # the name that the client gave: the model's or an adapter's
    prompts: Sequence[Sequence[int]] = ()  # token ids; in a finished request at least one prompt of one token
    images: tuple[PlacedImage, ...] = ()  # of the prompt, if there is one
    max_new_tokens: int | None  # None: what the context has room for
    sampling: SamplingParams  # of the first choice; seed and guide are set here
    seed: int | None = None  # None: drawn
    num_choices: int = 1  # of each prompt
    grammar: Grammar | None = None
    ignores_eos: bool = False
    text: TextOptions = field(default_factory=TextOptions)


@dataclass(frozen=True, slots=True)
class Choice:
    """One running answer."""

    index: int  # among all choices of the request
    tokens: TokenStream
    deltas: AsyncGenerator[TextDelta, None]

    @property
    def request(self) -> GenerationRequest:
        """The engine's request behind this answer."""
        return self.tokens.request


@dataclass(frozen=True, slots=True)
class Generation:
    """One accepted request with its running answers. Close it."""

    answer_id: str
    identity: Identity
    model: str
    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    num_choices: int = 1  # of each prompt

    @property
    def created(self) -> int:
        """Time of its begin, in seconds since the epoch."""
        return self.identity.created

    def close(self) -> None:
        """Cancel what has not finished. Idempotent."""
        for choice in self.choices:
            choice.tokens.close()
