"""A directory whose model reads images and has a text part that a family of ours runs.

Between :mod:`.huggingface` and the two halves: the text part is read as any model of its family, and so may run
natively; the vision encoder is ``transformers``' own. Where no family has the text part, :mod:`.fallback` runs both.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mlsys_orca.backends.transformers.config import read_transformers_config
from mlsys_orca.backends.transformers.image_rules import Vision
from mlsys_orca.backends.transformers.vision import ImageEncoder
from mlsys_orca.loading.fallback import check_found, read_whole
from mlsys_orca.loading.text_part import TextPart
from mlsys_orca.model.blocks import Decoder
from mlsys_orca.model.config import ModelConfig, UnsupportedModelError
from mlsys_orca.model.decoder import DecoderModel
from mlsys_orca.model.families import ARCHITECTURES, model_family
from mlsys_orca.model.family import Family
from mlsys_orca.model.weights.checkpoint import Progress, WeightForm
from mlsys_orca.model.weights.safetensors_file import SafetensorsDirectory

_PREFIXES = {"model.text_model.": "model.", "lm_head.": "lm_head."}  # of the text part's tensors -> alone
_LAYERS = "model.text_model.layers."


@dataclass(frozen=True, slots=True)
class SeeingModel:
    """A directory with a text part of ours and an encoder of images. Owner: the loader, while it loads."""

    path: Path
    source: Any  # transformers' configuration of the whole
    family: Family  # of the text part
    config: ModelConfig  # likewise
    vision: Vision

    def load(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightForm = "float",
        progress: Progress | None = None,
    ) -> DecoderModel:
        """Read the weights.

        Args:
            dtype: Dtype of weights, keys and values.
            device: Where to put them.
            weights: Storage form of the text part's matrices.
            progress: Called with the bytes of the text part's weights read so far and those in all.

        Raises:
            InvalidInputError: weights are missing, misshapen or left over, or the encoder does not fit its rules.
        """
        part = TextPart(SafetensorsDirectory(self.path), prefixes=_PREFIXES)
        is_tied = self.source.tie_word_embeddings or not part.has_head
        config = replace(self.config, tied_embeddings=is_tied)
        decoder = self.family.load(config, part, dtype=dtype, device=device, weights=weights, progress=progress)
        assert isinstance(decoder, Decoder)
        decoder.images = self._encoder(dtype, device)
        return decoder

    def _encoder(self, dtype: torch.dtype, device: torch.device) -> ImageEncoder:
        import transformers

        config = copy.deepcopy(self.source)
        config.get_text_config().num_hidden_layers = 0  # they are read by the family
        kind = transformers.AutoModelForImageTextToText
        model, found = read_whole(kind, self.path, config, attention="sdpa", dtype=dtype)
        left = {name for name in found.get("unexpected_keys") or () if not str(name).startswith(_LAYERS)}
        check_found(self.path, {**found, "unexpected_keys": left})
        model.model.text_model = torch.nn.Identity()
        encoder = ImageEncoder(model.to(device).eval(), self.vision)
        with torch.inference_mode():
            encoder.verify()
        return encoder


def open_seeing(path: Path, raw: Mapping[str, Any]) -> SeeingModel | None:
    """Judge the model in directory ``path``, whose ``config.json`` is ``raw``; None: no family has its text part.

    Raises:
        InvalidInputError: its parts do not belong together.
        UnsupportedModelError: it asks for what neither we nor ``transformers`` do.
        MissingDependencyError: ``transformers`` or Pillow is not installed.
    """
    whole, text, _ = read_transformers_config(path, raw)
    if whole is text or text.model_type not in ARCHITECTURES:
        return None
    family = model_family(text.model_type)
    try:
        config = family.from_huggingface({**text.to_dict(), "tie_word_embeddings": whole.tie_word_embeddings})
    except UnsupportedModelError:
        return None
    return SeeingModel(path, whole, family, config, Vision.of(path, whole))
