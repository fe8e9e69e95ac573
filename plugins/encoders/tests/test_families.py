"""Families of encoders on random small folders: what transformers and sentence-transformers' modules give."""

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
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 60,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 70,
    "initializer_range": 0.25,
}
DISTIL = {"vocab_size": 60, "dim": 24, "n_layers": 3, "n_heads": 2, "hidden_dim": 40, "max_position_embeddings": 70}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SIZES),
    "bert, tanh gelu": ("Bert", {**SIZES, "hidden_act": "gelu_new"}),
    "roberta": ("Roberta", {**SIZES, "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "xlm-roberta": ("XLMRoberta", {**SIZES, "type_vocab_size": 1, "pad_token_id": 1}),
    "mpnet": ("MPNet", SIZES),
    "distilbert": ("DistilBert", {**DISTIL, "initializer_range": 0.25}),
    "modernbert": ("ModernBert", {**SIZES, "local_attention": 16, "pad_token_id": 0, "layer_types": None}),
    "modernbert, biases": (
        "ModernBert",
        {
            **SIZES,
            "local_attention": 10,
            "pad_token_id": 0,
            "global_attn_every_n_layers": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
        },
    ),
    "nomic": ("NomicBert", SIZES),
}
LENGTHS = (3, 41, 1, 7, 66)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def model_of(name: str, kind: str = "Model", **config: Any) -> Any:
    prefix, sizes = FAMILIES[name]
    named = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2} if "Modern" in prefix else {}
    made = getattr(transformers, f"{prefix}Config")(**sizes, **named, **config)
    model = getattr(transformers, f"{prefix}{kind}")(made).eval()
    for parameter in model.parameters():  # norms and biases too
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 60, length) for length in lengths]


def run(model: BertStages, payloads: list[Any]) -> Tensor:
    requests: list[ServeRequest[Any]] = []
    for number, payload in enumerate(payloads):
        requests.append(ServeRequest(str(number), payload, length=model.check(payload)))
    with torch.inference_mode():
        values: Any = model.collate(requests, 1)
        for stage in range(model.num_stages):
            values = model.run(stage, values)
    return torch.from_numpy(np.stack(model.results(values)))


def assert_alike(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert functional.cosine_similarity(got, expected).min() > 0.99999


@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_are_those_of_transformers(name: str, tmp_path: Path):
    source = model_of(name)
    source.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = torch.stack(
            [source(torch.from_numpy(ids)[None]).last_hidden_state[0].mean(0) for ids in texts()]
        )  # fmt: skip
    for is_packed in (True, False):
        model = load_bert(tmp_path, num_stages=2, is_packed=is_packed)
        assert model.config.max_length in (70, 68)  # RoBERTa's positions begin behind the padding token's
        assert_alike(run(model, texts()), functional.normalize(expected, dim=-1))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "bert, tanh gelu"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classifiers_give_the_logits_of_transformers(name: str, num_labels: int, tmp_path: Path):
    config = {"classifier_pooling": "mean", "classifier_bias": True} if name == "modernbert, biases" else {}
    source = model_of(name, "ForSequenceClassification", num_labels=num_labels, **config)
    source.save_pretrained(tmp_path)
    payloads = texts()
    has_types = source.config.to_dict().get("type_vocab_size", 0) > 1
    if has_types:  # the second half of each text is of the second type
        payloads = [np.stack([ids, np.arange(len(ids)) >= len(ids) // 2]).astype(np.int64) for ids in payloads]
    expected = []
    for each in payloads:
        ids, types = each if has_types else (each, None)
        named = {} if types is None else {"token_type_ids": torch.from_numpy(types)[None]}
        with torch.no_grad():
            expected.append(source(torch.from_numpy(ids)[None], **named).logits[0])
    for is_packed in (True, False):
        model = load_bert(tmp_path, num_stages=3, is_packed=is_packed)
        assert model.config.head is not None
        assert model.config.head.labels == tuple(f"LABEL_{number}" for number in range(num_labels))
        assert_alike(run(model, payloads), torch.stack(expected)) if num_labels > 1 else torch.testing.assert_close(
            run(model, payloads), torch.stack(expected), rtol=1e-5, atol=1e-5
        )


def test_nomics_own_files_are_read(tmp_path: Path):
    source = model_of("nomic")
    source.save_pretrained(tmp_path)
    raw = {
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "n_embd": 24,
        "n_head": 2,
        "n_inner": 40,
        "n_layer": 3,
        "n_positions": 70,
        "vocab_size": 60,
        "layer_norm_epsilon": 1e-12,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "activation_function": "swiglu",
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with torch.no_grad():
        expected = torch.stack(
            [source(torch.from_numpy(ids)[None]).last_hidden_state[0].mean(0) for ids in texts()]
        )  # fmt: skip
    assert_alike(run(load_bert(tmp_path, is_packed=True), texts()), functional.normalize(expected, dim=-1))
    for key, value in (("rotary_scaling_factor", 2), ("prenorm", True), ("qkv_proj_bias", True)):
        (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
        with pytest.raises(InvalidInputError, match=f"got {key} {value!r}; only"):
            load_bert(tmp_path)


@pytest.mark.parametrize("is_normalised", [True, False])
def test_dense_modules_are_obeyed(tmp_path: Path, is_normalised: bool):
    source = model_of("bert")
    source.save_pretrained(tmp_path)
    kinds = ["Transformer", "Pooling", "Dense", "Dense", *(["Normalize"] if is_normalised else [])]
    paths = ["", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize"]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in zip(kinds, paths)]  # noqa: B905 - the last path may be unused
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    layers = [torch.nn.Linear(24, 10), torch.nn.Linear(10, 6, bias=False)]
    acts = ["torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"]
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    for path, layer, act in zip(paths[2:4], layers, acts, strict=True):
        (tmp_path / path).mkdir()
        asked = {"in_features": layer.in_features, "out_features": layer.out_features, "activation_function": act}
        (tmp_path / path / "config.json").write_text(json.dumps(asked | {"bias": layer.bias is not None}))
        save_file({f"linear.{k}": v for k, v in layer.state_dict().items()}, tmp_path / path / "model.safetensors")
    with torch.no_grad():
        states = [source(torch.from_numpy(ids)[None]).last_hidden_state[0, 0] for ids in texts()]
        expected = layers[1](torch.tanh(layers[0](torch.stack(states))))
    expected = functional.normalize(expected, dim=-1) if is_normalised else expected
    model = load_bert(tmp_path, is_packed=True)
    assert model.config.embedding_size == 6
    assert_alike(run(model, texts()), expected)


@pytest.mark.parametrize(
    ("name", "config", "says"),
    [
        ("bert", {"model_type": "deberta-v2"}, r"got 'deberta-v2'; a BERT-like encoder \(model_type bert, roberta,"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "only 32 is computed"),
        ("roberta", {"pad_token_id": "x"}, "pad_token_id is 'x'"),
        ("roberta", {"max_position_embeddings": 2}, "leave none behind"),
        ("modernbert", {"layer_types": ["chunked"] * 3}, "got layer_types 'chunked'"),
        ("modernbert", {"local_attention": 0}, "local_attention is 0"),
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "only those of rope_type"),
        ("nomic", {"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, "only those of rope_type"),
        ("bert", {"type_vocab_size": -1}, "type_vocab_size is -1"),
        ("bert", {"architectures": ["BertForSequenceClassification"], "id2label": {"1": "x"}}, "no label '0'"),
    ],
)
def test_configurations_that_are_not_computed_are_refused(name: str, config: Any, says: str, tmp_path: Path):
    model_of(name).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | config))
    with pytest.raises(InvalidInputError, match=says):
        load_bert(tmp_path)


def test_a_weight_too_many_is_refused(tmp_path: Path):
    model_of("modernbert").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "layers.0.attn_norm.weight": torch.ones(24)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidInputError, match=r"no layer takes layers\.0\.attn_norm\.weight"):
        load_bert(tmp_path)


def test_token_types_that_are_not_there_are_refused(tmp_path: Path):
    model_of("bert").save_pretrained(tmp_path)
    model = load_bert(tmp_path)
    with pytest.raises(InvalidInputError, match="token types from 0 to 2: the model has 0 to 1"):
        model.check(np.array([[5, 6], [0, 2]]))
