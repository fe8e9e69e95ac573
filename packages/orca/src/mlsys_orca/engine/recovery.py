"""Requests of a front, and the order in which they go on when a worker has died. Pure: no sockets, no clock.

A front holds each request and what is sealed of it, so that any worker can go on with it. When a worker dies, those
that ran in its last iteration are *suspects* if the worker crashed, or if it was killed for the third time without
their having advanced: something in them may be what kills. Suspects go on alone, one after the other, each until it is
further than it was at the death, which takes an iteration where its blocks are still there; then together with all
others. Who is alone in an iteration that crashes for the second time fails, or in four that crash; nobody else does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from mlsys_orca.scheduling.batch import SampledToken, ScoredPrompt
from mlsys_orca.scheduling.request import FinishedBy, GenerationRequest, GenerationResult

_LONE_CRASHES = 3  # each at another place, that may be somebody else's doing
_STILL_DEATHS = 2  # kills from outside without an advance between, from which on a request is a suspect


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has not ended, and what is sealed of it."""

    handle: int  # its name at the workers
    request: GenerationRequest
    number: int = 0  # of its arrival
    tokens: list[SampledToken] = field(default_factory=list)  # the answer so far
    scored: list[ScoredPrompt] = field(default_factory=list)
    block_table: tuple[int, ...] = ()  # K/V blocks that hold num_computed_tokens of its tokens
    num_computed_tokens: int = 0
    num_repeated: int = 0  # tokens that a worker which begins at the prompt is to give once more
    num_deaths: int = 0  # of workers that ran it at that moment
    place_at_death: tuple[int, int] | None = None  # how far it was at the last of them, or before if that was further
    num_crashes: int = 0  # at that place
    num_lone_crashes: int = 0  # at any place, with no other beside it
    num_still: int = 0  # deaths in a row between which it did not advance
    stalled_s: float = 0.0  # when a death held it up, in seconds of the front's clock; 0: its tokens come

    @property
    def place(self) -> tuple[int, int]:
        """Progress so far: tokens generated, tokens computed."""
        return len(self.tokens), self.num_computed_tokens

    @property
    def has_advanced(self) -> bool:
        """True if it is further than at any death so far, so that what it did then does not end a worker."""
        return self.place_at_death is None or self.place > self.place_at_death

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


@dataclass(frozen=True, slots=True)
class Verdict:
    """Judgement of the requests that ran when a worker died."""

    failed: tuple[LiveRequest, ...]  # they ran alone when the worker crashed
    suspects: tuple[LiveRequest, ...]  # to run alone first, one after the other


def judge(running: Collection[LiveRequest], *, is_crash: bool) -> Verdict:
    """Note the death of a worker for those that ran at that moment; return who fails and who is suspect.

    Args:
        running: Requests of the iteration under way.
        is_crash: The worker ended by its own doing, or hung; False: it was killed from outside.

    Example:
        >>> from mlsys_orca.scheduling.request import GenerationRequest
        >>> request = GenerationRequest(request_id="a", prompt_token_ids=(1,), max_new_tokens=2)
        >>> a, b = LiveRequest(0, request), LiveRequest(1, request)
        >>> [live.handle for live in judge([a, b], is_crash=True).suspects]
        [0, 1]
        >>> [live.handle for live in judge([b], is_crash=True).failed]
        [1]
    """
    suspects = []
    for live in running:
        live.num_deaths += 1
        if live.has_advanced:
            live.num_still, live.num_crashes, live.place_at_death = 0, 0, live.place
        else:
            live.num_still += 1
        live.num_crashes += is_crash
        if is_crash or live.num_still >= _STILL_DEATHS:
            suspects.append(live)
    if len(suspects) == len(running) == 1:
        (live,) = suspects
        live.num_lone_crashes += is_crash
        is_guilty = live.num_crashes > 1 or live.num_lone_crashes > _LONE_CRASHES
        if is_guilty if is_crash else live.num_still > _STILL_DEATHS:
            return Verdict((live,), ())
    return Verdict((), tuple(suspects))


class Return:
    """Order in which requests go on at a new worker.

    Args:
        suspects: Each runs alone, until it has had its turn or has left.

    The rest may run when :attr:`is_open`.

    Example:
        >>> order = Return([4, 5])
        >>> order.alone, order.is_open
        (4, False)
        >>> order.drop(4)
        >>> order.alone
        5
        >>> order.drop(5)
        >>> order.is_open
        True
    """

    def __init__(self, suspects: Iterable[int] = ()) -> None:
        self._left = deque(suspects)

    @property
    def left(self) -> tuple[int, ...]:
        """Handles of the suspects who have not had their turn."""
        return tuple(self._left)

    @property
    def alone(self) -> int | None:
        """Handle of the suspect whose turn it is; None: all may run."""
        return self._left[0] if self._left else None

    @property
    def is_open(self) -> bool:
        """True if every request may run."""
        return not self._left

    def drop(self, handle: int) -> None:
        """Note that a request has had its turn, or has left."""
        if handle in self._left:
            self._left.remove(handle)
