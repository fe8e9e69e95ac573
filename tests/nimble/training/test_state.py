"""State of the user's model after a preparation for training: each tensor is the object that it was."""

import copy

import torch
from mlsys_nimble import Nimble
from torch import nn


class Shared(nn.Module):
    """Layer under two names, and a weight under two layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.norm = nn.BatchNorm1d(4)
        self.again = self.norm
        self.third = nn.Linear(4, 4)
        self.third.weight = self.first.weight

    def forward(self, x):
        y = self.again(self.second(x))
        return y, self.third(y)


def test_shared_modules_keep_their_tensors_and_get_gradients():
    model, x = Shared(), torch.randn(8, 4)
    eager = copy.deepcopy(model)
    slots = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    prepared = Nimble(model).prepare(x, training=True)
    after = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    assert [(name, id(tensor)) for name, tensor in slots] == [(name, id(tensor)) for name, tensor in after]
    results, wanted = prepared(x), eager(x)
    assert type(results) is tuple
    torch.testing.assert_close(results, wanted)
    results[1].square().sum().backward()
    wanted[1].square().sum().backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    for ours, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
