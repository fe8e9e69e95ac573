"""Encoders against transformers: small random checkpoints of every family, and the real all-MiniLM-L6-v2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from mlsys_core.errors import MissingDependencyError
from mlsys_core.models import resolve_model
from mlsys_orca.engine.embedding import TextEncoder, load_encoder
from torch import Tensor
from torch.nn import functional

VOCAB = 200
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 70,
    "initializer_range": 0.2,
}
DISTILBERT = {"dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SHAPE),
    "bert-relu": ("Bert", SHAPE | {"hidden_act": "relu", "type_vocab_size": 1}),
    "roberta": ("Roberta", SHAPE | {"pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", SHAPE | {"pad_token_id": 1}),
    "camembert": ("Camembert", SHAPE | {"pad_token_id": 1}),
    "distilbert": ("DistilBert", SHAPE | DISTILBERT),
    "mpnet": ("MPNet", SHAPE | {"pad_token_id": 1}),
}
LENGTHS = [1, 20, 3, 33, 5, 2, 64, 9, 40, 4]
TEXTS = [[2 + (7 * i + 3 * j * j + 11) % (VOCAB - 2) for j in range(length)] for i, length in enumerate(LENGTHS)]


def write_checkpoint(path: Path, name: str, *, with_head: bool = False) -> Any:
    """A directory as transformers saves one, nothing left at a value that would hide a mistake; returns the model."""
    import transformers

    family, shape = CASES[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**shape)
    auto = transformers.AutoModelForMaskedLM if with_head else transformers.AutoModel
    model: Any = auto.from_config(config).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms are ones and biases zeros otherwise
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(path)
    vocab = {f"t{token_id}": token_id for token_id in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "t0")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({}))
    return model.base_model


def states(model: Any, text: list[int]) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(input_ids=torch.tensor([text])).last_hidden_state[0]
    return out


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    reference = write_checkpoint(tmp_path, name)
    found = [states(reference, text) for text in TEXTS]
    mean = load_encoder(tmp_path, dtype="fp32").embed(TEXTS)
    assert torch.allclose(mean, torch.stack([rows.mean(0) for rows in found]), atol=1e-5, rtol=0)
    first = load_encoder(tmp_path, dtype="fp32", pooling="cls", normalize=True).embed(TEXTS)
    assert torch.allclose(first, functional.normalize(torch.stack([rows[0] for rows in found])), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "mpnet"])
def test_heads_of_other_tasks_are_left_out(tmp_path: Path, name: str) -> None:
    """Such files also have longer names than those of an encoder alone."""
    reference = write_checkpoint(tmp_path, name, with_head=True)
    vectors = load_encoder(tmp_path, dtype="fp32").embed(TEXTS[:3])
    expected = torch.stack([states(reference, text).mean(0) for text in TEXTS[:3]])
    assert torch.allclose(vectors, expected, atol=1e-5, rtol=0)


def test_neighbours_change_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "bert")
    encoder = load_encoder(tmp_path, dtype="fp32")
    together = encoder.embed(TEXTS)
    assert torch.allclose(torch.cat([encoder.embed([text]) for text in TEXTS]), together, atol=1e-6, rtol=0)
    assert torch.allclose(encoder.embed(TEXTS[::-1], max_batch_tokens=50).flip(0), together, atol=1e-6, rtol=0)


def test_bf16_vectors_nearly_point_where_fp32_ones_do(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "bert")
    exact, rounded = (load_encoder(tmp_path, dtype=dtype).embed(TEXTS) for dtype in ("fp32", "bf16"))
    assert rounded.dtype == torch.float32
    assert functional.cosine_similarity(exact, rounded).min() > 0.999


SENTENCES = [
    "Plants need sunlight to grow.",
    "Photosynthesis turns light into sugar.",
    "The stock market fell sharply on Monday.",
    "Shares lost value at the start of the week.",
    "He plays the violin in an orchestra.",
    "A musician performs with a string instrument.",
    "Der Hund schläft im Garten.",
    "The dog sleeps in the garden.",
    "x",
    "",
    "Numbers like 3.14159 and 2.71828 are irrational, and transcendental too.",
    " ".join(["A long story about many things that happened in the village, told slowly."] * 60),
]


@pytest.fixture(scope="module")
def minilm() -> tuple[Path, TextEncoder]:
    try:
        path = resolve_model("all-minilm-l6-v2", Path("/nonexistent"))
    except MissingDependencyError as error:
        pytest.skip(str(error))
    return path, load_encoder(path, dtype="fp32")


@pytest.mark.model
def test_minilm_is_that_of_transformers(minilm: tuple[Path, TextEncoder]) -> None:
    """Its own files say: the mean, of 256 tokens at most, to length 1."""
    import transformers

    path, encoder = minilm
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path).eval()
    inputs = tokenizer(SENTENCES, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        rows = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    expected = functional.normalize((rows * mask).sum(1) / mask.sum(1))

    vectors = encoder.embed(SENTENCES, truncate=True)
    assert vectors.shape == (len(SENTENCES), encoder.dimension) == (12, 384)
    assert torch.allclose(vectors, expected, atol=1e-5, rtol=0)
    for ours, theirs in zip(vectors @ vectors.T, expected @ expected.T, strict=True):
        assert ours.argsort().tolist() == theirs.argsort().tolist()
    token_ids = [encoder.tokenize(text, truncate=True) for text in SENTENCES]
    assert [len(ids) for ids in token_ids] == inputs["attention_mask"].sum(1).tolist()
    assert torch.allclose(encoder.embed(token_ids, max_batch_tokens=64), vectors, atol=1e-6, rtol=0)


@pytest.mark.model
def test_minilm_knows_what_belongs_together(minilm: tuple[Path, TextEncoder]) -> None:
    vectors = minilm[1].embed(SENTENCES[:6])
    likeness = (vectors @ vectors.T).fill_diagonal_(-1)
    assert likeness.argmax(1).tolist() == [1, 0, 3, 2, 5, 4]
