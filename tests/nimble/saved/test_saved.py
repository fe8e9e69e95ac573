"""Saved models give the original's bits in any process, or are refused in one line."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import re
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_core.cli.main import run
from mlsys_core.errors import InvalidInputError
from mlsys_nimble import Nimble, load
from torch import nn
from torch.nn import functional as F  # noqa: N812


class Images(nn.Module):
    """Convolutions of every kernel, pools, concatenation, an operator that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.dense = nn.Conv2d(16, 16, 3, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.pointwise = nn.Conv2d(16, 8, 1)
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        x = torch.cat([F.relu(self.dense(x)) + x, self.pointwise(self.depthwise(x))], 1)
        x = F.avg_pool2d(F.pad(x, (1, 0, 0, 1), value=-float("inf")).clamp(min=-1.0), 2)
        return self.head(torch.cumsum(x, 2).mean((2, 3)))


class Words(nn.Module):
    """Attention, norms, tables, nested arguments and results, arguments that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.small = nn.Embedding(50, 16).half()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor, *, options: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
        x = self.norm(self.table(ids) + self.small(ids).float())
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, options["mask"])
        y = F.gelu(self.up(mixed.transpose(1, 2).flatten(2))) * scale
        return {"all": [y, y.softmax(-1)], "first": (y[:, 0].clone(), ids), "name": options["name"], "none": None}


class Counter(nn.Module):
    """A buffer that every call writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum(0)
        return x * self.seen


def images() -> tuple[Nimble, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    model = Nimble(Images()).prepare(torch.randn(2, 3, 12, 12), num_threads=2)
    return model, (torch.randn(2, 3, 12, 12),), {}


def words() -> tuple[Nimble, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    args = (torch.randint(0, 50, (2, 6)),)
    kwargs = {"options": {"mask": torch.randn(6, 6), "name": "text"}, "scale": 0.5}
    return Nimble(Words()).prepare(args, example_kwargs=kwargs, num_threads=1), args, kwargs


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Any, ...], torch.Tensor]:
    model, args, _ = images()
    path = tmp_path_factory.mktemp("saved") / "images.nimble"
    model.save(path)
    return path, args, model(*args)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("make", [images, words])
def test_a_loaded_model_gives_the_same_bits(make: Callable[[], Any], tmp_path: Path):
    model, args, kwargs = make()
    nbytes = model.save(tmp_path / "model")
    assert nbytes == (tmp_path / "model").stat().st_size
    for threads in (None, 1, 3):
        found = load(tmp_path / "model", num_threads=threads)
        for _ in range(2):
            assert_same(found(*args, **kwargs), model(*args, **kwargs))


def test_every_schedule_is_saved_and_weights_once(tmp_path: Path):
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU())
    model = Nimble(net).prepare(torch.zeros(2, 256))
    one = model.save(tmp_path / "one")
    expected = [model(torch.ones(size, 256)) for size in (2, 3)]
    model.save(tmp_path / "two")
    found = load(tmp_path / "two")
    assert_same([found(torch.ones(size, 256)) for size in (2, 3)], expected)
    assert one > 256 * 256 * 4


def test_buffers_go_on_from_where_they_were(tmp_path: Path):
    model = Nimble(Counter()).prepare(torch.zeros(2, 4))
    x = torch.arange(8.0).reshape(2, 4)
    model(x)
    model.save(tmp_path / "model")
    first, second = load(tmp_path / "model"), load(tmp_path / "model")
    expected = [model(x), model(x)]
    assert_same([first(x), first(x)], expected)
    assert_same([second(x), second(x)], expected)  # each has memory of its own; the file stays as it is
    with pytest.raises(InvalidInputError, match="buffers that calls write to"):
        copy.deepcopy(first)


def test_copies_pickles_threads_and_forks(saved: Any):
    path, args, expected = saved
    model = load(path)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(other(*args), expected)
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(model(*args))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(found, [expected] * 4)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(model(*args), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_spawned_process_takes_both(saved: Any):
    path, args, expected = saved
    prepared, _, _ = images()
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        for model in (load(path), prepared):
            assert_same(pool.apply(model, args), expected)


def test_another_file_in_its_place_is_noticed(saved: Any, tmp_path: Path):
    path = tmp_path / "model"
    path.write_bytes(saved[0].read_bytes())
    known = pickle.dumps(load(path))
    Nimble(nn.ReLU()).prepare(torch.zeros(2)).save(path)
    with pytest.raises(InvalidInputError, match="has changed since"):
        pickle.loads(known)


def test_other_arguments_are_refused(saved: Any):
    model = load(saved[0])
    for args, kwargs in (
        ((torch.zeros(1, 3, 12, 12),), {}),
        ((torch.zeros(2, 3, 12, 12, dtype=torch.float64),), {}),
        ((), {"x": torch.zeros(2, 3, 12, 12)}),
        ((torch.zeros(2, 3, 12, 12), 1), {}),
    ):
        with pytest.raises(InvalidInputError, match=r"has no schedule for .*; it has \(float32\[2, 3, 12, 12\]\)"):
            model(*args, **kwargs)
    with pytest.raises(InvalidInputError, match="requires a gradient"):
        model(torch.zeros(2, 3, 12, 12, requires_grad=True))


class Returns(nn.Module):
    """A model that gives what ``function`` gives."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


Pair = namedtuple("Pair", "first second")


@torch.library.custom_op("mlsys_saved::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """Return 2 x."""
    return x * 2


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (lambda x: twice(x) + 1, {}, "mlsys_saved.twice.default cannot be saved"),
        (lambda x: Pair(x + 1, x + 2), {}, "a result of class .*Pair cannot be saved"),
        (lambda x: (x.T, x + 1), {}, "a result that is a view of an argument"),
        (lambda x: x.add_(1) * 2, {}, "a forward that writes to its arguments"),
        (lambda x: x + 1, {"executor": "reference"}, "a schedule of ReferenceExecutor cannot be saved"),
        (lambda x: x + 1, {"dynamic": {0: {0: (1, 9)}}}, "one preparation for many sizes cannot be saved"),
        (lambda x: x + 1, {"training": True}, "it has no schedule for inference"),
        (None, {}, "it is not prepared"),
    ],
)
def test_what_has_no_form_in_a_file_is_refused(function: Any, options: Any, reason: str, tmp_path: Path):
    model = Nimble(Returns(function))
    if function is not None:
        model.prepare(torch.zeros(4, 3), **options)
    with pytest.raises(InvalidInputError, match=reason) as refusal:
        model.save(tmp_path / "model")
    assert len(str(refusal.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_changed_model_is_saved_as_it_is_now(tmp_path: Path):
    net = nn.Linear(4, 4)
    model = Nimble(net).prepare(torch.zeros(2, 4))
    nn.init.ones_(net.weight)
    with pytest.raises(InvalidInputError, match="has changed since cannot be saved: call it once"):
        model.save(tmp_path / "model")
    expected = model(torch.ones(2, 4))
    model.save(tmp_path / "model")
    assert_same(load(tmp_path / "model")(torch.ones(2, 4)), expected)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = str(tmp_path / "gru.nimble")
    assert run(["nimble", "save", "mlp", path, "--batch", "2"]) == 0
    assert f"run it with: mlsys nimble run {path}" in capsys.readouterr().out.replace("\n", "")
    assert run(["nimble", "run", path, "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"float32\[2, 128\] -> float32\[2, \d+\]", out)
    assert "on 1 threads" in out
    assert run(["nimble", "run", str(tmp_path / "missing")]) == 2
    assert run(["nimble", "save", "mlp", str(tmp_path / "no" / "folder")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) <= 4


def pages_of(path: Path) -> dict[str, int]:
    """Return kB of this process's pages of a file: mapped at all, in memory, and copied."""
    found = {"Size": 0, "Rss": 0, "Anonymous": 0}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, rest = line.partition(":")
        if "-" in key:  # a mapping's first line: its addresses and its file
            inside = line.endswith(str(path))
        elif inside and key in found:
            found[key] += int(rest.split()[0])
    return found


def test_weights_stay_pages_of_the_file_and_go_with_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path, x = tmp_path / "wide.nimble", torch.randn(1, 512)
    Nimble(nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))).prepare(x, num_threads=1).save(path)
    model = load(path)
    model(x)
    pages = pages_of(path)
    assert pages["Rss"] >= 4096  # kB: both matrices were read, in float32
    assert pages["Anonymous"] <= pages["Size"] // 20
    del model
    gc.collect()
    assert pages_of(path)["Size"] == 0
