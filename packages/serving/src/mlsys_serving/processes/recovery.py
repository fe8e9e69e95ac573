"""Judge the death of a worker: which requests fail, which go on alone first, and when the next worker starts.

Pure: no sockets, no clock.

When a worker dies, the requests that it ran are *suspects* if it crashed, or if it was killed from outside again and
again without their having advanced: something in them may be what kills. Suspects go on alone, one after the other,
before all others. A request fails that is alone in a crash for the second time in one place, or in four crashes;
nobody else does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

_LONE_CRASHES = 3  # each at another place, that may be somebody else's doing
_STILL_DEATHS = 2  # kills from outside without an advance between, from which on a request is a suspect


@dataclass(slots=True, eq=False, kw_only=True)
class Record:
    """Deaths of workers that ran one request at that moment."""

    num_deaths: int = 0
    place_at_death: tuple[int, ...] | None = None  # its place at the last of them, or before if that was further
    num_crashes: int = 0  # at that place
    num_lone_crashes: int = 0  # at any place, with no other beside it
    num_still: int = 0  # deaths in a row between which it did not advance

    @property
    def place(self) -> tuple[int, ...]:
        """Progress so far, which only rises; empty: a request is run in one piece."""
        return ()

    @property
    def has_advanced(self) -> bool:
        """True if it is further than at any death so far, so that what it did then does not end a worker."""
        return self.place_at_death is None or self.place > self.place_at_death


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Verdict(Generic[R]):
    """Judgement of the requests that ran when a worker died."""

    failed: tuple[R, ...]  # they ran alone when the worker crashed
    suspects: tuple[R, ...]  # to run alone first, one after the other


def judge(running: Collection[R], *, is_crash: bool, still_deaths: int | None = _STILL_DEATHS) -> Verdict[R]:
    """Note the death of a worker for those that ran at that moment; return who fails and who is suspect.

    Args:
        running: Requests under way.
        is_crash: The worker ended by its own doing, or hung; False: it was killed from outside.
        still_deaths: Kills from outside without an advance that make a suspect; None: no number of them does.

    Example:
        >>> a, b = Record(), Record()
        >>> judge([a, b], is_crash=True).suspects == (a, b)
        True
        >>> judge([b], is_crash=True).failed == (b,)
        True
    """
    suspects = []
    for each in running:
        each.num_deaths += 1
        if each.has_advanced:
            each.num_still, each.num_crashes, each.place_at_death = 0, 0, each.place
        else:
            each.num_still += 1
        each.num_crashes += is_crash
        if is_crash or (still_deaths is not None and each.num_still >= still_deaths):
            suspects.append(each)
    if len(suspects) == len(running) == 1:
        (each,) = suspects
        each.num_lone_crashes += is_crash
        is_guilty = each.num_crashes > 1 or each.num_lone_crashes > _LONE_CRASHES
        if is_guilty if is_crash else still_deaths is not None and each.num_still > still_deaths:
            return Verdict((each,), ())
    return Verdict((), tuple(suspects))


class Turns:
    """Order in which requests go on at a new worker.

    Args:
        suspects: Numbers of requests; each runs alone, until it has had its turn or has left.

    The rest may run when :attr:`is_open`.

    Example:
        >>> turns = Turns([4, 5])
        >>> turns.alone, turns.is_open
        (4, False)
        >>> turns.drop(4)
        >>> turns.put_first([7])
        >>> turns.left
        (7, 5)
    """

    def __init__(self, suspects: Iterable[int] = ()) -> None:
        self._left = deque(suspects)

    @property
    def left(self) -> tuple[int, ...]:
        """Suspects who have not had their turn."""
        return tuple(self._left)

    @property
    def alone(self) -> int | None:
        """Suspect whose turn it is; None: all may run."""
        return self._left[0] if self._left else None

    @property
    def is_open(self) -> bool:
        """True if every request may run."""
        return not self._left

    def put_first(self, suspects: Collection[int]) -> None:
        """Have suspects run before those that are left."""
        self._left = deque([*suspects, *(each for each in self._left if each not in suspects)])

    def drop(self, number: int) -> None:
        """Note that a request has had its turn, or has left."""
        if number in self._left:
            self._left.remove(number)


class RestartBudget:
    """Decision whether a process that died is started again, and when. Pure: the caller has the clock.

    Args:
        max_deaths: Deaths within ``window_s`` from which on nothing is started any more.
        window_s: Seconds.
        num_immediate: Deaths within ``window_s`` that are followed by a start at once; each further one waits twice
            as long as the one before, from ``backoff_s`` on.
        backoff_s: Seconds.

    Example:
        >>> budget = RestartBudget(max_deaths=4, window_s=10.0, num_immediate=2, backoff_s=0.5)
        >>> [budget.delay_s(now) for now in (0.0, 0.1, 0.2, 0.3)]
        [0.0, 0.0, 0.5, None]
        >>> budget.delay_s(60.0)
        0.0
    """

    def __init__(
        self, *, max_deaths: int = 16, window_s: float = 10.0, num_immediate: int = 8, backoff_s: float = 0.1
    ) -> None:
        self.max_deaths, self.window_s = max_deaths, window_s
        self._num_immediate, self._backoff_s = num_immediate, backoff_s
        self._deaths: deque[float] = deque()

    def delay_s(self, now: float) -> float | None:
        """Note a death at ``now`` (seconds); return how long to wait for the next start, or None: give up."""
        self._deaths.append(now)
        while self._deaths[0] <= now - self.window_s:
            self._deaths.popleft()
        number = len(self._deaths)
        if number >= self.max_deaths:
            return None
        if number <= self._num_immediate:
            return 0.0
        return self._backoff_s * 2.0 ** (number - self._num_immediate - 1)
