"""The encoder that the peers serve: all-MiniLM-L6-v2 with the very code and weights that DVABatch serves.

For servers in environments of their own: they need torch, safetensors, tokenizers and pluggy there, and this repository
in PYTHONPATH (`packages/core/src:packages/serving/src:plugins/dvabatch/src:plugins/encoders/src`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlsys_core.loop.queue import ServeRequest
from mlsys_encoders.models.bert_folder import load_bert
from tokenizers import Tokenizer


def embedder(folder: Path) -> Callable[[Sequence[str]], np.ndarray[Any, Any]]:
    """Return a function from texts to unit vectors [texts, features]; one padded batch, one thread."""
    torch.set_num_threads(1)
    model = load_bert(folder, num_stages=1)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)

    def embed(texts: Sequence[str]) -> np.ndarray[Any, Any]:
        tokens = [torch.tensor(encoded.ids) for encoded in tokenizer.encode_batch(list(texts))]
        requests: list[ServeRequest[Any]] = [ServeRequest(str(n), ids) for n, ids in enumerate(tokens)]
        with torch.inference_mode():
            values = model.run(0, model.collate(requests, 1))
            return np.stack([np.asarray(vector) for vector in model.results(values)])

    return embed
