"""A folder's pooling is obeyed, or refused: against transformers' encoder, pooled one text at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import ServeRequest
from mlsys_encoders.models.bert import BertStages
from mlsys_encoders.models.bert_folder import load_bert
from mlsys_encoders.models.sentence import read_sentence_form
from mlsys_encoders.serve.tokens import tokenizer_of
from safetensors.torch import load_file, save_file
from torch import Tensor

transformers = pytest.importorskip("transformers")
MODULES = ("Transformer", "Pooling", "Normalize")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32, vocab_size=50,
        max_position_embeddings=40,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    folder = tmp_path_factory.mktemp("encoder")
    model.save_pretrained(folder)
    return folder, model


def folder_of(source: Path, to: Path, files: dict[str, Any], **config: Any) -> Path:
    """A copy of ``source`` with further JSON files and other entries of its config.json."""
    for name in ("config.json", "model.safetensors"):
        (to / name).write_bytes((source / name).read_bytes())
    raw = json.loads((to / "config.json").read_text()) | config
    (to / "config.json").write_text(json.dumps(raw))
    for name, content in files.items():
        (to / name).parent.mkdir(exist_ok=True)
        (to / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return to


def modules(pooling: dict[str, Any], kinds: tuple[str, ...] = MODULES) -> dict[str, Any]:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    listed = [
        {"idx": n, "path": paths.get(k, k), "type": f"sentence_transformers.models.{k}"} for n, k in enumerate(kinds)
    ]
    return {"modules.json": listed, "1_Pooling/config.json": {"word_embedding_dimension": 24, **pooling}}


REFERENCE: dict[str, Any] = {  # of hidden [tokens, features]
    "cls_token": lambda hidden: hidden[0],
    "max_tokens": lambda hidden: torch.stack([column.max() for column in hidden.T]),
    "mean_tokens": lambda hidden: sum(hidden) / len(hidden),
    "mean_sqrt_len_tokens": lambda hidden: sum(hidden) / len(hidden) ** 0.5,
    "weightedmean_tokens": lambda hidden: (
        sum((n + 1) * row for n, row in enumerate(hidden)) / sum(range(len(hidden) + 1))
    ),
    "lasttoken": lambda hidden: hidden[-1],
}


def vectors(model: BertStages, texts: list[Any]) -> Tensor:
    requests: list[ServeRequest[Any]] = [ServeRequest(str(n), ids) for n, ids in enumerate(texts)]
    with torch.inference_mode():
        values: Any = model.collate(requests, 1)
        for stage in range(model.num_stages):
            values = model.run(stage, values)
    return torch.from_numpy(np.stack(model.results(values)))


@pytest.mark.parametrize(
    "asked", [*[[name] for name in REFERENCE], ["cls_token", "mean_tokens"], ["lasttoken", "max_tokens"]]
)
@pytest.mark.parametrize("is_normalised", [True, False])
def test_pooling_is_as_the_folder_says(source: tuple[Path, Any], tmp_path: Path, asked: list[str], is_normalised: bool):
    pooling = {f"pooling_mode_{name}": name in asked for name in REFERENCE}
    folder = folder_of(source[0], tmp_path, modules(pooling, MODULES if is_normalised else MODULES[:2]))
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 50, length) for length in (3, 11, 1, 7)]
    expected = []
    for ids in texts:
        with torch.no_grad():
            hidden = source[1](torch.from_numpy(ids)[None]).last_hidden_state[0]
        vector = torch.cat([REFERENCE[name](hidden) for name in REFERENCE if name in asked])
        expected.append(vector / vector.norm() if is_normalised else vector)
    for is_packed in (False, True):
        model = load_bert(folder, is_packed=is_packed)
        assert model.config.embedding_size == 24 * len(asked)
        torch.testing.assert_close(vectors(model, texts), torch.stack(expected), rtol=0, atol=1e-5)


def test_modes_by_name_and_without_files(source: tuple[Path, Any], tmp_path: Path):
    named = load_bert(folder_of(source[0], tmp_path, modules({"pooling_mode": "cls"})))
    assert named.config.form.poolings == ("cls",)
    assert named.config.form.is_normalised
    plain = load_bert(source[0])
    assert (plain.config.form.poolings, plain.config.form.is_normalised) == (("mean",), True)


MEAN = {"pooling_mode_mean_tokens": True}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a classifier without its head": ({}, {"architectures": ["BertForSequenceClassification"]}, "pooler.dense.weight"),
    "tags": (modules(MEAN), {"architectures": ["BertForTokenClassification"]}, "'BertForTokenClassification', whose"),
    "questions": ({}, {"architectures": "BertForQuestionAnswering"}, "whose head is more than the encoder"),
    "a norm between": (modules(MEAN, (*MODULES, "Dense")), {}, "got Transformer, Pooling, Normalize, Dense; known"),
    "another module": (modules(MEAN, (*MODULES[:2], "LayerNorm")), {}, "got Transformer, Pooling, LayerNorm; known"),
    "a dense layer's file": (modules(MEAN, (*MODULES[:2], "Dense")), {}, "Dense/config.json cannot be read"),
    "a dense layer's size": (
        modules(MEAN, (*MODULES[:2], "Dense")) | {"Dense/config.json": {"in_features": 23, "out_features": 4}},
        {},
        "a product of 23 to 4 numbers, behind vectors of 24",
    ),
    "a dense layer's activation": (
        modules(MEAN, (*MODULES[:2], "Dense"))
        | {"Dense/config.json": {"in_features": 24, "out_features": 4, "activation_function": "torch.nn.Mish"}},
        {},
        "the activation 'Mish' is not known",
    ),
    "no pooling": (modules(MEAN, MODULES[:1]), {}, "got Transformer; known"),
    "another folder": (
        {**modules(MEAN), "modules.json": [{"type": "Transformer", "path": "0_BERT"}]},
        {},
        "in the folder",
    ),
    "an unknown mode": (modules({"pooling_mode_attention": True}), {}, "asks for the pooling pooling_mode_attention"),
    "an unknown name": (modules({"pooling_mode": "median"}), {}, "asks for the pooling median"),
    "no mode": (modules({"pooling_mode_mean_tokens": False}), {}, "of no mode"),
    "another size": (modules({**MEAN, "word_embedding_dimension": 25}), {}, "pools vectors of 25 numbers"),
    "no file": ({"modules.json": modules(MEAN)["modules.json"]}, {}, "cannot be read"),
    "outside": (
        {"modules.json": [{"type": "Transformer"}, {"type": "Pooling", "path": "../../x"}]},
        {},
        "outside of the encoder",
    ),
    "no list": ({"modules.json": {}}, {}, "a list of objects"),
    "damaged": ({"modules.json": "[" * 100_000}, {}, "cannot be read"),
    "a prompt": (
        {"config_sentence_transformers.json": {"default_prompt_name": "query"}},
        {},
        "'query', which is none of its prompts",
    ),
    "pooling without the prompt": (
        {
            **modules({**MEAN, "include_prompt": False}),
            "config_sentence_transformers.json": {"prompts": {"query": "find: "}},
        },
        {},
        "pooling without the prompt",
    ),
    "tokens": ({"sentence_bert_config.json": {"max_seq_length": "many"}}, {}, "max_seq_length is 'many'"),
    "a decoder": ({}, {"is_decoder": True}, "got is_decoder True; only False is computed here"),
    "relative positions": ({}, {"position_embedding_type": "relative_key"}, "only 'absolute' is computed here"),
    "another activation": ({}, {"hidden_act": "mish"}, "computed here are gelu"),
    "no heads": ({}, {"num_attention_heads": 0}, "num_attention_heads is 0: a whole number from 1"),
    "heads": ({}, {"num_attention_heads": 5}, "that the heads divide"),
    "no size": ({}, {"hidden_size": None}, "hidden_size is None"),
    "layers": ({}, {"num_hidden_layers": 10_000_000}, "at most 512 layers"),
    "epsilon": ({}, {"layer_norm_eps": -1.0}, "layer_norm_eps is -1.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_outputs_that_are_not_computed_are_refused(source: tuple[Path, Any], tmp_path: Path, name: str):
    files, config, says = REFUSED[name]
    with pytest.raises(InvalidInputError, match=says):
        load_bert(folder_of(source[0], tmp_path, files, **config))


def test_weights_that_nobody_takes_are_refused(source: tuple[Path, Any], tmp_path: Path):
    folder = folder_of(source[0], tmp_path, {})
    weights = load_file(source[0] / "model.safetensors")
    save_file({**weights, "classifier.weight": torch.zeros(2, 24)}, folder / "model.safetensors")
    with pytest.raises(InvalidInputError, match=r"no layer takes classifier\.weight"):
        load_bert(folder)


def test_texts_are_cut_as_the_folder_says(source: tuple[Path, Any], tmp_path: Path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"a": 1, "b": 2, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    for asked, expected in ((5, 5), (100, 40), (None, 40)):
        files = {} if asked is None else {"sentence_bert_config.json": {"max_seq_length": asked, "do_lower_case": True}}
        to = tmp_path / str(asked)
        to.mkdir()
        folder = folder_of(source[0], to, files)
        tokenizer.save(str(folder / "tokenizer.json"))
        model = load_bert(folder)
        assert len(tokenizer_of(folder, model.config).encode("a b " * 100).ids) == expected
        assert model.config.form.is_lower_case == (asked is not None)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [(None, 8, 8), (5, 8, 5), (None, 10**30, 10**30), (None, 1e30, int(1e30)), (None, None, None)],
)
def test_the_limit_of_a_text_stands_in_either_file(
    tmp_path: Path, old: int | None, new: float | None, expected: object
):
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": old}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": new}))
    for has_head in (False, True):
        assert read_sentence_form(tmp_path, 4, has_head=has_head).max_tokens == expected


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "8"])
def test_an_unfit_limit_of_the_tokenizer_is_refused_by_name(tmp_path: Path, limit: object):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
    with pytest.raises(InvalidInputError, match="model_max_length is"):
        read_sentence_form(tmp_path, 4, has_head=False)


def test_vectors_that_a_folder_wants_cut_are_refused_by_name(tmp_path: Path):
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": 2}))
    with pytest.raises(InvalidInputError, match=r"truncate_dim is 2, .* `dimensions` in"):
        read_sentence_form(tmp_path, 4, has_head=False)
