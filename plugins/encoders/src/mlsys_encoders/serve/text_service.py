"""Texts to vectors, scores and labels, through the encoders of a repository and their policies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from mlsys_encoders.models.config import HeadConfig
from mlsys_encoders.serve.text_bodies import Floats, check_dimensions, shortened, unit
from mlsys_encoders.serve.tokens import Side, TextTokens
from mlsys_encoders.serve.wire import EncoderWire
from mlsys_serving.http import HttpError
from mlsys_serving.http.streaming import RequestThreads
from mlsys_serving.isolation import NotFiniteError, is_finite
from mlsys_serving.models import ModelRepository, ModelSpec

_Input = TypeVar("_Input")
_ENCODED_AT_ONCE = 64  # texts that are tokenised together, while those before them run
_PAIR_CHARS = 64  # beside its text, that a pair of texts counts for


class WrongModelError(HttpError):
    """The model is not of the kind that the route needs."""

    def __init__(self, message: str) -> None:
        super().__init__(message, http_status=424, error_code="wrong_model", param="model")


@dataclass(frozen=True, slots=True)
class Cutting:
    """Rule for texts that are too long."""

    is_cut: bool = False
    side: Side = "Right"


@runtime_checkable
class RowsModel(Protocol):
    """A model whose rows may be given one by one: in this process, or in others."""

    @property
    def max_batch_size(self) -> int:
        """Most rows in a batch."""
        ...

    @property
    def max_waiting(self) -> int:
        """Most rows waiting."""
        ...

    @property
    def spec(self) -> ModelSpec:
        """Its form on the wire."""
        ...

    @property
    def wire(self) -> object:
        """Form of its requests; those of encoders have a tokenizer."""
        ...

    async def run_rows(self, rows: Sequence[Any], key: str) -> list[Any]:
        """Return the answer to each row."""
        ...


class TextEncoder:
    """One encoder of the repository, for the routes. Made for one request.

    Args:
        model: With texts.
        threads: For tokenising what is large.
        key: Unique name of the request.
    """

    def __init__(self, model: RowsModel, threads: RequestThreads, key: str) -> None:
        texts = texts_of(model)
        assert texts is not None
        self.model, self._threads, self._key = model, threads, key
        self.texts: TextTokens = texts
        self.name = model.spec.name

    @property
    def head(self) -> HeadConfig | None:
        """Classifier of the encoder; None: it gives vectors."""
        return self.texts.config.head

    async def vectors(
        self,
        inputs: Sequence[str | list[int]],
        *,
        cutting: Cutting,
        prompt_name: str | None = None,
        dimensions: int | None = None,
    ) -> tuple[Floats, int]:
        """Return the vectors of texts or token ids, [inputs, numbers], and the tokens of all.

        Args:
            inputs: Texts, or their token ids with marks.
            cutting: What becomes of texts that are too long; token ids are never cut.
            prompt_name: See :meth:`.tokens.TextTokens.encode`.
            dimensions: The first so many numbers, scaled to length 1; None: all.

        Raises:
            WrongModelError: The model is a classifier.
            InvalidInputError: More dimensions than there are, no such prompt, or token ids that the model lacks.
            InputTooLongError: A text is too long and not to be cut.
        """
        if self.head is not None:
            raise WrongModelError(f"{self.name!r} is a classifier, which has no vectors: use /v1/rerank or /predict")
        check_dimensions(dimensions, self.texts.config.embedding_size, model=self.name)
        options: Any = {"prompt_name": prompt_name, "is_cut": cutting.is_cut, "side": cutting.side}

        def encode(some: Sequence[str | list[int]]) -> list[Any]:
            encoded = iter(self.texts.encode([each for each in some if isinstance(each, str)], **options))
            return [next(encoded) if isinstance(each, str) else np.array(each, np.int64) for each in some]

        size = sum(len(each) for each in inputs if isinstance(each, str))
        found, num_tokens = await self._answers(inputs, encode, size)
        return shortened(np.stack(found), dimensions), num_tokens

    async def logits(self, texts: Sequence[str | tuple[str, str]], *, cutting: Cutting) -> tuple[Floats, int]:
        """Return a classifier's logits for texts and pairs of texts, [texts, labels], and the tokens of all."""
        if self.head is None:
            raise WrongModelError(f"{self.name!r} gives vectors and is no classifier: use /embed or /v1/embeddings")

        def encode(some: Sequence[str | tuple[str, str]]) -> list[Any]:
            options: Any = {"is_cut": cutting.is_cut, "side": cutting.side}
            return [
                self.texts.encode([each], **options)[0]
                if isinstance(each, str)
                else self.texts.encode_pairs([each], **options)[0]
                for each in some
            ]

        size = sum(len(each) if isinstance(each, str) else sum(map(len, each)) + _PAIR_CHARS for each in texts)
        found, num_tokens = await self._answers(texts, encode, size)
        return np.stack(found), num_tokens

    async def _answers(
        self, inputs: Sequence[_Input], encode: Callable[[Sequence[_Input]], list[Any]], size: int
    ) -> tuple[list[Any], int]:
        """Return the answer to each input, and the tokens of all; later inputs are encoded while earlier ones run.

        Args:
            inputs: Any number.
            encode: Makes a row of each.
            size: Characters to encode.
        """
        parts = [inputs[first : first + _ENCODED_AT_ONCE] for first in range(0, len(inputs), _ENCODED_AT_ONCE)]
        most = min(4 * self.model.max_batch_size, self.model.max_waiting // 2) // _ENCODED_AT_ONCE
        room = asyncio.Semaphore(max(1, most))
        num_tokens = 0
        running: list[asyncio.Task[list[Any]]] = []

        async def run(rows: list[Any], key: str) -> list[Any]:
            try:
                return await self.model.run_rows(rows, key)
            finally:
                room.release()

        try:
            for number, part in enumerate(parts):
                await room.acquire()
                if any(task.done() and task.exception() is not None for task in running):
                    break  # told below
                rows = await self._threads.run(encode, part, size=size)
                num_tokens += _num_tokens(rows)
                running.append(asyncio.ensure_future(run(rows, f"{self._key}/{number}")))
            found = list(itertools.chain.from_iterable(await asyncio.gather(*running)))
            if not all(map(is_finite, found)):
                raise NotFiniteError
            return found, num_tokens
        except BaseException:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            raise

    async def scores(
        self, queries: Sequence[str], texts: Sequence[str], *, cutting: Cutting, is_raw: bool = False
    ) -> tuple[Floats, int]:
        """Return how well each text fits the one query, or that of its place, [texts], and the tokens of all.

        A cross-encoder's score is the sigmoid of its one logit (raw: the logit); an encoder's the cosine of vectors.

        Raises:
            WrongModelError: The model is a classifier of several labels.
        """
        if self.head is None:
            vectors, num_tokens = await self.vectors([*queries, *texts], cutting=cutting)
            asked, vectors = np.split(unit(vectors), [len(queries)])
            cosines: Floats = vectors @ asked[0] if len(asked) == 1 else np.einsum("td,td->t", vectors, asked)
            return cosines, num_tokens
        if len(self.head.labels) > 1:
            labels = len(self.head.labels)
            raise WrongModelError(f"{self.name!r} tells {labels} labels apart and ranks nothing: use /predict")
        logits, num_tokens = await self.logits(list(zip(itertools.cycle(queries), texts)), cutting=cutting)
        return logits[:, 0] if is_raw else sigmoid(logits[:, 0]), num_tokens


class TextService:
    """The encoders of a repository.

    Args:
        repository: All models of the server.
        threads: The server's, for large requests.
    """

    def __init__(self, repository: ModelRepository, threads: RequestThreads) -> None:
        self._repository, self._threads = repository, threads
        self._numbers = itertools.count()

    def names(self) -> list[str]:
        """Return the names of all encoders that take texts."""
        found = {version.spec.name for version in self._repository.versions() if texts_of(version.model) is not None}
        return sorted(found)

    @contextmanager
    def encoder(self, name: str | None = None) -> Iterator[TextEncoder]:
        """Hold an encoder for one request.

        Args:
            name: Name of the model; None: the only encoder.

        Raises:
            UnknownModelError: There is no such model.
            WrongModelError: It takes no texts.
            InvalidInputError: No name, and not one encoder.
        """
        if name is None:
            names = self.names()
            if len(names) != 1:
                raise InvalidInputError(
                    f"this server has {len(names)} encoders ({', '.join(names) or 'none'}): name one as the model of "
                    "/v1/embeddings or /v1/rerank, or serve one only"
                )
            name = names[0]
        version = self._repository.find(name)
        model = version.model
        require_texts(name, model.wire if isinstance(model, RowsModel) else None)
        assert isinstance(model, RowsModel)
        version.hold()
        try:
            yield TextEncoder(model, self._threads, f"text {next(self._numbers)}")
        finally:
            version.release()


def sigmoid(logits: Floats) -> Floats:
    """Return the sigmoid of each logit."""
    found: Floats = (1 / (1 + np.exp(-np.clip(logits, -80, 80)))).astype(np.float32)
    return found


def softmax(logits: Floats) -> Floats:
    """Return the softmax of each row."""
    parts = np.exp(logits - logits.max(-1, keepdims=True))
    found: Floats = parts / parts.sum(-1, keepdims=True)
    return found


def texts_of(model: object) -> TextTokens | None:
    """Return the tokenizer of a served encoder; None: the model takes no texts."""
    wire = model.wire if isinstance(model, RowsModel) else None
    return wire.texts if isinstance(wire, EncoderWire) else None


def require_texts(name: str, wire: object) -> None:
    """Refuse a model that takes no texts.

    Raises:
        WrongModelError: It is no encoder, or has no tokenizer.
    """
    if not isinstance(wire, EncoderWire) or wire.texts is None:
        raise WrongModelError(f"{name!r} takes no texts: it is no encoder with a tokenizer.json")


def _num_tokens(rows: Sequence[npt.NDArray[np.int64]]) -> int:
    return sum(row.shape[-1] for row in rows)
