"""``/v1/embeddings`` and ``/v1/rerank`` (``/v2/rerank``) over the encoders of a server, and their errors' format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Response
from mlsys_dvabatch.serve.tei_routes import TEI_PATHS, error_type
from mlsys_dvabatch.serve.text_service import Cutting, TextService
from mlsys_serving.http import ErrorFormat, ErrorInfo, Router
from mlsys_serving.http.errors import ErrorResponse, openai_body
from mlsys_serving.http.text_bodies import (
    EmbeddingList,
    EmbeddingRequest,
    RerankAnswer,
    RerankRequest,
    each_input,
    embedding_list,
    rerank_answer,
)
from mlsys_serving.http.threads import RequestThreads
from mlsys_serving.oip.app import ERROR_FORMAT, OipError
from pydantic import BaseModel

_OPENAI_PATHS = ("/v1/", "/v2/rerank")


def text_error_body(info: ErrorInfo) -> Mapping[str, object]:
    """Return the body of an error in the words of the route's protocol: OpenAI's, TEI's, or Open Inference's."""
    if info.path.startswith(_OPENAI_PATHS):
        return openai_body(info)
    if info.path in TEI_PATHS:
        return {"error": info.message, "error_type": error_type(info.status)}
    return ERROR_FORMAT.body(info)


TEXT_ERRORS = ErrorFormat(body=text_error_body, model=OipError)
_OPENAI_ERRORS: dict[int | str, dict[str, Any]] = {  # of its routes, in place of the app's
    "4XX": {"model": ErrorResponse, "description": "The request cannot be served as it is"},
    "5XX": {"model": ErrorResponse, "description": "The server cannot serve it now"},
}


def add_text_routes(router: Router, service: TextService, threads: RequestThreads) -> None:
    """Add OpenAI's and Cohere's routes.

    Args:
        router: To add to.
        service: The encoders.
        threads: For writing large answers.
    """

    @router.get("/v1/models", responses=_OPENAI_ERRORS)
    async def models() -> dict[str, object]:
        """List the encoders that take texts."""
        listed = [{"id": name, "object": "model", "created": 0, "owned_by": "mlsys"} for name in service.names()]
        return {"object": "list", "data": listed}

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
