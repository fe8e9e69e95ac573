"""The nets: as many parameters as published, results that depend on the input, the same every time."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from mlsys_bench.nimble.papers import NETS, net
from mlsys_core.errors import InvalidInputError
from mlsys_core.lazy import resolve
from mlsys_nimble.nets import find_net

QUICK = ("six-branch", "mlp", "gru", "lstm", "resnet20-cifar", "mobilenet-v2", "darts", "nasnet-mobile", "minilm-l6")


@pytest.mark.parametrize("name", [entry.name for entry in NETS])
def test_parameters_are_counted_as_published(name: str):
    """Published: torchvision 0.29 (ResNet, MobileNetV2, Inception-v3), timm 1.0 (EfficientNet, NASNet-A large),
    pretrainedmodels 0.7 (NASNet-A mobile), Hugging Face (BERT-base uncased, all-MiniLM-L6-v2).
    """
    entry = find_net(name, NETS)
    with torch.device("meta"):
        module = resolve(entry.factory)(1).module
    assert sum(parameter.numel() for parameter in module.parameters()) == entry.num_parameters


@pytest.mark.parametrize("name", QUICK)
def test_results_are_lively(name: str):
    """Different inputs give clearly different results: activations neither vanish nor saturate on the way."""
    module, inputs = net(name)
    others = tuple(
        torch.randint_like(x, 1000) if not x.is_floating_point() else torch.randn_like(x) for x in inputs[:1]
    )
    with torch.no_grad():
        first, second = module(*inputs), module(*others, *inputs[1:])
    first, second = (result[0] if isinstance(result, tuple) else result for result in (first, second))
    assert torch.isfinite(first).all()
    assert (first - second).std() > 0.05 * first.std()


def test_a_name_gives_the_same_net_each_time_and_leaves_the_generator_alone():
    torch.manual_seed(7)
    (first, inputs), (second, other_inputs) = net("six-branch"), net("six_branch")
    after = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(3))
    assert torch.equal(inputs[0], other_inputs[0])
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
    assert not torch.equal(net("six-branch", seed=1).inputs[0], inputs[0])


def test_batches():
    module, inputs = net("resnet20-cifar", batch=3)
    assert module(*inputs).shape == (3, 10)
    with pytest.raises(InvalidInputError, match="batch is 0"):
        net("mlp", batch=0)


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(InvalidInputError, match="did you mean 'inception-v3'"):
        net("inception_v4")


def test_the_table_needs_no_torch():
    code = "import sys, mlsys_nimble.nets; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_file_of_python_is_told_how_to_name_its_net():
    with pytest.raises(InvalidInputError, match=r"give nets\.mine:make, a function"):
        find_net("nets/mine.py")
