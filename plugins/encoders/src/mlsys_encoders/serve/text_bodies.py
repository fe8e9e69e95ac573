"""Bodies and answers of ``/v1/embeddings`` (OpenAI's), ``/v1/rerank`` (Cohere's, Jina's), ``/v1/score`` (vLLM's).

Beside a server of models, and beside a language model.
"""

from __future__ import annotations

import base64
import time
import uuid
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from mlsys_serving.http.bodies import MAX_TEXTS, Body, Ids, ManyIds, Name, Neutral, Text, Texts
from pydantic import BaseModel, Field, model_validator

Floats = npt.NDArray[np.float32]
VLLM: Neutral = {"add_special_tokens": (True,), "priority": (0,), "request_id": (), "truncate_prompt_tokens": ()}


def each_input(given: str | list[Any]) -> list[str | list[int]]:
    """Return the inputs of a request one by one: texts, or token ids.

    Example:
        >>> each_input("a"), each_input([1, 2]), each_input(["a", "b"])
        (['a'], [[1, 2]], ['a', 'b'])
    """
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


def unit(vectors: Floats) -> Floats:
    """Return vectors of length 1; one of zeros stays."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: Floats = vectors / np.maximum(lengths, 1e-12).astype(np.float32)
    return scaled


def check_dimensions(dimensions: int | None, size: int, *, model: str) -> None:
    """Refuse more numbers of a vector than there are.

    Args:
        dimensions: Numbers that the request asks for; None: all.
        size: Numbers of a vector.
        model: Name of the encoder.

    Raises:
        InvalidInputError: The vectors have fewer.
    """
    if dimensions is not None and dimensions > size:
        raise InvalidInputError(f"dimensions is {dimensions}; the vectors of {model!r} have {size}")


def shortened(vectors: Floats, dimensions: int | None) -> Floats:
    """Return the first ``dimensions`` numbers of each vector, scaled to length 1; None, or all: the vectors.

    Example:
        >>> shortened(np.array([[3.0, 4.0, 0.0]], np.float32), 2).round(2).tolist()
        [[0.6000000238418579, 0.800000011920929]]
    """
    return vectors if dimensions in (None, vectors.shape[-1]) else unit(vectors[:, :dimensions])


class EmbeddingRequest(Body):
    """``POST /v1/embeddings``."""

    neutral: ClassVar[Neutral] = VLLM
    model: Name | None = Field(default=None, description="Left out: the only encoder of this server.")
    input: Text | Ids | Texts | ManyIds
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1, description="The first so many numbers, scaled to length 1.")
    user: str | None = Field(default=None, max_length=256)
    truncate: bool = Field(default=False, description="An extension: cut texts that are too long.")
    prompt_name: Name | None = Field(default=None, description="An extension: a prompt of the model's folder.")


class Embedding(BaseModel):
    """One vector."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str  # numbers, or base64 of little-endian fp32


class TextUsage(BaseModel):
    """Number of tokens that a request cost."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """Answer of ``POST /v1/embeddings``."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: TextUsage


class Document(Body):
    """A document as an object."""

    text: Text


class RerankRequest(Body):
    """``POST /v1/rerank`` and ``/v2/rerank``."""

    neutral: ClassVar[Neutral] = VLLM
    model: Name | None = Field(default=None, description="Left out: the only encoder of this server.")
    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = True
    truncate: bool = Field(default=False, description="An extension: cut texts that are too long.")

    @property
    def texts(self) -> list[str]:
        """Texts of all documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class RankedDocument(BaseModel):
    """A document in an answer."""

    text: str


class RerankResult(BaseModel):
    """Rank of one document."""

    index: int  # among the request's documents
    relevance_score: float  # a cross-encoder's, from 0 to 1; else the cosine between query and document
    document: RankedDocument | None = None


class RerankAnswer(BaseModel):
    """Answer of ``POST /v1/rerank``, best first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RerankResult]
    usage: TextUsage


class ScoreRequest(Body):
    """``POST /v1/score`` and ``/score``: one text and others, or as many of both."""

    neutral: ClassVar[Neutral] = VLLM
    model: Name | None = Field(default=None, description="Left out: the only encoder of this server.")
    text_1: Text | Texts
    text_2: Text | Texts
    truncate: bool = Field(default=False, description="An extension: cut texts that are too long.")

    @model_validator(mode="after")
    def _are_pairs(self) -> ScoreRequest:
        firsts, seconds = self.pairs
        if len(firsts) not in (1, len(seconds)):
            raise ValueError("'text_1' is one text, or as many as 'text_2' has")
        return self

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """One text, or as many as there are of the others; and these."""
        return _listed(self.text_1), _listed(self.text_2)


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


class Score(BaseModel):
    """Score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreAnswer(BaseModel):
    """Answer of ``POST /v1/score``."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: TextUsage


def score_answer(scores: Floats, *, model: str, num_tokens: int) -> ScoreAnswer:
    """Return the answer to a request for scores of pairs."""
    return ScoreAnswer(
        id=f"score-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        data=[Score(index=index, score=score) for index, score in enumerate(scores.tolist())],
        usage=_usage(num_tokens),
    )


def embedding_list(body: EmbeddingRequest, vectors: Floats, *, model: str, num_tokens: int) -> EmbeddingList:
    """Return the answer to a request for embeddings.

    Args:
        body: The request.
        vectors: One for each input, [inputs, numbers].
        model: Name of the encoder.
        num_tokens: Tokens of all inputs.
    """
    numbers: list[list[float]] | list[str] = (
        [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        if body.encoding_format == "base64"
        else vectors.tolist()
    )
    data = [Embedding.model_construct(index=index, embedding=each) for index, each in enumerate(numbers)]
    return EmbeddingList(data=data, model=model, usage=_usage(num_tokens))


def ranked(scores: Floats) -> list[tuple[int, float]]:
    """Return index and score of each text, best first; equal ones in the order in which they came.

    Example:
        >>> ranked(np.array([0.5, 1.0, 0.5]))
        [(1, 1.0), (0, 0.5), (2, 0.5)]
    """
    listed = scores.tolist()
    return [(index, listed[index]) for index in sorted(range(len(listed)), key=lambda index: -listed[index])]


def rerank_answer(body: RerankRequest, scores: Floats, *, model: str, num_tokens: int) -> RerankAnswer:
    """Return the answer to a request for a ranking.

    Args:
        body: The request.
        scores: One for each document, [documents].
        model: Name of the encoder.
        num_tokens: Tokens of the query and all documents.
    """
    texts = body.texts
    results = [
        RerankResult(
            index=index,
            relevance_score=score,
            document=RankedDocument(text=texts[index]) if body.return_documents else None,
        )
        for index, score in ranked(scores)[: body.top_n]
    ]
    return RerankAnswer(id=f"rerank-{uuid.uuid4().hex}", model=model, results=results, usage=_usage(num_tokens))


def _usage(num_tokens: int) -> TextUsage:
    return TextUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
