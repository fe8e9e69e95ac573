"""BERT-like encoders in stages: padded or token-packed batches, sentence embeddings at the end (all-MiniLM-L6-v2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.serving.isolation import Draw, Kind
from mlsys_core.serving.request import ServeRequest
from mlsys_dvabatch.stages.activations import Packed, Padded, to_host
from mlsys_dvabatch.stages.isolation import IsolationCheck
from mlsys_dvabatch.stages.models.sentence import SentenceForm
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Shape of an encoder."""

    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    vocab_size: int = 30522
    max_length: int = 512
    layer_norm_eps: float = 1e-12
    form: SentenceForm = field(default_factory=SentenceForm)  # from the last layer to a request's vector

    @property
    def embedding_size(self) -> int:
        """Numbers of a request's vector."""
        return self.hidden_size * len(self.form.poolings)


BERT_BASE = BertConfig()
BERT_LARGE = BertConfig(hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096)
MINILM = BertConfig(hidden_size=384, num_layers=6, num_heads=12, intermediate_size=1536)


class Layer(nn.Module):
    """One encoder layer, normalised after each sum.

    Our own: transformers' layers take padded rows only, and Orca's are built on its own kernels.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.query_key_value = nn.Linear(size, 3 * size)
        self.attention_output = nn.Linear(size, size)
        self.attention_norm = nn.LayerNorm(size, config.layer_norm_eps)
        self.up = nn.Linear(size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, size)
        self.output_norm = nn.LayerNorm(size, config.layer_norm_eps)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Run the layer on ``hidden`` [requests, tokens, features].

        ``mask`` is [requests, 1, 1, tokens], True where there is a token.
        """
        num, length, size = hidden.shape
        packed = self.query_key_value(hidden).view(num, length, 3, self.num_heads, size // self.num_heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self._rest(hidden, mixed.transpose(1, 2).reshape(num, length, size))

    def forward_packed(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Run the layer on ``hidden`` [tokens of all requests, features]; attention stays within each request."""
        size = hidden.shape[-1]
        packed = self.query_key_value(hidden).view(-1, 3, self.num_heads, size // self.num_heads).permute(1, 2, 0, 3)
        mixed = [
            functional.scaled_dot_product_attention(*(part[None] for part in own))[0]
            for own in zip(*(torch.split(packed[which], list(lengths), 1) for which in range(3)), strict=True)
        ]
        return self._rest(hidden, torch.cat(mixed, 1).transpose(0, 1).reshape(-1, size))

    def _rest(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        hidden = self.attention_norm(hidden + self.attention_output(mixed))
        out: Tensor = self.output_norm(hidden + self.down(functional.gelu(self.up(hidden))))
        return out


class BertStages(nn.Module):
    """An encoder cut into stages of whole layers; from a request's token ids, an array, it makes a vector.

    The embedding belongs to the first stage, pooling and normalisation to the last.

    Args:
        config: shape.
        num_stages: 1 to the number of layers.
        is_packed: without padding.

    Raises:
        InvalidInputError: it cannot be cut so.
    """

    def __init__(self, config: BertConfig, num_stages: int = 2, *, is_packed: bool = False) -> None:
        super().__init__()
        self.config = config
        self.is_packed = is_packed
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_length, config.hidden_size)
        self.token_type = nn.Parameter(torch.zeros(config.hidden_size))
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.isolation = IsolationCheck("the encoder", self, most=8)
        self.cut(num_stages)

    def cut(self, num_stages: int) -> None:
        """Cut anew into stages of whole layers, as even as they go."""
        num_layers = self.config.num_layers
        if not 1 <= num_stages <= num_layers:
            raise InvalidInputError(f"{num_stages} stages of {num_layers} layers: give 1 to {num_layers}")
        self.num_stages = num_stages
        self._bounds = [round(stage * num_layers / num_stages) for stage in range(num_stages + 1)]

    def with_form(self, *, is_packed: bool, num_stages: int | None = None) -> BertStages:
        """Return a model with the same weights, packed or not."""
        with torch.device("meta"):
            other = BertStages(self.config, num_stages or self.num_stages, is_packed=is_packed)
        other.load_state_dict(self.state_dict(), assign=True)
        return other.eval()

    def check(self, payload: Any) -> int:
        """Check a request and return its length in tokens.

        Raises:
            InvalidInputError: it is not a vector of token ids that the model takes.
        """
        if not isinstance(payload, np.ndarray) or payload.ndim != 1 or payload.dtype not in (np.int32, np.int64):
            is_array = isinstance(payload, np.ndarray)
            what = f"{payload.dtype} of shape {list(payload.shape)}" if is_array else type(payload).__name__
            raise InvalidInputError(f"got {what}: a request is a vector of token ids, int32 or int64")
        if not 1 <= len(payload) <= self.config.max_length:
            raise InvalidInputError(f"got {len(payload)} tokens: the model takes 1 to {self.config.max_length}")
        if int(payload.min()) < 0 or int(payload.max()) >= self.config.vocab_size:
            raise InvalidInputError(
                f"token ids from {int(payload.min())} to {int(payload.max())}: the vocabulary has "
                f"0 to {self.config.vocab_size - 1}"
            )
        return len(payload)

    def collate(self, requests: Sequence[ServeRequest[Any]], padded_length: int) -> Padded | Packed:
        """Return the token ids of a batch; embeddings are made in the first stage."""
        lengths = [len(request.payload) for request in requests]
        if self.is_packed:
            packed = np.concatenate([request.payload for request in requests], dtype=np.int64)
            return Packed(torch.from_numpy(packed)[:, None].to(self.token_type.device), tuple(lengths))
        tokens = np.zeros((len(requests), max(padded_length, *lengths)), np.int64)
        for row, request in enumerate(requests):
            tokens[row, : lengths[row]] = request.payload
        device = self.token_type.device
        return Padded({"tokens": torch.from_numpy(tokens).to(device), "length": torch.tensor(lengths, device=device)})

    def run(self, stage: int, values: Any) -> Any:
        """Run the layers of one stage; see :class:`~mlsys_dvabatch.stages.activations.StageModel`."""
        layers = self.layers[self._bounds[stage] : self._bounds[stage + 1]]
        return self._run_packed(stage, layers, values) if self.is_packed else self._run_padded(stage, layers, values)

    @property
    def tolerance(self) -> float:
        """Tolerance of the isolation check; see :class:`~mlsys_dvabatch.stages.isolation.Triable`."""
        return float(torch.finfo(self.token_type.dtype).eps ** 0.5)

    def draw(self) -> Draw:
        """Draw vectors of token ids; see :class:`~mlsys_dvabatch.stages.isolation.Triable`."""

        def draw(rng: np.random.Generator, kind: Kind) -> npt.NDArray[np.int64] | None:
            if kind not in (Kind.ORDINARY, Kind.OTHER_LENGTH):
                return None
            length = min(7 if kind is Kind.ORDINARY else 19, self.config.max_length)
            return rng.integers(0, self.config.vocab_size, length)

        return draw

    def answers(self, payloads: Sequence[Any]) -> list[list[npt.NDArray[Any]]]:
        """Return each request's arrays; see :class:`~mlsys_dvabatch.stages.isolation.Triable`."""
        requests = [ServeRequest(str(n), each, length=len(each)) for n, each in enumerate(payloads)]
        values: Any = self.collate(requests, max(map(len, payloads)))
        for stage in range(self.num_stages):
            values = self.run(stage, values)
        return [[vector] for vector in self.results(values)]

    def results(self, values: Any) -> list[npt.NDArray[np.float32]]:
        """Return one vector [features] for each request, copied out of its batch."""
        return list(to_host(values.tokens if self.is_packed else values.tensors["hidden"]).copy())

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.words(tokens) + self.positions(positions) + self.token_type)
        return hidden

    def _run_padded(self, stage: int, layers: Any, values: Padded) -> Padded:
        lengths = values.tensors["length"]
        if stage:
            hidden = values.tensors["hidden"]
        else:
            tokens = values.tensors["tokens"]
            hidden = self._embed(tokens, torch.arange(tokens.shape[1], device=tokens.device))
        mask = torch.arange(hidden.shape[1], device=hidden.device)[None] < lengths[:, None]
        for layer in layers:
            hidden = layer(hidden, None if bool(mask.all()) else mask[:, None, None])
        if stage == self.num_stages - 1:
            hidden = self.config.form.pool(hidden, mask, lengths)
        return Padded({"hidden": hidden, "length": lengths})

    def _run_packed(self, stage: int, layers: Any, values: Packed) -> Packed:
        hidden, lengths = values.tokens, values.lengths
        if not stage:
            positions = torch.cat([torch.arange(length, device=hidden.device) for length in lengths])
            hidden = self._embed(hidden[:, 0], positions)
        for layer in layers:
            hidden = layer.forward_packed(hidden, lengths)
        if stage < self.num_stages - 1:
            return Packed(hidden, lengths)
        vectors = [
            self.config.form.pool(
                part[None],
                part.new_ones(1, len(part), dtype=torch.bool),
                torch.tensor([len(part)], device=part.device),
            )
            for part in torch.split(hidden, list(lengths))
        ]
        return Packed(torch.cat(vectors), (1,) * len(lengths))
