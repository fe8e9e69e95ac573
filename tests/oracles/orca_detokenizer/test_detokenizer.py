"""A bounded part of the oracle, and long streams."""

from __future__ import annotations

import random

import pytest
from mlsys_orca.text.tokenizer import Detokenizer

from tests.oracles.orca_detokenizer.sequences import Counting, build, fault

TOKENIZERS = build()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_join_to_what_decoding_at_once_gives(name: str) -> None:
    faults = [fault(random.Random(seed), TOKENIZERS[name]) for seed in range(150)]
    assert [each for each in faults if each] == []


@pytest.mark.parametrize("name", TOKENIZERS)
def test_cost_is_linear_whatever_token_comes_again_and_again(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for token_id in range(tokenizer.vocab_size + 1, 3):
        counting = Counting(tokenizer)
        detokenizer = Detokenizer(counting, prompt_ids=[1])  # type: ignore[arg-type]
        for _ in range(200):
            detokenizer.push(token_id)
        assert counting.num_decoded < 200 * 20, tokenizer.token_bytes(token_id)
