"""Guesses at what comes next, found in the request's own tokens (prompt lookup; Saxena, 2023), pure; or a model's.

Answers quote: a name from the prompt, a line of code, a phrase of their own. Where the last few tokens were seen
before, those that followed then are put behind the next row as a *draft*; one forward gives the logits of all of them,
and each guess stays if it is what would have been sampled there. So the answer is the same with and without drafts,
greedy or with a seed; only the number of iterations changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlsys_orca.scheduling.batch import SamplingParams

_NGRAM = 3  # tokens that must have been seen before: with two most guesses are wrong


class Drafter(Protocol):
    """Guesser of next tokens where prompt lookup finds nothing; see :mod:`mlsys_orca.backends.drafting`."""

    def draft(self, request_id: str, token_ids: Sequence[int], max_tokens: int, sampling: SamplingParams) -> list[int]:
        """Return up to ``max_tokens`` guesses at what follows ``token_ids``, of a request that samples so."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request that has left."""
        ...


class NgramIndex:
    """Index of the last position of each run of three tokens, in a list that only grows.

    Example:
        >>> index, tokens = NgramIndex(), [1, 2, 3, 4, 5, 9, 1, 2, 3]
        >>> index.draft(tokens, 2)
        [4, 5]
    """

    __slots__ = ("_ends", "_num_read")

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> position after it
        self._num_read = _NGRAM - 1  # tokens whose n-grams are known, but for the last one's

    def draft(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Return up to ``max_tokens`` tokens that followed the last three where they were seen before; else none."""
        # The n-gram at the very end is entered in the next call: it must not find itself.
        for end in range(self._num_read + 1, len(token_ids)):
            self._ends[tuple(token_ids[end - _NGRAM : end])] = end
        self._num_read = max(self._num_read, len(token_ids) - 1)
        start = self._ends.get(tuple(token_ids[-_NGRAM:]))
        return [] if start is None else list(token_ids[start : start + max_tokens])
