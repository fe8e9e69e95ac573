"""Nets of the training benchmark: each makes a module, a batch of its inputs, and the classes to be found."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from mlsys_nimble.nets.registry import net as net_of
from torch import Tensor, nn

Example = tuple[nn.Module, Tensor, Tensor]  # module, input, target of cross_entropy
CLASSES = 10
NUM_TOKENS = 64


class Transformer(nn.Module):
    """A small encoder over 64 tokens: four layers of width 128."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(4)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(128, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[N, 64]`` of int64 to ``[N, 10]``."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x.mean(1))
        return result


class _Logits(nn.Module):
    """Model of transformers that returns its logits, classes in dimension 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Map images to ``[N, classes]``, or tokens ``[N, T]`` to ``[N, vocabulary, T]``."""
        logits: Tensor = self.model(x).logits
        return logits.movedim(-1, 1)


def _image_net(name: str, size: int, batch: int) -> Example:
    module = net_of(name).module
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = 0.1
    return module, torch.randn(batch, 3, size, size), _classes(batch)


def _transformer(batch: int) -> Example:
    return Transformer(), torch.randint(0, 1000, (batch, NUM_TOKENS)), _classes(batch)


def vit(batch: int, **shape: int) -> Example:
    """Return a vision transformer (Dosovitskiy et al. 2021), ViT-S/16 on 224 x 224 unless ``shape`` says otherwise."""
    transformers: Any = importlib.import_module("transformers")
    small = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
    config = transformers.ViTConfig(num_labels=CLASSES, **{**small, **shape})
    image = torch.randn(batch, 3, config.image_size, config.image_size)
    return _Logits(transformers.ViTForImageClassification(config)), image, _classes(batch)


def gpt2(batch: int, **shape: int) -> Example:
    """Return GPT-2 small (Radford et al. 2019) on 64 tokens and the next of each, without dropout."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **shape)
    tokens = torch.randint(0, config.vocab_size, (batch, NUM_TOKENS + 1))
    return _Logits(transformers.GPT2LMHeadModel(config)), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _classes(batch: int) -> Tensor:
    return torch.randint(0, CLASSES, (batch,))


NETS: dict[str, Callable[[int], Example]] = {
    "resnet20-cifar": partial(_image_net, "resnet20-cifar", 32),
    "mobilenet-v2": partial(_image_net, "mobilenet-v2", 32),
    "efficientnet-b0": partial(_image_net, "efficientnet-b0", 32),
    "transformer": _transformer,
    "vit-small": vit,
    "gpt2-small": gpt2,
}
