"""A model as the front sees it: its requests run in worker processes."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mlsys_core.errors import InvalidInputError

from mlsys_serving.instances.fleet import Fleet
from mlsys_serving.instances.members import Reply
from mlsys_serving.instances.shared import Array
from mlsys_serving.models.model import Executions, InferRequest, InferResponse, Model, Timing
from mlsys_serving.models.spec import ModelSpec

REPEATABLE = "repeatable"  # a request's parameter; false: it must not run twice
_SENT = tuple(field.name for field in fields(InferRequest) if field.name not in ("key", "inputs", "parameters"))


class RemoteModel:
    """A :class:`~mlsys_serving.models.UnaryModel` whose instances are processes.

    Args:
        fleet: Has the processes.
        group: The model's number there.
        spec: Of the model.
    """

    def __init__(self, fleet: Fleet, group: int, spec: ModelSpec) -> None:
        self.spec = spec
        self.executions: Executions = fleet.executions[group]
        self._fleet, self._group = fleet, group

    async def infer(self, request: InferRequest) -> InferResponse:
        """Return the response of an instance.

        Raises:
            InstanceDiedError: The request has ended its worker, or must not run again and its worker has died.
            ModelNotReadyError: All instances have crashed again and again.
            HttpError: The model's own.
        """
        reply = await self._fleet.call(self._group, "infer", request.inputs, **_fields(request))
        return _response(reply)

    async def run_rows(self, rows: Sequence[Array]) -> list[Array]:
        """Return the answers of a model's ``run_rows``; its rows and answers are arrays.

        Raises:
            As :meth:`infer`.
        """
        named = {str(index): row for index, row in enumerate(rows)}
        reply = await self._fleet.call(self._group, "rows", named, request={}, is_repeatable=True)
        return list(reply.outputs.values())

    async def close(self) -> None:
        """Forget the model; the fleet ends with the last."""
        self._fleet.leave()


class RemoteStreamingModel(RemoteModel):
    """A remote model that gives several responses as well."""

    async def stream(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Yield the responses of an instance. Raises as :meth:`infer`."""
        async for reply in self._fleet.parts(self._group, "stream", request.inputs, **_fields(request)):
            yield _response(reply)


class RemoteSource:
    """All models of a fleet, ready when an instance of each is."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._groups: dict[str, list[int]] = {}  # numbers of a model's versions, by name
        for number, group in enumerate(fleet.groups):
            self._groups.setdefault(group.spec.name, []).append(number)

    def names(self) -> Sequence[str]:
        """Return all names, sorted."""
        return sorted(self._groups)

    def directory(self, name: str) -> Path | None:
        """Return the folder of a model's files; None: it has none."""
        return next((self._fleet.groups[number].folder for number in self._groups.get(name, ())), None)

    async def load(self, name: str) -> Sequence[Model]:
        """Wait for an instance of each version of a model, and return them."""
        found: list[Model] = []
        for number in self._groups[name]:
            group = self._fleet.groups[number]
            await self._fleet.ready(number)
            made = (RemoteStreamingModel if group.is_streaming else RemoteModel)(self._fleet, number, group.spec)
            found.append(group.wrap(made))
        return found


def _fields(request: InferRequest) -> dict[str, Any]:
    parameters = dict(request.parameters)
    is_repeatable = parameters.pop(REPEATABLE, True)
    if not isinstance(is_repeatable, bool):
        raise InvalidInputError(f"parameter {REPEATABLE!r} is true or false, got {str(is_repeatable)[:40]!r}")
    for name, value in parameters.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidInputError(f"parameter {name!r} is {value}; give a number")
    sent = {name: getattr(request, name) for name in _SENT}
    return {"request": sent | {"parameters": parameters}, "is_repeatable": is_repeatable}


def _response(reply: Reply) -> InferResponse:
    timing = reply.fields["timing"]
    return InferResponse(
        reply.outputs, parameters=reply.fields["parameters"], timing=None if timing is None else Timing(**timing)
    )
