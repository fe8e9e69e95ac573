"""Encoders as models that DVABatch serves: folders in Hugging Face layout, and shapes with random weights by name."""

from __future__ import annotations

from pathlib import Path

import torch
from mlsys_core.device import get_device
from mlsys_core.errors import InvalidInputError
from mlsys_core.plugins.loading import LoadContext
from mlsys_dvabatch.stages.zoo import Loaded

from mlsys_encoders.models.bert import BertStages
from mlsys_encoders.models.bert_folder import load_bert
from mlsys_encoders.models.config import BERT_BASE, BERT_LARGE, MINILM, BertConfig, Weights
from mlsys_encoders.serve.tokens import TextTokens, tokenizer_of
from mlsys_encoders.serve.wire import EncoderWire

NAMED: dict[str, BertConfig] = {"bert-base": BERT_BASE, "bert-large": BERT_LARGE, "minilm-random": MINILM}
_FORMS: dict[str, Weights] = {"float": "float", "int8": "int8"}


def load_encoder(path: Path, context: LoadContext) -> Loaded:
    """Load the folder of a BERT-like encoder, or a name of :data:`NAMED`. Encoders are cut between layers.

    Raises:
        InvalidInputError: The folder holds no such encoder, or an option is not for encoders.
    """
    options = context.taken(
        "stages", "shape", "packed", "compiler", "slice_at", "exit_confidence", "exit_rule", "weights"
    )
    if options.get("compiler") is not None:
        raise InvalidInputError(f"{path}: encoders run as they are; --compiler is for models that are sliced")
    if (form := options.get("weights", "float")) not in _FORMS:
        raise InvalidInputError(f"--weights {form!r}: give float or int8")
    num_stages, is_packed = options.get("stages") or 2, options.get("packed", False)
    if path.name in NAMED and not path.exists():
        torch.manual_seed(0)
        model, texts = BertStages(NAMED[path.name], num_stages, is_packed=is_packed).eval(), None
    else:
        model = load_bert(path, num_stages=num_stages, is_packed=is_packed)
        tokenizer = tokenizer_of(path, model.config)
        texts = None if tokenizer is None else TextTokens(tokenizer, model.config)
    model.weights = _FORMS[form]
    return Loaded(path.name, model.to(get_device(context.device).torch_name), EncoderWire(model.config, texts))
