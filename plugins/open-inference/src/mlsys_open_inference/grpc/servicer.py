"""Methods of the gRPC service, on the engine and the repository; :mod:`.server` calls them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from google.protobuf.json_format import ParseDict
from mlsys_core.errors import MlsysError
from mlsys_open_inference.descriptions import (
    index_entry,
    model_config,
    model_metadata,
    model_statistics,
    server_metadata,
)
from mlsys_open_inference.engine import Answer, Engine
from mlsys_open_inference.files import load_config
from mlsys_open_inference.grpc.codec import decode_message, encode_message
from mlsys_open_inference.grpc.schema import messages
from mlsys_serving.http import Readiness
from mlsys_serving.http.middleware.gate import check_model_control
from mlsys_serving.models.errors import UnknownModelError
from mlsys_serving.models.model import flag
from mlsys_serving.models.version import Version

_MAX_CONCURRENT = 64  # requests of one stream that run at a time; more are read when one has ended
_EMPTY_FINAL = "triton_enable_empty_final_response"
_FINAL = "triton_final_response"  # of each response in a stream, asked for or not

Method = Callable[[Any, float | None], Awaitable[Any]]  # (request, deadline in seconds of the clock) -> response


class Servicer:
    """The service's methods, by their names in the protocol.

    Args:
        engine: runs inference.
        readiness: of the server.
        describe_error: returns the client's text for an error within a stream.
        model_control: let clients load and unload.
    """

    def __init__(
        self,
        engine: Engine,
        readiness: Readiness,
        describe_error: Callable[[Exception], str],
        *,
        model_control: bool = False,
    ) -> None:
        self._engine = engine
        self._repository = engine.repository
        self._readiness = readiness
        self._describe_error = describe_error
        self._model_control = model_control

    @property
    def methods(self) -> Mapping[str, Method]:
        """Methods by name, for those with one request and one response."""
        return {
            "ModelInfer": self.infer,
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._repository_model_load,
            "RepositoryModelUnload": self._repository_model_unload,
        }

    async def infer(self, request: Any, deadline_s: float | None) -> Any:
        """Serve ``ModelInfer``."""
        started_s = self._engine.now()
        version = self._repository.find(request.model_name, request.model_version)
        wire, num_classes = decode_message(request, version)
        answer = await self._engine.infer(version, wire, started_s=started_s, deadline_s=deadline_s)
        return await self._encoded(answer, num_classes)

    async def _encoded(self, answer: Answer, num_classes: Mapping[str, int]) -> Any:
        return await self._engine.threads.run(encode_message, answer, num_classes, size=answer.nbytes // 16)

    async def stream_infer(self, requests: AsyncIterator[Any], deadline_s: float | None) -> AsyncGenerator[Any, None]:
        """Serve ``ModelStreamInfer``: requests run side by side; unary models' responses keep their order.

        An error of one request is a message of its own; the stream goes on.
        """
        outbox: asyncio.Queue[Any] = asyncio.Queue(maxsize=_MAX_CONCURRENT)
        reader = asyncio.create_task(self._run_all(requests, deadline_s, outbox))
        try:
            while (response := await outbox.get()) is not None:
                yield response
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _run_all(
        self, requests: AsyncIterator[Any], deadline_s: float | None, outbox: asyncio.Queue[Any]
    ) -> None:
        room = asyncio.Semaphore(_MAX_CONCURRENT)
        last_unary: asyncio.Task[None] | None = None
        try:
            async with asyncio.TaskGroup() as group:
                async for request in requests:
                    await room.acquire()
                    is_streaming = self._is_streaming(request)
                    work = self._run_one(request, deadline_s, outbox, None if is_streaming else last_unary)
                    task = group.create_task(work)
                    task.add_done_callback(lambda _: room.release())
                    if not is_streaming:
                        last_unary = task
        finally:
            if not asyncio.current_task().cancelling():  # type: ignore[union-attr]  # else nobody reads any more
                await outbox.put(None)

    def _is_streaming(self, request: Any) -> bool:
        try:
            return self._repository.find(request.model_name, request.model_version).streaming is not None
        except MlsysError:
            return False

    async def _run_one(
        self, request: Any, deadline_s: float | None, outbox: asyncio.Queue[Any], after: asyncio.Task[None] | None
    ) -> None:
        response_type = messages().ModelStreamInferResponse
        responses = []
        try:
            started_s = self._engine.now()
            version = self._repository.find(request.model_name, request.model_version)
            wire, num_classes = decode_message(request, version)
            wants_final = flag(wire.parameters, _EMPTY_FINAL)
            wire.parameters.pop(_EMPTY_FINAL, None)
            async with aclosing(
                self._engine.stream(version, wire, started_s=started_s, deadline_s=deadline_s)
            ) as answers:
                async for answer in answers:
                    response = response_type(infer_response=await self._encoded(answer, num_classes))
                    response.infer_response.parameters[_FINAL].bool_param = version.streaming is None
                    if version.streaming is None:
                        responses.append(response)
                        continue
                    await outbox.put(response)
            if wants_final and not responses:
                responses = [_final(version, request.id)]
        except Exception as error:  # noqa: BLE001  (the boundary of one request of the stream)
            response = response_type(error_message=self._describe_error(error))
            response.infer_response.id = request.id
            response.infer_response.model_name = request.model_name
            response.infer_response.parameters[_FINAL].bool_param = True
            responses = [response]
        if after is not None:
            await asyncio.wait({after})
        for response in responses:
            await outbox.put(response)

    async def _server_live(self, request: Any, deadline_s: float | None) -> Any:
        return messages().ServerLiveResponse(live=True)

    async def _server_ready(self, request: Any, deadline_s: float | None) -> Any:
        return messages().ServerReadyResponse(ready=(await self._readiness.report()).is_ready)

    async def _model_ready(self, request: Any, deadline_s: float | None) -> Any:
        try:
            self._repository.find(request.name, request.version)
        except MlsysError:
            return messages().ModelReadyResponse(ready=False)
        return messages().ModelReadyResponse(ready=True)

    async def _server_metadata(self, request: Any, deadline_s: float | None) -> Any:
        return ParseDict(server_metadata(), messages().ServerMetadataResponse())

    async def _model_metadata(self, request: Any, deadline_s: float | None) -> Any:
        versions = self._repository.versions(_named(request), request.version)
        found = self._repository.find(request.name, request.version)
        return ParseDict(model_metadata(found, versions), messages().ModelMetadataResponse())

    async def _model_config(self, request: Any, deadline_s: float | None) -> Any:
        config = model_config(self._repository.find(_named(request), request.version))
        return ParseDict({"config": config}, messages().ModelConfigResponse())

    async def _model_statistics(self, request: Any, deadline_s: float | None) -> Any:
        versions = self._repository.versions(request.name, request.version)
        described = {"model_stats": [model_statistics(version) for version in versions]}
        return ParseDict(described, messages().ModelStatisticsResponse())

    async def _repository_index(self, request: Any, deadline_s: float | None) -> Any:
        entries = [index_entry(entry) for entry in self._repository.index(ready_only=request.ready)]
        return ParseDict({"models": entries}, messages().RepositoryIndexResponse())

    async def _repository_model_load(self, request: Any, deadline_s: float | None) -> Any:
        check_model_control(self._model_control)
        await self._repository.load(request.model_name, load_config(_load_parameters(request.parameters)))
        return messages().RepositoryModelLoadResponse()

    async def _repository_model_unload(self, request: Any, deadline_s: float | None) -> Any:
        check_model_control(self._model_control)
        await self._repository.unload(request.model_name)
        return messages().RepositoryModelUnloadResponse()


def _final(version: Version, request_id: str) -> Any:
    """Return the empty last response of a stream, for a client that asked for one."""
    response = messages().ModelStreamInferResponse()
    response.infer_response.model_name = version.spec.name
    response.infer_response.model_version = version.spec.version
    response.infer_response.id = request_id
    response.infer_response.parameters[_FINAL].bool_param = True
    return response


def _load_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: getattr(value, value.WhichOneof("parameter_choice") or "", None) for name, value in parameters.items()
    }


def _named(request: Any) -> str:
    if not request.name:
        raise UnknownModelError("the request names no model")
    name: str = request.name
    return name
