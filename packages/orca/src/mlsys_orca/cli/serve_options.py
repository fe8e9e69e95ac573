"""Groups of options of ``mlsys orca serve``, each a frozen dataclass whose fields are options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from mlsys_core.cli.options import BlockPoolName, CompilerName, Device
from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.options import (
    ActivationsForm,
    Adapters,
    ChatTemplateFile,
    Dtype,
    KvDtype,
    MaxBatchSize,
    MaxModelLen,
    PipelineParallel,
    Replicas,
    ReplicaThreads,
    Speculate,
    TensorParallel,
    Weights,
    adapter_directories,
    is_divided,
    num_threads_of,
    refuse_divided,
)
from mlsys_orca.cli.placing import Executor, HeartbeatTimeout, JoinTimeout, PlacedModel, RayAddress, find_placer

if TYPE_CHECKING:
    from mlsys_orca.parallel.ranks import RankPlacer


class _OwnGroup:
    """Group of options of this command alone: it has no panel, and the variables of every server do not hold for it."""

    panel: ClassVar[str | None] = None
    is_shared: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(_OwnGroup):
    """The model: its name, its form, what is beside it, and what clients may change of it."""

    name: Annotated[str | None, typer.Option(help="The model's name for clients; by default the one given.")] = None
    adapter: Adapters = None
    chat_template: ChatTemplateFile = None
    dtype: Dtype = None
    weights: Weights = None
    activations: ActivationsForm = None
    device: Device = "cpu"
    compiler: CompilerName = None

    @property
    def adapters(self) -> Mapping[str, str]:
        """Directories of the adapters by name.

        Raises:
            InvalidInputError: one is not written NAME=DIRECTORY.
        """
        return adapter_directories(self.adapter or [])

    @property
    def dtype_everywhere(self) -> str:
        """Dtype of all machines: this one's, where none is given."""
        from mlsys_orca.loading.load import default_dtype

        return self.dtype or default_dtype()

    @property
    def form(self) -> dict[str, Any]:
        """Form of the weights and what is multiplied with them, as loaders take it."""
        return {"weights": self.weights, "activations": self.activations}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions(_OwnGroup):
    """Processes and machines that the model runs in."""

    threads: ReplicaThreads = 0
    replicas: Replicas = 1
    tensor_parallel: TensorParallel = 1
    pipeline_parallel: PipelineParallel = 1
    executor: Executor = "local"
    ray_address: RayAddress = "auto"
    heartbeat_timeout: HeartbeatTimeout = 5.0
    join_timeout: JoinTimeout = 300.0
    single_process: Annotated[
        bool, typer.Option("--single-process", help="Run all in one process, which nothing restarts.")
    ] = False

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees of the division of a model."""
        return {"tensor_parallel": self.tensor_parallel, "pipeline_parallel": self.pipeline_parallel}

    @property
    def is_divided(self) -> bool:
        """True if processes of their own have the model's parts, on this machine or on several."""
        return self.is_placed or is_divided(**self.degrees)

    @property
    def is_placed(self) -> bool:
        """True if another engine places the processes."""
        return self.executor != "local"

    @property
    def num_threads(self) -> int:
        """Threads of each process that computes."""
        if self.is_placed:
            return self.threads or 1
        return num_threads_of(self.threads, replicas=self.replicas * self.tensor_parallel * self.pipeline_parallel)

    def check(self, model: ModelOptions) -> None:
        """Refuse what a model that is placed so has not.

        Raises:
            InvalidInputError: something of it was asked for.
        """
        refused: dict[str, object] = {f"--device {model.device}": model.device != "cpu", "--compiler": model.compiler}
        refused["--adapter"] = model.adapter
        refuse_divided(refused, **self.degrees)
        refused["--single-process"] = self.single_process
        if self.is_placed and (given := [name for name, value in refused.items() if value]):
            raise InvalidInputError(f"--executor {self.executor} runs without {given[0]}: leave one of them out")

    def placer(self, model: str, served: ModelOptions) -> RankPlacer | None:
        """Return who places the model's ranks; None: they are forked on this machine.

        Raises:
            InvalidInputError: there is no such executor or cluster, or the parts do not fit it.
        """
        if not self.is_placed:
            return None
        placed = PlacedModel(
            model=model,
            address=self.ray_address,
            num_replicas=self.replicas,
            num_threads=self.num_threads,
            dtype=served.dtype_everywhere,
            heartbeat_timeout_s=self.heartbeat_timeout,
            join_timeout_s=self.join_timeout,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            **served.form,
        )
        return find_placer(self.executor, placed)

    def supervises(self, device: str) -> bool:
        """Return True if the server runs in several processes; says why not, where that was not asked for.

        Raises:
            InvalidInputError: it cannot, and replicas were asked for.
        """
        from mlsys_serving.processes import can_supervise

        why = can_supervise() if device == "cpu" else f"a model on {device!r} cannot be shared by forked processes"
        if self.single_process:
            why = "--single-process was given"
        if why is not None and self.replicas > 1:
            raise InvalidInputError(
                f"--replicas {self.replicas} needs a process for each, and all would run in one: {why}; ask for 1"
            )
        if why is not None and not self.single_process:
            typer.echo(f"mlsys: all runs in one process: {why}", err=True)
        return why is None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions(_OwnGroup):
    """Requests at a time, and the memory of their keys and values."""

    max_batch_size: MaxBatchSize = None
    max_model_len: MaxModelLen = None
    policy: Annotated[
        str,
        typer.Option(help="Scheduling policy: chunked, paged, orca, request-level, or one that a plugin registered."),
    ] = "chunked"
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens per iteration under 'chunked' (512; of an encoder-decoder, all).",
        ),
    ] = None
    max_chunk_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of prompts in an iteration in which others decode, under 'chunked' (24): fewer keep streams "
            "smoother, more begin answers sooner.",
        ),
    ] = None
    kv_tokens: Annotated[
        int | None, typer.Option(min=16, help="K/V slots of each replica; by default what fits the memory.")
    ] = None
    kv_dtype: KvDtype = None
    memory_pool: BlockPoolName = None
    speculate: Speculate = 0
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="Refuse a model whose answers would depend on what it is batched with."),
    ] = False
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; more get 429.")] = 256

    def engine(self, model: ModelOptions, placement: PlacementOptions) -> dict[str, Any]:
        """Return the keywords of ``EngineConfig``, those of the policy apart."""
        return {
            "max_batch_size": self.max_batch_size,
            "num_kv_tokens": self.kv_tokens,
            "kv_dtype": self.kv_dtype,
            "max_model_len": self.max_model_len,
            "num_threads": placement.num_threads,
            "policy": self.policy,
            "memory_pool": self.memory_pool,
            "compiler": model.compiler,
            "batch_invariant": self.batch_invariant,
            "max_waiting": self.max_waiting,
            "num_draft_tokens": self.speculate,
            "num_replicas": placement.replicas,
            **placement.degrees,
        }
