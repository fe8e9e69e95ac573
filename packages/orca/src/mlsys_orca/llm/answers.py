"""Answers as Python callers get them. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

PieceKind = Literal["text", "reasoning", "call"]
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the model asks for."""

    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer as it grows; the texts of one kind joined are the whole."""

    text: str  # of a call: its arguments, as JSON
    kind: PieceKind = "text"
    name: str | None = None  # of the function whose call begins here
    finish_reason: FinishReason | None = None  # of the answer, on its last piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the answers to a prompt."""

    text: str
    token_ids: tuple[int, ...]  # with the token that ended it, if one did
    finish_reason: FinishReason
    logprobs: tuple[float, ...] | None = None  # natural logarithms, by token; None: not asked for
    top_logprobs: tuple[Mapping[int, float], ...] | None = None  # by token: the likeliest ones' by token id
    reasoning: str | None = None  # what the model thought before the text; None: it does not
    tool_calls: tuple[ToolCall, ...] = ()
    first_token_s: float | None = None  # seconds from the request to its first token; None: it has none
    total_s: float = 0.0  # seconds from the request to its end

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second behind the first; None: there are none."""
        num_after = len(self.token_ids) - 1
        if self.first_token_s is None or num_after < 1 or self.total_s <= self.first_token_s:
            return None
        return num_after / (self.total_s - self.first_token_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer to one prompt: the first choice's fields are its own.

    Example:
        >>> choice = Choice(text="Paris.", token_ids=(3, 7), finish_reason="stop")
        >>> Answer(num_prompt_tokens=5, choices=(choice,)).text
        'Paris.'
    """

    choices: tuple[Choice, ...] = field(default=())  # as many as were asked for (``n``), at least one
    num_prompt_tokens: int
    num_cached_tokens: int = 0  # of the prompt, whose keys and values were there

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Reason why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[float, ...] | None:
        """Log-probabilities of the first choice's tokens."""
        return self.choices[0].logprobs

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls of the first choice."""
        return self.choices[0].tool_calls

    def __str__(self) -> str:
        return self.text
