"""Compare two cases' greedy answers; where they part, tell a tie that rounding decided from a wrong answer.

Sums of floating-point numbers depend on their order, and where kernels choose it by the shape of the batch, two
batches may break a near-tie between two tokens differently. So where answers part, the model is asked for both tokens'
log-probabilities after the common beginning, alone: as close as its arithmetic, they tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.backends.runner import Runner
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.kv_cache import DEFAULT_BLOCK_SIZE
from mlsys_orca.scheduling.batch import MAX_LOGPROBS, BatchBuilder, GenerationRequest, SamplingParams

from mlsys_bench.orca.serve import Answers

_TIES = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # in log-probability, by the dtype computed in


@dataclass(frozen=True, slots=True)
class Difference:
    """Place where two answers to one request part."""

    index: int  # of the request
    position: int  # of the first token that differs, in the answer
    gap: float | None  # between the two tokens' log-probabilities; None: one is not among the most likely
    is_tie: bool  # the gap is within the arithmetic's error


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of comparing the answers to all requests that both have."""

    num_compared: int
    differences: tuple[Difference, ...]

    @property
    def num_wrong(self) -> int:
        """Answers that part at no tie."""
        return sum(not difference.is_tie for difference in self.differences)

    def __str__(self) -> str:
        if self.num_wrong:
            return f"{self.num_wrong} of {self.num_compared} WRONG"
        ties = len(self.differences)
        return f"{self.num_compared} equal" if not ties else f"{self.num_compared - ties} equal, {ties} part at a tie"


def compare(
    expected: Answers, got: Answers, *, loaded: LoadedModel, requests: Sequence[GenerationRequest]
) -> Comparison:
    """Compare the answers to the requests that are in both."""
    common = sorted(expected.keys() & got.keys())
    parted = [index for index in common if expected[index] != got[index]]
    differences = [_difference(index, expected[index], got[index], loaded, requests[index]) for index in parted]
    return Comparison(len(common), tuple(differences))


def _difference(
    index: int, expected: tuple[int, ...], got: tuple[int, ...], loaded: LoadedModel, request: GenerationRequest
) -> Difference:
    pairs = list(zip(expected, got, strict=False))
    position = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
    if position == len(pairs):  # one answer is the beginning of the other: no rounding does that
        return Difference(index, position, None, is_tie=False)
    logprobs = _logprobs(loaded, (*request.prompt_token_ids, *expected[:position]))
    if not {expected[position], got[position]} <= logprobs.keys():
        return Difference(index, position, None, is_tie=False)
    gap = abs(logprobs[expected[position]] - logprobs[got[position]])
    return Difference(index, position, gap, is_tie=gap <= _TIES.get(loaded.model.dtype, 0.0))


def _logprobs(loaded: LoadedModel, token_ids: Sequence[int]) -> dict[int, float]:
    """Return the most likely tokens after ``token_ids``, with their log-probabilities."""
    num_blocks = -(-len(token_ids) // DEFAULT_BLOCK_SIZE)
    builder = BatchBuilder()
    builder.add(
        "alone",
        token_ids,
        num_computed_tokens=0,
        block_table=tuple(range(num_blocks)),
        sampling=SamplingParams(num_logprobs=MAX_LOGPROBS),
    )
    runner = Runner(loaded.model, new_kv_cache(loaded.model, num_blocks=num_blocks))
    return dict(runner.run(builder.build()).sampled[0].top_logprobs)
