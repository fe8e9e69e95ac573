"""Logits to tokens. Called by the runner once per iteration, on the sampled rows only.

Random numbers depend on the request alone: the number for the token at position ``p`` of a request with seed ``s`` is
a hash of ``(s, p)``. So neither the batch's other requests, nor an earlier preemption, nor a worker restarted in the
middle changes what a request gets, and there is no generator to keep or to lose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mlsys_orca.batch import SampledToken, SamplingParams

Row = NDArray[np.float32]  # [vocab_size], or some of it
Ids = NDArray[np.int64]
_THRESHOLDS = (1e-3, 1e-6, 0.0)  # of a weight, the largest being 1: which are sorted for top_p


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
        >>> import torch
        >>> sample(torch.tensor([[0.0, 2.0]]), request_ids=["a"], positions=[7], params=[SamplingParams()])[0].token_id
        1
    """
    # numpy's argmax takes a tenth of torch's time on a CPU. Greedy requests need no row of their own: to cut the
    # matrix into rows would cost more than all else here.
    best = (logits.numpy() if logits.device.type == "cpu" else logits).argmax(-1).tolist()
    sampled = []
    for index, (greedy, request_id, position, how) in enumerate(zip(best, request_ids, positions, params, strict=True)):
        token_id = greedy if how.is_greedy else _draw(logits[index].cpu().numpy(), how, uniform(how.seed, position))
        if how.num_logprobs is None:
            sampled.append(SampledToken(request_id, token_id))
            continue
        logprobs = logits[index].log_softmax(dim=-1)
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


def _draw(logits: Row, params: SamplingParams, number: float) -> int:
    """The token at which the cumulative probability of the allowed tokens, most likely first, passes ``number``."""
    weights = np.exp((logits - logits.max()) / np.float32(params.temperature))
    if params.top_k is not None:
        ids = _most_likely(logits, min(params.top_k, len(logits)))
        allowed = weights[ids]
    elif params.top_p < 1:
        ids, allowed = _likely(weights, params.top_p * float(weights.sum(dtype=np.float64)))
    else:
        return _pick(weights, number)
    if params.top_p < 1:
        # A token stays if those before it do not yet reach top_p, so at least one stays.
        of_all = allowed if params.top_k is not None else weights
        before = np.cumsum(allowed, dtype=np.float64) - allowed
        allowed = allowed[before < params.top_p * float(of_all.sum(dtype=np.float64))]
    return int(ids[_pick(allowed, number)])


def _most_likely(logits: Row, count: int) -> Ids:
    """The ids of the ``count`` largest, the largest first and the smaller id first among equals."""
    if count < len(logits):
        least = np.partition(logits, len(logits) - count)[len(logits) - count]
        ids = np.flatnonzero(logits >= least)
    else:
        ids = np.arange(len(logits))
    return ids[np.argsort(-logits[ids], kind="stable")][:count]


def _likely(weights: Row, reach: float) -> tuple[Ids, Row]:
    """Enough of the largest weights, largest first, to reach a sum: their ids and they; few are sorted as a rule."""
    for least in _THRESHOLDS:
        ids = np.flatnonzero(weights >= least)
        if least == 0 or float(weights[ids].sum(dtype=np.float64)) > reach:
            break
    ids = ids[np.argsort(-weights[ids])]
    return ids, weights[ids]


def _pick(weights: Row, number: float) -> int:
    """The index at which the running sum of ``weights`` passes ``number`` of the whole sum."""
    running = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(running, number * running[-1], side="right"))
    # Rounding may put the sum's last step below number; a token of probability zero must not be chosen there.
    return min(index, int(np.flatnonzero(weights)[-1]))
