from dataclasses import replace

import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.attention import AttentionOptions, ragged_attention
from mlsys_orca.model.decoder import AttentionSpan
from torch import Tensor

OPTIONS = [
    AttentionOptions(),
    AttentionOptions(scale=0.6),
    AttentionOptions(window=1),
    AttentionOptions(window=3),
    AttentionOptions(window=7),
    AttentionOptions(softcap=1.5),
    AttentionOptions(scale=0.6, softcap=1.5, window=4),
    AttentionOptions(is_causal=False),
    AttentionOptions(is_causal=False, softcap=1.5),
]
REACH = 3


def reference(query: Tensor, keys: Tensor, values: Tensor, context_len: int, options: AttentionOptions) -> Tensor:
    """Attention written out: row i of n sees the first context_len - n + i + 1 keys, or the window's last, or all."""
    num_rows, num_heads, head_dim = query.shape
    group = num_heads // keys.shape[1]
    out = torch.empty_like(query)
    for row in range(num_rows):
        position = context_len - num_rows + row
        stop = position + 1 if options.is_causal else context_len
        seen = slice(max(0, stop - (options.window or stop)), stop)
        for head in range(num_heads):
            scores = keys[seen, head // group] @ query[row, head] * (options.scale or head_dim**-0.5)
            if options.softcap:
                scores = options.softcap * (scores / options.softcap).tanh()
            if options.bias is not None:
                distances = [min(max(key - position, -REACH), REACH) for key in range(*seen.indices(context_len))]
                scores = scores + torch.stack([options.bias[head, REACH + distance] for distance in distances])
            out[row, head] = scores.softmax(-1) @ values[seen, head // group]
    return out.flatten(1)


@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (9, 3), (4, 1)])
def test_each_request_sees_its_own_past(
    num_heads: int, num_kv_heads: int, options: AttentionOptions, is_biased: bool
) -> None:
    generator = torch.Generator().manual_seed(num_heads)
    if is_biased:
        options = replace(options, bias=torch.randn(num_heads, 2 * REACH + 1, generator=generator))
    keys, values = torch.randn(2, 64, num_kv_heads, 16, generator=generator)
    scattered = torch.tensor([40, 3, 41, 7, 55, 50, 9])
    rows_and_slots = [
        (5, slice(0, 5)),  # a whole prompt
        (1, slice(5, 12)),  # a decode
        (3, slice(12, 20)),  # a later chunk
        (1, slice(20, 21)),  # a prompt of one token
        (1, scattered),
        (4, scattered),
        (7, scattered),
    ]
    query = torch.randn(sum(rows for rows, _ in rows_and_slots), num_heads, 16, generator=generator)
    spans, expected, start = [], [], 0
    for rows, slots in rows_and_slots:
        context = keys[slots]
        spans.append(AttentionSpan(start, start + rows, len(context), slots))
        expected.append(reference(query[start : start + rows], context, values[slots], len(context), options))
        start += rows
    assert torch.allclose(ragged_attention(query, keys, values, spans, options), torch.cat(expected), atol=1e-5)


def test_slots_of_others_are_never_read() -> None:
    keys = torch.full((8, 2, 4), torch.nan)
    keys[2:5] = 1
    spans = [AttentionSpan(0, 1, 3, slice(2, 5)), AttentionSpan(1, 3, 3, torch.tensor([4, 2, 3]))]
    assert not ragged_attention(torch.ones(3, 4, 4), keys, keys, spans).isnan().any()


def test_keys_need_not_be_a_cache() -> None:
    """Rows attend to a matrix of others: a decoder's to an encoder's."""
    query, keys, values = torch.randn(3, 2, 4), torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    options = AttentionOptions(is_causal=False)
    found = ragged_attention(query, keys, values, [AttentionSpan(0, 3, 5, slice(0, 5))], options)
    assert torch.allclose(found, reference(query, keys, values, 5, options), atol=1e-5)


def test_a_window_goes_with_causal_attention() -> None:
    with pytest.raises(InvalidInputError, match="window"):
        AttentionOptions(window=4, is_causal=False)
