"""Objects among the results: the same where those of eager are, others where they only share memory."""

from __future__ import annotations

from itertools import combinations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_nimble import CaptureError, Nimble
from torch import nn

SAME = (lambda x: x, lambda x: x.contiguous(), lambda x: x.to(torch.float32), lambda x: x.detach(), lambda x: x.view(3))
OTHERS = (lambda x: x.data, lambda x: torch.ops.aten.alias(x), lambda x: x[:], lambda x: x.view(1, 3)[0])


@settings(max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(SAME + OTHERS), st.sampled_from(SAME + OTHERS)), max_size=4))
def test_results_are_one_object_where_those_of_eager_are(parts):
    class Several(nn.Module):
        def forward(self, x):
            y = x * 2
            return [second(first(y if is_computed else x)) for is_computed, first, second in parts]

    x = torch.ones(3)
    with torch.no_grad():
        expected = Several()(x)
        try:
            found = Nimble(Several().eval()).prepare((x,))(x)
        except CaptureError:
            return
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    theirs, ours = [[x, *each] for each in (expected, found)]
    for i, j in combinations(range(len(ours)), 2):
        assert (ours[i] is ours[j]) == (theirs[i] is theirs[j])
        assert (ours[i].data_ptr() == ours[j].data_ptr()) == (theirs[i].data_ptr() == theirs[j].data_ptr())
