"""Actor of one rank: it loads its part of the model once, and follows the messages of one master after the other.

Steps run in the actor's own thread, in the order of their calls. Whatever must be heard while one runs (the keeper's
beats, the end of a group) has threads beside it.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

import torch
from mlsys_core.device import get_device
from mlsys_core.errors import MlsysError
from mlsys_orca.cli.placing import PlacedModel
from mlsys_orca.parallel.named import find_divided
from mlsys_orca.parallel.native_shard import NativeShard
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.shard import GroupBrokenError
from mlsys_orca.parallel.tensors.ring import KvMemory

from mlsys_ray import messages
from mlsys_ray.member import Member

_LEAVE_S = 5.0  # for a step of a lost group to end


class RankActor:
    """A rank on the machine where Ray has placed this actor. Its keys and values outlive its masters, not itself.

    Args:
        model: The model, and its division.
        place: The rank's.
    """

    def __init__(self, model: PlacedModel, place: Placement) -> None:
        ray: Any = importlib.import_module("ray")
        self._node: str = ray.get_runtime_context().get_node_id()
        self._host: str = ray.util.get_node_ip_address()
        self._place = place
        self._memory = KvMemory()
        self._member: Member | None = None
        self._wanted = ""  # name of the group whose steps are run
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._error = ""
        try:
            _, self._parts = find_divided(
                model.model,
                model.dtype,
                tensor_parallel=model.tensor_parallel,
                pipeline_parallel=model.pipeline_parallel,
                weights=model.weights,
                activations=model.activations,
                share=1 / (model.tensor_parallel * model.pipeline_parallel),
            )
            self._shard: Any = self._parts.load(self._place)
        except MlsysError as error:  # Ray would start this actor again and again
            self._error = str(error)

    def beat(self) -> None:
        """Return, as long as this process lives."""

    def part(self) -> bytes:
        """Return what is loaded: :class:`~.messages.Part`, or :class:`~.messages.Failed`."""
        if self._error:
            return messages.encode(messages.Failed(f"{self._place.name}: {self._error}"))
        shard = self._shard
        return messages.encode(
            messages.Part(
                node=self._node,
                nbytes=shard.nbytes,
                is_native=isinstance(shard, NativeShard),
                dtype=str(getattr(shard, "dtype", "")),
                needs_logits=shard.needs_logits,
                available_nbytes=get_device("cpu").memory_info().available_nbytes,
            )
        )

    def leave(self, group: str) -> str:
        """Leave any other group for that one, which comes; return the id of this machine.

        A step of the old group ends as its neighbours leave, who close their ends. Where one is cut off, nothing
        closes: then this process ends, and Ray starts it anew.
        """
        self._wanted = group
        if (member := self._member) is not None:
            member.abort()
            self._member = None
        del member
        if not self._is_idle.wait(_LEAVE_S):
            os._exit(1)
        return self._node

    def join(self, joining: bytes) -> bytes:
        """Meet the others of a group; return this rank's greeting.

        Raises:
            GroupBrokenError: they cannot be reached.
        """
        order = messages.decode_joining(joining)
        self._is_idle.clear()
        try:
            member = Member(self._place, self._shard, self._parts, order, host=self._host, memory=self._memory)
            if order.group != self._wanted:
                raise GroupBrokenError("another group has come meanwhile")
            self._member = member
            return member.rank.greeting
        finally:
            self._is_idle.set()

    def follow(self, group: str, payload: bytes) -> bytes | None:
        """Do what a message of a group's master says; return the answer. None: the group is lost."""
        self._is_idle.clear()
        try:
            member = self._member
            if member is None or group != self._wanted:
                return None
            with torch.inference_mode():
                return member.rank.follow(payload)
        except GroupBrokenError:
            self._member = None
            return None
        finally:
            member = None
            self._is_idle.set()
