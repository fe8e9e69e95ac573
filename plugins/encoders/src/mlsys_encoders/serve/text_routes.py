"""``/v1/embeddings`` and ``/v1/rerank`` (``/v2/rerank``) over the encoders of a server."""

from __future__ import annotations

from typing import Any

from fastapi import Response
from mlsys_encoders.serve.text_bodies import (
    EmbeddingList,
    EmbeddingRequest,
    RerankAnswer,
    RerankRequest,
    each_input,
    embedding_list,
    rerank_answer,
)
from mlsys_encoders.serve.text_service import Cutting, TextService
from mlsys_serving.http import Router
from mlsys_serving.http.errors import ErrorResponse
from mlsys_serving.http.threads import RequestThreads
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


def add_text_routes(router: Router, service: TextService, threads: RequestThreads) -> None:
    """Add OpenAI's and Cohere's routes.

    Args:
        router: To add to.
        service: The encoders.
        threads: For writing large answers.
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
            scores, num_tokens = await encoder.scores(body.query, body.texts, cutting=Cutting(is_cut=body.truncate))
            name = encoder.name
        return to_json(rerank_answer(body, scores, model=name, num_tokens=num_tokens))


def to_json(answer: BaseModel) -> Response:
    """Return an answer as JSON, without the fields that are None."""
    return Response(answer.model_dump_json(exclude_none=True), media_type="application/json")
