"""Room for requests of batches beside those of clients. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_YIELDS = 3  # times that one request makes room; then it runs to its end


@dataclass(frozen=True, slots=True)
class Load:
    """Load of an engine at one moment."""

    num_at_once: int  # requests in iterations
    num_unfinished: int  # requests of the engine, those of batches among them
    num_of_batches: int  # of them, or about to be

    @property
    def num_interactive(self) -> int:
        """Requests of clients."""
        return max(0, self.num_unfinished - self.num_of_batches)


def may_start(load: Load, weight: int) -> bool:
    """Return True if a request of a batch that makes ``weight`` answers finds room that nobody else wants.

    One that is larger than an iteration runs when nothing else does.

    Example:
        >>> may_start(Load(num_at_once=8, num_unfinished=7, num_of_batches=5), 1)
        True
        >>> may_start(Load(num_at_once=8, num_unfinished=7, num_of_batches=5), 2)
        False
    """
    if not load.num_interactive and not load.num_of_batches:
        return True
    return load.num_interactive + load.num_of_batches + weight <= load.num_at_once


def to_yield(load: Load, running: Sequence[tuple[int, int]]) -> int:
    """Return how many requests of batches, the youngest, should leave so that clients do not wait for them.

    Args:
        load: The engine's.
        running: Of each running request of a batch, the oldest first: the answers it makes, and how often it has left.

    Example:
        >>> to_yield(Load(num_at_once=4, num_unfinished=5, num_of_batches=3), [(1, 0), (1, 0), (1, 0)])
        1
    """
    excess = load.num_unfinished - load.num_at_once
    if not load.num_interactive or excess <= 0:
        return 0
    excess, num = min(excess, load.num_interactive), 0
    for weight, num_yields in reversed(running):
        if excess <= 0 or num_yields >= MAX_YIELDS:
            break
        excess, num = excess - weight, num + 1
    return num
