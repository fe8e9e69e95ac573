"""The engine in this process, with streams of tokens for asynchronous fronts.

Stands between the fronts (asyncio) and the loop's thread, where iterations run. A front opens a stream per request and
reads tokens as iterations complete; closing the stream early cancels the request within one iteration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import LoopRecorder
from mlsys_core.plugins import Registry
from mlsys_orca.engine.client import BusyError, EngineClient
from mlsys_orca.engine.core import EngineCore, plan_kv_tokens
from mlsys_orca.engine.settings import EngineConfig, EngineCounts, EngineShape
from mlsys_orca.engine.streams import EngineStats, Streams, TokenStream
from mlsys_orca.engine.watching.local import LocalScore
from mlsys_orca.loading.loaded import LoadedModel

if TYPE_CHECKING:  # a model that is not divided starts without them
    from mlsys_orca.parallel.ranks import RankExecutor, RankGroup, RankHolders

__all__ = ["BusyError", "Engine", "EngineConfig", "TokenStream", "plan_kv_tokens"]


class Engine(EngineClient):
    """Server of one model, in one thread of this process. A context manager.

    Args:
        loaded: The model.
        config: Limits.
        available_nbytes: Memory the K/V cache may count on (used if ``config.num_kv_tokens`` is None).
        recorder: Records the loop's iterations, and which requests ran in each.
        registry: Where the policy and the memory pool are looked up; None: what the installed plugins registered.
        holders: Processes that have the parts of a divided model, and end with the engine; None: it runs here.

    Raises:
        InvalidInputError: the limits do not fit the model or the memory, the policy or its options are unknown, or
            several replicas are asked for.
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
        holders: RankHolders | None = None,
    ) -> None:
        if config.num_replicas > 1:
            raise InvalidInputError(
                f"{config.num_replicas} replicas need a process each, and this engine runs in one: ask for 1, or serve "
                "with processes"
            )
        self._holders = holders
        self._group: RankGroup | None = None
        streams, stats = Streams(), EngineStats()
        core = EngineCore(
            loaded,
            config,
            available_nbytes=available_nbytes,
            listener=streams,
            recorder=recorder,
            traces=stats.traces,
            registry=registry,
            new_executor=None if holders is None else lambda shape: self._divided(loaded, shape, config, holders),
        )
        streams.is_live = core.shape.streams_tokens
        super().__init__(core.shape, config, core.loop, streams, stats)
        self.core, self._loaded = core, loaded
        self.block_tables, self.pool = core.block_tables, core.pool  # to be read
        self.score_source = score = LocalScore(core, streams, stats.traces)
        if core.pool is not None:
            core.pool.on_placed = stats.placed
            core.pool.on_preempted = score.preempted

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the loop, if one did."""
        return self.core.failure

    def start(self) -> None:
        """Start the engine's thread."""
        self.core.start()

    async def ready(self) -> None:
        """Return: requests wait for nobody."""

    def close(self) -> None:
        """Stop: unfinished requests are cancelled. Idempotent."""
        self.core.close()
        if self._group is not None:
            self._group.close()
        if self._holders is not None:
            self._holders.close()

    def counts(self) -> EngineCounts:
        """Return the engine's numbers as they are now."""
        return self.core.counts()

    def _divided(
        self, loaded: LoadedModel, shape: EngineShape, config: EngineConfig, holders: RankHolders
    ) -> RankExecutor:
        """Return an executor over ranks, which have the keys and values of the first replica."""
        from mlsys_orca.engine.divided import group_shape

        self._group = holders.group(group_shape(holders.model, loaded.config, shape, config))
        executor = self._group.executor()
        executor.serve(0)
        return executor
