"""Requests of a front, and what is sealed of each, so that any worker can go on with it. Pure: no sockets, no clock.

:mod:`mlsys_serving.processes.recovery` judges the deaths of workers. A suspect runs alone until it is further than it
was at the death, which takes an iteration where its blocks are still there; then together with all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from mlsys_orca.scheduling.batch import FinishedBy, GenerationRequest, GenerationResult, SampledToken, ScoredPrompt
from mlsys_serving.processes.recovery import Record


@dataclass(slots=True, eq=False)
class LiveRequest(Record):
    """A request that has not ended, and what is sealed of it."""

    handle: int  # its name at the workers
    request: GenerationRequest
    number: int = 0  # of its arrival
    tokens: list[SampledToken] = field(default_factory=list)  # the answer so far
    scored: list[ScoredPrompt] = field(default_factory=list)
    block_table: tuple[int, ...] = ()  # K/V blocks that hold num_computed_tokens of its tokens
    num_computed_tokens: int = 0
    num_repeated: int = 0  # tokens that a worker which begins at the prompt is to give once more
    stalled_s: float = 0.0  # when a death held it up, in seconds of the front's clock; 0: its tokens come

    @property
    def place(self) -> tuple[int, int]:
        """Progress so far: tokens generated, tokens computed."""
        return len(self.tokens), self.num_computed_tokens

    @property
    def has_begun(self) -> bool:
        """True if it has run."""
        return bool(self.tokens or self.block_table)

    @property
    def num_outstanding_tokens(self) -> int:
        """Tokens of its prompt left to compute, and of its answer left to generate, at most."""
        left = len(self.request.prompt_token_ids) - self.num_computed_tokens
        return max(0, left) + self.request.max_new_tokens - len(self.tokens)

    @property
    def finish_reason(self) -> FinishedBy | None:
        """Reason why its answer is complete; None: it is not."""
        return self.request.finish_reason(len(self.tokens), self.tokens[-1].token_id) if self.tokens else None

    def result(self, reason: FinishedBy) -> GenerationResult:
        """Return its result, when it is complete."""
        return GenerationResult(tuple(self.tokens), reason, tuple(self.scored))

    def take_scored(self, part: ScoredPrompt) -> ScoredPrompt | None:
        """Keep log-probabilities of its prompt; return those that were not known, or None.

        A prompt that is computed again may be cut into other pieces, so one may begin with what is known.
        """
        known = self.scored[-1].position + len(self.scored[-1].tokens) if self.scored else part.position
        new = part.tokens[max(0, known - part.position) :]
        if not new:
            return None
        self.scored.append(replace(part, position=max(known, part.position), tokens=new))
        return self.scored[-1]


class Ledger:
    """All requests of a replica that have not ended.

    Args:
        numbers: Handles for them, rising; ledgers that share it may hand requests over.
    """

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        self.live: dict[int, LiveRequest] = {}
        self.handles: dict[str, int] = {}  # by request id
        self._numbers = count() if numbers is None else numbers

    def by_arrival(self) -> list[LiveRequest]:
        """Return the requests, first come first."""
        return sorted(self.live.values(), key=lambda live: live.number)

    def open(self, request: GenerationRequest) -> LiveRequest:
        """Add a request."""
        handle = next(self._numbers)
        live = self.live[handle] = LiveRequest(handle, request, handle)
        if request.progress is not None:
            live.tokens = [SampledToken(request.request_id, token) for token in request.progress.answer]
        self.handles[request.request_id] = handle
        return live

    def adopt(self, live: LiveRequest) -> None:
        """Add a request of another ledger, which has dropped it, under a new handle."""
        live.handle = self.handles[live.request.request_id] = next(self._numbers)
        self.live[live.handle] = live

    def rename(self, live: LiveRequest) -> None:
        """Give a request another handle: what a worker still says of the old one is for nobody."""
        self.drop(live.handle)
        self.adopt(live)

    def drop(self, handle: int) -> LiveRequest | None:
        """Remove a request and return it; None: there is none."""
        live = self.live.pop(handle, None)
        if live is not None:
            del self.handles[live.request.request_id]
        return live
