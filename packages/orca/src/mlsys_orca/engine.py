"""The engine: core's serving loop over the scheduler and the runner, with streams of tokens for asynchronous fronts.

Stands between the fronts (asyncio) and the loop's thread, where iterations run. A front opens a stream per request and
reads tokens as iterations complete; closing the stream early cancels the request within one iteration.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.plugins import Registry, installed_plugins
from mlsys_core.serving import Finished, FinishReason, InlineExecutor, LoopRecorder, ServingLoop, WallClock

from mlsys_orca.batch import IterationBatch, IterationOutput, SampledToken
from mlsys_orca.iteration_trace import record_iterations
from mlsys_orca.kv_cache import DEFAULT_BLOCK_SIZE, BlockTables, kv_nbytes_per_token
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.native.decoder import NativeDecoder, new_kv_cache
from mlsys_orca.runner import Runner, intra_op_threads
from mlsys_orca.schedulers.book import RequestBook
from mlsys_orca.schedulers.policy import DEFAULT_POLICY, make_scheduler
from mlsys_orca.schedulers.request import GenerationRequest, GenerationResult

_log = logging.getLogger(__name__)
_CACHE_SHARE = 0.25  # of the available memory, at most, if the number of K/V slots is not given


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is told once."""

    max_batch_size: int = 8  # requests per iteration
    num_kv_tokens: int | None = None  # K/V slots (the paper's n_slots); None: what fits, see plan_kv_tokens
    max_model_len: int | None = None  # tokens of prompt and answer; None: what the model was made for
    num_threads: int = 1  # of the model's operators
    policy: str = DEFAULT_POLICY  # the scheduling policy's registered name
    policy_options: Mapping[str, Any] = field(default_factory=dict)  # keywords of the policy's own
    batch_invariant: bool = False  # refuse a model whose numbers would depend on what it is batched with


def plan_kv_tokens(loaded: LoadedModel, config: EngineConfig, available_nbytes: int) -> int:
    """K/V slots for ``config``: enough for a full batch of longest requests, or a quarter of the available memory.

    Raises:
        InvalidInputError: not even one request of ``max_model_len`` fits.
    """
    max_model_len = config.max_model_len or loaded.config.max_positions
    per_token = kv_nbytes_per_token(loaded.config, loaded.model.dtype)
    wanted = -(-max_model_len // DEFAULT_BLOCK_SIZE) * DEFAULT_BLOCK_SIZE * config.max_batch_size  # in whole blocks
    fits = int(available_nbytes * _CACHE_SHARE) // per_token
    num_tokens = config.num_kv_tokens or min(wanted, fits)
    if num_tokens < max_model_len:
        raise InvalidInputError(
            f"{num_tokens} K/V slots cannot hold one request of {max_model_len} tokens "
            f"({per_token * max_model_len / 2**20:.0f} MiB): lower --max-model-len, or free memory"
        )
    return num_tokens


class Engine:
    """Serves one model in one thread of its own. A context manager.

    Args:
        loaded: The model.
        config: Limits.
        available_nbytes: Memory the K/V cache may count on (used if ``config.num_kv_tokens`` is None).
        recorder: Records the loop's iterations, and which requests ran in each.
        registry: Where the policy is looked up; None: what the installed plugins registered.

    Raises:
        InvalidInputError: the limits do not fit the model or the memory, or the policy or its options are unknown.
        PluginError: the policy cannot be loaded.

    Example:
        >>> with Engine(load_model(path), EngineConfig(), available_nbytes=2**30) as engine:  # doctest: +SKIP
        ...     async for item in engine.generate(request):
        ...         print(item)
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        available_nbytes: int,
        recorder: LoopRecorder | None = None,
        registry: Registry | None = None,
    ) -> None:
        self.max_model_len = min(config.max_model_len or loaded.config.max_positions, loaded.config.max_positions)
        num_kv_tokens = plan_kv_tokens(loaded, config, available_nbytes)
        self.block_tables = BlockTables(num_blocks=-(-num_kv_tokens // DEFAULT_BLOCK_SIZE))
        scheduler = make_scheduler(
            config.policy,
            installed_plugins().registry if registry is None else registry,
            block_tables=self.block_tables,
            max_batch_size=config.max_batch_size,
            max_model_len=self.max_model_len,
            options=config.policy_options,
        )
        self.policy = config.policy
        self._has_encoder = loaded.config.encoder is not None
        book = getattr(scheduler, "book", None)
        self.book = book if isinstance(book, RequestBook) else None  # to be read; None: the policy keeps none
        model = loaded.model
        self.is_batch_invariant = isinstance(model, NativeDecoder)
        if isinstance(model, NativeDecoder):
            model = model.with_threads(config.num_threads)
        elif config.batch_invariant:
            raise InvalidInputError(
                f"{loaded.name} runs in torch's operators, whose sums depend on the number of rows: only native models "
                "give a request the same bits in any batch"
            )
        kv_cache = new_kv_cache(model, num_blocks=self.block_tables.num_blocks)
        self.kv_nbytes = kv_cache.nbytes
        # One worker: an iteration runs in the loop's own thread, and requests join between iterations in any case.
        self._runner = Runner(model, kv_cache)
        run = self._runner.run if recorder is None else record_iterations(self._runner.run, recorder)
        executor: InlineExecutor[IterationBatch, IterationOutput] = InlineExecutor(run)
        self._streams = _Streams(is_live=getattr(scheduler, "streams_tokens", True))
        self._loop = ServingLoop(scheduler, executor, WallClock(), recorder=recorder, listener=self._streams)
        self._num_threads = config.num_threads
        self._thread = threading.Thread(target=self._run, name="orca-engine", daemon=True)
        self.failure: BaseException | None = None  # what ended the loop, if something did

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop: unfinished requests are cancelled. Idempotent."""
        self._loop.stop()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def num_unfinished(self) -> int:
        """Requests accepted that have not left."""
        return self._loop.num_unfinished

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[SampledToken | GenerationResult, None]:
        """The request's tokens as they come, then its result; leaving the iteration early cancels the request.

        Under a policy that does not stream (``request-level``) the tokens come all at once, right before the result.

        Raises:
            InvalidInputError: the request can never be served, or its id is in use.
            ServingError: the engine stopped, or the iteration failed.
        """
        if (request.num_encoder_tokens > 0) != self._has_encoder:
            raise InvalidInputError(
                f"an encoder is to read {request.num_encoder_tokens} tokens of request {request.request_id!r}; this "
                f"model has {'an encoder that needs some' if self._has_encoder else 'none'}"
            )
        items: asyncio.Queue[SampledToken | Finished[Any]] = asyncio.Queue()
        self._streams.open(request.request_id, asyncio.get_running_loop(), items.put_nowait)
        is_finished = False
        try:
            self._loop.submit(request, request.request_id)
            while True:
                item = await items.get()
                if isinstance(item, SampledToken):
                    yield item
                    continue
                is_finished = True
                yield _result_of(item)
                return
        finally:
            if not is_finished:
                self._loop.cancel(request.request_id)
            self._streams.close(request.request_id)

    def _run(self) -> None:
        with intra_op_threads(self._num_threads):
            try:
                self._loop.run_forever()
            except BaseException as error:  # noqa: BLE001 - the thread's end; requests were failed with it, readiness tells
                self.failure = error
                _log.exception("the engine has stopped")


def _result_of(finished: Finished[Any]) -> GenerationResult:
    if finished.reason is FinishReason.DONE and isinstance(finished.result, GenerationResult):
        return finished.result
    if isinstance(finished.error, InvalidInputError):
        raise finished.error
    if finished.reason is FinishReason.CANCELLED:
        raise ServingError("the server stopped before the answer was complete: try again")
    raise ServingError("the model failed on this request") from finished.error


class _Streams:
    """Hands tokens from the loop's thread to the event loops that wait for them: one wake-up per iteration and loop.

    Args:
        is_live: Whether tokens are handed over as iterations complete; False: with their request's result.
    """

    def __init__(self, *, is_live: bool) -> None:
        self._is_live = is_live
        self._sinks: dict[str, tuple[asyncio.AbstractEventLoop, Callable[[Any], None]]] = {}

    def open(self, request_id: str, loop: asyncio.AbstractEventLoop, put: Callable[[Any], None]) -> None:
        if request_id in self._sinks:
            raise InvalidInputError(f"request id {request_id!r} is in use")
        self._sinks[request_id] = loop, put

    def close(self, request_id: str) -> None:
        self._sinks.pop(request_id, None)

    def on_output(self, batch: IterationBatch, output: IterationOutput, now: float) -> None:
        """Deliver one iteration's tokens."""
        if not self._is_live:
            return
        deliveries: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        for token in output.sampled:
            sink = self._sinks.get(token.request_id)
            if sink is not None:
                deliveries.setdefault(sink[0], []).append(partial(sink[1], token))
        for loop, calls in deliveries.items():
            _call_soon(loop, calls)

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        """Deliver a request's end, after its tokens if those were held back."""
        sink = self._sinks.get(finished.request_id)
        if sink is not None:
            result = finished.result
            held_back = result.tokens if isinstance(result, GenerationResult) and not self._is_live else ()
            _call_soon(sink[0], [partial(sink[1], item) for item in (*held_back, finished)])


def _call_soon(loop: asyncio.AbstractEventLoop, calls: list[Callable[[], None]]) -> None:
    def run() -> None:
        for call in calls:
            call()

    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError:  # that event loop has been closed: nobody waits any more
        _log.debug("an event loop was closed before its tokens came")
