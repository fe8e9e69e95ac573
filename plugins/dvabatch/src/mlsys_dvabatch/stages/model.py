"""Protocols of models in stages, and the check that one keeps requests apart, by value before the first request.

Executors need little of a model, serving more; loaders of plugins bring their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy.typing as npt
import torch
from mlsys_core.loop.queue import ServeRequest
from mlsys_serving.isolation import Draw, require_isolated
from mlsys_serving.isolation.reading import require_followed
from torch import Tensor

if TYPE_CHECKING:
    from mlsys_serving.models import TensorSpec

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
        followed: The model as a function of tensors, and one request to it, ``[1, ...]`` each, in host memory: on a
            GPU numbers out of range would end the process. None: it has no operators to follow.
    """

    def __init__(
        self,
        name: str,
        model: Triable,
        *,
        num_inner: int = 0,
        is_short: bool = False,
        most: int | None = None,
        followed: tuple[Callable[..., Any], Sequence[Tensor]] | None = None,
    ) -> None:
        self._name = name
        self._model = model
        self._options: Any = {"num_inner": num_inner, "is_short": is_short}
        self._most = most
        self._followed = followed
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
        if self._followed is not None and largest > 1:
            require_followed(self._name, *self._followed)
            self._followed = None
        self._largest = largest


Array = npt.NDArray[Any]


class StageModel(Protocol):
    """A model in stages, as executors need it. Called from several threads, one stage at a time in each.

    The models here take and give NumPy arrays: the front's thread makes and reads them, and NumPy keeps Python's lock
    where each operator of torch lets go of it, for whichever other thread waits.
    """

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        ...

    def collate(self, requests: Sequence[ServeRequest[Any]], padded_length: int) -> Any:
        """Return the inputs of a batch as activations of the first stage."""
        ...

    def run(self, stage: int, values: Any) -> Any:
        """Run one stage: activations in, activations out, the same requests in the same order."""
        ...

    def results(self, values: Any) -> list[Any]:
        """Return each request's result from the last stage's activations; an exception fails its request alone."""
        ...


class ServableModel(StageModel, Triable, Protocol):
    """A staged model that can be profiled and served."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths to profile at, rising; (1,) where requests have one shape."""
        ...

    def check(self, payload: Any) -> int:
        """Check a request's payload; return its length.

        Raises:
            InvalidInputError: The model does not take it.
        """
        ...

    def example_of(self, length: int) -> Any:
        """Return a payload of one of :attr:`lengths`."""
        ...


@runtime_checkable
class Packable(Protocol):
    """A model whose batches need no padding: the units of all requests lie one after another, as an encoder's tokens.

    Attributes:
        is_packed: Batches of this one are packed.
    """

    is_packed: bool

    @property
    def form(self) -> str:
        """Text that tells apart forms of the same weights that differ in speed; "" for padded batches."""
        ...

    @property
    def needs_packing(self) -> str | None:
        """The option that padded batches cannot follow, for messages; None: there is none."""
        ...

    def with_form(self, *, is_packed: bool, num_stages: int | None = None) -> Self:
        """Return a model with the same weights, packed or not."""
        ...


class Wire(Protocol):
    """Form of a model's requests on the wire, where payloads are not simply its input tensors' rows."""

    def tensors(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Return the model's inputs and outputs."""
        ...

    def payloads(self, inputs: Mapping[str, Array], num_rows: int) -> list[Any]:
        """Return the payload of each row of a request's tensors.

        Raises:
            InvalidInputError: The tensors do not go together.
        """
        ...

    def payload(self, made: Any) -> Any:
        """Return the payload for a value that a service's preprocessing made.

        Raises:
            InvalidInputError: The model takes no such value.
        """
        ...
