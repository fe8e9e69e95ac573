"""The routes of text-embeddings-inference (``docs/openapi.json`` of version 1.7) over the encoders of a server."""

from __future__ import annotations

from typing import Any

from fastapi import Response
from mlsys_core.errors import InvalidInputError
from mlsys_encoders import __version__
from mlsys_encoders.models.config import HeadConfig
from mlsys_encoders.serve.tei_fields import (
    Cut,
    Prediction,
    Rank,
    TeiDecodeRequest,
    TeiEmbedRequest,
    TeiPredictRequest,
    TeiRerankRequest,
    TeiSimilarityRequest,
    TeiTokenizeRequest,
    Token,
)
from mlsys_encoders.serve.text_bodies import Floats, each_input, unit
from mlsys_encoders.serve.text_service import Cutting, TextEncoder, TextService, sigmoid, softmax
from mlsys_serving.http import ErrorFormat, ErrorInfo, HttpError, Router
from mlsys_serving.http.bodies import MAX_TEXTS
from mlsys_serving.http.streaming import RequestThreads
from pydantic import BaseModel
from pydantic_core import to_json

TEI_PATHS = frozenset(
    {"/embed", "/embed_all", "/embed_sparse", "/rerank", "/predict", "/similarity", "/tokenize", "/decode", "/info"}
)


class TeiError(BaseModel):
    """An error."""

    error: str
    error_type: str


def _error_body(info: ErrorInfo) -> dict[str, object]:
    is_backend = info.status == 424 or info.status >= 500
    kind = "Overloaded" if info.status in (429, 503) else "Backend" if is_backend else "Validation"
    return {"error": info.message, "error_type": kind}


TEI_ERRORS = ErrorFormat(body=_error_body, model=TeiError)


def add_tei_routes(router: Router, service: TextService, threads: RequestThreads) -> None:
    """Add the routes; they name no model, so the server must have one encoder.

    Args:
        router: To add to.
        service: The encoders.
        threads: For tokenising, and for writing large answers.
    """

    @router.get("/info")
    async def info() -> dict[str, object]:
        """Describe the encoder."""
        with service.encoder() as encoder:
            return _info(encoder)

    @router.post("/embed", response_model=list[list[float]])
    async def embed(body: TeiEmbedRequest) -> Response:
        """Return the vectors of texts."""
        with service.encoder() as encoder:
            if not body.normalize and encoder.texts.config.form.is_normalised:
                raise InvalidInputError(
                    f"normalize is false, and {encoder.name!r} scales vectors to length 1 by its own modules: leave it "
                    "out"
                )
            vectors, _ = await encoder.vectors(
                each_input(body.inputs),
                cutting=_cutting(body),
                prompt_name=body.prompt_name,
                dimensions=body.dimensions,
            )
        vectors = unit(vectors) if body.normalize else vectors
        return await threads.run(lambda: _json(vectors.tolist()), size=vectors.nbytes)

    @router.post("/rerank", response_model=list[Rank])
    async def rerank(body: TeiRerankRequest) -> Response:
        """Rank texts by their fit to a query."""
        with service.encoder() as encoder:
            scores, _ = await encoder.scores([body.query], body.texts, cutting=_cutting(body), is_raw=body.raw_scores)
        listed = scores.tolist()
        order = sorted(range(len(listed)), key=lambda index: -listed[index])
        texts = [{"text": body.texts[index]} if body.return_text else {} for index in order]
        return _json([{"index": at, "score": listed[at], **text} for at, text in zip(order, texts, strict=True)])

    @router.post("/predict", response_model=list[Prediction] | list[list[Prediction]])
    async def predict(body: TeiPredictRequest) -> Response:
        """Classify a text, a pair of texts, or a batch of them."""
        batch, is_batch = _predicted(body.inputs)
        with service.encoder() as encoder:
            logits, _ = await encoder.logits(batch, cutting=_cutting(body))
            assert encoder.head is not None
            found = [
                _predictions(row, encoder.head) for row in _scores(logits, encoder.head.problem, is_raw=body.raw_scores)
            ]
        return _json(found if is_batch else found[0])

    @router.post("/similarity", response_model=list[float])
    async def similarity(body: TeiSimilarityRequest) -> Response:
        """Return the cosine of each sentence's vector and the source's."""
        with service.encoder() as encoder:
            vectors, _ = await encoder.vectors(
                [body.inputs.source_sentence, *body.inputs.sentences],
                cutting=Cutting() if body.parameters is None else _cutting(body.parameters),
                prompt_name=None if body.parameters is None else body.parameters.prompt_name,
            )
        vectors = unit(vectors)
        return _json((vectors[1:] @ vectors[0]).tolist())

    @router.post("/tokenize", response_model=list[list[Token]])
    async def tokenize(body: TeiTokenizeRequest) -> Response:
        """Return the tokens of texts, which are cut as for vectors."""
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        with service.encoder() as encoder:
            return await threads.run(
                lambda: _json([_tokens(encoder, text, body) for text in texts]), size=sum(map(len, texts))
            )

    @router.post("/decode", response_model=list[str])
    async def decode(body: TeiDecodeRequest) -> Response:
        """Return the texts of token ids."""
        many: Any = [body.ids] if isinstance(body.ids[0], int) else body.ids
        with service.encoder() as encoder:
            tokenizer = encoder.texts.tokenizer
            return _json(tokenizer.decode_batch(many, skip_special_tokens=body.skip_special_tokens))

    @router.post("/embed_all")
    @router.post("/embed_sparse")
    async def not_offered() -> Response:
        """Refuse vectors of single tokens and of words, which this server has not."""
        raise HttpError(
            "vectors of single tokens (embed_all) and of words (embed_sparse) are not offered: use /embed",
            http_status=501,
            error_code="not_implemented",
        )


def _cutting(body: Cut) -> Cutting:
    return Cutting(is_cut=bool(body.truncate), side=body.truncation_direction)


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


def _predicted(inputs: Any) -> tuple[list[str | tuple[str, str]], bool]:
    """Return the texts and pairs of a request, and whether they are a batch."""
    if isinstance(inputs, str):
        return [inputs], False
    is_batch = not isinstance(inputs[0], str)
    many = inputs if is_batch else [inputs]
    for each in many:
        if len(each) > 2:
            raise InvalidInputError(
                f"got {len(each)} texts together: give a text, a pair, or a batch of lists of one or two texts"
            )
    return [each[0] if len(each) == 1 else (each[0], each[1]) for each in many], is_batch


def _scores(logits: Floats, problem: str | None, *, is_raw: bool) -> Floats:
    """Return a classifier's scores as pipelines of transformers have them."""
    if is_raw or problem == "regression":
        return logits
    if problem == "multi_label_classification" or logits.shape[1] == 1:
        return sigmoid(logits)
    return softmax(logits)


def _predictions(row: Floats, head: HeadConfig) -> list[dict[str, object]]:
    listed = row.tolist()
    order = sorted(range(len(listed)), key=lambda label: -listed[label])
    return [{"score": listed[label], "label": head.labels[label]} for label in order]


def _tokens(encoder: TextEncoder, text: str, body: TeiTokenizeRequest) -> list[dict[str, object]]:
    tokens = encoder.texts
    whole = tokens.config.form.prompt(body.prompt_name) + text
    whole = whole.lower() if tokens.config.form.is_lower_case else whole
    found = tokens.tokenizer.encode(whole, add_special_tokens=body.add_special_tokens)
    listed = []
    for token_id, piece, is_mark, (start, stop) in zip(
        found.ids, found.tokens, found.special_tokens_mask, found.offsets, strict=True
    ):
        at = (None, None) if is_mark else (start, stop)
        word = piece if is_mark else whole[start:stop]
        listed.append({"id": token_id, "text": word, "special": bool(is_mark), "start": at[0], "stop": at[1]})
    return listed


def _info(encoder: TextEncoder) -> dict[str, object]:
    config, head, model = encoder.texts.config, encoder.head, encoder.model
    model_type: dict[str, object] = {"embedding": {"pooling": "+".join(config.form.poolings)}}
    if head is not None:
        names = {str(number): label for number, label in enumerate(head.labels)}
        kind = "reranker" if len(head.labels) == 1 else "classifier"
        model_type = {kind: {"id2label": names, "label2id": {label: int(number) for number, label in names.items()}}}
    return {
        "model_id": encoder.name,
        "model_sha": None,
        "model_dtype": "float32",
        "model_type": model_type,
        "max_concurrent_requests": model.max_waiting,
        "max_input_length": config.max_tokens,
        "max_batch_tokens": model.max_batch_size * config.max_tokens,
        "max_batch_requests": model.max_batch_size,
        "max_client_batch_size": MAX_TEXTS,
        "auto_truncate": False,
        "tokenization_workers": 1,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
