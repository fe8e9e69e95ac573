"""Divided encoders: the states of one process to the bit, and a live server's vectors through deaths of their ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.backends.runner import intra_op_threads
from mlsys_orca.engine.embedding import TextEncoder, load_encoder
from mlsys_orca.loading.encoder_files import read_encoder_files
from mlsys_orca.loading.load import DTYPES, default_dtype
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.encoder import spans_of
from mlsys_orca.parallel import messages
from mlsys_orca.parallel.encoder_parts import divide_encoder
from mlsys_orca.parallel.encoder_shard import NoCache, config_of, load_encoder_shard
from mlsys_orca.parallel.placement import Placement, all_places
from mlsys_orca.parallel.tensors.shared_memory import SharedReducer
from mlsys_orca.parallel.wiring import GroupShape
from mlsys_serving.processes import can_supervise
from torch import Tensor

from tests.orca.parallel.groups import group_of
from tests.orca.survival.commands import Served, served

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{index}" for index in range(255))]  # 259: no degree divides it
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SHAPE),
    "roberta": ("Roberta", SHAPE),
    "mpnet": ("MPNet", SHAPE),
    "distilbert": ("DistilBert", {"dim": 128, "hidden_dim": 256, "n_layers": 4, "n_heads": 4}),
}
LENGTHS = [7, 1, 30, 12]
FP32 = torch.float32


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a family's small encoder, each written once."""
    transformers = pytest.importorskip("transformers")
    made: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        if name not in made:
            family, shape = FAMILIES[name]
            torch.manual_seed(7)
            config = getattr(transformers, f"{family}Config")(
                vocab_size=len(WORDS), max_position_embeddings=70, initializer_range=0.2, **shape
            )
            model = transformers.AutoModel.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter), alpha=0.2)
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
            write_tokenizer(made[name])
        return made[name]

    return path_of


def write_tokenizer(path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with intra_op_threads(1):
        yield


class Sliced:
    """All of an encoder in this process, its sums in the slices that ranks have."""

    head, device = None, torch.device("cpu")

    def __init__(self, path: Path, dtype: torch.dtype = FP32) -> None:
        self._shard = load_encoder_shard(read_encoder_files(path), Placement(), dtype=dtype, slices=True)
        self._shard = self._shard.join(None, num_threads=1)

    def __call__(self, token_ids: Tensor, positions: Tensor, spans: Any) -> Tensor:
        step = step_of(token_ids.tolist(), [span.stop - span.start for span in spans])
        out = torch.empty(len(token_ids), self._shard.whole.hidden_size)
        self._shard.run(ForwardInputs(messages.batch_of(step), block_size=1, device="cpu"), None, out, NoCache())
        return out


def step_of(token_ids: list[int], lengths: list[int]) -> messages.Step:
    parts = tuple(messages.Part(length, 0, ()) for length in lengths)
    return messages.Step(0, tuple(token_ids), parts, (), tuple(range(len(token_ids))), needs_logits=True)


def divided_states(path: Path, step: messages.Step, ranks: int, stages: int) -> Tensor:
    files = read_encoder_files(path)
    whole = config_of(files.config)
    memories = [SharedReducer.create(whole, num_ranks=ranks) for _ in range(stages)]
    joined = []
    for place in all_places(tensor_parallel=ranks, pipeline_parallel=stages):
        reducer = SharedReducer(memories[place.stage], whole, rank=place.rank, num_ranks=ranks)
        shard = load_encoder_shard(files, place, dtype=FP32)
        joined.append(shard.join(reducer if ranks > 1 else None, num_threads=1))
    shape = GroupShape(
        tensor_parallel=ranks,
        pipeline_parallel=stages,
        max_in_flight=1,
        max_tokens=64,
        max_rows=64,
        hidden_size=whole.hidden_size,
        vocab_size=whole.hidden_size,
        num_blocks=1,
        num_threads=1,
    )
    with group_of(joined, shape) as executor:
        return executor.results_of(step)


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_give_the_bits_of_one_process(encoders: Any, name: str) -> None:
    path = encoders(name)
    token_ids = [(11 * index + 5) % len(WORDS) for index in range(sum(LENGTHS))]
    step, spans = step_of(token_ids, LENGTHS), spans_of(LENGTHS)
    ids, positions = torch.tensor(token_ids), torch.cat([torch.arange(length) for length in LENGTHS])
    sliced = Sliced(path)(ids, positions, spans)
    with torch.inference_mode():
        plain = load_encoder(path, dtype="fp32")._encoder(ids, positions, spans).float()
    for ranks, stages in ((2, 1), (4, 1), (2, 2)):
        assert torch.equal(divided_states(path, step, ranks, stages), sliced), (ranks, stages)
    for stages in (2, 4):
        assert torch.equal(divided_states(path, step, 1, stages), plain), stages
    assert torch.allclose(sliced, plain, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_divided_is_refused_in_one_line(encoders: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="1, 2 or 4 do"):
        divide_encoder(encoders("bert"), tensor_parallel=3, pipeline_parallel=1)
    with pytest.raises(InvalidInputError, match="4 layers; 1, 2 or 4 do"):
        divide_encoder(encoders("bert"), tensor_parallel=1, pipeline_parallel=3)
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**SHAPE, vocab_size=len(WORDS), num_labels=1)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(InvalidInputError, match="is a cross-encoder, and those are not divided"):
        divide_encoder(tmp_path, tensor_parallel=2, pipeline_parallel=1)


@pytest.mark.slow
@pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise()))
def test_a_servers_vectors_outlive_the_ranks_that_compute_them(encoders: Any, six_layers: Path) -> None:
    path = encoders("bert")
    files, sliced = read_encoder_files(path), Sliced(path, DTYPES[default_dtype()])
    alone = TextEncoder("one", config=files.config, encoder=sliced, tokenizer=files.tokenizer(), pooling=files.pooling)
    texts = ["w1 w2 w3", "w9", " ".join(f"w{index}" for index in range(40))]
    expected = alone.embed(texts).tolist()

    def vectors(server: Served) -> list[list[float]]:
        answer = server.post("/v1/embeddings", model=path.name, input=texts)
        assert answer.status_code == 200, answer.text
        return [item["embedding"] for item in answer.json()["data"]]

    def ranks(server: Served) -> list[psutil.Process]:
        return [each for each in server.processes("mlsys-rank") if each.parent().name().startswith("embed")]

    options = ["--name", "six", "--dtype", "fp32", "--max-model-len", "96", "--encoder", str(path)]
    with served(str(six_layers), *options, "--tensor-parallel", "2") as server:
        assert f"embeddings by {path.name}, 1 stage of 2 ranks" in server.said()
        assert vectors(server) == expected
        assert len(ranks(server)) == 2
        for number in (signal.SIGKILL, signal.SIGSTOP):
            ranks(server)[0].send_signal(number)
            assert vectors(server) == expected
        server.processes("embed 0.1")[0].kill()
        assert vectors(server) == expected
