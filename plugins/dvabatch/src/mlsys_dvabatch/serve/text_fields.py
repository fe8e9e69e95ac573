"""Bodies of the routes for texts: OpenAI's embeddings, Cohere's and Jina's rerank, text-embeddings-inference's own.

Every field works or is refused by name; a field that no protocol has is an error.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from mlsys_dvabatch.serve.tokens import Side
from pydantic import BaseModel, ConfigDict, Field

MAX_TEXTS = 2048  # of one request
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
Mixed = Annotated[list[Text | Ids], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


def each_input(given: str | list[Any]) -> list[str | list[int]]:
    """Return the inputs of a request one by one: texts, or token ids."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


class Body(BaseModel):
    """A request's body: no unknown fields, no values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class EmbeddingRequest(Body):
    """``POST /v1/embeddings``."""

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
    """``POST /v1/rerank`` and ``/v2/rerank``: as Cohere's and Jina's."""

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


class Cut(Body):
    """Fields of text-embeddings-inference for texts that are too long."""

    truncate: bool | None = False
    truncation_direction: Side = "Right"


class TeiEmbedRequest(Cut):
    """``POST /embed``."""

    inputs: Text | Ids | Mixed
    normalize: bool = True
    prompt_name: Name | None = None
    dimensions: int | None = Field(default=None, ge=1)


class TeiRerankRequest(Cut):
    """``POST /rerank``."""

    query: Text
    texts: Texts
    raw_scores: bool = False
    return_text: bool = False


class Rank(BaseModel):
    """Rank of one text, of ``POST /rerank``."""

    index: int
    score: float
    text: str | None = None


class TeiPredictRequest(Cut):
    """``POST /predict``: a text, a pair of texts, or a batch of lists of one or two texts."""

    inputs: Text | Texts | Annotated[list[Texts], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
    raw_scores: bool = False


class Prediction(BaseModel):
    """Score of one label."""

    score: float
    label: str


class SimilarityInput(Body):
    """Texts to compare."""

    source_sentence: Text
    sentences: Texts


class SimilarityParameters(Cut):
    """Options of ``POST /similarity``."""

    prompt_name: Name | None = None


class TeiSimilarityRequest(Body):
    """``POST /similarity``."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None


class TeiTokenizeRequest(Body):
    """``POST /tokenize``."""

    inputs: Text | Texts
    add_special_tokens: bool = True
    prompt_name: Name | None = None


class Token(BaseModel):
    """A token of a text."""

    id: int
    text: str
    special: bool
    start: int | None  # characters of the text; None: a mark
    stop: int | None


class TeiDecodeRequest(Body):
    """``POST /decode``."""

    ids: Ids | ManyIds
    skip_special_tokens: bool = True
