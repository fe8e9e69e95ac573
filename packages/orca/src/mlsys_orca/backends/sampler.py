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

from mlsys_orca.backends.drawing import Ids, draw, reshaped, uniform
from mlsys_orca.scheduling.batch import (
    IterationBatch,
    IterationOutput,
    RequestSlice,
    SampledToken,
    SamplingParams,
    ScoredPrompt,
    SliceDetails,
)
from torch import Tensor


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
            token_id = draw(values, params, uniform(params.seed, first + index))
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
        token_id = greedy if how.is_greedy else draw(logits[index].cpu().numpy(), how, uniform(how.seed, position))
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
