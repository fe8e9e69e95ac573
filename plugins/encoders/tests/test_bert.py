"""The encoder: packed equals padded; the real MiniLM equals the reference; damaged folders are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlsys_core.cli.main import run
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_core.loop import Collector, ServeRequest
from mlsys_core.models import resolve_model
from mlsys_core.profiling import ProfileTable, UnitProfile
from mlsys_dvabatch.engine import Engine
from mlsys_dvabatch.scheduling.costs import TableCosts, unit_name
from mlsys_dvabatch.scheduling.policies.input import PackedPolicy
from mlsys_dvabatch.serve.preparing import Batching, prepare
from mlsys_dvabatch.stages.profile import boundary_nbytes
from mlsys_dvabatch.stages.simulated import LinearStage, StagedModel
from mlsys_dvabatch.stages.zoo import Loaded, Loading, load
from mlsys_encoders.models.bert import BertStages
from mlsys_encoders.models.bert_folder import load_bert
from mlsys_encoders.models.config import BertConfig
from mlsys_encoders.serve.tokens import tokenizer_of
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.graph_checks import check_graph

TINY = BertConfig(hidden_size=32, num_layers=5, num_heads=4, intermediate_size=64, vocab_size=100, max_length=64)
TEXTS = (
    "The train is late.",
    "A dog sleeps in the sun, and the cat watches it from the window sill without moving.",
    "Bread.",
    "Although the forecast had promised clear skies for the whole weekend, a storm came up from the coast on Saturday.",
    "The puppy naps on the warm porch.",
)


def embed(model: BertStages, tokens: list[Tensor], padded_length: int = 1) -> Tensor:
    requests: list[ServeRequest[Any]] = [ServeRequest(str(n), ids.numpy()) for n, ids in enumerate(tokens)]
    with torch.inference_mode():
        values = model.collate(requests, padded_length)
        for stage in range(model.num_stages):
            values = model.run(stage, values)
        return torch.from_numpy(np.stack(model.results(values)))


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_batch_gives_what_each_alone_gives(num_stages: int, is_packed: bool):
    torch.manual_seed(0)
    model = BertStages(TINY, 1).eval()
    tokens = [torch.randint(100, (length,)) for length in (3, 17, 1, 40)]
    alone = torch.cat([embed(model, [ids]) for ids in tokens])
    other = model.with_form(is_packed=is_packed, num_stages=num_stages)
    torch.testing.assert_close(embed(other, tokens, padded_length=48), alone, rtol=0, atol=1e-5)


def test_stages_are_whole_layers():
    with pytest.raises(InvalidInputError, match="give 1 to 5"):
        BertStages(TINY, 6)


@pytest.mark.model
def test_minilm_equals_the_reference():
    """Vectors within 1e-5 of transformers' BertModel, and the same order of likeness."""
    transformers = pytest.importorskip("transformers")
    try:
        folder = resolve_model("all-minilm-l6-v2", settings().cache_dir)
    except MissingDependencyError as error:
        pytest.skip(str(error))
    loaded = load("all-minilm-l6-v2", settings().cache_dir, Loading(num_stages=3))
    assert isinstance(loaded.model, BertStages)
    tokenizer = tokenizer_of(folder, loaded.model.config)
    tokens = [torch.tensor(encoded.ids) for encoded in tokenizer.encode_batch(list(TEXTS))]
    reference = transformers.BertModel.from_pretrained(str(folder)).eval()
    with torch.no_grad():
        pooled = torch.cat([reference(ids[None]).last_hidden_state.mean(1) for ids in tokens])
    expected = torch.nn.functional.normalize(pooled, dim=-1)
    for model in (loaded.model, loaded.model.with_form(is_packed=True)):
        got = embed(model, tokens)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        assert (got @ got.T).argsort(1).tolist() == (expected @ expected.T).argsort(1).tolist()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "holds no BERT-like encoder"),
        ({"config.json": b"{"}, "holds no BERT-like encoder"),
        ({"config.json": b"{}", "model.safetensors": b"damaged"}, "damaged"),
    ],
    ids=["empty", "config", "weights"],
)
def test_damaged_folders_are_refused(tmp_path: Path, files: dict[str, bytes], says: str):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInputError, match=says):
        load_bert(tmp_path)


def test_another_kind_of_model_is_refused(tmp_path: Path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InvalidInputError, match="got 'llama'"):
        load_bert(tmp_path)


def test_an_unknown_name_lists_what_there_is(tmp_path: Path):
    with pytest.raises(InvalidInputError, match="bert-base, bert-large"):
        load("berth", tmp_path)


def test_an_encoder_has_no_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(InvalidInputError, match=r"has no exits, .* take another policy"):
        prepare("minilm-random", tmp_path / "cache", Batching(policy="early-exit"))
    monkeypatch.setenv("MLSYS_CACHE_DIR", str(tmp_path))
    settings.cache_clear()
    try:
        assert run(["dvabatch", "profile", "minilm-random", "--exits"]) == 2
    finally:
        settings.cache_clear()
    assert "this model has no exits" in capsys.readouterr().err


def test_values_between_stages_are_counted():
    def zeros(length: int) -> NDArray[np.int64]:
        return np.zeros(length, np.int64)

    model = BertStages(TINY, 3, is_packed=True).eval()
    hidden = 4 * 7 * TINY.hidden_size * 4  # requests, tokens, features, bytes
    assert boundary_nbytes(model, zeros, num=4, length=7) == [hidden, hidden]
    padded = boundary_nbytes(model.with_form(is_packed=False), zeros, num=4, length=7)
    assert all(hidden < nbytes < 2 * hidden for nbytes in padded)


@pytest.mark.parametrize("is_packed", [False, True])
def test_an_encoder_that_sees_its_padding_is_refused(is_packed: bool):
    config = BertConfig(hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, vocab_size=100, max_length=32)
    torch.manual_seed(0)
    model = BertStages(config, 2, is_packed=is_packed).eval()
    model.isolation.require(64)

    class Careless(BertStages):
        def _embed(self, tokens: Tensor, types: Tensor | None, positions: Tensor) -> Tensor:
            return super()._embed(tokens, types, positions) * tokens.shape[0 if is_packed else 1]

    careless = Careless(config, 2, is_packed=is_packed).eval()
    careless.norm = nn.Identity()
    with pytest.raises(InvalidInputError, match="mixes requests"):
        careless.isolation.require(64)


def test_answers_of_batches_made_ready_are_those_of_texts_alone():
    config = BertConfig(hidden_size=48, num_layers=2, num_heads=3, intermediate_size=80, vocab_size=50, max_length=64)
    model = BertStages(config, 1, is_packed=True).eval()
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 50, int(length)) for length in rng.integers(1, 30, 120)]
    instant = StagedModel((LinearStage(0.0, 1e-15),))  # so the next batch is due when one begins
    collector = Collector[Any, Any]()
    engine = Engine(model, instant, PackedPolicy(max_tokens=64), listener=collector, num_threads=2, max_batch_size=8)
    for number, row in enumerate(rows):
        engine.loop.submit(ServeRequest(str(number), row, length=len(row)), str(number))
    with engine:
        assert engine.loop.drain(600)
        assert engine.scheduler.counters["made ready ahead"] > 5
        assert sum(meter.num_rows for meter in engine.runner.meters) == 120
    for number, row in enumerate(rows):
        with torch.inference_mode():
            [[alone]] = model.answers([row])
        assert np.array_equal(collector.finished[str(number)].result, alone)


def test_stages_of_an_encoder(tmp_path: Path):
    config = BertConfig(hidden_size=8, num_layers=2, num_heads=2, intermediate_size=8, vocab_size=2000, max_length=16)
    loaded = Loaded("small", BertStages(config, 2).eval())
    units = [
        UnitProfile(unit_name(stage, length), (1, 4), (each * length, 2 * each * length), (0.0, 0.0))
        for stage, each in enumerate((0.1, 0.2))
        for length in (8, 16)
    ]
    costs = TableCosts(ProfileTable(tuple(units)), 2, (8, 16))
    graph = loaded.to_networkx(costs)
    check_graph(graph, tmp_path)
    assert list(graph) == ["stage 1", "stage 2"]
    first, second = (graph.nodes[name] for name in graph)
    assert (first["stage"], first["seconds"], first["catch_up_s"], first["has_exit"]) == (1, 1.6, 0.0, False)
    assert (second["stage"], second["seconds"], second["catch_up_s"], second["has_exit"]) == (2, 3.2, 1.6, True)
    assert (first["batch_sizes"], first["preferred_batch_size"]) == ("1, 4", 4)
    assert graph.edges["stage 1", "stage 2"]["nbytes"] == 16 * 8 * 4 + 8  # hidden states of 16 tokens, the length
