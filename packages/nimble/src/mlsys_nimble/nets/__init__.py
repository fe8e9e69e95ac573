"""Nets by name: small ones and known architectures, with random weights that do not change.

The table is here, torch is imported when a net is made; :mod:`.resolve` has what else a command may be given: another
library's net, a ``.pt2`` file, a function of the user's. Nothing here is downloaded.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlsys_core import lazy
from mlsys_core.errors import InvalidInputError

if TYPE_CHECKING:
    from mlsys_nimble.nets.blocks import Net


@dataclass(frozen=True, slots=True)
class NetEntry:
    """Net with a name."""

    name: str
    factory: str  # -> Callable[[int], Net]; the argument is the batch size
    help: str  # description with its input's size
    num_parameters: int


_HERE = "mlsys_nimble.nets"
NETS: tuple[NetEntry, ...] = (
    NetEntry("six-branch", f"{_HERE}.small:six_branch", "six branches of twelve 64 x 64 linears", 303_370),
    NetEntry("mlp", f"{_HERE}.small:mlp", "sixteen 128 x 128 linears in a row", 265_482),
    NetEntry("gru", f"{_HERE}.small:gru", "two GRU layers of 64, 16 steps", 50_570),
    NetEntry("lstm", f"{_HERE}.small:lstm", "two LSTM layers of 64, 16 steps", 67_210),
    NetEntry("resnet20-cifar", f"{_HERE}.small:resnet20_cifar", "ResNet-20, 32 x 32", 272_474),
    NetEntry("inception-v3", f"{_HERE}.inception:inception_v3", "Inception-v3, 299 x 299", 23_834_568),
    NetEntry("resnet50", f"{_HERE}.small:resnet50", "ResNet-50, 224 x 224", 25_557_032),
    NetEntry("resnet101", f"{_HERE}.small:resnet101", "ResNet-101, 224 x 224", 44_549_160),
    NetEntry("bert-base", f"{_HERE}.resolve:bert_base", "BERT-base of transformers, 128 tokens", 109_482_240),
    NetEntry("minilm-l6", f"{_HERE}.resolve:minilm_l6", "the shape of all-MiniLM-L6-v2, 128 tokens", 22_713_216),
)


def find_net(name: str, nets: Sequence[NetEntry] = NETS) -> NetEntry:
    """Return the entry of ``nets`` called ``name``; underscores stand for dashes.

    Raises:
        InvalidInputError: there is none; the message gives the closest name.
    """
    wanted = name.replace("_", "-").lower()
    names = [entry.name for entry in nets]
    if wanted not in names:
        close = difflib.get_close_matches(wanted, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(names)}"
        if name.endswith(".py"):
            module = name.removesuffix(".py").replace("/", ".")
            hint = f"for a net of your own give {module}:make, a function that returns (module, example inputs)"
        raise InvalidInputError(f"no net is called {name!r}; {hint}")
    return nets[names.index(wanted)]


def net(name: str, *, batch: int = 1, seed: int = 0) -> Net:
    """Build the module called ``name`` in eval mode, with example inputs; equal arguments give equal tensors.

    Batch norms hold the statistics of the example, so that activations neither vanish nor explode.

    Raises:
        InvalidInputError: there is no such net, or ``batch`` is not positive.

    Example:
        >>> module, inputs = net("mlp")
        >>> module(*inputs).shape
        torch.Size([1, 10])
    """
    return build(find_net(name), batch=batch, seed=seed)


def build(entry: NetEntry, *, batch: int, seed: int) -> Net:
    """Build an entry's module as :func:`net` does.

    Raises:
        InvalidInputError: ``batch`` is not positive.
    """
    if batch < 1:
        raise InvalidInputError(f"batch is {batch}: give 1 or more")
    factory: Callable[[int], Net] = lazy.resolve(entry.factory)
    import torch

    from mlsys_nimble.nets.blocks import settle

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return settle(factory(batch))
