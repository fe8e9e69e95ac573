"""BERT-like encoders in stages: padded or token-packed batches, a vector or logits at the end (all-MiniLM-L6-v2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop.queue import ServeRequest
from mlsys_dvabatch.stages.activations import Packed, Padded, to_host
from mlsys_dvabatch.stages.model import IsolationCheck
from mlsys_serving.isolation import Draw, Kind
from torch import Tensor, nn
from torch.nn import functional

from mlsys_encoders.models.config import BertConfig, Weights
from mlsys_encoders.models.layers import ACTIVATIONS, Head, Layer, Places, bias_of, norm_of, rotations
from mlsys_encoders.models.native.layers import CompiledLayers, compiled_layers, short_operators
from mlsys_encoders.models.pooling import pool_packed, pool_padded

LENGTHS = (8, 16, 32, 64, 128, 256)  # tokens, at which encoders are profiled


class BertStages(nn.Module):
    """An encoder cut into stages of whole layers; from a request's token ids, an array, it makes a vector or logits.

    A request is [tokens], or [2, tokens] where the encoder has types of tokens: ids, and the type of each. The
    embedding belongs to the first stage, pooling, normalisation and head to the last.

    Args:
        config: shape.
        num_stages: 1 to the number of layers.
        is_packed: without padding.
        weights: "int8": the products of packed layers multiply int8 values; padded batches have no such form.

    Raises:
        InvalidInputError: it cannot be cut so.
    """

    def __init__(
        self, config: BertConfig, num_stages: int = 2, *, is_packed: bool = False, weights: Weights = "float"
    ) -> None:
        super().__init__()
        self.config = config
        self.is_packed = is_packed
        self.weights = weights
        self._native: tuple[CompiledLayers | None] | None = None  # packed layers once they were asked for
        size = config.hidden_size
        self.words = nn.Embedding(config.vocab_size, size)
        if config.has_positions:
            self.positions = nn.Embedding(config.max_length + config.position_offset, size)
        if config.num_token_types:
            self.token_types = nn.Parameter(torch.zeros(config.num_token_types, size))
        if config.num_buckets:
            self.relative = nn.Parameter(torch.zeros(config.num_buckets, config.num_heads))
        self.norm = norm_of(config)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_layers))
        self.last_norm = norm_of(config) if config.is_pre_norm else nn.Identity()
        self.denses = nn.ModuleList(
            nn.Linear(dense.in_features, dense.out_features, bias=dense.has_bias) for dense in config.form.denses
        )
        self.head = None if config.head is None else Head(config, config.head)
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
            other = BertStages(self.config, num_stages or self.num_stages, is_packed=is_packed, weights=self.weights)
        other.load_state_dict(self.state_dict(), assign=True)
        return other.eval()

    def check(self, payload: Any) -> int:
        """Check a request and return its length in tokens.

        Raises:
            InvalidInputError: it is not a vector of token ids that the model takes.
        """
        if not isinstance(payload, np.ndarray) or payload.dtype not in (np.int32, np.int64) or not self._fits(payload):
            is_array = isinstance(payload, np.ndarray)
            what = f"{payload.dtype} of shape {list(payload.shape)}" if is_array else type(payload).__name__
            raise InvalidInputError(f"got {what}: a request is a vector of token ids, int32 or int64")
        length = payload.shape[-1]
        if not 1 <= length <= self.config.max_length:
            raise InvalidInputError(f"got {length} tokens: the model takes 1 to {self.config.max_length}")
        ids, types = payload if payload.ndim == 2 else (payload, payload[:0])
        if int(ids.min()) < 0 or int(ids.max()) >= self.config.vocab_size:
            raise InvalidInputError(
                f"token ids from {int(ids.min())} to {int(ids.max())}: the vocabulary has "
                f"0 to {self.config.vocab_size - 1}"
            )
        if len(types) and (int(types.min()) < 0 or int(types.max()) >= self.config.num_token_types):
            raise InvalidInputError(
                f"token types from {int(types.min())} to {int(types.max())}: the model has 0 to "
                f"{self.config.num_token_types - 1}"
            )
        return int(length)

    def _fits(self, payload: npt.NDArray[Any]) -> bool:
        return payload.ndim == 1 or (payload.ndim == 2 and len(payload) == 2 and self.config.num_token_types > 0)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.words.weight.device

    def collate(self, requests: Sequence[ServeRequest[Any]], padded_length: int) -> Padded | Packed:
        """Return the token ids of a batch, and their types where any request has some."""
        rows = [request.payload for request in requests]
        lengths = [row.shape[-1] for row in rows]
        if any(row.ndim == 2 for row in rows):
            rows = [row if row.ndim == 2 else np.stack([row, np.zeros_like(row)]) for row in rows]
        else:
            rows = [row[None] for row in rows]
        if self.is_packed:
            packed = np.concatenate(rows, axis=1, dtype=np.int64)
            return Packed(torch.from_numpy(packed).T.to(self.device), tuple(lengths))
        tokens = np.zeros((len(rows), len(rows[0]), max(padded_length, *lengths)), np.int64)
        for number, row in enumerate(rows):
            tokens[number, :, : lengths[number]] = row
        return Padded(
            {
                "tokens": torch.from_numpy(tokens).to(self.device),
                "length": torch.tensor(lengths, device=self.device),
            }
        )

    def run(self, stage: int, values: Any) -> Any:
        """Run the layers of one stage; see :class:`~mlsys_dvabatch.stages.model.StageModel`."""
        return self._run_packed(stage, values) if self.is_packed else self._run_padded(stage, values)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths in tokens to profile at."""
        return tuple(length for length in LENGTHS if length <= self.config.max_length)

    def example_of(self, length: int) -> npt.NDArray[np.int64]:
        """Return ``length`` token ids."""
        generator = torch.Generator().manual_seed(length)
        vocab_size = self.config.vocab_size
        return torch.randint(min(1000, vocab_size // 2), vocab_size, (length,), generator=generator).numpy()

    @property
    def tolerance(self) -> float:
        """Tolerance of the isolation check; see :class:`~mlsys_dvabatch.stages.model.Triable`."""
        return float(torch.finfo(self.words.weight.dtype).eps ** 0.5)

    def draw(self) -> Draw:
        """Draw vectors of token ids; see :class:`~mlsys_dvabatch.stages.model.Triable`."""

        def draw(rng: np.random.Generator, kind: Kind) -> npt.NDArray[np.int64] | None:
            if kind not in (Kind.ORDINARY, Kind.OTHER_LENGTH):
                return None
            length = min(7 if kind is Kind.ORDINARY else 19, self.config.max_length)
            return rng.integers(0, self.config.vocab_size, length)

        return draw

    def answers(self, payloads: Sequence[Any]) -> list[list[npt.NDArray[Any]]]:
        """Return each request's arrays; see :class:`~mlsys_dvabatch.stages.model.Triable`."""
        requests = [ServeRequest(str(n), each, length=len(each)) for n, each in enumerate(payloads)]
        values: Any = self.collate(requests, max(map(len, payloads)))
        for stage in range(self.num_stages):
            values = self.run(stage, values)
        return [[vector] for vector in self.results(values)]

    def results(self, values: Any) -> list[npt.NDArray[np.float32]]:
        """Return one vector [features] or [labels] for each request, copied out of its batch."""
        return list(to_host(values.tokens if self.is_packed else values.tensors["hidden"]).copy())

    def _embed(self, tokens: Tensor, types: Tensor | None, positions: Tensor) -> Tensor:
        hidden: Tensor = self.words(tokens)
        if self.config.has_positions:
            hidden = hidden + self.positions(positions + self.config.position_offset)
        if self.config.num_token_types:
            hidden = hidden + (self.token_types[0] if types is None else self.token_types[types])
        out: Tensor = self.norm(hidden)
        return out

    def _places(self, positions: Tensor, longest: int) -> Places:
        config = self.config
        turns = rotations(config.thetas, positions, config.hidden_size // config.num_heads)
        return Places(positions, turns, bias_of(self.relative, longest) if config.num_buckets else None)

    def _run_padded(self, stage: int, values: Padded) -> Padded:
        lengths = values.tensors["length"]
        first = values.tensors["hidden" if stage else "tokens"]
        width = first.shape[1] if stage else first.shape[2]
        positions = torch.arange(width, device=first.device)
        hidden = first if stage else self._embed(first[:, 0], first[:, 1] if first.shape[1] > 1 else None, positions)
        places = self._places(positions, width)
        mask = positions[None] < lengths[:, None]
        seen = None if bool(mask.all()) else mask[:, None, None]
        layers: Any = self.layers[self._bounds[stage] : self._bounds[stage + 1]]
        for layer in layers:
            hidden = layer(hidden, seen, places)
        if stage == self.num_stages - 1:
            hidden = self.last_norm(hidden)
            hidden = self._answer(pool_padded(self._poolings, hidden, mask, lengths))
        return Padded({"hidden": hidden, "length": lengths})

    def _run_packed(self, stage: int, values: Packed) -> Packed:
        compiled = self._compiled()
        if compiled is None:
            return self._packed(stage, values, None, 0)
        with short_operators() as threads:
            return self._packed(stage, values, compiled, threads)

    def _packed(self, stage: int, values: Packed, compiled: CompiledLayers | None, threads: int) -> Packed:
        hidden, lengths = values.tokens, values.lengths
        positions = torch.cat([torch.arange(length, device=hidden.device) for length in lengths])
        if not stage:
            hidden = self._embed(hidden[:, 0], hidden[:, 1] if hidden.shape[1] > 1 else None, positions)
        places = self._places(positions, max(lengths))
        first, stop = self._bounds[stage : stage + 2]
        if compiled is not None:
            hidden = compiled.run(hidden, lengths, places, first, stop, threads=threads)
        else:
            layers: Any = self.layers[first:stop]
            for layer in layers:
                hidden = layer.forward_packed(hidden, lengths, places)
        if stage < self.num_stages - 1:
            return Packed(hidden, lengths)
        vectors = self._answer(pool_packed(self._poolings, self.last_norm(hidden), lengths))
        return Packed(vectors, (1,) * len(lengths))

    @property
    def computes_in_turn(self) -> bool:
        """Return whether a batch may be made ready while another runs: the layers of one run at a time."""
        return self.is_packed and self._compiled() is not None

    @property
    def needs_packing(self) -> str | None:
        """The option that padded batches cannot follow; None: there is none."""
        return None if self.weights == "float" else f"--weights {self.weights}"

    @property
    def form(self) -> str:
        """Return a text that tells apart forms of the same weights that differ in speed; "" for padded batches."""
        if not self.is_packed:
            return ""
        if self._compiled() is None:
            return " packed"
        return " packed, compiled" if self.weights == "float" else f" packed, compiled, {self.weights}"

    def _compiled(self) -> CompiledLayers | None:
        """Return the layers for the compiled loops, packed at the first call; None: torch's operators run."""
        if self._native is None:
            layers: Any = list(self.layers)
            self._native = (compiled_layers(layers, self.config, self.weights),)
        return self._native[0]

    def _apply(self, *arguments: Any, **options: Any) -> Self:
        self._native = None  # weights may go to another device or dtype
        apply: Any = super()._apply  # torch gives it no types
        moved: Self = apply(*arguments, **options)
        return moved

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles are made of: packed layers are addresses, and are packed again."""
        return {**self.__dict__, "_native": None}

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Load weights; see :meth:`torch.nn.Module.load_state_dict`."""
        self._native = None
        return super().load_state_dict(*arguments, **options)

    @property
    def _poolings(self) -> tuple[str, ...]:
        return self.config.form.poolings if self.config.head is None else (self.config.head.pooling,)

    def _answer(self, vectors: Tensor) -> Tensor:
        """Return what requests get for their pooled states: logits, or vectors through the folder's Dense modules."""
        if self.head is not None:
            logits: Tensor = self.head(vectors)
            return logits
        form = self.config.form
        for module, dense in zip(self.denses, form.denses, strict=True):
            vectors = ACTIVATIONS[dense.activation](module(vectors))
        return functional.normalize(vectors, dim=-1) if form.is_normalised else vectors
