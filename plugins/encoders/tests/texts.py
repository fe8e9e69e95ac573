"""A small encoder of words in a folder, as transformers writes it, and a server of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.loading import LoadContext
from mlsys_dvabatch.scheduling.policies.input import PackedPolicy
from mlsys_dvabatch.serve.models import ServedModel
from mlsys_dvabatch.stages.simulated import parse_stages
from mlsys_encoders.loading import load_encoder
from mlsys_open_inference import create_oip_app
from mlsys_serving.extensions import Extensions
from mlsys_serving.http import BackgroundServer
from mlsys_serving.models import ModelRepository
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

_MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
_PLAIN = "a the cat dog sat ran on mat home is query : sun moon red blue"
WORDS = [*_MARKS, *_PLAIN.split()]


def write_folder(folder: Path, *, num_labels: int = 0, files: dict[str, Any] | None = None) -> Any:
    """Write an encoder of at most 16 tokens into ``folder``, or a classifier; return transformers' model."""
    torch.manual_seed(num_labels)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32,
        max_position_embeddings=16, initializer_range=0.3,
        **({"num_labels": num_labels} if num_labels else {}),
    )  # fmt: skip
    kind = transformers.BertForSequenceClassification if num_labels else transformers.BertModel
    model = kind(config).eval()
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(_MARKS)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return model


def served(folder: Path) -> ServedModel:
    """Serve a folder's encoder, packed."""
    loaded = load_encoder(folder, LoadContext(options={"stages": 1, "packed": True}))
    return ServedModel(loaded, parse_stages("1+0.1"), PackedPolicy(), max_batch_size=4, num_threads=1)


@contextmanager
def serving(*folders: Path) -> Iterator[str]:
    """Serve folders on a free port, and yield the address."""
    repository = ModelRepository([served(folder) for folder in folders])
    extensions = Extensions.of("dvabatch", installed_plugins().registry)
    app = create_oip_app(repository, system="dvabatch", extensions=extensions)
    with BackgroundServer(app) as server:
        yield server.url
