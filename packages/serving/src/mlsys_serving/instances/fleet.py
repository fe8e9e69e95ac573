"""Requests of the front: each goes to an instance, runs again if its worker dies, and is told once.

Used from one event loop. :mod:`.recovery` decides what runs again, :mod:`.crew` has the workers; this module owns who
waits for an answer, and the shared memory in which requests lie.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import numpy as np
from mlsys_core.errors import ServingError

from mlsys_serving.http.errors import HttpError
from mlsys_serving.instances.crew import Crew, cannot_start
from mlsys_serving.instances.members import (
    Instance,
    InstanceDiedError,
    Message,
    OutOfServiceError,
    Reply,
    Roles,
    Ticket,
    encode,
)
from mlsys_serving.instances.shared import Array, Placed, SharedPart, read
from mlsys_serving.models.errors import ModelNotReadyError
from mlsys_serving.models.model import BatchCounts, Executions
from mlsys_serving.processes.children import Death
from mlsys_serving.processes.workers import SupervisorLink

if TYPE_CHECKING:
    from mlsys_serving.instances.members import InstanceGroup


class Fleet:
    """All instances of all models.

    Args:
        groups: The models.
        roles: Cores and memory of instances.
        memory: Shared with the workers.
        link: To the supervisor.
    """

    def __init__(self, groups: Sequence[InstanceGroup], roles: Roles, memory: mmap.mmap, link: SupervisorLink) -> None:
        self.groups = groups
        self.executions = [Executions() for _ in groups]
        self._memory = memory
        self._crew = Crew(
            len(groups),
            roles,
            link,
            on_message=self._on_message,
            on_ready=self._on_ready,
            on_death=self._on_death,
            on_gave_up=self._on_gave_up,
        )
        self._requests = SharedPart(memory, 0, roles.num_pages * len(self._crew.instances))
        self._numbers = itertools.count(1)
        self._tickets: dict[int, Ticket] = {}
        self._ready = [asyncio.Event() for _ in groups]
        self._num_models = len(groups)

    # --- requests

    async def call(
        self, group: int, method: str, inputs: Mapping[str, Array], *, request: Mapping[str, Any], is_repeatable: bool
    ) -> Reply:
        """Run a request on an instance and return its one response."""
        async with aclosing(self.parts(group, method, inputs, request=request, is_repeatable=is_repeatable)) as replies:
            async for reply in replies:
                return reply
        raise ServingError(f"model {self.groups[group].spec.name!r} gave no response")

    async def parts(
        self, group: int, method: str, inputs: Mapping[str, Array], *, request: Mapping[str, Any], is_repeatable: bool
    ) -> AsyncGenerator[Reply, None]:
        """Run a request on an instance and yield its responses; each once, whatever happens to workers."""
        placed = self._requests.put(inputs)
        fields = {"method": method, "request": request, "layout": placed.layout, "page": placed.page}
        ticket = Ticket(next(self._numbers), group, fields, placed, is_repeatable)
        try:
            self._submit(ticket)
            while (reply := await ticket.replies.get()) is not None:
                if isinstance(reply, BaseException):
                    raise reply
                yield reply
        finally:
            self._cancel(ticket)

    def _submit(self, ticket: Ticket) -> None:
        instance = self._choice(ticket.group)
        self._tickets[ticket.number] = ticket
        self._give(ticket, instance)

    def _give(self, ticket: Ticket, instance: Instance) -> None:
        ticket.instance = instance
        instance.ledger.add(ticket.number)
        self._pump(instance)

    def _move_waiting(self, instance: Instance) -> None:
        """Give requests that wait for an instance to one that is ready, and fail them where none is left."""
        for number in list(instance.ledger.waiting):
            ticket = self._tickets[number]
            try:
                chosen = self._choice(ticket.group)
            except ModelNotReadyError as error:
                self._end(ticket, error)
                continue
            if chosen is not instance:
                instance.ledger.remove(number)
                self._give(ticket, chosen)

    def _choice(self, group: int) -> Instance:
        able = [each for each in self._crew.instances if each.group == group and not each.is_out]
        if not able:
            name = self.groups[group].spec.name
            raise OutOfServiceError(f"all instances of model {name!r} have crashed again and again; try later")
        return min(able, key=lambda each: (not each.is_ready, each.ledger.has_suspects, len(each.ledger)))

    def _pump(self, instance: Instance) -> None:
        """Send what may be sent now."""
        worker = instance.worker
        if worker is None or not instance.is_ready:
            return
        for number in instance.ledger.next():
            ticket = self._tickets[number]
            worker.channel.send(encode(Message("run", {"number": number, **ticket.fields}, ticket.placed.inline)))

    def _cancel(self, ticket: Ticket) -> None:
        """Give a request up, unless it has ended; one under way keeps its memory until its worker lets go of it."""
        instance = ticket.instance
        if ticket.number not in self._tickets or ticket.is_cancelled:
            if instance is None:
                self._free(ticket)
            return
        assert instance is not None
        if ticket.number in instance.ledger.running and instance.worker is not None:
            ticket.is_cancelled = True
            instance.worker.channel.send(encode(Message("cancel", {"number": ticket.number})))
        else:
            self._end(ticket, None)

    def _end(self, ticket: Ticket, error: BaseException | None) -> None:
        """Forget a request, and tell who waits for it."""
        instance = ticket.instance
        del self._tickets[ticket.number]
        self._free(ticket)
        ticket.replies.put_nowait(error)
        if instance is not None:
            instance.ledger.remove(ticket.number)
            self._pump(instance)

    def _free(self, ticket: Ticket) -> None:
        if ticket.placed.page is not None:
            self._requests.free(ticket.placed.page, ticket.placed.num_pages)
            ticket.placed = Placed([], b"", None)

    # --- life

    async def ready(self, group: int) -> None:
        """Wait until an instance of a model takes requests; takes workers from the first call on.

        Raises:
            ServingError: Its processes end before they are ready.
        """
        self._crew.open()
        await self._ready[group].wait()
        if not any(each.is_ready for each in self._crew.instances if each.group == group):
            raise ServingError(f"model {self.groups[group].spec.name!r} could not start in its process: see the log")

    def leave(self) -> None:
        """Note that the front has closed a model; with the last, all workers are left."""
        self._num_models -= 1
        if self._num_models == 0:
            self._crew.close()

    # --- from the crew

    def _on_ready(self, instance: Instance) -> None:
        self._ready[instance.group].set()
        self._pump(instance)
        for other in self._crew.instances:
            if other.group == instance.group and not other.is_ready:
                self._move_waiting(other)

    def _on_gave_up(self) -> None:
        error = ServingError("the workers died again and again, and are not started any more")
        for ticket in list(self._tickets.values()):
            self._end(ticket, error)

    def _on_message(self, instance: Instance, message: Message) -> None:
        fields = message.fields
        ticket = self._tickets.get(fields["number"])
        reply = None
        if message.kind != "failed":
            reply = self._reply(instance, message)
            for counts in fields["executions"]:
                self.executions[instance.group].add(BatchCounts(*counts))
        if ticket is None:
            return
        if message.kind == "failed":
            error = fields["error"]
            self._end(ticket, None if ticket.is_cancelled else HttpError(**error))
        elif reply is not None and message.kind == "part":
            if fields["index"] >= ticket.num_told:  # else a worker before has told it
                ticket.num_told += 1
                ticket.replies.put_nowait(reply)
        elif reply is not None:
            if ticket.fields["method"] != "stream":
                ticket.replies.put_nowait(reply)
            self._end(ticket, None)

    def _reply(self, instance: Instance, message: Message) -> Reply:
        """Return a response, its arrays copied out of the worker's memory."""
        fields = message.fields
        outputs = read(self._memory, fields["layout"], message.content, fields["page"])
        if fields["page"] is not None:
            outputs = {name: np.array(array) for name, array in outputs.items()}
            pages = {"page": fields["page"], "num_pages": fields["num_pages"]}
            assert instance.worker is not None
            instance.worker.channel.send(encode(Message("free", pages)))
        return Reply(fields, outputs)

    def _on_death(self, instance: Instance, death: Death) -> None:
        """Decide on the requests that were under way."""
        name = self.groups[instance.group].spec.name
        at_work = list(instance.ledger.running)
        for number in at_work:
            ticket = self._tickets[number]
            if ticket.is_cancelled:
                self._end(ticket, None)
            elif not ticket.is_repeatable:
                text = f"the process of model {name!r} died ({death}); the request must not run again"
                self._end(ticket, InstanceDiedError(text))
        for number in instance.ledger.died(is_crash=death.is_crash):
            text = f"this request ends the process of model {name!r} ({death}), also when it runs alone"
            self._end(self._tickets[number], InstanceDiedError(text))
        self.executions[instance.group].num_repeated += sum(number in self._tickets for number in at_work)
        self._move_waiting(instance)
        if cannot_start(instance):
            self._ready[instance.group].set()
