"""A family of encoders as their loader sees it, and the shape that all of them have.

BERT's shape: learned positions, LayerNorm after every sum, biases everywhere. A family says what its files call things.
Each family's file ends in a ``FAMILY``; :data:`mlsys_orca.model.families.ENCODERS` finds it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.attention import AttentionOptions
from mlsys_orca.model.blocks import MLP, PostNormLayer
from mlsys_orca.model.config import RelativePositions
from mlsys_orca.model.encoder import Encoder, PairHead, RowAttention
from mlsys_orca.model.layers import Embedding
from mlsys_orca.model.limits import MAX_WIDTH
from mlsys_orca.model.operator_reader import OperatorReader
from mlsys_orca.model.relative_positions import bias_by_distance
from mlsys_orca.model.weights.checkpoint import Checkpoint, Progress
from mlsys_orca.model.weights.reading import WeightReader
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Configuration of an encoder."""

    architecture: str  # a name of mlsys_orca.model.families.ENCODERS
    vocab_size: int  # tokens
    hidden_size: int  # features of a token's state
    intermediate_size: int  # features inside the MLP
    num_layers: int
    num_heads: int
    head_dim: int | None = None  # features per head; None: hidden_size over num_heads
    max_positions: int  # tokens of a text
    position_offset: int = 0  # row of the position table for position 0
    num_token_types: int = 0  # rows of the token-type table; a text alone is of type 0; 0: there is no table
    norm_eps: float  # added to the variance
    activation: str = "gelu"  # of the MLP; a name of layers.ACTIVATIONS
    relative_positions: RelativePositions | None = None  # beside the learned ones, one table for all layers
    scores_pairs: bool = False  # a head gives a pair of texts one number: a cross-encoder

    def __post_init__(self) -> None:
        if not 1 <= self.intermediate_size <= MAX_WIDTH:
            size = self.intermediate_size
            raise InvalidInputError(f"the encoder's intermediate_size is {size}; it must be from 1 to {MAX_WIDTH}")

    @property
    def attention_size(self) -> int:
        """Features of all heads."""
        return self.num_heads * (self.head_dim or self.hidden_size // self.num_heads)

    @property
    def num_position_rows(self) -> int:
        """Rows of the position table for one type of token."""
        return self.max_positions + self.position_offset

    @property
    def has_second_type(self) -> bool:
        """True if the second text of a pair has tokens of a type of its own."""
        return self.scores_pairs and self.architecture == "bert" and self.num_token_types > 1  # RoBERTa has a table too


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """One family. Its reader refuses by name whatever it meets that is not implemented."""

    from_huggingface: Callable[[Mapping[str, Any]], EncoderConfig]  # of a config.json
    stems: Mapping[str, str]  # for OperatorReader
    ignorable_prefixes: tuple[str, ...]  # of tensors behind the encoder: heads that other tasks put on it
    head_activation: str = "tanh"  # between the two products of a head that scores pairs, "pool" and "score"

    def load(
        self,
        config: EncoderConfig,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        read_by: Callable[..., OperatorReader] = OperatorReader,
    ) -> Encoder:
        """Read the weights.

        Args:
            config: The encoder's shape, as this family's reader gave it.
            checkpoint: Where its tensors are.
            dtype: Dtype of the computation.
            device: Where.
            progress: Called with bytes read and bytes in all.
            read_by: Makes the reader of operators.

        Raises:
            InvalidInputError: a tensor is missing, misshapen or unknown to this family.
        """
        reader = WeightReader(checkpoint, progress=progress)
        with torch.inference_mode():
            read = read_by(reader, self.stems, dtype=dtype, device=device, eps=config.norm_eps)
            encoder = _build(config, read, self.head_activation)
        reader.finish(lambda name: name.startswith(self.ignorable_prefixes) or name.endswith(".position_ids"))
        return encoder


def _build(config: EncoderConfig, read: OperatorReader, head_activation: str) -> Encoder:
    table = read.matrix({"embedding": config.vocab_size}, config.hidden_size)
    options = AttentionOptions(is_causal=False, bias=_bias(config, read))
    return Encoder(
        embedding=Embedding(table, positions=_positions(config, read), offset=config.position_offset),
        first_norm=read.layer_norm("norm", config.hidden_size, dtype=torch.float32),
        layers=(_layer(config, read, options, index) for index in range(config.num_layers)),
        head=_head(config, read, head_activation) if config.scores_pairs else None,
    )


def _positions(config: EncoderConfig, read: OperatorReader) -> Tensor:
    """Return the position table with token types added: rows of type 0, and for pairs those of type 1 below them."""
    hidden = config.hidden_size
    positions = read.tensor("positions", (config.num_position_rows, hidden), dtype=torch.float32)
    if not config.num_token_types:
        return positions
    types = read.tensor("types", (config.num_token_types, hidden), dtype=torch.float32)
    return torch.cat([positions + row for row in types[: 2 if config.has_second_type else 1]])


def _head(config: EncoderConfig, read: OperatorReader, activation: str) -> PairHead:
    hidden = config.hidden_size
    return PairHead(
        read.linear({"pool": hidden}, hidden, bias=True),
        read.linear({"score": 1}, hidden, bias=True),
        activation=activation,
        dtype=read.dtype,
    )


def _bias(config: EncoderConfig, read: OperatorReader) -> Tensor | None:
    positions = config.relative_positions
    if positions is None:
        return None
    table = read.tensor("relative", (positions.num_buckets, config.num_heads), dtype=torch.float32)
    return bias_by_distance(table, positions, is_causal=False)


def _layer(config: EncoderConfig, read: OperatorReader, options: AttentionOptions, index: int) -> PostNormLayer:
    hidden, inner, at, heads = config.hidden_size, config.intermediate_size, (index,), config.attention_size
    return PostNormLayer(
        attention=RowAttention(
            qkv=read.linear({"q": heads, "k": heads, "v": heads}, hidden, at=at, bias=True),
            output=read.linear({"o": hidden}, heads, at=at, bias=True),
            num_heads=config.num_heads,
            options=options,
        ),
        attention_norm=read.layer_norm("attention_norm", hidden, at=at, dtype=torch.float32),
        mlp=MLP(
            read.linear({"up": inner}, hidden, at=at, bias=True),
            read.linear({"down": hidden}, inner, at=at, bias=True),
            activation=config.activation,
        ),
        mlp_norm=read.layer_norm("mlp_norm", hidden, at=at, dtype=torch.float32),
        dtype=read.dtype,
    )
