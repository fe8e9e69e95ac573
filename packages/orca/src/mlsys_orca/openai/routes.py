"""The routes of the OpenAI protocol that this server has."""

from __future__ import annotations

from fastapi import Request, Response
from mlsys_core.serving.http import ClosingStreamingResponse, HttpError, Router, cancel_on_disconnect

from mlsys_orca.openai import render
from mlsys_orca.openai.requests import ChatCompletionRequest, CompletionRequest
from mlsys_orca.openai.responses import ChatCompletion, Completion, ModelCard, ModelList
from mlsys_orca.openai.service import ModelService

_STREAM = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "Answer or stream"}}


def make_router(service: ModelService) -> Router:
    """``/v1`` over one served model."""
    router = Router(prefix="/v1", tags=["OpenAI"])
    tokenizer = service.loaded.tokenizer

    def card() -> ModelCard:
        return ModelCard(id=service.name, created=service.created, max_model_len=service.engine.max_model_len)

    @router.get("/models")
    async def list_models() -> ModelList:
        """The models served here."""
        return ModelList(data=[card()])

    @router.get("/models/{name:path}")
    async def get_model(name: str) -> ModelCard:
        """One model."""
        if name != service.name:
            message = f"the model {name[:256]!r} does not exist here; this server has {service.name!r}"
            raise HttpError(message, http_status=404, error_code="model_not_found", param="model")
        return card()

    @router.post("/chat/completions", response_model=ChatCompletion, responses=_STREAM)  # type: ignore[arg-type]
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response | ChatCompletion:
        """Answer a conversation, whole or as a stream of server-sent events."""
        generation = service.chat(body)
        if not body.stream:
            return await cancel_on_disconnect(request, render.chat_completion(generation, service.name, tokenizer))
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        events = render.chat_events(generation, service.name, tokenizer, include_usage=include_usage)
        return ClosingStreamingResponse(events, media_type="text/event-stream")

    @router.post("/completions", response_model=Completion, responses=_STREAM)  # type: ignore[arg-type]
    async def completions(body: CompletionRequest, request: Request) -> Response | Completion:
        """Continue a text, whole or as a stream of server-sent events."""
        generation = service.complete(body)
        if not body.stream:
            return await cancel_on_disconnect(request, render.completion(generation, service.name, tokenizer))
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        events = render.completion_events(generation, service.name, tokenizer, include_usage=include_usage)
        return ClosingStreamingResponse(events, media_type="text/event-stream")

    return router
