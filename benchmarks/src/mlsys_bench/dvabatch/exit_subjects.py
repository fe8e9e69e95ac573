"""Models with early exits, trained here on real data: an encoder of texts, and a ResNet-20 of digits.

The encoder is all-MiniLM-L6-v2 as it is, with a small head behind every second layer, on the topics of the package
``chatterbot-corpus``. The ResNet-20 is He et al.'s for CIFAR, of 16 x 16 images of one channel, with heads behind its
three groups, on scikit-learn's digits: no package carries its CIFAR weights or CIFAR's images.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import MissingDependencyError, MlsysError
from mlsys_core.models import resolve_model
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import Dim, export, save
from torch.nn import functional

LEAST_TEXTS = 60  # of a topic
MOST_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Subject:
    """A trained model as a file, and requests that it has not seen."""

    name: str
    file: Path
    requests: list[tuple[NDArray[Any], ...]]
    labels: NDArray[np.int64]
    what: str  # data, in words


class ExitingEncoder(nn.Module):
    """A BERT with a head behind every second layer: token ids and mask [b, n] -> scores [b, classes], three times."""

    def __init__(self, bert: Any, classes: int) -> None:
        super().__init__()
        self.bert = bert
        size = bert.config.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, classes)) for _ in range(3)
        )

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
        """Return the mean of the tokens behind every second layer, [b, hidden] each."""
        hidden = self.bert.embeddings(input_ids=input_ids)
        kept = attention_mask.unsqueeze(-1).to(hidden.dtype)
        # Layer by layer: transformers records hidden states by hooks, and an export records others.
        bias = (1 - kept).transpose(1, 2).unsqueeze(1) * torch.finfo(hidden.dtype).min
        found = []
        for number, layer in enumerate(self.bert.encoder.layer, 1):
            given = layer(hidden, bias)
            hidden = given[0] if isinstance(given, tuple) else given
            if number % 2 == 0:
                found.append((hidden * kept).sum(1) / kept.sum(1).clamp(min=1e-9))
        return found

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Return the scores of the heads, in order."""
        found = self.features(input_ids, attention_mask)
        return tuple(head(each) for head, each in zip(self.heads, found, strict=True))


def topics() -> tuple[list[str], list[int], int]:
    """Return texts, the number of each one's topic, and the number of topics.

    Raises:
        MissingDependencyError: The package is not installed.
    """
    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None or spec.origin is None:
        raise MissingDependencyError("texts come from a package: pip install --no-deps chatterbot-corpus")
    yaml: Any = importlib.import_module("yaml")

    found: dict[str, list[str]] = {}
    for file in sorted((Path(spec.origin).parent / "data" / "english").glob("*.yml")):
        content = yaml.safe_load(file.read_text())
        texts = [str(line).strip().lower() for talk in content["conversations"] for line in talk]
        found[file.stem] = sorted({text for text in texts if len(text) > 8})
    kept = {name: texts for name, texts in found.items() if len(texts) >= LEAST_TEXTS}
    pairs = [(text, number) for number, texts in enumerate(kept.values()) for text in texts[:400]]
    order = np.random.default_rng(0).permutation(len(pairs))
    return [pairs[place][0] for place in order], [pairs[place][1] for place in order], len(kept)


def encoder(cache_dir: Path, *, num_tests: int) -> Subject:
    """Train the heads of the encoder, export it with any length, and return it with tests."""
    from tokenizers import Tokenizer
    from transformers import BertModel

    texts, labels, classes = topics()
    folder = resolve_model("all-minilm-l6-v2", cache_dir)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MOST_TOKENS)
    ids = [np.array(each.ids, np.int64) for each in tokenizer.encode_batch(texts)]
    torch.manual_seed(0)
    bert: Any = BertModel.from_pretrained(folder, add_pooling_layer=False)
    model = ExitingEncoder(bert.eval(), classes)
    num_seen = len(texts) - min(num_tests, len(texts) // 4)
    columns: list[list[Tensor]] = [[], [], []]
    with torch.no_grad():
        for each in ids[:num_seen]:
            row = torch.from_numpy(each)[None]
            for column, feature in zip(columns, model.features(row, torch.ones_like(row)), strict=True):
                column.append(feature)
    features = [torch.cat(column) for column in columns]
    truth = torch.tensor(labels[:num_seen])
    _fit(
        model.heads,
        lambda batch: [head(each[batch]) for head, each in zip(model.heads, features, strict=True)],
        truth,
        steps=600,
    )
    rows, length = torch.randint(1000, 9000, (2, 16)), Dim("length", min=1, max=MOST_TOKENS)
    file = _written(cache_dir, "exiting-encoder", model, (rows, torch.ones_like(rows)), ({1: length}, {1: length}))
    tests: list[tuple[NDArray[Any], ...]] = [(each, np.ones_like(each)) for each in ids[num_seen:]]
    what = f"{len(texts)} texts of {classes} topics (chatterbot-corpus), {len(tests)} of them unseen"
    return Subject("MiniLM-L6, heads behind layers 2, 4, 6", file, tests, np.array(labels[num_seen:]), what)


class Block(nn.Module):
    """Two convolutions around a shortcut, option A of He et al."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride, self.more = (1, 0) if before == after else (2, after - before)
        self.first = nn.Conv2d(before, after, 3, self.stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features after the block."""
        y = self.norms[1](self.second(torch.relu(self.norms[0](self.first(x)))))
        short = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return torch.relu(y + short)


class ExitingResNet(nn.Module):
    """ResNet-20: images [b, 1, 16, 16] -> scores of ten digits behind each of its three groups."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        widths = [(16, 16), (16, 32), (32, 64)]
        self.groups = nn.ModuleList(
            nn.Sequential(Block(before, after), Block(after, after), Block(after, after)) for before, after in widths
        )
        self.heads = nn.ModuleList(nn.Linear(after, 10) for _, after in widths)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the scores of the heads, in order."""
        found: list[Tensor] = []
        x = self.begin(x)
        for group, head in zip(self.groups, self.heads, strict=True):
            x = group(x)
            found.append(head(x.mean((2, 3))))
        return tuple(found)


def resnet(cache_dir: Path, *, num_tests: int, steps: int) -> Subject:
    """Train the ResNet-20, export it, and return it with digits that it has not seen."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    images, labels = functional.interpolate(images, 16, mode="bilinear"), torch.tensor(digits.target)
    torch.manual_seed(0)
    order = torch.randperm(len(labels))
    seen, unseen = order[:1200], order[1200 : 1200 + num_tests]
    model = ExitingResNet()
    inputs = images[seen]
    _fit(model, lambda batch: list(model(inputs[batch])), labels[seen], steps=steps, batch_size=64)
    model.eval()
    file = _written(cache_dir, "exiting-resnet20", model, (images[:2],), ({},))
    tests: list[tuple[NDArray[Any], ...]] = [(each.numpy(),) for each in images[unseen]]
    what = f"scikit-learn's digits, 8 x 8 scaled to 16 x 16, {len(tests)} unseen"
    return Subject("ResNet-20, heads behind its three groups", file, tests, labels[unseen].numpy(), what)


def _fit(
    module: nn.Module, scores: Callable[[Tensor], list[Tensor]], truth: Tensor, *, steps: int, batch_size: int = 256
) -> None:
    """Train all heads together."""
    optimiser = torch.optim.AdamW(module.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(0)
    module.train()
    for _ in range(steps):
        batch = torch.randint(len(truth), (batch_size,), generator=generator)
        loss = torch.stack([functional.cross_entropy(each, truth[batch]) for each in scores(batch)]).sum()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    module.eval()


def _written(
    cache_dir: Path, name: str, model: nn.Module, inputs: tuple[Tensor, ...], axes: tuple[dict[int, Any], ...]
) -> Path:
    folder = cache_dir / "bench-exits"
    folder.mkdir(parents=True, exist_ok=True)
    batch = Dim("batch", min=1, max=64)
    dims = tuple({0: batch, **each} for each in axes)
    with torch.no_grad():
        program = export(model.eval(), inputs, dynamic_shapes=dims)
        for one, other in zip(program.module()(*inputs), model(*inputs), strict=True):
            if not torch.allclose(one, other, atol=1e-4):
                raise MlsysError(f"{name}: the exported program does not give what the module gives")
        save(program, folder / f"{name}.pt2")
    return folder / f"{name}.pt2"
