"""Programs whose requests have several sizes: batched only where each gets its own run's answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import ServeRequest
from mlsys_dvabatch.cli.explain import print_batching
from mlsys_dvabatch.serve.models import ServedModel
from mlsys_dvabatch.serve.preparing import Batching, Prepared, prepare
from mlsys_dvabatch.stages.activations import Padded
from mlsys_dvabatch.stages.slicing.program import load_program
from mlsys_dvabatch.stages.slicing.sized import Grouped, Member, SizedModel
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from mlsys_dvabatch.stages.zoo import Loading, load
from mlsys_open_inference import create_oip_app
from mlsys_serving.models import ModelRepository
from rich.console import Console
from torch import Tensor, nn
from torch._higher_order_ops import scan
from torch.export import Dim, export, save

BATCH = Dim("batch", min=1, max=64)
LENGTH = Dim("length", min=1, max=32)
RNG = np.random.default_rng(0)


def written(path: Path, module: nn.Module, inputs: tuple[Tensor, ...], *axes: dict[int, Any]) -> Path:
    """Export a module with dynamic axes, beside the batch's."""
    dims = tuple({0: BATCH, **each} for each in axes)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(export(module.eval(), inputs, dynamic_shapes=(dims,) if module.__class__ is nn.Sequential else dims), path)
    return path


class Recurrent(nn.Module):
    """A tagger over torch's own LSTM or GRU cell; from both ends if it is asked to."""

    def __init__(self, cell: type[nn.Module], *, both: bool = False) -> None:
        super().__init__()
        self.words, self.cell, self.tags, self.both = nn.Embedding(40, 8), cell(8, 12), nn.Linear(12, 5), both

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words).transpose(0, 1)
        zero = x.new_zeros(words.shape[0], 12)
        if isinstance(self.cell, nn.LSTMCell):

            def step(carry: Any, at: Tensor) -> Any:
                h, c = self.cell(at, carry)
                return (h, c), h.clone()

            hidden = scan(step, (zero, zero.clone()), x, reverse=self.both)[1]
        else:

            def step(carry: Any, at: Tensor) -> Any:
                h = self.cell(at, carry)
                return h, h.clone()

            hidden = scan(step, zero, x)[1]
        return self.tags(hidden.transpose(0, 1))


class Encoder(nn.Module):
    """A BERT of transformers, averaged over the tokens that its mask marks."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        self.bert = BertModel(BertConfig(vocab_size=60, max_position_embeddings=32, **shape))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        kept = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * kept).sum(1) / kept.sum(1).clamp(min=1e-9)


class Images(nn.Module):
    """A ResNet of transformers, for images of any height and width."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetForImageClassification

        config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3)
        self.net = ResNetForImageClassification(config)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.net(pixels).logits


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("programs")
    words, ones = torch.randint(0, 40, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
    sides = {2: Dim("height", min=9, max=64), 3: Dim("width", min=9, max=64)}
    return {
        "lstm": written(place / "lstm.pt2", Recurrent(nn.LSTMCell), (words,), {1: LENGTH}),
        "backwards": written(place / "backwards.pt2", Recurrent(nn.LSTMCell, both=True), (words,), {1: LENGTH}),
        "gru": written(place / "gru.pt2", Recurrent(nn.GRUCell), (words,), {1: LENGTH}),
        "encoder": written(place / "encoder.pt2", Encoder(), (words, ones), {1: LENGTH}, {1: LENGTH}),
        "images": written(place / "images.pt2", Images(), (torch.randn(2, 3, 24, 16),), sides),
    }


@pytest.fixture(scope="module")
def prepared(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Prepared]:
    """Each file is tried and measured once; its policy is of the one engine that serves it."""
    cache = tmp_path_factory.mktemp("cache")
    return lru_cache(lambda name: prepare(str(files[name]), cache, Batching(max_batch_size=4)))


def texts(length: int) -> tuple[Any, ...]:
    return (RNG.integers(0, 40, length),)


def masked(length: int) -> tuple[Any, ...]:
    ids, mask = RNG.integers(0, 60, length), np.ones(length, np.int64)
    if length > 4:
        mask[int(RNG.integers(1, length)) :] = 0
    if length == 9:
        mask[:2] = 0  # no padding of the right side: runs with its own size only
        mask[4] = 1
    return ids, mask


def images(side: int) -> tuple[Any, ...]:
    return (RNG.standard_normal((3, side + 8, 40 - side)).astype(np.float32),)


CASES: dict[str, tuple[Callable[[int], tuple[Any, ...]], str | None]] = {
    "lstm": (texts, "without a mask"),
    "backwards": (texts, None),
    "gru": (texts, "without a mask"),
    "encoder": (masked, "with 'attention_mask' as the mask"),
    "images": (images, None),
}


def expected(file: Path, requests: Sequence[tuple[Any, ...]]) -> list[Any]:
    module = torch.export.load(file).module()
    with torch.inference_mode():
        return [module(*(torch.from_numpy(each)[None] for each in request))[0].numpy() for request in requests]


@pytest.mark.parametrize("name", CASES)
def test_a_server_gives_each_request_its_own_answer(
    name: str, files: dict[str, Path], prepared: Callable[[str], Prepared]
):
    make, way = CASES[name]
    made = prepared(name)
    model = made.loaded.model
    assert isinstance(model, SizedModel)
    assert made.policy_name == "input"
    ways = [trial.describe().split(": ")[0] for trial in model.trials if trial.problem is None]
    assert ways == ([] if way is None else [way])
    assert (model.padding is None) == (way is None)
    sizes = [3, 5, 8, 3, 12, 9, 1, 5, 9, 8]
    requests = [make(size) for size in sizes]
    answers = expected(files[name], requests)
    batch = model.collate([ServeRequest(str(n), each) for n, each in enumerate(requests)], 1)
    assert len(batch.groups) == (len(set(sizes)) if way is None else 2 if name == "encoder" else 1)
    with torch.inference_mode():
        for row, other in zip(model.answers(requests), answers, strict=True):
            np.testing.assert_allclose(row[0], other, atol=1e-5)
    served = ServedModel(made.loaded, made.costs, made.policy, max_batch_size=4, num_threads=1)
    with TestClient(create_oip_app(ModelRepository([served]))) as client, ThreadPoolExecutor(5) as pool:
        description = client.get(f"/v2/models/{served.spec.name}").json()
        dynamic = {"images": [-1, 3, -1, -1]}.get(name, [-1, -1])
        assert [each["shape"] for each in description["inputs"]] == [dynamic] * len(requests[0])

        def ask(request: tuple[Any, ...]) -> Any:
            inputs = [
                {**tensor, "shape": [1, *array.shape], "data": array.ravel().tolist()}
                for tensor, array in zip(description["inputs"], request, strict=True)
            ]
            (output,) = client.post(f"/v2/models/{served.spec.name}/infer", json={"inputs": inputs}).json()["outputs"]
            return np.array(output["data"]).reshape(output["shape"])[0]

        for got, other in zip(pool.map(ask, requests), answers, strict=True):
            np.testing.assert_allclose(got, other, atol=1e-5)
        wrong = {**description["inputs"][0], "shape": [1, 3, 99, 16] if name == "images" else [1, 33]}
        wrong["data"] = [0] * int(np.prod(wrong["shape"]))
        others = [{**each, "shape": [1, 33], "data": [1] * 33} for each in description["inputs"][1:]]
        refused = client.post(f"/v2/models/{served.spec.name}/infer", json={"inputs": [wrong, *others]})
        assert refused.status_code == 400
        assert "takes requests of shape [" in refused.json()["error"]


def test_the_choice_is_explained(prepared: Callable[[str], Prepared]):
    for name, says in (
        ("encoder", ["Padding without a mask: what stands in the padding changes answers", "chosen under load:"]),
        ("backwards", ["one size only", "by size"]),
    ):
        console = Console(width=200)
        with console.capture() as capture:
            print_batching(prepared(name), console)
        assert all(each in capture.get() for each in [*says, "Policy: input"])


def test_a_mask_that_is_none_is_refused(files: dict[str, Path], tmp_path: Path):
    assert load(str(files["encoder"]), tmp_path, Loading(mask="attention_mask")).model.padding is not None
    for mask, file, says in (
        ("input_ids", "encoder", "a mask is an input of shape"),
        ("pixels", "images", "one dynamic dimension"),
        ("words", "lstm", "none of this program"),
    ):
        with pytest.raises(InvalidInputError, match=says):
            load(str(files[file]), tmp_path, Loading(mask=mask))


class Ignored(nn.Module):
    """A mean over all tokens, whatever the mask says."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.mean(1, keepdim=True) + 0 * mask.to(x.dtype).sum(1, keepdim=True)


class Pair(nn.Module):
    """Two inputs, the second twice as long."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sum(1) + y[:, ::2].sum(1)


def test_a_mask_that_keeps_nothing_out_is_refused(tmp_path: Path):
    inputs = (torch.randn(2, 8), torch.ones(2, 8))
    file = written(tmp_path / "ignored.pt2", Ignored(), inputs, {1: LENGTH}, {1: LENGTH})
    with pytest.raises(InvalidInputError, match="padded requests would get other answers than alone; with 'mask'"):
        load(str(file), tmp_path, Loading(mask="mask"))
    model = load(str(file), tmp_path).model
    assert isinstance(model, SizedModel)
    assert model.padding is None
    assert [trial.mask for trial in model.trials] == [None, "x", "mask"]


class Scaled(nn.Module):
    """A forward tagger whose answers are larger beyond some length, as with attention scaled by log n."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least

    def forward(self, x: Tensor) -> Tensor:
        num = torch.full((1,), x.shape[1]).to(x.dtype)
        return x.cumsum(1) * (num / self.least).clamp(min=1.0)


@settings(max_examples=4, deadline=None)
@given(least=st.integers(3, 400), most=st.integers(40, 400), example=st.integers(4, 12))
def test_padding_is_tried_over_all_lengths_that_are_padded(least: int, most: int, example: int):
    with TemporaryDirectory() as folder:
        length = Dim("length", min=1, max=most)
        file = written(Path(folder) / "scaled.pt2", Scaled(least), (torch.randn(2, example),), {1: length})
        program = load_program(file)
    model = SizedModel(SlicedModel(program, []))
    numbers = np.random.default_rng(least).standard_normal
    requests = [(numbers(size).astype(np.float32),) for size in {1, most, *range(2, most, 7)}]
    with torch.inference_mode():
        for (x,), (got,) in zip(requests, model.answers(requests), strict=True):
            np.testing.assert_allclose(got, Scaled(least)(torch.from_numpy(x)[None])[0].numpy(), rtol=1e-3, atol=1e-4)


class Together(nn.Module):
    """Texts that are centred over their batch from some number of requests on."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least

    def forward(self, x: Tensor) -> Tensor:
        num = torch.full((1, 1), x.shape[0]).to(x.dtype)
        return torch.where(num >= self.least, x - x.mean(0), x)


@pytest.mark.parametrize("least", [4, 9, 40, 64])
def test_batches_of_several_sizes_are_tried_as_large_as_they_are_served(least: int, tmp_path: Path):
    file = written(tmp_path / "together.pt2", Together(least), (torch.randn(2, 8),), {1: LENGTH})
    model = load(str(file), tmp_path).model
    model.isolation.require(least - 1)
    with pytest.raises(InvalidInputError, match="mixes requests"):
        model.isolation.require(64)


class Late(nn.Module):
    """Positions from some length on get the greatest number of the batch, where it is above a bound."""

    def __init__(self, least: int, bound: float) -> None:
        super().__init__()
        self.least, self.bound = least, bound

    def forward(self, x: Tensor) -> Tensor:
        is_late = torch.arange(x.shape[1]).to(x.dtype) >= self.least
        return torch.where(is_late, x + (x.max() - self.bound).relu(), x)


@settings(max_examples=4, deadline=None)
@given(least=st.integers(0, 300), power=st.integers(0, 9), example=st.integers(4, 12))
def test_mixing_behind_a_length_is_refused_or_beyond_what_is_batched(least: int, power: int, example: int):
    """A bound hides the mixing from values, and the length from the example."""
    with TemporaryDirectory() as folder:
        length = Dim("length", min=1, max=100_000)
        file = written(Path(folder) / "late.pt2", Late(least, 10.0**power), (torch.randn(2, example),), {1: length})
        program = load_program(file)
    model = SizedModel(SlicedModel(program, []))
    if least < 16 * example:
        with pytest.raises(InvalidInputError, match="mixes requests"):
            model.isolation.require(8)
        return
    model.isolation.require(8)
    rng = np.random.default_rng(least)
    sizes = rng.choice([1, example, 16 * example, least + 1, least + 1, least + 9], 6).tolist()
    requests = [((10.0 ** rng.uniform(0, 10) * rng.standard_normal(size)).astype(np.float32),) for size in sizes]
    with torch.inference_mode():
        for (x,), (got,) in zip(requests, model.answers(requests), strict=True):
            np.testing.assert_array_equal(got, Late(least, 10.0**power)(torch.from_numpy(x)[None])[0].numpy())


def test_sizes_that_follow_from_others_are_checked(tmp_path: Path):
    n = Dim("n", min=3, max=9)
    inputs = (torch.randn(2, 4), torch.randn(2, 8))
    program = load_program(written(tmp_path / "pair.pt2", Pair(), inputs, {1: n}, {1: 2 * n}))
    model = SizedModel(SlicedModel(program, program.allowed_cuts[:1]))
    assert program.sizes is not None
    assert program.sizes.describe() == ["x: [n: 3 to 9]", "y: [2*n]"]
    assert model.check((np.zeros(5, np.float32), np.zeros(10, np.float32))) == 5
    for one, other in ((5, 9), (2, 4), (10, 20)):
        with pytest.raises(InvalidInputError, match="takes requests of shape"):
            model.check((np.zeros(one, np.float32), np.zeros(other, np.float32)))
    assert model.group_of((np.zeros(5, np.float32), np.zeros(10, np.float32))) == (5,)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=1, max_size=3), st.randoms())
def test_groups_keep_their_requests(sizes: list[list[int]], random: Any):
    """Joined and selected in any order, each request has its own row."""
    parts, names = [], []
    for part, each in enumerate(sizes):
        members, rows = [], {}
        for position, size in enumerate(each):
            rows.setdefault((size,), []).append([100.0 * part + position] * size)
            members.append(Member((size,), len(rows[(size,)]) - 1, (size,)))
            names.append((100.0 * part + position, size))
        parts.append(Grouped({key: Padded({"x": torch.tensor(value)}) for key, value in rows.items()}, tuple(members)))
    joined = parts[0].join(parts[1:])
    taken = random.sample(range(len(names)), random.randint(1, len(names)))
    chosen = joined.select(taken)
    for position, member in zip(taken, chosen.members, strict=True):
        row = chosen.groups[member.group].tensors["x"][member.row]
        assert row.tolist() == [names[position][0]] * names[position][1]
    assert chosen.num == len(taken)
    assert sum(group.num for group in chosen.groups.values()) == len(taken)
