"""``/tokenize`` and ``/detokenize``, as vLLM has them: what a prompt becomes, and back."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Request, Response
from mlsys_serving.http import Router
from mlsys_serving.http.bodies import Body, TokenId
from pydantic import BaseModel, Field, model_validator

from mlsys_orca.api.chat import Message
from mlsys_orca.api.conversation import encode_chat
from mlsys_orca.api.fields import MAX_MESSAGES
from mlsys_orca.api.service import ModelService, body_size

MAX_CHARS = 1_000_000  # of a text; it may be longer than the context, to learn by how much


class TokenizeRequest(Body):
    """``POST /tokenize``: a text, or a chat."""

    model: str | None = Field(default=None, min_length=1, max_length=256)
    prompt: str | None = Field(default=None, max_length=MAX_CHARS)
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool = True  # of a text; a chat's template has its own
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give 'prompt' or 'messages', one of both")
        return self


class Tokens(BaseModel):
    """Answer of ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: str | None = Field(default=None, min_length=1, max_length=256)
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class Detokenized(BaseModel):
    """Answer of ``POST /detokenize``."""

    prompt: str


def add_routes(router: Router, service: ModelService) -> None:
    """Add the routes ``/tokenize`` and ``/detokenize``."""

    @router.post("/tokenize", response_model=Tokens)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Return the token ids that a text or a chat becomes."""
        if body.model is not None:
            service.adapter_of(body.model)
        return await service.front.answer(lambda: _tokens(body, service), size=body_size(request))

    @router.post("/detokenize", response_model=Detokenized)
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Return the text of token ids."""
        if body.model is not None:
            service.adapter_of(body.model)
        return await service.front.answer(lambda: _text(body, service), size=len(body.tokens))


def _text(body: DetokenizeRequest, service: ModelService) -> Detokenized:
    service.check_vocabulary(body.tokens)
    return Detokenized(prompt=service.loaded.tokenizer.decode(body.tokens, skip_special=False))


def _tokens(body: TokenizeRequest, service: ModelService) -> Tokens:
    tokenizer = service.loaded.tokenizer
    if body.messages is not None:
        messages = [message.for_template() for message in body.messages]
        ids = encode_chat(service, messages, variables=body.chat_template_kwargs)
    else:
        ids = tokenizer.encode(body.prompt or "", add_bos=body.add_special_tokens, allow_special=True)
    texts = [tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None
    # Not checked again: a million numbers would keep the interpreter's lock for long.
    return Tokens.model_construct(
        count=len(ids), max_model_len=service.engine.max_model_len, tokens=ids, token_strs=texts
    )
