"""``/v1/embeddings`` and ``/v1/rerank``, over an encoder that is served beside the model."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from fastapi import Request, Response
from mlsys_core.errors import InvalidInputError
from mlsys_core.serving.http import Router
from pydantic import BaseModel, Field
from torch import Tensor
from torch.nn import functional

from mlsys_orca.api.fields import Body, Ids, ManyIds, Text, Texts
from mlsys_orca.api.front import to_json
from mlsys_orca.api.identity import identity_of
from mlsys_orca.api.service import ModelService, unknown_model
from mlsys_orca.engine.client import BusyError
from mlsys_orca.engine.embedding import TextEncoder

MAX_WAITING = 64  # requests for the encoder, beside one of a batch


class EmbeddingRequest(Body):
    """``POST /v1/embeddings``."""

    model: str = Field(min_length=1, max_length=256)
    input: Text | Ids | Texts | ManyIds
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1, description="Only the model's own number.")
    truncate: bool = Field(default=False, description="An extension: cut texts that are too long.")
    user: str | None = Field(default=None, max_length=256)

    @property
    def texts(self) -> list[str | list[int]]:
        """All inputs."""
        if isinstance(self.input, str):
            return [self.input]
        return [self.input] if isinstance(self.input[0], int) else list(self.input)


class Embedding(BaseModel):
    """One vector."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str  # numbers, or base64 of little-endian fp32


class EncoderUsage(BaseModel):
    """Number of tokens a request cost."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """Answer of ``POST /v1/embeddings``."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EncoderUsage


class RerankRequest(Body):
    """``POST /v1/rerank``: as Cohere's and Jina's."""

    model: str = Field(min_length=1, max_length=256)
    query: Text
    documents: Texts
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = True
    truncate: bool = Field(default=False, description="An extension: cut texts that are too long.")


class RerankDocument(BaseModel):
    """A document as it came."""

    text: str


class RerankResult(BaseModel):
    """Rank of one document."""

    index: int  # among the request's documents
    relevance_score: float  # a cross-encoder's, from 0 to 1; else the cosine between query and document
    document: RerankDocument | None = None


class RerankAnswer(BaseModel):
    """Answer of ``POST /v1/rerank``, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EncoderUsage


def add_routes(router: Router, service: ModelService) -> None:
    """Add the routes ``/v1/embeddings`` and ``/v1/rerank``."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="orca-encoder")  # an encoder has one caller at a time
    num_waiting = 0

    def encoder_of(model: str) -> TextEncoder:
        encoder = service.encoder
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
            raise InvalidInputError(f"{body.model!r} is a cross-encoder, which has no vectors: use /v1/rerank")
        if body.dimensions not in (None, encoder.dimension):
            raise InvalidInputError(f"dimensions is {body.dimensions}; this model's vectors have {encoder.dimension}")
        return await run(request, lambda: _embeddings(encoder, body))

    @router.post("/v1/rerank", response_model=RerankAnswer)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Rank documents by their fit to a query: a cross-encoder's score, or the cosine of an encoder's vectors."""
        encoder = encoder_of(body.model)
        return await run(request, lambda: _ranking(encoder, body))


def _embeddings(encoder: TextEncoder, body: EmbeddingRequest) -> EmbeddingList:
    vectors, num_tokens = _vectors(encoder, body.texts, truncate=body.truncate)
    data = [
        Embedding(
            index=index,
            embedding=vector.tolist()
            if body.encoding_format == "float"
            else base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode(),
        )
        for index, vector in enumerate(vectors)
    ]
    return EmbeddingList(data=data, model=body.model, usage=_usage(num_tokens))


def _ranking(encoder: TextEncoder, body: RerankRequest) -> RerankAnswer:
    score = _scores if encoder.scores_pairs else _cosines
    found, num_tokens = score(encoder, body.query, body.documents, truncate=body.truncate)
    scores = found.tolist()
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results = [
        RerankResult(
            index=index,
            relevance_score=scores[index],
            document=RerankDocument(text=body.documents[index]) if body.return_documents else None,
        )
        for index in order
    ]
    return RerankAnswer(id=f"rerank-{uuid.uuid4().hex}", model=body.model, results=results, usage=_usage(num_tokens))


def _usage(num_tokens: int) -> EncoderUsage:
    return EncoderUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)


def _vectors(encoder: TextEncoder, texts: Sequence[str | list[int]], *, truncate: bool) -> tuple[Tensor, int]:
    ids = [encoder.tokenize(text, truncate=truncate) if isinstance(text, str) else text for text in texts]
    return encoder.embed(ids), sum(map(len, ids))


def _cosines(encoder: TextEncoder, query: str, documents: Sequence[str], *, truncate: bool) -> tuple[Tensor, int]:
    vectors, num_tokens = _vectors(encoder, [query, *documents], truncate=truncate)
    return functional.cosine_similarity(vectors[:1], vectors[1:]), num_tokens


def _scores(encoder: TextEncoder, query: str, documents: Sequence[str], *, truncate: bool) -> tuple[Tensor, int]:
    return encoder.score(query, documents, truncate=truncate)
