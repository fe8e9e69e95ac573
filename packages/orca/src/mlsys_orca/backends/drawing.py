"""One row of logits to one token: what requests ask for before the draw, and the draw.

The number of a draw depends on the request's seed and the token's position alone; see :mod:`.sampler`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mlsys_orca.scheduling.batch import SamplingParams
from numpy.typing import NDArray

Row = NDArray[np.float32]  # [vocab_size], or some of it
Ids = NDArray[np.int64]
_THRESHOLDS = (1e-3, 1e-6, 0.0)  # of a weight, the largest being 1: which are sorted for top_p


def reshaped(logits: Row, params: SamplingParams, past: Sequence[int], num_prompt_tokens: int) -> Row:
    """Return ``logits`` with biases, then penalties, then minus infinity for forbidden tokens; a new array.

    Repetition is divided out as in CTRL (Keskar et al., 2019), over prompt and answer; presence and frequency are taken
    off as the OpenAI protocol has it, over the answer.

    Args:
        logits: [vocab_size].
        params: The request's sampling parameters.
        past: The tokens of prompt and answer so far.
        num_prompt_tokens: Number of them that are the prompt's.

    Example:
        >>> params = SamplingParams(logit_bias=((0, 5.0),), presence_penalty=1.0)
        >>> reshaped(np.zeros(3, np.float32), params, [2, 1], 1).tolist()
        [5.0, -1.0, 0.0]
    """
    row = logits.copy()
    for token_id, bias in params.logit_bias:
        row[token_id] += bias
    if params.repetition_penalty != 1:
        ids = np.unique(np.asarray(past, dtype=np.int64))
        seen = row[ids]
        row[ids] = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    answer = past[num_prompt_tokens:]
    if (params.presence_penalty or params.frequency_penalty) and answer:
        ids, counts = np.unique(np.asarray(answer, dtype=np.int64), return_counts=True)
        row[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    if len(answer) < params.min_tokens:
        row[list(params.late_token_ids)] = -np.inf
    if params.allowed_token_ids is not None:
        kept = row[list(params.allowed_token_ids)]
        row[:] = -np.inf
        row[list(params.allowed_token_ids)] = kept
    if params.guide is not None:
        row[~params.guide.allowed(answer)] = -np.inf
    if params.bad_sequences:
        _forbid(row, params.bad_sequences, answer)
    return row


def _forbid(row: Row, sequences: Sequence[Sequence[int]], answer: Sequence[int]) -> None:
    """Mask the last token of each sequence that ``answer`` ends with but for it, unless no other token may come."""
    last = [s[-1] for s in sequences if len(s) == 1 or tuple(answer[1 - len(s) :]) == tuple(s[:-1])]
    values = row[last]
    row[last] = -np.inf
    if last and np.isneginf(row).all():
        row[last] = values


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) for one position of a request's random stream (splitmix64 of both).

    Example:
        >>> uniform(1, 5) == uniform(1, 5), uniform(1, 5) == uniform(1, 6)
        (True, False)
    """
    mixed = _splitmix64(_splitmix64(seed & _MASK) ^ position)
    return float(mixed >> 11) / float(1 << 53)


_MASK = (1 << 64) - 1


def _splitmix64(state: int) -> int:
    """Return one output of Steele, Lea and Flood's generator (Fast Splittable Pseudorandom Number Generators, 2014)."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def draw(logits: Row, params: SamplingParams, number: float) -> int:
    """Draw the token at which the cumulative probability of the allowed tokens passes ``number``.

    Tokens are taken most likely first.
    """
    weights = np.exp((logits - logits.max()) / np.float32(params.temperature))
    if params.min_p:
        weights[weights < params.min_p] = 0  # the largest is 1
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
    """Return the ids of the ``count`` largest logits, largest first and the smaller id first among equals."""
    if count < len(logits):
        least = np.partition(logits, len(logits) - count)[len(logits) - count]
        ids = np.flatnonzero(logits >= least)
    else:
        ids = np.arange(len(logits))
    return ids[np.argsort(-logits[ids], kind="stable")][:count]


def _likely(weights: Row, reach: float) -> tuple[Ids, Row]:
    """Return the ids and values of enough of the largest weights, largest first, to pass the sum ``reach``.

    As a rule only few have to be sorted.
    """
    for least in _THRESHOLDS:
        ids = np.flatnonzero(weights >= least)
        if least == 0 or float(weights[ids].sum(dtype=np.float64)) > reach:
            break
    ids = ids[np.argsort(-weights[ids])]
    return ids, weights[ids]


def _pick(weights: Row, number: float) -> int:
    """Return the index at which the running sum of ``weights`` passes ``number`` of the whole sum."""
    running = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(running, number * running[-1], side="right"))
    # Rounding may put the sum's last step below number; a token of probability zero must not be chosen there.
    return min(index, int(np.flatnonzero(weights)[-1]))
