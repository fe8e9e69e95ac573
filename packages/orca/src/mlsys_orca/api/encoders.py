"""``/v1/embeddings`` and ``/v1/rerank``, over an encoder that is served beside the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from fastapi import Request, Response
from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import Router
from mlsys_serving.http.text_bodies import (
    EmbeddingList,
    EmbeddingRequest,
    RerankAnswer,
    RerankRequest,
    check_dimensions,
    each_input,
    embedding_list,
    rerank_answer,
    shortened,
)
from pydantic import BaseModel
from torch import Tensor
from torch.nn import functional

from mlsys_orca.api.errors import unknown_model
from mlsys_orca.api.front import to_json
from mlsys_orca.api.identity import identity_of
from mlsys_orca.api.service import ModelService
from mlsys_orca.engine.client import BusyError
from mlsys_orca.engine.embedding import TextEncoder

MAX_WAITING = 64  # requests for the encoder, beside one of a batch


def add_routes(router: Router, service: ModelService) -> None:
    """Add the routes ``/v1/embeddings`` and ``/v1/rerank``."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="orca-encoder")  # an encoder has one caller at a time
    num_waiting = 0

    def encoder_of(model: str | None) -> TextEncoder:
        encoder = service.encoder
        if model is None:
            if encoder is None:
                raise InvalidInputError("this server has no encoder: serve --encoder NAME")
            return encoder
        if encoder is None or model != encoder.name:
            if model in service.names:
                raise InvalidInputError(f"{model!r} generates text; vectors come from an encoder: serve --encoder NAME")
            raise unknown_model(model, [] if encoder is None else [encoder.name])
        return encoder

    async def run(request: Request, make: Callable[[], BaseModel]) -> Response:
        nonlocal num_waiting
        weight = 1 if identity_of(request) is None else 0
        if num_waiting >= MAX_WAITING:
            raise BusyError(num_waiting, MAX_WAITING, 1.0)
        num_waiting += weight
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(thread, lambda: Response(to_json(make()), media_type="application/json"))
        finally:
            num_waiting -= weight

    @router.post("/v1/embeddings", response_model=EmbeddingList)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Return the vectors of texts."""
        encoder = encoder_of(body.model)
        if encoder.scores_pairs:
            raise InvalidInputError(f"{encoder.name!r} is a cross-encoder, which has no vectors: use /v1/rerank")
        if body.prompt_name is not None:
            raise InvalidInputError("prompt_name: this encoder puts its own prompt before each text; leave it out")
        check_dimensions(body.dimensions, encoder.dimension, model=encoder.name)
        return await run(request, lambda: _embeddings(encoder, body))

    @router.post("/v1/rerank", response_model=RerankAnswer)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Rank documents by their fit to a query: a cross-encoder's score, or the cosine of an encoder's vectors."""
        encoder = encoder_of(body.model)
        return await run(request, lambda: _ranking(encoder, body))


def _embeddings(encoder: TextEncoder, body: EmbeddingRequest) -> EmbeddingList:
    vectors, num_tokens = _vectors(encoder, each_input(body.input), truncate=body.truncate)
    found = shortened(vectors.numpy(), body.dimensions)
    return embedding_list(body, found, model=encoder.name, num_tokens=num_tokens)


def _ranking(encoder: TextEncoder, body: RerankRequest) -> RerankAnswer:
    score = _scores if encoder.scores_pairs else _cosines
    scores, num_tokens = score(encoder, body.query, body.texts, truncate=body.truncate)
    return rerank_answer(body, scores.numpy(), model=encoder.name, num_tokens=num_tokens)


def _vectors(encoder: TextEncoder, texts: Sequence[str | list[int]], *, truncate: bool) -> tuple[Tensor, int]:
    ids = [encoder.tokenize(text, truncate=truncate) if isinstance(text, str) else text for text in texts]
    return encoder.embed(ids), sum(map(len, ids))


def _cosines(encoder: TextEncoder, query: str, documents: Sequence[str], *, truncate: bool) -> tuple[Tensor, int]:
    vectors, num_tokens = _vectors(encoder, [query, *documents], truncate=truncate)
    return functional.cosine_similarity(vectors[:1], vectors[1:]), num_tokens


def _scores(encoder: TextEncoder, query: str, documents: Sequence[str], *, truncate: bool) -> tuple[Tensor, int]:
    return encoder.score(query, documents, truncate=truncate)
