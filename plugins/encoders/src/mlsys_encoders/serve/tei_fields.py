"""Bodies of text-embeddings-inference's routes; OpenAI's and Cohere's are core's.

Every field works or is refused by name; a field that no protocol has is an error.
"""

from __future__ import annotations

from typing import Annotated

from mlsys_encoders.serve.tokens import Side
from mlsys_serving.http.bodies import MAX_TEXTS, Body, Ids, ManyIds, Name, Text, Texts
from pydantic import BaseModel, BeforeValidator, Field

Mixed = Annotated[list[Text | Ids], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
_SIDES = {"left": "Left", "right": "Right"}  # the protocol's other spellings


class Cut(Body):
    """Fields of text-embeddings-inference for texts that are too long."""

    truncate: bool | None = False
    truncation_direction: Annotated[Side, BeforeValidator(lambda side: _SIDES.get(str(side), side))] = "Right"


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
