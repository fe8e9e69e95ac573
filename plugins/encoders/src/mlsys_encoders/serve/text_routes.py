"""``/v1/embeddings``, ``/v1/rerank`` (``/v2/rerank``) and ``/v1/score`` (``/score``) over the encoders of a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Response
from mlsys_encoders.serve.text_bodies import (
    EmbeddingList,
    EmbeddingRequest,
    RerankAnswer,
    RerankRequest,
    ScoreAnswer,
    ScoreRequest,
    each_input,
    embedding_list,
    rerank_answer,
    score_answer,
)
from mlsys_encoders.serve.text_service import Cutting, TextService
from mlsys_serving.http import Router
from mlsys_serving.http.errors import ErrorResponse
from mlsys_serving.http.streaming import RequestThreads
from pydantic import BaseModel

_OPENAI_ERRORS: dict[int | str, dict[str, Any]] = {  # errors of these routes in OpenAPI, in place of the app's
    "4XX": {"model": ErrorResponse, "description": "The request cannot be served as it is"},
    "5XX": {"model": ErrorResponse, "description": "The server cannot serve it now"},
}


def add_model_list(router: Router, service: TextService) -> None:
    """Add OpenAI's list of models."""

    @router.get("/v1/models", responses=_OPENAI_ERRORS)
    async def models() -> dict[str, object]:
        """List the encoders that take texts."""
        listed = [{"id": name, "object": "model", "created": 0, "owned_by": "mlsys"} for name in service.names()]
        return {"object": "list", "data": listed}


def add_text_routes(router: Router, service: TextService, threads: RequestThreads) -> Callable[..., Any]:
    """Add OpenAI's, Cohere's and vLLM's routes.

    Args:
        router: To add to.
        service: The encoders.
        threads: For writing large answers.

    Returns:
        The function of ``/v1/rerank``.
    """

    @router.post("/v1/embeddings", response_model=EmbeddingList, responses=_OPENAI_ERRORS)
    async def embeddings(body: EmbeddingRequest) -> Response:
        """Return the vectors of texts."""
        with service.encoder(body.model) as encoder:
            vectors, num_tokens = await encoder.vectors(
                each_input(body.input),
                cutting=Cutting(is_cut=body.truncate),
                prompt_name=body.prompt_name,
                dimensions=body.dimensions,
            )
            name = encoder.name
        return await threads.run(
            lambda: to_json(embedding_list(body, vectors, model=name, num_tokens=num_tokens)), size=vectors.nbytes
        )

    @router.post("/v1/rerank", response_model=RerankAnswer, responses=_OPENAI_ERRORS)
    @router.post("/v2/rerank", response_model=RerankAnswer, include_in_schema=False)
    async def rerank(body: RerankRequest) -> Response:
        """Rank documents by their fit to a query: a cross-encoder's score, or the cosine of an encoder's vectors."""
        with service.encoder(body.model) as encoder:
            scores, num_tokens = await encoder.scores([body.query], body.texts, cutting=Cutting(is_cut=body.truncate))
            name = encoder.name
        return to_json(rerank_answer(body, scores, model=name, num_tokens=num_tokens))

    @router.post("/v1/score", response_model=ScoreAnswer, responses=_OPENAI_ERRORS)
    @router.post("/score", include_in_schema=False)
    async def score(body: ScoreRequest) -> Response:
        """Score pairs of texts as ``/v1/rerank`` scores a query and a document."""
        with service.encoder(body.model) as encoder:
            scores, num_tokens = await encoder.scores(*body.pairs, cutting=Cutting(is_cut=body.truncate))
            name = encoder.name
        return to_json(score_answer(scores, model=name, num_tokens=num_tokens))

    return rerank


def to_json(answer: BaseModel) -> Response:
    """Return an answer as JSON, without the fields that are None."""
    return Response(answer.model_dump_json(exclude_none=True), media_type="application/json")
