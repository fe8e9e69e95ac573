"""``POST /v1/responses``: OpenAI's newer endpoint, for text and calls, with answers kept to be gone on with by id."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

from fastapi import Query, Request, Response
from mlsys_orca.api.answers import (
    STREAMED,
    Generation,
    GenerationParameters,
    Whole,
    collect,
    identity_of,
    merged,
    named_event,
    owner_of,
)
from mlsys_orca.api.conversation import AnswerForm, AnswerReader, prepare
from mlsys_orca.api.service import ModelService, body_size, to_json
from mlsys_orca.api.text_stream import Part, joined
from mlsys_orca.scheduling.batch import SamplingParams
from mlsys_serving.http import HttpError, Router, cancel_on_disconnect
from mlsys_serving.http.describe import describe
from pydantic import BaseModel

from mlsys_orca_gateway.responses.answer import Items, ResponseError, ResponsesAnswer, StreamEvent, answer_of
from mlsys_orca_gateway.responses.fields import INPUT_ITEMS, InputItem, ResponsesRequest
from mlsys_orca_gateway.responses.store import ResponseStore, StoredResponse
from mlsys_orca_gateway.streams.keeper import AnswerKeeper, KeptAnswer


class Deleted(BaseModel):
    """Answer of ``DELETE /v1/responses/ID``."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class Asked:
    """A request with the conversation before it, and what its answer is read and kept with."""

    def __init__(self, body: ResponsesRequest, service: ModelService, store: ResponseStore, owner: str) -> None:
        self.body, self.owner = body, owner
        self._service, self._store = service, store
        self._before: list[InputItem] = []
        self.form = AnswerForm()

    def parameters(self) -> GenerationParameters:
        """Return what is to be generated.

        Raises:
            HttpError: the earlier response is not there (404).
            InvalidInputError: as :func:`.conversation.prepare`.
        """
        body = self.body
        if body.previous_response_id is not None:
            stored = self._store.get(body.previous_response_id, self.owner)
            if not stored.items:
                raise HttpError(
                    f"the response {body.previous_response_id!r} has not ended, or not come to its own end",
                    http_status=409,
                    error_code="response_not_ended",
                    param="previous_response_id",
                )
            self._before = INPUT_ITEMS.validate_json(stored.items)
        asked = GenerationParameters(
            prefix="resp",
            model=body.model,
            max_new_tokens=body.max_output_tokens,
            sampling=SamplingParams(temperature=body.temperature, top_k=body.top_k_or_none, top_p=body.top_p),
        )
        parameters, self.form = prepare(body.conversation(self._before), asked, self._service)
        return parameters

    def ended(
        self, generation: Generation, whole: Whole, items: Items
    ) -> tuple[ResponsesAnswer, StoredResponse | None]:
        """Return the complete answer, and as it is to be kept; None: that was refused."""
        num_reasoning = len(self._service.loaded.tokenizer.encode(items.reasoning)) if items.reasoning else 0
        answer = answer_of(generation, self.body, whole, items.done, num_reasoning)
        if not answer.store:
            return answer, None
        output = INPUT_ITEMS.validate_python([item.model_dump() for item in items.done])
        conversation = INPUT_ITEMS.dump_json([*self._before, *self.body.items, *output], exclude_none=True)
        return answer, StoredResponse(to_json(answer), conversation, self.owner)

    async def keep(self, answer: ResponsesAnswer, stored: StoredResponse | None) -> None:
        """Keep an answer, if it is to be; with a journal it outlives the server from then on."""
        if stored is not None:
            self._store.put(answer.id, stored)
            await self._store.settled()

    def keep_unended(self, answer: ResponsesAnswer) -> None:
        """Keep an answer that has not come to its own end, or not yet."""
        self._store.put(answer.id, StoredResponse(to_json(answer), b"", self.owner))

    def whole(self, generation: Generation, whole: Whole) -> tuple[ResponsesAnswer, StoredResponse | None]:
        """Return the complete answer from its text; as :meth:`ended`."""
        reader, items = AnswerReader(self.form), Items(generation.answer_id)
        parts = reader.push(whole.text)
        for part in joined(parts + reader.finish(whole.finish_reason)) or [Part("text")]:
            for _ in items.add(part):
                pass
        for _ in items.end(_last_status(whole)):
            pass
        return self.ended(generation, whole, items)


def _last_status(whole: Whole) -> Literal["completed", "incomplete"]:
    return "incomplete" if whole.finish_reason == "length" else "completed"


async def response_events(generation: Generation, asked: Asked, service: ModelService) -> AsyncGenerator[bytes, None]:
    """Yield the answer as named server-sent events."""
    reader, items, whole = AnswerReader(asked.form), Items(generation.answer_id), Whole(0)
    begun = answer_of(generation, asked.body, None, [], 0)
    yield items.event("response.created", response=begun)
    yield items.event("response.in_progress", response=begun)
    has_item = False
    async for _, delta in merged(generation):
        if delta.token is not None:
            whole.tokens.append(delta.token)
        parts = reader.push(delta.text)
        if delta.finish_reason is not None:
            whole.finish_reason = delta.finish_reason
            parts += reader.finish(delta.finish_reason)
            parts = parts if parts or has_item else [Part("text")]
        for part in parts:
            has_item = True
            for event in items.add(part):
                yield event
    for event in items.end(_last_status(whole)):
        yield event
    ended, stored = await service.front.run(asked.ended, generation, whole, items, size=len(whole.tokens))
    await asked.keep(ended, stored)
    yield items.event(f"response.{ended.status}", response=ended)


async def background_events(generation: Generation, asked: Asked, service: ModelService) -> AsyncGenerator[bytes, None]:
    """Yield the events of an answer that nobody may be reading: an error is its last event, and is kept."""
    num_events = 0
    try:
        async with aclosing(response_events(generation, asked, service)) as events:
            async for event in events:
                num_events += 1
                yield event
    except Exception as error:  # noqa: BLE001 - it is told to whoever comes back
        info = describe(error, validation_status=400)
        failed = answer_of(generation, asked.body, None, [], 0).model_copy(
            update={"status": "failed", "error": ResponseError(code=info.code, message=info.message)}
        )
        asked.keep_unended(failed)
        made = StreamEvent(type="response.failed", sequence_number=num_events, response=failed)  # type: ignore[call-arg]
        yield named_event(made.type, made)


def add_routes(router: Router, service: ModelService, keeper: AnswerKeeper, store: ResponseStore) -> None:
    """Add the route ``/v1/responses`` and those of answers that were kept."""
    _add_kept(router, store, keeper)

    @router.post("/v1/responses", response_model=ResponsesAnswer, responses=STREAMED)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a text or a conversation: whole, as a stream of named events, or for the client to come back to."""
        service.check_counts(body.model)
        asked = Asked(body, service, store, owner_of(request))
        parameters = await service.front.run(asked.parameters, size=body_size(request))
        generation = await service.start(parameters, user=body.user, identity=identity_of(request))
        if body.background:
            events = background_events(generation, asked, service)
            begun = answer_of(generation, body, None, [], 0)
            asked.keep_unended(begun)
            try:
                answer = await keeper.keep(request, generation, events, waits=True)
            except BaseException:
                store.delete(begun.id, asked.owner)
                raise
            return keeper.respond(request, answer) if body.stream else await service.front.answer(lambda: begun)
        if body.stream:
            return await keeper.streamed(request, generation, response_events(generation, asked, service))
        (text,) = await cancel_on_disconnect(request, collect(generation))
        whole, stored = await service.front.run(asked.whole, generation, text)
        await asked.keep(whole, stored)
        return await service.front.answer(lambda: whole)


def _add_kept(router: Router, store: ResponseStore, keeper: AnswerKeeper) -> None:
    def running(response_id: str, owner: str) -> KeptAnswer | None:
        return keeper.find(response_id.partition("-")[2], owner)

    def current(response_id: str, owner: str) -> Response:
        stored = store.get(response_id, owner)
        if not stored.items and running(response_id, owner) is None:
            answer = ResponsesAnswer.model_validate_json(stored.answer)
            if answer.status == "in_progress":  # its server has ended, and none could go on with it
                error = ResponseError(code="engine_died", message="the answer was lost with its server: ask again")
                answer = answer.model_copy(update={"status": "failed", "error": error})
            return Response(to_json(answer), media_type="application/json")
        return Response(stored.answer, media_type="application/json")

    @router.get("/v1/responses/{response_id}", response_model=ResponsesAnswer, responses=STREAMED)
    async def get_response(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=-1, lt=2**31)] = -1,
    ) -> Response:
        """Return an answer that was kept; as a stream, its events behind number ``starting_after``."""
        owner = owner_of(request)
        if not stream:
            return current(response_id, owner)
        answer = running(response_id, owner)
        if answer is None:
            store.get(response_id, owner)
            raise HttpError(
                f"the events of response {response_id!r} are not kept any more: leave out 'stream' to have it whole",
                http_status=404,
                error_code="stream_not_found",
            )
        return keeper.respond(request, answer, (starting_after + 1,))

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> Deleted:
        """Drop an answer that was kept; one that runs ends."""
        owner = owner_of(request)
        store.delete(response_id, owner)
        if (answer := running(response_id, owner)) is not None and answer.waits:
            await keeper.cancel(answer)
        return Deleted(id=response_id)

    @router.post("/v1/responses/{response_id}/cancel", response_model=ResponsesAnswer)
    async def cancel_response(response_id: str, request: Request) -> Response:
        """End an answer that runs in the background, and return it; one that has ended stays as it is."""
        owner = owner_of(request)
        stored, answer = store.get(response_id, owner), running(response_id, owner)
        if answer is not None and answer.ended_s is None:
            if not answer.waits:
                raise HttpError(
                    f"the response {response_id!r} does not run in the background: close its connection",
                    http_status=400,
                    error_code="not_in_background",
                )
            await keeper.cancel(answer)
            ended = ResponsesAnswer.model_validate_json(stored.answer).model_copy(update={"status": "cancelled"})
            store.put(response_id, StoredResponse(to_json(ended), b"", owner))
        return current(response_id, owner)
