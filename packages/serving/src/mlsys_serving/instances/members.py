"""Records of a fleet: instances, the workers that have their roles, and the requests that wait for answers.

Front and worker exchange frames of :class:`Message`. Kinds to a worker: ``start``, ``run``, ``cancel``, ``free``; to
the front: ``ready``, ``part``, ``done``, ``failed``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from mlsys_core.errors import ServingError

from mlsys_serving.instances.recovery import Ledger
from mlsys_serving.instances.shared import Array, Placed
from mlsys_serving.models.errors import ModelNotReadyError
from mlsys_serving.models.model import Model
from mlsys_serving.models.spec import ModelSpec
from mlsys_serving.processes.channel import FrameChannel
from mlsys_serving.processes.recovery import RestartBudget


class Message(msgspec.Struct, array_like=True, frozen=True):
    """One frame's content.

    Example:
        >>> decode(encode(Message("done", {"number": 3}, b"xyz")))
        Message(kind='done', fields={'number': 3}, content=b'xyz')
    """

    kind: str
    fields: dict[str, Any] = {}
    content: bytes = b""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode


OUT_S = 10.0  # that an instance is left out once it has crashed again and again


class InstanceDiedError(ServingError):
    """A request's worker died, and the request does not run again."""

    http_status = 500
    error_code = "instance_died"


class OutOfServiceError(ModelNotReadyError):
    """All instances of a model are left out for a while."""

    retry_after_s = OUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGroup:
    """A model of which there are to be several instances; loaded before the processes are forked."""

    spec: ModelSpec
    build: Callable[[int], Model]  # number of cores -> the model with its engine; called in a worker
    is_streaming: bool = False  # it has ``stream`` as well
    wrap: Callable[[Any], Any] = lambda model: model  # a RemoteModel -> its form in the front
    folder: Path | None = None  # of its files, for settings there


@dataclass(frozen=True, slots=True)
class Roles:
    """Cores and shared memory of the instances, which a worker is told with its role."""

    cores: Sequence[Sequence[int]]  # of each instance; models share them
    num_pages: int  # of shared memory for an instance's answers; before all these lie as many for requests


@dataclass(frozen=True, slots=True)
class Reply:
    """One response."""

    fields: Mapping[str, Any]
    outputs: dict[str, Array]


@dataclass(slots=True, eq=False)
class Ticket:
    """A request between its first sending and its last answer."""

    number: int
    group: int
    fields: dict[str, Any]
    placed: Placed
    is_repeatable: bool
    replies: asyncio.Queue[Reply | BaseException | None] = field(default_factory=asyncio.Queue)  # None: the end
    num_told: int = 0  # parts of a stream
    instance: Instance | None = None
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class Worker:
    """A worker process."""

    number: int
    pid: int
    channel: FrameChannel
    instance: Instance | None = None  # None: a standby
    was_stopped: bool = False

    def read(self) -> None:
        """Take what the worker has told."""
        self.channel.read()

    def close(self) -> None:
        """Close the front's end, which ends the worker."""
        self.channel.close()


@dataclass(slots=True, eq=False)
class Instance:
    """One instance of a model: a role that workers have, one after the other."""

    group: int
    number: int
    index: int  # among all of the fleet
    ledger: Ledger = field(default_factory=Ledger)
    budget: RestartBudget = field(default_factory=lambda: RestartBudget(max_deaths=8, num_immediate=4, window_s=OUT_S))
    worker: Worker | None = None
    is_ready: bool = False
    is_out: bool = False
    may_start: bool = True
    has_served: bool = False
    num_failed_starts: int = 0
