"""Result of loading: the model and everything its file says about using it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor

from mlsys_orca.backends.native.decoder import NativeDecoder
from mlsys_orca.loading.rows import RowsChoice
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import DecoderModel, ForwardInputs
from mlsys_orca.model.weights.quantized import weights_nbytes
from mlsys_orca.text.chat_template import ChatTemplate
from mlsys_orca.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True, eq=False)
class DividedModel:
    """A model whose parts run in other processes: a :class:`~mlsys_orca.model.decoder.DecoderModel` that cannot run."""

    config: ModelConfig  # of the whole model
    dtype: torch.dtype
    device: torch.device
    nbytes: int = 0  # of the weights of all parts, once they have reported
    is_native: bool = False  # the parts run as native programs

    def __call__(self, inputs: ForwardInputs, kv_cache: Any) -> Tensor:
        """Refuse.

        Raises:
            InvalidInputError: always.
        """
        raise InvalidInputError("this process has no weights: the model's parts run in the processes of its group")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run. Owner: whoever called ``load_model``."""

    name: str  # of its file or directory
    config: ModelConfig
    model: DecoderModel  # for the Runner
    tokenizer: Tokenizer  # for the front; knows the ids that end a generation
    chat_template: ChatTemplate | None  # None: the file has none, so chat requests cannot be served
    adapters: Mapping[str, str] = field(default_factory=dict)  # name -> key under which the model has it
    rows: RowsChoice | None = None  # the form in which rows meet packed weights; None: torch's operators run it
    device: str = "cpu"  # the registered name of the device that the model runs on

    @property
    def is_native(self) -> bool:
        """True if the model runs in native kernels, so that a request gets the same bits in any batch."""
        model = self.model
        return model.is_native if isinstance(model, DividedModel) else isinstance(model, NativeDecoder)

    @property
    def weights_nbytes(self) -> int:
        """Memory of the weights, before torch's path packs what it multiplies by."""
        if isinstance(self.model, DividedModel):
            return self.model.nbytes
        if isinstance(self.model, NativeDecoder):
            return self.model.nbytes + weights_nbytes(self.model.embedding)
        module: Any = getattr(self.model, "module", self.model)  # transformers' model is inside ours
        return weights_nbytes(module)
