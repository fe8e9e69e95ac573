"""Models whose instances are processes: each is loaded once, and has its engine in each worker (ADR 41)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.serve.models import ServedModel
from mlsys_dvabatch.serve.preparing import Batching, Prepared
from mlsys_dvabatch.serve.spec import WireForm, wire_form
from mlsys_dvabatch.stages.model import Triable, Wire
from mlsys_serving.instances import InstanceGroup, RemoteModel
from mlsys_serving.models import InferRequest, InferResponse


class RemoteRows:
    """A model in other processes, with its own form of requests, which is read in this process.

    Args:
        remote: Its instances.
        wire: Form of its requests.
        batching: Options of each instance.
    """

    def __init__(self, remote: RemoteModel, *, wire: Wire, batching: Batching) -> None:
        self.spec, self.executions, self.wire = remote.spec, remote.executions, wire
        self.max_batch_size, self.max_waiting = batching.max_batch_size, batching.max_waiting
        self._remote = remote

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run a request of tensors."""
        return await self._remote.infer(request)

    async def run_rows(self, rows: Sequence[Any], key: str) -> list[Any]:
        """Return the answer to each payload, an array."""
        return list(await self._remote.run_rows(rows))

    async def close(self) -> None:
        """Leave the instances."""
        await self._remote.close()


def served_model(
    prepared: Prepared,
    batching: Batching,
    num_threads: int | None,
    form: WireForm | None = None,
) -> ServedModel:
    """Return a prepared model with an engine of its own."""
    return ServedModel(
        prepared.loaded,
        prepared.costs,
        prepared.policy,
        max_batch_size=batching.max_batch_size,
        max_waiting=batching.max_waiting,
        num_threads=num_threads,
        form=form,
    )


def instance_group(prepared: Prepared, batching: Batching) -> InstanceGroup:
    """Return a prepared model as a group of instances.

    All that takes long is done here, once: a worker that takes over has requests waiting, and only starts its engine.
    """
    model = prepared.loaded.model
    program: Any = getattr(model, "program", None)
    if program is not None and not program.can_fork:
        raise InvalidInputError(
            f"{prepared.loaded.name} runs in ONNX Runtime, which cannot fork: leave out --instances"
        )
    form = wire_form(prepared.loaded, max_batch_size=batching.max_batch_size)
    if isinstance(model, Triable):
        model.isolation.require(batching.max_batch_size)  # the result is cached

    def build(num_cores: int) -> ServedModel:
        torch.set_num_threads(num_cores)
        return served_model(prepared, batching, num_cores, form)

    if prepared.loaded.wire is None:
        return InstanceGroup(spec=form.spec, build=build)
    return InstanceGroup(spec=form.spec, build=build, wrap=partial(RemoteRows, wire=form.wire, batching=batching))
