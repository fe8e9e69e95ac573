"""Logits to tokens. Called by the runner once per iteration, on the wanted rows only.

Plain requests, all but those that ask for penalties, biases, guides, drafts or their prompt's log-probabilities, take
one short path; the others a row at a time, what they ask for done by :func:`reshaped`.

Random numbers depend on the request alone: the number for the token at position ``p`` of a request with seed ``s`` is
a hash of ``(s, p)``. So neither the batch's other requests, nor an earlier preemption, nor a worker restarted in the
middle changes what a request gets, and there is no generator to keep or to lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from mlsys_orca.scheduling.batch import (
    IterationBatch,
    IterationOutput,
    RequestSlice,
    SampledToken,
    SamplingParams,
    ScoredPrompt,
    SliceDetails,
)
from numpy.typing import NDArray
from torch import Tensor


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


Row = NDArray[np.float32]  # [vocab_size], or some of it
Ids = NDArray[np.int64]
_THRESHOLDS = (1e-3, 1e-6, 0.0)  # of a weight, the largest being 1: which are sorted for top_p


def wanted_rows(batch: IterationBatch) -> list[int]:
    """Return the rows of ``batch`` whose logits :func:`choose` takes, in its order."""
    if batch.is_plain:
        return [request.stop - 1 for request in batch.sampled]
    rows: list[int] = []
    for request in batch.requests:
        rows.extend(_scored_rows(request))
        if request.sampling is not None:
            rows.extend(range(request.stop - 1 - request.num_draft_tokens, request.stop))
    return rows


def needs_logits(batch: IterationBatch) -> bool:
    """Return whether :func:`choose` reads logits at all, if it is given each row's largest."""
    params = [request.sampling for request in batch.sampled if request.sampling is not None]
    return not batch.is_plain or any(not each.is_greedy or each.num_logprobs is not None for each in params)


def choose(batch: IterationBatch, logits: Tensor, *, largest: Ids | None = None) -> IterationOutput:
    """Choose a token for each request that samples, more where draft tokens were right; report prompts' scores.

    Args:
        batch: The batch that ran.
        logits: fp32 [rows, vocab_size], of :func:`wanted_rows`; [rows, 0] with ``largest``, unless
            :func:`needs_logits`.
        largest: [rows] where each row's largest is, where the model found it on the way; None: it is looked for.
    """
    if batch.is_plain:
        sampled = batch.sampled
        chosen = sample(
            logits,
            request_ids=[request.request_id for request in sampled],
            positions=[request.context_len for request in sampled],
            params=[request.sampling for request in sampled if request.sampling is not None],
            largest=largest,
        )
        return IterationOutput(_with_cached(batch, chosen))
    tokens: list[SampledToken] = []
    scored: list[ScoredPrompt] = []
    row = 0
    for request in batch.requests:
        details = request.details or SliceDetails()
        if num_scored := len(_scored_rows(request)):
            scored.append(_score(request, details, logits[row : row + num_scored]))
            row += num_scored
        if request.sampling is not None:
            num_rows = 1 + details.num_draft_tokens
            draft = batch.token_ids[request.stop - details.num_draft_tokens : request.stop]
            tokens += _verify(request, details, draft, logits[row : row + num_rows])
            row += num_rows
    return IterationOutput(_with_cached(batch, tuple(tokens)), tuple(scored))


def _with_cached(batch: IterationBatch, tokens: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
    """Return ``tokens``, the first of an answer with what its prompt found in kept blocks."""
    if not batch.has_cached:
        return tokens
    cached = {request.request_id: request.num_cached_tokens for request in batch.requests}
    return tuple(replace(token, num_cached_tokens=cached[token.request_id]) for token in tokens)


def _scored_rows(request: RequestSlice) -> range:
    """Return the rows whose next token is the prompt's, of a prompt whose log-probabilities are wanted."""
    details = request.details
    if details is None or details.num_prompt_logprobs is None:
        return range(0)
    num_left = details.num_prompt_tokens - 1 - request.num_computed_tokens
    return range(request.start, min(request.stop, request.start + max(0, num_left)))


def _score(request: RequestSlice, details: SliceDetails, logits: Tensor) -> ScoredPrompt:
    first = request.num_computed_tokens + 1
    tokens = details.past[first : first + len(logits)]
    count = details.num_prompt_logprobs or 0
    return ScoredPrompt(
        request.request_id,
        first,
        tuple(_report(row, request.request_id, token, count) for row, token in zip(logits, tokens, strict=True)),
    )


def _verify(request: RequestSlice, details: SliceDetails, draft: Sequence[int], logits: Tensor) -> list[SampledToken]:
    """Sample row after row as if each guess before had been sampled, until one was not."""
    params = request.sampling
    assert params is not None
    first = request.context_len - len(draft)
    past, tokens = list(details.past), list[SampledToken]()
    for index, row in enumerate(logits):
        values = row.cpu().numpy()
        if not params.is_plain:
            values = reshaped(values, params, past, details.num_prompt_tokens)
        if params.is_greedy:
            token_id = int(values.argmax())
        else:
            token_id = _draw(values, params, uniform(params.seed, first + index))
        tokens.append(_report(row, request.request_id, token_id, params.num_logprobs))
        past.append(token_id)
        if index < len(draft) and draft[index] != token_id:
            break
    if params.guide is not None:
        params.guide.foresee(past[details.num_prompt_tokens :])
    return tokens


def sample(
    logits: Tensor,
    *,
    request_ids: Sequence[str],
    positions: Sequence[int],
    params: Sequence[SamplingParams],
    largest: Ids | None = None,
) -> tuple[SampledToken, ...]:
    """Choose one token for each row.

    Args:
        logits: fp32 [num_sampled, vocab_size].
        request_ids: [num_sampled] whose row it is.
        positions: [num_sampled] the position that the chosen token will have in its request.
        params: [num_sampled] how to choose.
        largest: See :func:`choose`.

    Returns:
        One token per row, in order.

    Example:
        >>> import torch
        >>> sample(torch.tensor([[0.0, 2.0]]), request_ids=["a"], positions=[7], params=[SamplingParams()])[0].token_id
        1
    """
    # numpy's argmax takes a tenth of torch's time on a CPU. Greedy requests need no row of their own: to cut the
    # matrix into rows would cost more than all else here.
    found = (logits.numpy() if logits.device.type == "cpu" else logits).argmax(-1) if largest is None else largest
    best = found.tolist()
    sampled = []
    for index, (greedy, request_id, position, how) in enumerate(zip(best, request_ids, positions, params, strict=True)):
        token_id = greedy if how.is_greedy else _draw(logits[index].cpu().numpy(), how, uniform(how.seed, position))
        if how.num_logprobs is None:
            sampled.append(SampledToken(request_id, token_id))
        else:
            sampled.append(_report(logits[index], request_id, token_id, how.num_logprobs))
    return tuple(sampled)


def _report(logits: Tensor, request_id: str, token_id: int, num_logprobs: int | None) -> SampledToken:
    """Return the token with its log-probability among ``logits`` [vocab_size] and the best ones, if wanted."""
    if num_logprobs is None:
        return SampledToken(request_id, token_id)
    logprobs = logits.log_softmax(dim=-1)
    top = logprobs.topk(num_logprobs)
    pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return SampledToken(request_id, token_id, float(logprobs[token_id]), pairs)


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


def _draw(logits: Row, params: SamplingParams, number: float) -> int:
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
