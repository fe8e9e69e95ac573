"""Logits to tokens. Called by the runner once per iteration, on the sampled rows only.

Random numbers depend on the request alone: the number for the token at position ``p`` of a request with seed ``s`` is
a hash of ``(s, p)``. So neither the batch's other requests, nor an earlier preemption, nor a worker restarted in the
middle changes what a request gets, and there is no generator to keep or to lose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlsys_orca.batch import SampledToken, SamplingParams

_CANDIDATES = 1024  # tokens looked at first for top_p; all of them only where these do not reach it


def sample(
    logits: Tensor,
    *,
    request_ids: Sequence[str],
    positions: Sequence[int],
    params: Sequence[SamplingParams],
) -> tuple[SampledToken, ...]:
    """Choose one token for each row.

    Args:
        logits: fp32 [num_sampled, vocab_size].
        request_ids: [num_sampled] whose row it is.
        positions: [num_sampled] the position that the chosen token will have in its request.
        params: [num_sampled] how to choose.

    Returns:
        One token per row, in order.

    Example:
        >>> sample(torch.tensor([[0.0, 2.0]]), request_ids=["a"], positions=[7], params=[SamplingParams()])[0].token_id
        1
    """
    best = logits.argmax(dim=-1).tolist()
    sampled = []
    for row, greedy, request_id, position, how in zip(logits, best, request_ids, positions, params, strict=True):
        token_id = greedy if how.is_greedy else _draw(row, how, uniform(how.seed, position))
        if how.num_logprobs is None:
            sampled.append(SampledToken(request_id, token_id))
            continue
        logprobs = row.log_softmax(dim=-1)
        top = logprobs.topk(how.num_logprobs)
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        sampled.append(SampledToken(request_id, token_id, float(logprobs[token_id]), pairs))
    return tuple(sampled)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) for one position of a request's random stream (splitmix64 of both).

    Example:
        >>> uniform(1, 5) == uniform(1, 5), uniform(1, 5) == uniform(1, 6)
        (True, False)
    """
    mixed = _splitmix64(_splitmix64(seed & _MASK) ^ position)
    return float(mixed >> 11) / float(1 << 53)


_MASK = (1 << 64) - 1


def _splitmix64(state: int) -> int:
    """One output of Steele, Lea and Flood's generator (Fast Splittable Pseudorandom Number Generators, 2014)."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _draw(row: Tensor, params: SamplingParams, number: float) -> int:
    """The token at which the cumulative probability of the allowed tokens, most likely first, passes ``number``."""
    scaled = (row / params.temperature).double()
    if params.top_k is None and params.top_p == 1:
        return _pick(scaled.softmax(dim=-1), number)
    if params.top_k is not None:
        scaled, ids = scaled.topk(min(params.top_k, len(scaled)))
        probabilities = scaled.softmax(dim=-1)
    else:
        everything = scaled.softmax(dim=-1)
        probabilities, ids = everything.topk(min(_CANDIDATES, len(everything)))
        if probabilities.sum() < params.top_p:
            probabilities, ids = everything.sort(descending=True)
    if params.top_p < 1:
        # A token stays if those before it do not yet reach top_p, so at least one stays.
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities[before < params.top_p]
    return int(ids[_pick(probabilities, number)])


def _pick(probabilities: Tensor, number: float) -> int:
    """The index at which the running sum of ``probabilities`` (of any sum) passes ``number`` of it."""
    running = probabilities.cumsum(dim=-1)
    index = int(torch.searchsorted(running, number * running[-1], right=True))
    # Rounding may put the sum's last step below number; a token of probability zero must not be chosen there.
    return min(index, int((probabilities > 0).nonzero()[-1]))
