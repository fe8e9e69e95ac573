"""Targets of the load generator: the protocol, and a target that is a function of this process.

The load generator owns time, limits and records; a target only turns one trace item into one request and returns its
outcome. :class:`mlsys_bench.workload.http_target.HttpTarget` is the one for servers.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from mlsys_bench.workload.trace import TraceItem

OnToken: TypeAlias = Callable[[], None]  # call it as each output token, or chunk of tokens, comes in


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one request, as its target saw it."""

    num_output_tokens: int | None = None  # as the server counts them; None: the number of on_token calls counts
    num_input_tokens: int | None = None  # likewise; None: the trace's number
    http_status: int | None = None
    error: str | None = None  # kind, e.g. "connect", "http_500", "disconnect"; None: it succeeded
    detail: str = ""  # of the error, in words
    output: str | None = None  # generated text, if the target keeps it


class Target(Protocol):
    """A receiver of requests."""

    async def send(self, item: TraceItem, on_token: OnToken) -> Outcome:
        """Send one request and wait for its end. Failures come back as an outcome with ``error``.

        The caller records any exception raised nevertheless, under its name. Must not block the event loop, and must
        let cancellation through.
        """
        ...

    async def aclose(self) -> None:
        """Release connections; idempotent."""
        ...


class InProcessTarget:
    """A target that calls ``function(item)``, for engines without a network in between.

    The function returns an async iterator, each element of which counts as one token, or an awaitable, whose result is
    the whole answer; it may be an :class:`Outcome`. Blocking functions stall the load generator itself: hand them over
    as ``lambda item: asyncio.to_thread(function, item)``.

    Example:
        >>> import asyncio
        >>> async def three_tokens(item):
        ...     for token in "abc":
        ...         yield token
        >>> came = []
        >>> _ = asyncio.run(InProcessTarget(three_tokens).send(TraceItem(0.0, 1, 3), lambda: came.append(1)))
        >>> len(came)
        3
    """

    def __init__(self, function: Callable[[TraceItem], AsyncIterator[Any] | Awaitable[Any]]) -> None:
        self._function = function

    async def send(self, item: TraceItem, on_token: OnToken) -> Outcome:
        """See :meth:`Target.send`."""
        answer = self._function(item)
        if not isinstance(answer, AsyncIterator):
            result = await answer
            return result if isinstance(result, Outcome) else Outcome()
        async for _ in answer:
            on_token()
        return Outcome()

    async def aclose(self) -> None:
        """Do nothing: there is nothing to release."""


_WORDS = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city name team minute idea body back parent face level office
door health person art war history party result change morning reason research girl guy food moment air
teacher force order
""".split()  # noqa: SIM905 - a list of them fills three pages


def synthetic_prompt(num_tokens: int, *, seed: int) -> str:
    """Return ``num_tokens`` common words drawn with ``seed``.

    Example:
        >>> len(synthetic_prompt(5, seed=0).split())
        5
    """
    # Seeded by text: as an integer, -1 would give what 1 gives.
    return " ".join(random.Random(f"prompt {seed}").choices(_WORDS, k=num_tokens))
