"""Parts of an answer in no protocol's words: reasoning, text, calls."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer: it goes on with the piece before it if that is of the same kind, and this has no name."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""  # of a call: its arguments, as JSON
    name: str | None = None  # of the function whose call begins here

    def follows(self, other: Part) -> bool:
        """Return whether this piece goes on with ``other``."""
        return self.kind == other.kind and self.name is None


def call_id(prefix: str, answer_id: str, number: int, *, choice: int = 0) -> str:
    """Return the id of a call, which clients give back with its result; the same whenever the answer is made again.

    Args:
        prefix: The protocol's.
        answer_id: The answer's.
        number: Index of the call in its choice.
        choice: Index of the choice.
    """
    place = f"{answer_id}/{choice}/{number}".encode()
    return f"{prefix}_{hashlib.blake2b(place, digest_size=12).hexdigest()}"


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return ``parts`` with pieces that belong together as one.

    Example:
        >>> joined([Part("text", "a"), Part("text", "b"), Part("call", name="f"), Part("call", "{}")])
        [Part(kind='text', text='ab', name=None), Part(kind='call', text='{}', name='f')]
    """
    whole: list[Part] = []
    for part in parts:
        if whole and part.follows(whole[-1]):
            whole[-1] = replace(whole[-1], text=whole[-1].text + part.text)
        else:
            whole.append(part)
    return whole


def text_of(parts: Iterable[Part], kind: Literal["reasoning", "text"]) -> str:
    """Return the text of all parts of that kind."""
    return "".join(part.text for part in parts if part.kind == kind)


def calls_of(parts: Iterable[Part]) -> list[Part]:
    """Return the calls among parts that are joined."""
    return [part for part in parts if part.kind == "call"]
