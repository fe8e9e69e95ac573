"""``POST /v1/responses``: OpenAI's newer endpoint, for text and calls, with answers kept to be gone on with by id."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal

from fastapi import Request, Response
from mlsys_core.serving.http import Router, cancel_on_disconnect
from pydantic import BaseModel

from mlsys_orca.api.answer_reader import AnswerForm, AnswerReader
from mlsys_orca.api.answers import STREAMED, Whole, collect, merged, streamed
from mlsys_orca.api.conversation import prepare
from mlsys_orca.api.front import body_size, to_json
from mlsys_orca.api.parts import Part, joined
from mlsys_orca.api.response_answer import Items, ResponsesAnswer, answer_of
from mlsys_orca.api.response_store import ResponseStore, StoredResponse
from mlsys_orca.api.responses_fields import INPUT_ITEMS, InputItem, ResponsesRequest
from mlsys_orca.api.service import Generation, GenerationParameters, ModelService
from mlsys_orca.api.text_stream import TextOptions
from mlsys_orca.scheduling.batch import SamplingParams


class Deleted(BaseModel):
    """Answer of ``DELETE /v1/responses/ID``."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class Asked:
    """A request with the conversation before it, and what its answer is read and kept with."""

    def __init__(self, body: ResponsesRequest, service: ModelService, store: ResponseStore) -> None:
        self.body = body
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
            self._before = INPUT_ITEMS.validate_json(self._store.get(body.previous_response_id).items)
        prepared = prepare(body.conversation(self._before), self._service)
        self.form = prepared.form
        return GenerationParameters(
            prefix="resp",
            model=body.model,
            prompts=[prepared.prompt],
            max_new_tokens=body.max_output_tokens,
            sampling=SamplingParams(temperature=body.temperature, top_k=body.top_k_or_none, top_p=body.top_p),
            grammar=prepared.grammar,
            text=TextOptions(skips_special=not prepared.has_control_marks),
        )

    def ended(self, generation: Generation, whole: Whole, items: Items) -> ResponsesAnswer:
        """Return the complete answer; it is kept if that was not refused."""
        num_reasoning = len(self._service.loaded.tokenizer.encode(items.reasoning)) if items.reasoning else 0
        answer = answer_of(generation, self.body, whole, items.done, num_reasoning)
        if answer.store:
            output = INPUT_ITEMS.validate_python([item.model_dump() for item in items.done])
            conversation = INPUT_ITEMS.dump_json([*self._before, *self.body.items, *output], exclude_none=True)
            self._store.put(answer.id, StoredResponse(to_json(answer), conversation))
        return answer

    def whole(self, generation: Generation, whole: Whole) -> ResponsesAnswer:
        """Return the complete answer from its text."""
        reader, items = AnswerReader(self.form), Items(generation.answer_id)
        parts = reader.push(whole.text)
        for part in joined(parts + reader.finish()) or [Part("text")]:
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
            parts += reader.finish()
            parts = parts if parts or has_item else [Part("text")]
        for part in parts:
            has_item = True
            for event in items.add(part):
                yield event
    for event in items.end(_last_status(whole)):
        yield event
    ended = await service.front.run(asked.ended, generation, whole, items, size=len(whole.tokens))
    yield items.event(f"response.{ended.status}", response=ended)


def add_routes(router: Router, service: ModelService) -> None:
    """Add the routes ``/v1/responses`` and ``/v1/responses/ID``."""
    store = ResponseStore()

    @router.post("/v1/responses", response_model=ResponsesAnswer, responses=STREAMED)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a text or a conversation, whole or as a stream of named events."""
        service.check_counts(body.model)
        asked = Asked(body, service, store)
        parameters = await service.front.run(asked.parameters, size=body_size(request))
        generation = await service.start(parameters, user=body.user)
        if body.stream:
            return streamed(generation, response_events(generation, asked, service))
        (whole,) = await cancel_on_disconnect(request, collect(generation))
        return await service.front.answer(lambda: asked.whole(generation, whole))

    @router.get("/v1/responses/{response_id}", response_model=ResponsesAnswer)
    async def get_response(response_id: str) -> Response:
        """Return an answer that was kept."""
        return Response(store.get(response_id).answer, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> Deleted:
        """Drop an answer that was kept."""
        store.delete(response_id)
        return Deleted(id=response_id)
