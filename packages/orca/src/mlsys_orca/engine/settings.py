"""Settings and facts of an engine, and its numbers at one moment: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlsys_orca.scheduling.policy import DEFAULT_POLICY


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine, fixed at its start."""

    max_batch_size: int = 8  # requests per iteration
    num_kv_tokens: int | None = None  # K/V slots (the paper's n_slots); None: what fits, see plan_kv_tokens
    kv_dtype: str | None = None  # of keys and values: float32, bfloat16, float16, int8; None or auto: the model's
    max_model_len: int | None = None  # tokens of prompt and answer; None: what the model was made for
    num_threads: int = 1  # of the model's operators
    policy: str = DEFAULT_POLICY  # the scheduling policy's registered name
    memory_pool: str | None = None  # the registered name of the pool of K/V blocks; None: the core's own
    policy_options: Mapping[str, Any] = field(default_factory=dict)  # keywords of the policy's own
    compiler: str | None = None  # the registered name of what compiles the layers' feed-forward parts; None: nothing
    batch_invariant: bool = False  # refuse a model whose numbers would depend on what it is batched with
    max_waiting: int | None = None  # requests beyond those of an iteration, from which on new ones are refused
    num_draft_tokens: int = 0  # guesses behind each decode at most, by prompt lookup; 0: none
    tensor_parallel: int = 1  # processes that each layer is divided over
    pipeline_parallel: int = 1  # stages that the layers are divided over
    num_replicas: int = 1  # engines behind one front, each with these limits; more than 1 need processes

    @property
    def num_at_once(self) -> int:
        """Requests in the iterations of all replicas at most."""
        return self.max_batch_size * self.num_replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """Facts about an engine that do not change while it runs."""

    name: str  # of the model, for messages
    max_model_len: int  # tokens of prompt and answer
    num_blocks: int  # K/V blocks
    block_size: int  # K/V slots in a block
    num_states: int | None  # slots for states of requests; None: the model has none
    kv_nbytes: int
    kv_dtype: str  # of keys and values, as torch calls it
    adapters: Mapping[str, str]  # name -> key
    has_encoder: bool
    is_batch_invariant: bool  # the same bits in any batch
    streams_tokens: bool  # the policy gives tokens as they come
    goes_on: bool  # the policy begins a request where its progress says, not at its prompt
    restores_blocks: bool  # it takes K/V blocks of another engine over, and holds all but one request when told to

    @property
    def num_kv_tokens(self) -> int:
        """K/V slots."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """Numbers of a request pool; the last four are totals since the start."""

    num_running: int
    num_unfinished: int
    num_preemptions: int
    num_cached_tokens: int
    num_guessed: int
    num_right: int


@dataclass(slots=True)
class Recoveries:
    """Deaths of worker processes so far, and what they cost."""

    num_deaths: int = 0
    num_resumed: int = 0  # requests that went on at another worker
    num_recomputed_tokens: int = 0  # whose keys and values were lost
    num_poisoned: int = 0  # requests that were given up, since they ended workers
    longest_stall_s: float = 0.0  # from a death until the next token of a request that had begun


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts:
    """Numbers of an engine at one moment."""

    num_blocks: int
    num_free_blocks: int
    pool: PoolCounts | None  # None: the policy keeps no request pool
