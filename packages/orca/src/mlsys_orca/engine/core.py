"""The engine proper: core's serving loop over a scheduler and a runner, in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from mlsys_core.device import get_device
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import (
    Executor,
    InlineExecutor,
    Listener,
    LoopRecorder,
    ServingLoop,
    StreamExecutor,
    WallClock,
)
from mlsys_core.memory import find_pool
from mlsys_core.plugins import Registry, installed_plugins
from mlsys_core.plugins.loading import find_module_compiler
from mlsys_orca.backends.native.decoder import NativeDecoder, new_kv_cache
from mlsys_orca.backends.native.iteration import NativeKVCache
from mlsys_orca.backends.runner import Runner, intra_op_threads
from mlsys_orca.engine.iteration_trace import Run, record_iterations
from mlsys_orca.engine.settings import EngineConfig, EngineCounts, EngineShape, PoolCounts
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.kv_cache import DEFAULT_BLOCK_SIZE, BlockTables, KVCache, kv_dtype_name, kv_nbytes_per_token
from mlsys_orca.scheduling.batch import IterationBatch, IterationOutput
from mlsys_orca.scheduling.policy import GenerationScheduler, make_scheduler
from mlsys_orca.scheduling.request_pool import RequestPool
from mlsys_serving.tracing import EngineTraces

_log = logging.getLogger(__name__)
CACHE_SHARE = 0.25  # of the available memory, at most, if the number of K/V slots is not given


def kv_token_nbytes(loaded: LoadedModel, config: EngineConfig) -> int:
    """Return the bytes that one token's keys and values take in all layers.

    Raises:
        InvalidInputError: the model cannot keep them in ``config.kv_dtype``.
    """
    name = kv_dtype_name(config.kv_dtype, loaded.model.dtype, is_native=loaded.is_native)
    return kv_nbytes_per_token(loaded.config, getattr(torch, name))


def state_nbytes(loaded: LoadedModel, config: EngineConfig) -> int:
    """Return the bytes of a full batch's states; 0 where the model has none."""
    part = loaded.config.recurrent
    return 0 if part is None else part.nbytes * config.max_batch_size


def plan_kv_tokens(loaded: LoadedModel, config: EngineConfig, available_nbytes: int) -> int:
    """Return the number of K/V slots: for a full batch of longest requests, or a quarter of the available memory.

    Raises:
        InvalidInputError: not even one request of ``max_model_len`` fits, or the model cannot keep keys and values in
            ``config.kv_dtype``.
    """
    max_model_len = config.max_model_len or loaded.config.max_positions
    per_token = kv_token_nbytes(loaded, config)
    wanted = -(-max_model_len // DEFAULT_BLOCK_SIZE) * DEFAULT_BLOCK_SIZE * config.max_batch_size  # in whole blocks
    states = state_nbytes(loaded, config)
    if (left := int(available_nbytes * CACHE_SHARE) - states) < 0 and config.num_kv_tokens is None:
        raise InvalidInputError(
            f"the states of {config.max_batch_size} requests take {states / 2**20:.0f} MiB, more than a quarter of the "
            f"{available_nbytes / 2**20:.0f} MiB there are: lower --max-batch-size"
        )
    fits = left // per_token if per_token else wanted
    num_tokens = config.num_kv_tokens or min(wanted, fits)
    if num_tokens < max_model_len:
        more = "free memory" if config.num_kv_tokens is None else "raise --kv-tokens"
        raise InvalidInputError(
            f"{num_tokens} K/V slots cannot hold one request of {max_model_len} tokens "
            f"({per_token * max_model_len / 2**20:.0f} MiB): lower --max-model-len, or {more}"
        )
    return num_tokens


def pool_of(scheduler: object) -> RequestPool | None:
    """Return the request pool that a scheduler keeps, if it does."""
    pool = getattr(scheduler, "pool", None)
    return pool if isinstance(pool, RequestPool) else None


def plan_engine(
    loaded: LoadedModel, config: EngineConfig, available_nbytes: int, registry: Registry
) -> tuple[EngineShape, BlockTables, GenerationScheduler]:
    """Check the settings of an engine, and make what needs no memory of the model's size: its shape and scheduler.

    Raises:
        InvalidInputError: the limits do not fit the model or the memory, or the policy or its options are unknown.
        PluginError: the policy cannot be loaded.
    """
    max_model_len = min(config.max_model_len or loaded.config.max_positions, loaded.config.max_positions)
    num_kv_tokens = plan_kv_tokens(loaded, config, available_nbytes)
    num_states = None if loaded.config.recurrent is None else config.max_batch_size
    block_tables = BlockTables(
        num_blocks=-(-num_kv_tokens // DEFAULT_BLOCK_SIZE),
        num_states=num_states,
        new_pool=find_pool(config.memory_pool, "blocks", registry),
    )
    scheduler = make_scheduler(
        config.policy,
        registry,
        block_tables=block_tables,
        max_batch_size=config.max_batch_size,
        max_model_len=max_model_len,
        options=config.policy_options,
    )
    if config.num_draft_tokens and pool_of(scheduler) is None:
        raise InvalidInputError(f"policy {config.policy!r} keeps no RequestPool, so it cannot speculate")
    _check_recurrent(loaded, config, scheduler)
    is_native = loaded.is_native
    if config.batch_invariant and not is_native:
        raise InvalidInputError(
            f"{loaded.name} runs in torch's operators, whose sums depend on the number of rows: only native models "
            "give a request the same bits in any batch"
        )
    shape = EngineShape(
        name=loaded.name,
        max_model_len=max_model_len,
        num_blocks=block_tables.num_blocks,
        block_size=block_tables.block_size,
        num_states=num_states,
        kv_nbytes=state_nbytes(loaded, config)
        + block_tables.num_blocks * block_tables.block_size * kv_token_nbytes(loaded, config),
        kv_dtype=kv_dtype_name(config.kv_dtype, loaded.model.dtype, is_native=is_native),
        adapters=dict(loaded.adapters) or {name: name for name in getattr(loaded.model, "adapters", ())},
        has_encoder=loaded.config.encoder is not None,
        is_batch_invariant=is_native,
        streams_tokens=getattr(scheduler, "streams_tokens", True),
        goes_on=pool_of(scheduler) is not None,
        restores_blocks=num_states is None  # a state that an iteration was changing is lost with its worker
        and getattr(scheduler, "restores_blocks", False)
        and pool_of(scheduler) is not None,
    )
    return shape, block_tables, scheduler


def _check_recurrent(loaded: LoadedModel, config: EngineConfig, scheduler: GenerationScheduler) -> None:
    """Refuse what cannot be done with states: they go forward only, and come with the pool's batches."""
    if loaded.config.recurrent is None:
        return
    if config.num_draft_tokens:
        raise InvalidInputError(
            f"{loaded.name} is recurrent, and its state cannot take back wrong guesses: no speculation"
        )
    if pool_of(scheduler) is None:
        raise InvalidInputError(f"policy {config.policy!r} keeps no RequestPool, which gives requests their states")


class EngineCore:
    """Server of one model, in one thread of its own.

    Args:
        loaded: The model.
        config: Limits.
        available_nbytes: Memory the K/V cache may count on (used if ``config.num_kv_tokens`` is None).
        listener: Hears each iteration's output and each request's end, in the engine's thread.
        kv_cache: Memory for keys and values, as :func:`new_kv_cache` makes it; None: a new one.
        wrap: Put around the function that runs an iteration.
        new_executor: Makes what runs iterations elsewhere, over keys and values of its own, for an engine of that
            shape; None: the model of ``loaded`` runs here.
        recorder: Records the loop's iterations, and which requests ran in each.
        traces: Of requests, which note the iterations that they run in; None: none are.
        registry: Where the policy and the memory pool are looked up; None: what the installed plugins registered.

    Raises:
        InvalidInputError: the limits do not fit the model or the memory, or the policy or its options are unknown.
        PluginError: the policy cannot be loaded.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        available_nbytes: int,
        listener: Listener[IterationBatch, IterationOutput],
        kv_cache: KVCache | NativeKVCache | None = None,
        wrap: Callable[[Run], Run] | None = None,
        new_executor: Callable[[EngineShape], Executor[IterationBatch, IterationOutput]] | None = None,
        recorder: LoopRecorder | None = None,
        traces: EngineTraces | None = None,
        registry: Registry | None = None,
    ) -> None:
        registry = installed_plugins().registry if registry is None else registry
        self.shape, self.block_tables, scheduler = plan_engine(loaded, config, available_nbytes, registry)
        self.pool = pool_of(scheduler)  # to be read; None: the policy keeps none
        if self.pool is not None:
            self.pool.num_draft_tokens = config.num_draft_tokens
        self.runner: Runner | None = None  # None: iterations run elsewhere
        # A native model has threads of its own. Those of torch's small operators around it would spin, each time for
        # a while, on a core that the model's want next.
        self._num_torch_threads = config.num_threads
        clock = WallClock()
        if new_executor is None:
            executor = self._local(loaded, config, kv_cache, clock, wrap=wrap, recorder=recorder, registry=registry)
        else:
            executor, self._num_torch_threads = new_executor(self.shape), 1
        self.loop: ServingLoop[Any, IterationBatch, IterationOutput] = ServingLoop(
            scheduler, executor, clock, recorder=recorder, listener=listener, traces=traces
        )
        self._thread = threading.Thread(target=self._run, name="orca-engine", daemon=True)
        self.failure: BaseException | None = None  # what ended the loop, if something did

    def _local(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        kv_cache: KVCache | NativeKVCache | None,
        clock: WallClock,
        *,
        wrap: Callable[[Run], Run] | None,
        recorder: LoopRecorder | None,
        registry: Registry,
    ) -> Executor[IterationBatch, IterationOutput]:
        """Return an executor that runs the model in this process."""
        model = loaded.model
        if isinstance(model, NativeDecoder):
            model = model.with_threads(config.num_threads)
            self._num_torch_threads = 1
        if config.compiler is not None:
            from mlsys_orca.backends.compiled import compile_decodes

            compiler = find_module_compiler(config.compiler, registry)
            model = compile_decodes(model, compiler, config.max_batch_size)
        if kv_cache is None:
            kv_cache = new_kv_cache(
                model,
                num_blocks=self.block_tables.num_blocks,
                num_states=self.shape.num_states or 1,
                dtype=self.shape.kv_dtype,
            )
        # One worker, since requests join between iterations in any case: an iteration runs in the loop's own thread, or
        # on a stream of a device that has some.
        self.runner = Runner(model, kv_cache)
        run: Run = self.runner.run
        if wrap is not None:
            run = wrap(run)
        if recorder is not None:
            run = record_iterations(run, recorder)
        device = get_device(loaded.device)
        if device.kind == "cpu":
            return InlineExecutor(run)
        device.synchronize()  # what was loaded on other streams is there
        return StreamExecutor(run, device, clock)

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop: unfinished requests are cancelled. Idempotent."""
        self.loop.stop()
        if self._thread.is_alive():
            self._thread.join()

    def counts(self) -> EngineCounts:
        """Return the engine's numbers as they are now; from any thread."""
        pool, counts = self.pool, None
        if pool is not None:
            counts = PoolCounts(
                num_running=pool.num_running,
                num_unfinished=pool.num_unfinished,
                num_preemptions=pool.num_preemptions,
                num_cached_tokens=pool.num_cached_tokens,
                num_guessed=pool.num_guessed,
                num_right=pool.num_right,
            )
        return EngineCounts(
            num_blocks=self.block_tables.num_blocks, num_free_blocks=self.block_tables.num_free_blocks, pool=counts
        )

    def _run(self) -> None:
        with intra_op_threads(self._num_torch_threads):
            try:
                self.loop.run_forever()
            except BaseException as error:  # noqa: BLE001 - the thread's end; requests were failed with it, readiness tells
                self.failure = error
                _log.exception("the engine has stopped")
