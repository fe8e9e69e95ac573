"""The requests of a benchmark: exact lengths, the same at every load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mlsys_bench.orca.serve import Workload
from mlsys_bench.workload.lengths import Uniform
from mlsys_orca.loading.load import load_model
from mlsys_orca.text.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(make_gguf: Callable[..., Path]) -> Tokenizer:
    return load_model(make_gguf(), dtype="fp32", backend="torch").tokenizer


def workload() -> Workload:
    return Workload(prompts=Uniform(3, 40), outputs=Uniform(1, 9), num_requests=12)


def test_requests_have_the_trace_s_lengths_at_every_load(tokenizer: Tokenizer) -> None:
    requests = workload().requests(tokenizer)
    for rate in (None, 0.5, 20.0):
        items = workload().trace(rate).items
        assert [len(each.prompt_token_ids) for each in requests] == [item.num_input_tokens for item in items]
        assert [each.max_new_tokens for each in requests] == [item.num_output_tokens for item in items]
    assert all(item.arrival_s == 0 for item in workload().trace(None))
    slow, fast = (workload().trace(rate).items[-1].arrival_s for rate in (0.5, 20.0))
    assert slow == pytest.approx(40 * fast, rel=1e-4)


def test_prompts_differ(tokenizer: Tokenizer) -> None:
    prompts = [each.prompt_token_ids for each in workload().requests(tokenizer)]
    assert len(set(prompts)) == len(prompts)
