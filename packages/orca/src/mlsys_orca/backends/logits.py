"""Changes to a request's logits before a token is chosen: biases, penalties, tokens that may not come.

Called by the sampler for requests that ask for any of it, a row at a time; functions of the row, the parameters and
the tokens so far, so that nothing is kept between iterations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mlsys_orca.scheduling.batch import SamplingParams
from numpy.typing import NDArray

Row = NDArray[np.float32]  # [vocab_size]


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
