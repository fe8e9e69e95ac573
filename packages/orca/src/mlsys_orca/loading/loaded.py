"""Result of loading: the model and everything its file says about using it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlsys_orca.backends.native.decoder import NativeDecoder
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import DecoderModel
from mlsys_orca.model.weights.quantized import weights_nbytes
from mlsys_orca.text.chat_template import ChatTemplate
from mlsys_orca.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Generation settings that the model's authors recommend where a request has none; None: the file has none."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run. Owner: whoever called ``load_model``."""

    name: str  # of its file or directory
    config: ModelConfig
    model: DecoderModel  # for the Runner
    tokenizer: Tokenizer  # for the front; knows the ids that end a generation
    chat_template: ChatTemplate | None  # None: the file has none, so chat requests cannot be served
    generation: GenerationDefaults
    adapters: Mapping[str, str] = field(default_factory=dict)  # name -> key under which the model has it
    device: str = "cpu"  # the registered name of the device that the model runs on

    @property
    def weights_nbytes(self) -> int:
        """Memory of the weights, before torch's path packs what it multiplies by."""
        if isinstance(self.model, NativeDecoder):
            return self.model.nbytes + weights_nbytes(self.model.embedding)
        module: Any = getattr(self.model, "module", self.model)  # transformers' model is inside ours
        return weights_nbytes(module)
