"""The encoder's public face: batches, refusals, and the command."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import openai
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_orca.api.server import make_app, make_service
from mlsys_orca.cli.main import app
from mlsys_orca.engine.embedding import TextEncoder, load_encoder, pack
from mlsys_orca.engine.engine import EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_serving.http import BackgroundServer, HttpConfig
from typer.testing import CliRunner

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "plants", "need", "light", "so", "do", "we"]


@given(st.lists(st.integers(1, 30)), st.integers(1, 40))
def test_every_text_is_in_one_batch_that_is_no_larger_than_it_must_be(lengths: list[int], budget: int) -> None:
    batches = list(pack(lengths, budget))
    assert [index for batch in batches for index in batch] == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[index] for index in batch) <= budget for batch in batches)
    for batch, following in pairwise(batches):
        assert sum(lengths[index] for index in batch) + lengths[following.start] > budget


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    path = tmp_path_factory.mktemp("tiny-bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
    )
    transformers.BertModel(config).save_pretrained(path)
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(WORDS[:4])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def encoder(directory: Path) -> TextEncoder:
    return load_encoder(directory, dtype="fp32")


def test_texts_and_their_tokens_are_the_same(encoder: TextEncoder) -> None:
    assert encoder.tokenize("plants need light") == [2, 4, 5, 6, 3]
    progress: list[tuple[int, int]] = []
    texts = ["plants need light", [2, 7, 8, 9, 3], "so do we"]
    vectors = encoder.embed(texts, max_batch_tokens=10, progress=lambda *at: progress.append(at))
    assert vectors.shape == (3, encoder.dimension)
    assert torch.equal(vectors[1], vectors[2])
    assert progress == [(2, 3), (3, 3)]
    assert encoder.embed([]).shape == (0, 16)


def test_a_long_text_is_refused_or_cut_before_its_last_mark(encoder: TextEncoder) -> None:
    text = "plants need light so do we so"
    with pytest.raises(InvalidInputError, match=r"9 tokens; .* takes from 1 to 8"):
        encoder.embed([text])
    assert encoder.tokenize(text, truncate=True) == [2, 4, 5, 6, 7, 8, 9, 3]


@pytest.mark.parametrize("token_ids", [[], [2, 10], [-1]])
def test_impossible_token_ids_are_refused(encoder: TextEncoder, token_ids: list[int]) -> None:
    with pytest.raises(InvalidInputError):
        encoder.embed([token_ids])


def test_a_text_forges_no_marks(encoder: TextEncoder) -> None:
    assert 3 not in encoder.tokenize("so [SEP] do")[1:-1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "tanh"}, "'tanh'"),
        ({"model_type": "deberta"}, "supported are bert"),
    ],
    ids=["positions", "decoder", "activation", "architecture"],
)
def test_unimplemented_options_are_refused_by_name(
    directory: Path, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    raw = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(InvalidInputError, match=said):
        load_encoder(tmp_path)


def test_an_encoder_is_no_language_model(directory: Path) -> None:
    with pytest.raises(InvalidInputError, match="writes no text; for embeddings: mlsys orca embed"):
        load_model(directory)


def test_the_command_writes_a_line_per_text(directory: Path, encoder: TextEncoder, tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_text("plants need light\n\nso do we\n")
    arguments = ["embed", str(file), "--model", str(directory), "--dtype", "fp32", "--threads", "1"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    piped = CliRunner().invoke(app, ["embed", "-", *arguments[2:]], input=file.read_text(), catch_exceptions=False)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["text"] for line in lines] == ["plants need light", "so do we"]
    assert torch.equal(
        torch.tensor([line["embedding"] for line in lines]), encoder.embed(["plants need light", "so do we"])
    )
    assert piped.stdout == result.stdout


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert", "MPNet"])
def test_a_cross_encoder_scores_pairs_as_transformers_does(directory: Path, tmp_path: Path, kind: str) -> None:
    import transformers

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "DistilBert":
        sizes = {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(WORDS), max_position_embeddings=24, pad_token_id=1, num_labels=1, initializer_range=0.5, **sizes
    )
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    model.save_pretrained(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    encoder = load_encoder(tmp_path, dtype="fp32")
    query, documents = "so do plants", ["we need light", "plants", "light light do we need so do we"]
    scores, num_tokens = encoder.score(query, documents, max_batch_tokens=20)
    pairs = [backend.encode(query, document) for document in documents]
    assert num_tokens == sum(len(pair.ids) for pair in pairs)
    for score, pair in zip(scores, pairs, strict=True):
        types = {"token_type_ids": torch.tensor([pair.type_ids])} if kind == "Bert" else {}
        with torch.inference_mode():
            expected = model(torch.tensor([pair.ids]), **types).logits[0, 0].sigmoid()
        assert score == pytest.approx(float(expected), abs=1e-5)
    assert len(set(scores.tolist())) == 3
    long = "light " * 30
    with pytest.raises(InvalidInputError, match="have it truncated"):
        encoder.score(query, [long])
    assert encoder.score(query, [long], truncate=True)[1] == encoder.max_tokens


def test_an_encoder_without_such_a_head_scores_no_pairs(encoder: TextEncoder) -> None:
    with pytest.raises(InvalidInputError, match="no cross-encoder"):
        encoder.score("so", ["do"])


def test_a_batch_of_embeddings(encoder: TextEncoder, tiny_gguf: Path) -> None:
    encoder.name = "tiny-bert"
    service = make_service(load_model(tiny_gguf, dtype="fp32"), "tiny", EngineConfig(max_model_len=96), encoder=encoder)
    texts = ["plants need light", "so do we", "we", "light"]
    bodies = [{"model": encoder.name, "input": text} for text in texts] + [{"model": "tiny", "input": "so"}]
    lines = [
        {"custom_id": str(index), "method": "POST", "url": "/v1/embeddings", "body": body}
        for index, body in enumerate(bodies)
    ]
    with BackgroundServer(make_app(service, HttpConfig(validation_status=400))) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        while (batch := client.batches.retrieve(batch.id)).status != "completed":
            time.sleep(0.01)
        found = [json.loads(line) for line in client.files.content(batch.output_file_id or "").text.splitlines()]
        (error,) = client.files.content(batch.error_file_id or "").text.splitlines()
    vectors = [line["response"]["body"]["data"][0]["embedding"] for line in found]
    assert torch.equal(torch.tensor(vectors), torch.cat([encoder.embed([text]) for text in texts]))
    assert json.loads(error)["response"]["status_code"] == 400
