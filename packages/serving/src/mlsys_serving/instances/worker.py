"""A worker process: one instance of one model, which it learns with its first message.

It ends with its front, and keeps nothing that would be lost.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlsys_core.posix.machine import run_on_cores

from mlsys_serving.http.describe import describe
from mlsys_serving.instances.members import Message, decode, encode
from mlsys_serving.instances.shared import Array, SharedPart, read
from mlsys_serving.models.model import InferRequest, InferResponse
from mlsys_serving.processes.box import Box
from mlsys_serving.processes.channel import FrameChannel
from mlsys_serving.processes.children import EXIT_UNHANDLED

if TYPE_CHECKING:
    from mlsys_serving.instances.members import InstanceGroup

_log = logging.getLogger(__name__)
_COUNT_S = 0.25  # between two reports of executions, while requests run


class InstanceWorker:
    """A model behind a socket.

    Args:
        groups: All models that it might have to run.
        memory: Shared with the front.
        end: The socket to the front.
        box: Where the process notes that it takes messages.
    """

    def __init__(self, groups: Sequence[InstanceGroup], memory: mmap.mmap, end: socket.socket, box: Box) -> None:
        self._groups, self._memory, self._end, self._box = groups, memory, end, box
        self._answers = SharedPart(memory, 0, 1)  # until it has a role
        self._model: Any = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._counted: dict[int, list[float]] = {}  # executions that the front knows, by batch size
        self._count_at = 0.0

    def run(self) -> None:
        """Follow the front's messages until it closes the socket; signals for the whole group are the front's."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        asyncio.run(self._main())

    async def _main(self) -> None:
        closed = asyncio.Event()
        self._channel = FrameChannel(
            self._end, asyncio.get_running_loop(), on_frame=self._on_frame, on_closed=closed.set
        )
        await closed.wait()
        os._exit(0)  # the front is gone: what runs is for nobody

    def _on_frame(self, payload: bytes) -> None:
        self._box.receive()
        message = decode(payload)
        fields = message.fields
        match message.kind:
            case "start":
                self._start(fields)
            case "run":
                number = fields["number"]
                self._tasks[number] = asyncio.ensure_future(self._run(fields, message.content))
            case "cancel":
                if (task := self._tasks.get(fields["number"])) is not None:
                    task.cancel()
            case "free":
                self._answers.free(fields["page"], fields["num_pages"])

    def _start(self, fields: Mapping[str, Any]) -> None:
        self._answers = SharedPart(self._memory, fields["first_page"], fields["num_pages"])
        run_on_cores(fields["cores"])
        try:
            self._model = self._groups[fields["group"]].build(len(fields["cores"]))
        except Exception:  # noqa: BLE001 - the process ends here
            _log.exception("the model cannot be started: this worker ends")
            os._exit(EXIT_UNHANDLED)
        self._channel.send(encode(Message("ready")))

    async def _run(self, fields: Mapping[str, Any], content: bytes) -> None:
        number = fields["number"]
        try:
            inputs = read(self._memory, fields["layout"], content, fields["page"])
            match fields["method"]:
                case "rows":
                    rows = await self._model.run_rows(list(inputs.values()), str(number))
                    answer = InferResponse({str(index): row for index, row in enumerate(rows)})
                    self._tell("done", number, answer)
                case "stream":
                    index = 0
                    async for part in self._model.stream(_request(number, fields["request"], inputs)):
                        self._tell("part", number, part, index=index)
                        index += 1
                    self._tell("done", number, InferResponse({}))
                case _:
                    self._tell("done", number, await self._model.infer(_request(number, fields["request"], inputs)))
        except asyncio.CancelledError:
            self._channel.send(encode(Message("failed", {"number": number, "error": {"message": "cancelled"}})))
        except Exception as error:  # noqa: BLE001 - told to the front
            self._fail(number, error)
        finally:
            del self._tasks[number]

    def _tell(self, kind: str, number: int, answer: InferResponse, **fields: Any) -> None:
        placed = self._answers.put(answer.outputs)
        fields |= {
            "number": number,
            "layout": placed.layout,
            "page": placed.page,
            "num_pages": placed.num_pages,
            "parameters": dict(answer.parameters),
            "timing": None if answer.timing is None else asdict(answer.timing),
            "executions": self._new_executions(),
        }
        self._channel.send(encode(Message(kind, fields, placed.inline)))

    def _fail(self, number: int, error: Exception) -> None:
        info = describe(error)
        if info.status == 500:
            _log.error("a request failed in its model", exc_info=error)
        told = {
            "message": info.message,
            "http_status": info.status,
            "error_code": info.code,
            "param": info.param,
            "headers": dict(info.headers),
        }
        self._channel.send(encode(Message("failed", {"number": number, "error": told})))

    def _new_executions(self) -> list[list[float]]:
        """Return the executions since the last report: batch size, count, and the three times, in seconds."""
        executions = getattr(self._model, "executions", None)
        now = time.monotonic()
        if executions is None or (len(self._tasks) > 1 and now < self._count_at):
            return []
        self._count_at = now + _COUNT_S
        found = []
        for counts in executions.snapshot():
            numbers = [counts.count, counts.compute_input_s, counts.compute_infer_s, counts.compute_output_s]
            before = self._counted.get(counts.batch_size, [0, 0.0, 0.0, 0.0])
            if numbers[0] > before[0]:
                found.append([counts.batch_size, *(new - old for new, old in zip(numbers, before, strict=True))])
                self._counted[counts.batch_size] = numbers
        return found


def _request(number: int, fields: Mapping[str, Any], inputs: Mapping[str, Array]) -> InferRequest:
    return InferRequest(**{**fields, "key": str(number), "inputs": inputs, "outputs": tuple(fields["outputs"])})
