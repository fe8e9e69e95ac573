"""The engine as fronts see it: requests in, streams of tokens out, wherever the model runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import closing
from dataclasses import replace
from typing import Self

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_orca.engine.settings import EngineConfig, EngineCounts, EngineShape, Recoveries
from mlsys_orca.engine.streams import EngineStats, KnownAnswer, Requests, Streams, TokenStream
from mlsys_orca.scheduling.batch import GenerationRequest, GenerationResult, Progress, SampledToken, ScoredPrompt
from mlsys_serving.watch import Source

_LOOK_S = 0.02  # between two looks if a request still runs under an adapter


class BusyError(ServingError):
    """More requests wait than may; try again later."""

    http_status = 429
    error_code = "queue_full"

    def __init__(self, num_waiting: int, max_waiting: int, retry_after_s: float) -> None:
        super().__init__(
            f"{num_waiting} requests wait, and at most {max_waiting} may: try again in {retry_after_s:.0f} s"
        )
        self.retry_after_s = retry_after_s


class EngineClient(ABC):
    """Entrance of one engine for fronts: checks requests, and gives each a stream of its tokens. A context manager.

    Args:
        shape: The engine's.
        config: Its settings.
        requests: Where checked requests go.
        streams: Where their tokens come from.
        stats: Times and counts, noted as streams are read.
    """

    def __init__(
        self, shape: EngineShape, config: EngineConfig, requests: Requests, streams: Streams, stats: EngineStats
    ) -> None:
        self.shape, self.config, self.stats = shape, config, stats
        stats.model = shape.name
        self.score_source: Source | None = None  # what shows its iterations on the score
        self.num_of_batches = 0  # of the unfinished requests, those of batches, which nobody waits behind
        self._requests, self._streams = requests, streams
        self._num_at_once = config.num_at_once

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    @abstractmethod
    def failure(self) -> BaseException | None:
        """Error that ended the engine, if one did."""

    @abstractmethod
    def start(self) -> None:
        """Begin to serve."""

    @abstractmethod
    async def ready(self) -> None:
        """Return when requests would run.

        Raises:
            ServingError: they never will.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop: unfinished requests are cancelled. Idempotent."""

    @abstractmethod
    def counts(self) -> EngineCounts:
        """Return the engine's numbers as they are now."""

    @property
    def recoveries(self) -> Recoveries | None:
        """Deaths of workers so far; None: the engine runs in this process."""
        return None

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer at most."""
        return self.shape.max_model_len

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the adapters."""
        return frozenset(self.shape.adapters)

    def adapter_key(self, name: str) -> str | None:
        """Return what a request under the adapter of that name gives; None: there is none."""
        return self.shape.adapters.get(name)

    @property
    def num_unfinished(self) -> int:
        """Requests accepted that have not left."""
        return self._requests.num_unfinished

    def submit(self, request: GenerationRequest, *, known: KnownAnswer | None = None) -> TokenStream:
        """Accept a request, from a running event loop; close what is returned.

        Args:
            request: The request.
            known: Beginning of its answer, which is given again and not computed; a policy that cannot go on behind it
                computes it again, and gives the same.

        Raises:
            BusyError: too many requests wait.
            InvalidInputError: the request can never be served, or its id is in use.
            ServingError: the engine has stopped.
        """
        if (request.num_encoder_tokens > 0) != self.shape.has_encoder:
            raise InvalidInputError(
                f"an encoder is to read {request.num_encoder_tokens} tokens of request {request.request_id!r}; this "
                f"model has {'an encoder that needs some' if self.shape.has_encoder else 'none'}"
            )
        if request.num_encoder_tokens and request.sampling.num_prompt_logprobs is not None:
            raise InvalidInputError("an encoder's tokens have no log-probabilities: leave out prompt_logprobs and echo")
        if request.adapter is not None and request.adapter not in self.shape.adapters.values():
            raise InvalidInputError(f"there is no adapter {request.adapter!r} (there are: {sorted(self.adapters)})")
        self.check_room()
        if known is None or not known.tokens or not (self.shape.goes_on and self.shape.streams_tokens):
            stream = TokenStream(request, self._requests, self._streams, self.stats)
        else:
            progress = Progress(tuple(token.token_id for token in known.tokens))
            request = replace(request, progress=progress)
            stream = TokenStream(request, self._requests, self._streams, self.stats, known)
        return stream

    def check_room(self, num_more: int = 1) -> None:
        """See whether ``num_more`` requests may wait.

        Raises:
            InvalidInputError: so many never may, however few others there are.
            BusyError: they may not now.
        """
        bound = self.config.max_waiting
        num_at_once = self._num_at_once
        if bound is not None and num_more > bound + num_at_once:
            raise InvalidInputError(
                f"this asks for {num_more} answers, and the server takes at most {bound + num_at_once} "
                "at a time: send fewer prompts or choices in one request"
            )
        num_waiting = max(0, self.num_unfinished - self.num_of_batches) - num_at_once
        if bound is not None and num_waiting + num_more > bound:
            whole = self.stats.whole
            num_ended = whole.buckets()[-1][1]
            mean_s = whole.sum / num_ended if num_ended else 1.0
            retry_after_s = mean_s * (num_waiting + 1) / num_at_once
            raise BusyError(num_waiting, bound, min(max(retry_after_s, 1.0), 60.0))

    async def generate(
        self, request: GenerationRequest
    ) -> AsyncGenerator[ScoredPrompt | SampledToken | GenerationResult, None]:
        """Yield the request's items, as :class:`TokenStream`; leaving the iteration early cancels the request.

        Raises:
            BusyError: too many requests wait.
            InvalidInputError: the request can never be served, or its id is in use.
            ServingError: the engine stopped, or the iteration failed.
        """
        with closing(self.submit(request)) as items:
            async for item in items:
                yield item
