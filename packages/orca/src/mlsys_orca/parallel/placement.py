"""The place of one process in a model that several run, and the part of the model that is its own; pure.

Between the command line, which gives the two degrees, and :mod:`.shard`, which reads and runs a part. Layers are
divided over stages (the ORCA paper's inter-layer parallelism, section 4.1), heads and the MLP's features over the ranks
of a stage (intra-layer), the vocabulary's rows too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlsys_core.errors import InvalidInputError

from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.slices import rank_degrees

MAX_STAGES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One process's place: the stage whose layers it has, and its rank among the processes of that stage.

    Raises:
        InvalidInputError: the stage or the rank is not below its number.
    """

    stage: int = 0
    num_stages: int = 1
    rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        for name, index, number in (("stage", self.stage, self.num_stages), ("rank", self.rank, self.num_ranks)):
            if not 0 <= index < number:
                raise InvalidInputError(f"{name} {index} of {number} is no place; {name}s count from 0")

    @property
    def is_first(self) -> bool:
        """True if this stage embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if this stage makes logits."""
        return self.stage == self.num_stages - 1

    @property
    def name(self) -> str:
        """Words for it in messages."""
        return f"rank {self.rank} of stage {self.stage}"

    @property
    def is_whole(self) -> bool:
        """True if this process has all of the model."""
        return self.num_stages == self.num_ranks == 1

    def layers(self, config: ModelConfig) -> range:
        """Return the layers of this stage, numbered as in the whole model, whose configuration this is."""
        own = config.num_layers // self.num_stages
        return range(own * self.stage, own * (self.stage + 1))

    def vocabulary(self, config: ModelConfig) -> range:
        """Return the rows of the embedding's table and the columns of the logits that this rank has."""
        return range(*(config.vocab_size * rank // self.num_ranks for rank in (self.rank, self.rank + 1)))

    def share(self, number: int) -> range:
        """Return this rank's part of ``number`` heads or features, which the ranks divide."""
        own = number // self.num_ranks
        return range(own * self.rank, own * (self.rank + 1))


def all_places(*, tensor_parallel: int, pipeline_parallel: int) -> list[Placement]:
    """Return every place, stage after stage.

    Example:
        >>> [(place.stage, place.rank) for place in all_places(tensor_parallel=2, pipeline_parallel=2)]
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    return [
        Placement(stage=stage, num_stages=pipeline_parallel, rank=rank, num_ranks=tensor_parallel)
        for stage in range(pipeline_parallel)
        for rank in range(tensor_parallel)
    ]


def check_degrees(config: ModelConfig, *, tensor_parallel: int, pipeline_parallel: int) -> None:
    """See that the model divides into so many ranks and stages.

    Raises:
        InvalidInputError: it does not; the line names the degrees that fit.
    """
    if config.encoder is not None and tensor_parallel * pipeline_parallel > 1:
        raise InvalidInputError("a model with an encoder beside its decoder runs in one process, and is not divided")
    fitting, layers = rank_degrees(config), config.num_layers
    if tensor_parallel not in fitting:
        raise InvalidInputError(
            f"tensor-parallel {tensor_parallel} does not divide this model ({config.num_heads} heads, "
            f"{config.num_kv_heads} key/value heads, {config.intermediate_size} features of the MLP"
            f"{_why_whole(config)}); "
            f"{_listed(fitting)} {'does' if len(fitting) == 1 else 'do'}"
        )
    most = 1 if config.recurrent is not None else min(layers, MAX_STAGES)  # states of requests are one process's
    stages = [degree for degree in range(1, most + 1) if layers % degree == 0]
    if pipeline_parallel not in stages:
        raise InvalidInputError(
            f"pipeline-parallel {pipeline_parallel} does not divide this model's {layers} layers"
            f"{'' if config.recurrent is None else ', whose states are in one process'}; "
            f"{_listed(stages)} {'does' if len(stages) == 1 else 'do'}"
        )


def shard_config(config: ModelConfig, placement: Placement) -> ModelConfig:
    """Return the configuration of the part of a model at ``placement``: its layers, heads, features and tokens.

    Raises:
        InvalidInputError: the model does not divide so.
    """
    check_degrees(config, tensor_parallel=placement.num_ranks, pipeline_parallel=placement.num_stages)
    if placement.is_whole:
        return config
    own = placement.layers(config)
    return replace(
        config,
        vocab_size=max(1, len(placement.vocabulary(config))),
        num_layers=len(own),
        num_heads=config.num_heads // placement.num_ranks,
        num_kv_heads=config.num_kv_heads // placement.num_ranks,
        intermediate_size=config.intermediate_size // placement.num_ranks,
        windows=None if config.windows is None else config.windows[own.start : own.stop],
        dense=None if config.dense is None else config.dense[own.start : own.stop],
        rotated=None if config.rotated is None else config.rotated[own.start : own.stop],
    )


def _why_whole(config: ModelConfig) -> str:
    """Return what of a model ranks cannot share, as the end of a list."""
    if not config.spans_heads:
        return ""
    if config.recurrent is not None:
        return ", states of recurrent layers"
    if config.latent is not None:
        return ", one latent of all heads"
    if config.num_experts:
        return ", a shared expert or biases of experts"
    return ", norms over all heads"


def _listed(numbers: list[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
