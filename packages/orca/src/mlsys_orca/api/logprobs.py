"""Log-probabilities of an answer's tokens, in the shapes of the endpoints.

A token's text is what its own bytes spell, so the texts joined are the answer: decoding a token alone would drop the
space before a word (SentencePiece), and give all parts of characters one text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from mlsys_orca.scheduling.batch import SampledToken
from mlsys_orca.text.tokenizer import Detokenizer, Tokenizer

LEAST_LOGPROB = -9999.0  # for minus infinity, which JSON has not; the protocol's own stand-in


class TopLogprob(BaseModel):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The token chosen at a position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat answer's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion's tokens, in the older shape."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    """One token at a position of the prompt."""

    logprob: float
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TextOffsets:
    """Positions of an answer's tokens in its text, as the tokens come.

    A token that ends no character begins where the next character does.

    Args:
        tokenizer: The model's.
        prompt_ids: The tokens before the first.
        skip_special: Whether control tokens are left out of the text.
        start: Position of the first token.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, prompt_ids: Sequence[int] = (), skip_special: bool = True, start: int = 0
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids=prompt_ids, skip_special=skip_special)
        self._num_chars = start

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """Return the position of each of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_chars)
            self._num_chars += len(self._detokenizer.push(token_id))
        return offsets


def finite(logprob: float | None) -> float:
    """Return ``logprob`` as a number that JSON can hold."""
    return logprob if logprob is not None and math.isfinite(logprob) else LEAST_LOGPROB


def chat_logprobs(tokens: list[SampledToken], tokenizer: Tokenizer) -> ChatLogprobs:
    """Return log-probabilities in the chat endpoint's shape."""

    def entry(token_id: int, logprob: float | None) -> TopLogprob:
        raw = tokenizer.token_bytes(token_id)
        text = tokenizer.token_text(token_id)
        return TopLogprob(token=text, logprob=finite(logprob), bytes=None if raw is None else list(raw))

    return ChatLogprobs(
        content=[
            TokenLogprob(
                **entry(token.token_id, token.logprob).model_dump(),
                top_logprobs=[entry(token_id, logprob) for token_id, logprob in token.top_logprobs],
            )
            for token in tokens
        ]
    )


def completion_logprobs(tokens: list[SampledToken], tokenizer: Tokenizer, offsets: list[int]) -> CompletionLogprobs:
    """Return log-probabilities in the older shape; ``offsets`` are the tokens' positions in the text."""
    return CompletionLogprobs(
        tokens=[_key(token.token_id, tokenizer) for token in tokens],
        token_logprobs=[None if token.logprob is None else finite(token.logprob) for token in tokens],
        top_logprobs=[None if token.logprob is None else _best(token, tokenizer) for token in tokens],
        text_offset=offsets,
    )


def _best(token: SampledToken, tokenizer: Tokenizer) -> dict[str, float]:
    pairs = ((token.token_id, token.logprob), *token.top_logprobs)
    return {_key(token_id, tokenizer): finite(logprob) for token_id, logprob in pairs}


def _key(token_id: int, tokenizer: Tokenizer) -> str:
    r"""Return a token's text, or where it is no whole characters its bytes, as OpenAI does: ``bytes:\xe2\x80``."""
    raw = tokenizer.token_bytes(token_id) or b""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(scored: tuple[SampledToken, ...], tokenizer: Tokenizer) -> PromptLogprobs:
    """Return the prompt's log-probabilities, token by token, in vLLM's shape; None for the first."""

    def entries(token: SampledToken) -> dict[str, PromptLogprob]:
        pairs = ((token.token_id, token.logprob), *token.top_logprobs)
        return {
            str(token_id): PromptLogprob(logprob=finite(logprob), decoded_token=tokenizer.token_text(token_id))
            for token_id, logprob in pairs
        }

    return [None, *map(entries, scored)]
