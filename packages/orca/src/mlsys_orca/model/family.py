"""A model family as the loaders see it: its configuration, the names of its tensors, its construction.

Each family's file ends in a ``FAMILY``; :data:`mlsys_orca.model.families.ARCHITECTURES` finds it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.config_readers import GgufFields
from mlsys_orca.model.decoder import DecoderModel
from mlsys_orca.model.operator_reader import OperatorReader, WeightReader
from mlsys_orca.model.weights.checkpoint import Checkpoint, Layout, Progress, WeightForm

# Tensors that say nothing the configuration has not said: rotary frequencies, and a tied head stored again.
_IGNORABLE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", "lm_head.weight")


Stems = dict[Layout, dict[str, str]]  # of a family: layout -> role -> name, for OperatorReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family. The readers refuse by name whatever they meet that is not implemented."""

    from_huggingface: Callable[[Mapping[str, Any]], ModelConfig]  # of a config.json
    from_gguf: Callable[[GgufFields], ModelConfig] | None  # None: GGUF has no layout for it
    stems: Mapping[Layout, Mapping[str, str]]  # for OperatorReader
    build: Callable[[ModelConfig, OperatorReader], DecoderModel]
    ignorable_suffixes: tuple[str, ...] = ()  # of names of tensors that the model does not need
    ignorable_prefixes: tuple[str, ...] = ()
    transposed: frozenset[Layout] = frozenset()  # whose weights in layers are [in_features, out_features]
    guesses_in_gguf: bool = False  # layers behind the last one guess further tokens there, which nobody asks of them
    pairs_in_gguf: bool = False  # rotary pairs stand beside each other there, and half a head apart in directories

    def load(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightForm = "float",
        progress: Progress | None = None,
        read_by: Callable[..., OperatorReader] = OperatorReader,
    ) -> DecoderModel:
        """Read the weights.

        Args:
            config: The model's shape, as one of this family's readers gave it.
            checkpoint: Where its tensors are; either layout.
            dtype: Dtype of the computation, and of floating weights, keys and values.
            device: Where.
            weights: Storage form of matrices.
            progress: Called with bytes read and bytes in all.
            read_by: Makes the reader of operators.

        Raises:
            InvalidInputError: a tensor is missing, misshapen or unknown to this family.
        """
        reader = WeightReader(checkpoint, progress=progress)
        stems = self.stems[checkpoint.layout]
        with torch.inference_mode():
            read = read_by(reader, stems, dtype=dtype, device=device, eps=config.norm_eps, weights=weights)
            model = self.build(config, read)
        guessing = self.guesses_in_gguf and checkpoint.layout == "gguf"
        reader.finish(lambda name: self.is_ignorable(name) or (guessing and _layer(name) >= config.num_layers))
        return model

    def is_ignorable(self, name: str) -> bool:
        """Return whether the model does not need the tensor of that name."""
        return (
            name in _IGNORABLE
            or name.endswith((".rotary_emb.inv_freq", *self.ignorable_suffixes))
            or name.startswith(self.ignorable_prefixes)
        )


def _layer(name: str) -> int:
    """Return the number of the layer that a tensor of a GGUF belongs to; -1: to none."""
    first, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if first == "blk" and number.isdecimal() else -1
