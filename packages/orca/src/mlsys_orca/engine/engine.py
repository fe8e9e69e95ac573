"""The engine: core's serving loop over the scheduler and the runner, with streams of tokens for asynchronous fronts.

Stands between the fronts (asyncio) and the loop's thread, where iterations run. A front opens a stream per request and
reads tokens as iterations complete; closing the stream early cancels the request within one iteration.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from mlsys_core.device import get_device
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.memory import find_pool
from mlsys_core.plugins import Registry, installed_plugins
from mlsys_core.plugins.compilers import find_module_compiler
from mlsys_core.serving import (
    Executor,
    Finished,
    FinishReason,
    InlineExecutor,
    LoopRecorder,
    ServingLoop,
    StreamExecutor,
    WallClock,
)
from mlsys_orca.backends.compiled import compile_decodes
from mlsys_orca.backends.native.decoder import NativeDecoder, new_kv_cache
from mlsys_orca.backends.runner import Runner, intra_op_threads
from mlsys_orca.engine.iteration_trace import record_iterations
from mlsys_orca.engine.stats import EngineStats
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.kv_cache import DEFAULT_BLOCK_SIZE, BlockTables, kv_nbytes_per_token
from mlsys_orca.scheduling.batch import IterationBatch, IterationOutput, SampledToken, ScoredPrompt
from mlsys_orca.scheduling.policy import DEFAULT_POLICY, make_scheduler
from mlsys_orca.scheduling.request import GenerationRequest, GenerationResult
from mlsys_orca.scheduling.request_pool import RequestPool

_log = logging.getLogger(__name__)
_CACHE_SHARE = 0.25  # of the available memory, at most, if the number of K/V slots is not given


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine, fixed at its start."""

    max_batch_size: int = 8  # requests per iteration
    num_kv_tokens: int | None = None  # K/V slots (the paper's n_slots); None: what fits, see plan_kv_tokens
    max_model_len: int | None = None  # tokens of prompt and answer; None: what the model was made for
    num_threads: int = 1  # of the model's operators
    policy: str = DEFAULT_POLICY  # the scheduling policy's registered name
    memory_pool: str | None = None  # the registered name of the pool of K/V blocks; None: the core's own
    policy_options: Mapping[str, Any] = field(default_factory=dict)  # keywords of the policy's own
    compiler: str | None = None  # the registered name of what compiles the layers' feed-forward parts; None: nothing
    batch_invariant: bool = False  # refuse a model whose numbers would depend on what it is batched with
    max_waiting: int | None = None  # requests beyond those of an iteration, from which on new ones are refused
    num_draft_tokens: int = 0  # guesses behind each decode at most, by prompt lookup; 0: none


class BusyError(ServingError):
    """More requests wait than may; try again later."""

    http_status = 429
    error_code = "queue_full"

    def __init__(self, num_waiting: int, max_waiting: int, retry_after_s: float) -> None:
        super().__init__(
            f"{num_waiting} requests wait, and at most {max_waiting} may: try again in {retry_after_s:.0f} s"
        )
        self.retry_after_s = retry_after_s


def plan_kv_tokens(loaded: LoadedModel, config: EngineConfig, available_nbytes: int) -> int:
    """Return the number of K/V slots: for a full batch of longest requests, or a quarter of the available memory.

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
    """Server of one model, in one thread of its own. A context manager.

    Args:
        loaded: The model.
        config: Limits.
        available_nbytes: Memory the K/V cache may count on (used if ``config.num_kv_tokens`` is None).
        recorder: Records the loop's iterations, and which requests ran in each.
        registry: Where the policy and the memory pool are looked up; None: what the installed plugins registered.

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
        registry = installed_plugins().registry if registry is None else registry
        self.block_tables = BlockTables(
            num_blocks=-(-num_kv_tokens // DEFAULT_BLOCK_SIZE),
            new_pool=find_pool(config.memory_pool, "blocks", registry),
        )
        scheduler = make_scheduler(
            config.policy,
            registry,
            block_tables=self.block_tables,
            max_batch_size=config.max_batch_size,
            max_model_len=self.max_model_len,
            options=config.policy_options,
        )
        self.policy = config.policy
        self._has_encoder = loaded.config.encoder is not None
        pool = getattr(scheduler, "pool", None)
        self.pool = pool if isinstance(pool, RequestPool) else None  # to be read; None: the policy keeps none
        self.stats = EngineStats()
        if self.pool is not None:
            self.pool.num_draft_tokens = config.num_draft_tokens
            self.pool.on_placed = self.stats.placed
        elif config.num_draft_tokens:
            raise InvalidInputError(f"policy {config.policy!r} keeps no RequestPool, so it cannot speculate")
        self.config = config
        self.adapters = frozenset(getattr(loaded.model, "adapters", ()))  # names that a request may give
        model = loaded.model
        self.is_batch_invariant = isinstance(model, NativeDecoder)
        if isinstance(model, NativeDecoder):
            model = model.with_threads(config.num_threads)
        elif config.batch_invariant:
            raise InvalidInputError(
                f"{loaded.name} runs in torch's operators, whose sums depend on the number of rows: only native models "
                "give a request the same bits in any batch"
            )
        if config.compiler is not None:
            compiler = find_module_compiler(config.compiler, registry)
            model = compile_decodes(model, compiler, config.max_batch_size)
        kv_cache = new_kv_cache(model, num_blocks=self.block_tables.num_blocks)
        self.kv_nbytes = kv_cache.nbytes
        # One worker, since requests join between iterations in any case: an iteration runs in the loop's own thread, or
        # on a stream of a device that has some.
        self._runner = Runner(model, kv_cache)
        run = self._runner.run if recorder is None else record_iterations(self._runner.run, recorder)
        clock, device = WallClock(), get_device(loaded.device)
        executor: Executor[IterationBatch, IterationOutput] = InlineExecutor(run)
        if device.kind != "cpu":
            device.synchronize()  # what was loaded on other streams is there
            executor = StreamExecutor(run, device, clock)
        self._streams = _Streams(is_live=getattr(scheduler, "streams_tokens", True))
        self._loop = ServingLoop(scheduler, executor, clock, recorder=recorder, listener=self._streams)
        # A native model has threads of its own. Those of torch's small operators around it would spin, each time for
        # a while, on a core that the model's want next.
        self._num_torch_threads = 1 if isinstance(model, NativeDecoder) else config.num_threads
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

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Accept a request, from a running event loop; close what is returned.

        Raises:
            BusyError: too many requests wait.
            InvalidInputError: the request can never be served, or its id is in use.
            ServingError: the engine has stopped.
        """
        if (request.num_encoder_tokens > 0) != self._has_encoder:
            raise InvalidInputError(
                f"an encoder is to read {request.num_encoder_tokens} tokens of request {request.request_id!r}; this "
                f"model has {'an encoder that needs some' if self._has_encoder else 'none'}"
            )
        if request.num_encoder_tokens and request.sampling.num_prompt_logprobs is not None:
            raise InvalidInputError("an encoder's tokens have no log-probabilities: leave out prompt_logprobs and echo")
        if request.adapter is not None and request.adapter not in self.adapters:
            raise InvalidInputError(f"there is no adapter {request.adapter!r} (there are: {sorted(self.adapters)})")
        self.check_room()
        return TokenStream(request, self._loop, self._streams, self.stats)

    def check_room(self, num_more: int = 1) -> None:
        """See whether ``num_more`` requests may wait.

        Raises:
            InvalidInputError: so many never may, however few others there are.
            BusyError: they may not now.
        """
        bound = self.config.max_waiting
        if bound is not None and num_more > bound + self.config.max_batch_size:
            raise InvalidInputError(
                f"this asks for {num_more} answers, and the server takes at most {bound + self.config.max_batch_size} "
                "at a time: send fewer prompts or choices in one request"
            )
        num_waiting = self.num_unfinished - self.config.max_batch_size
        if bound is not None and num_waiting + num_more > bound:
            whole = self.stats.whole
            num_ended = whole.buckets()[-1][1]
            mean_s = whole.sum / num_ended if num_ended else 1.0
            retry_after_s = mean_s * (num_waiting + 1) / self.config.max_batch_size
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

    def _run(self) -> None:
        with intra_op_threads(self._num_torch_threads):
            try:
                self._loop.run_forever()
            except BaseException as error:  # noqa: BLE001 - the thread's end; requests were failed with it, readiness tells
                self.failure = error
                _log.exception("the engine has stopped")


class TokenStream:
    """Stream of one request's log-probabilities of the prompt, tokens and result, as iterations complete.

    Under a policy that does not stream (``request-level``) all comes at once, right before the result. An asynchronous
    iterator for one reader; :meth:`close` it, which cancels the request if it has not finished.
    """

    def __init__(
        self, request: GenerationRequest, loop: ServingLoop[Any, Any, Any], streams: _Streams, stats: EngineStats
    ) -> None:
        self.request = request
        self._loop, self._streams, self._stats = loop, streams, stats
        self._items: asyncio.Queue[ScoredPrompt | SampledToken | Finished[Any]] = asyncio.Queue()
        self._num_tokens = 0
        self._is_complete = False  # its last token has come
        self._is_closed = False
        streams.open(request.request_id, asyncio.get_running_loop(), self._items.put_nowait)
        try:
            loop.submit(request, request.request_id)
        except BaseException:
            self._is_closed = True
            streams.close(request.request_id)
            raise
        self._submitted_s = self._last_s = stats.submitted(request.request_id, len(request.prompt_token_ids))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ScoredPrompt | SampledToken | GenerationResult:
        while not self._is_closed:
            item = await self._items.get()
            if isinstance(item, Finished):
                self._end(_reason_of(item))
                return _result_of(item)
            if isinstance(item, SampledToken):
                if self._is_complete:  # a right guess behind a stop token: no part of the answer
                    continue
                self._note(item)
            return item
        raise StopAsyncIteration

    def close(self) -> None:
        """Stop reading; what has not finished is cancelled within one iteration. Idempotent."""
        if not self._is_closed:
            self._loop.cancel(self.request.request_id)
            self._end("abort")

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):  # nobody came to read it
            self.close()

    def _end(self, reason: str) -> None:
        self._is_closed = True
        self._streams.close(self.request.request_id)
        self._stats.ended(self.request.request_id, reason, self._submitted_s)

    def _note(self, token: SampledToken) -> None:
        now, stats = time.perf_counter(), self._stats
        (stats.between_tokens if self._num_tokens else stats.first_token).observe(now - self._last_s)
        self._last_s = now
        self._num_tokens += 1
        stats.num_new_tokens += 1
        request = self.request
        self._is_complete = token.token_id in request.stop_token_ids or self._num_tokens == request.max_new_tokens


def _reason_of(finished: Finished[Any]) -> str:
    if isinstance(finished.result, GenerationResult):
        return finished.result.finish_reason
    return "abort" if finished.reason is FinishReason.CANCELLED else "error"


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
        is_live: True: tokens are handed over as iterations complete; False: with their request's result.
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
        items: tuple[ScoredPrompt | SampledToken, ...] = output.sampled
        if output.scored:
            items = (*output.scored, *items)
        for token in items:
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
            held_back: tuple[Any, ...] = ()
            if isinstance(result, GenerationResult) and not self._is_live:
                held_back = (*result.scored, *result.tokens)
            _call_soon(sink[0], [partial(sink[1], item) for item in (*held_back, finished)])


def _call_soon(loop: asyncio.AbstractEventLoop, calls: list[Callable[[], None]]) -> None:
    def run() -> None:
        for call in calls:
            call()

    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError:  # that event loop has been closed: nobody waits any more
        _log.debug("an event loop was closed before its tokens came")
