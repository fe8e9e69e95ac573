"""Check that models keep requests apart: each is tried by value before the first request, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from mlsys_serving.isolation import Draw, require_isolated

Answers = Sequence[Sequence[Any]]


@runtime_checkable
class Triable(Protocol):
    """A staged model that can be tried; those of this package can."""

    @property
    def tolerance(self) -> float | None:
        """Relative difference between batch sizes that counts as rounding; None: by the answers' dtype."""
        ...

    @property
    def isolation(self) -> IsolationCheck:
        """The check of this model."""
        ...

    def draw(self) -> Draw:
        """Make requests, as payloads."""
        ...

    def answers(self, payloads: Sequence[Any]) -> Answers:
        """Return each request's arrays, run as one batch: what it leaves between stages, then its result."""
        ...


class IsolationCheck:
    """The check of one model; what was tried is not tried again.

    Args:
        name: Name of the model, for messages.
        model: The staged model.
        num_inner: Leading arrays of its answers that lie between stages.
        is_short: It takes long.
        most: Largest batch to try, where larger ones tell nothing new; None: the largest that is served.
    """

    def __init__(
        self, name: str, model: Triable, *, num_inner: int = 0, is_short: bool = False, most: int | None = None
    ) -> None:
        self._name = name
        self._model = model
        self._options: Any = {"num_inner": num_inner, "is_short": is_short}
        self._most = most
        self._largest = 0

    def require(self, largest: int) -> None:
        """Refuse the model if it mixes requests in batches of up to ``largest``.

        Raises:
            InvalidInputError: It does, or remembers requests, or answers at random.
        """
        if largest <= self._largest:
            return
        model, tried = self._model, min(largest, self._most or largest)
        with torch.inference_mode():
            require_isolated(
                self._name, model.answers, model.draw(), largest=tried, tolerance=model.tolerance, **self._options
            )
        self._largest = largest
