"""Tokens beside those of llama.cpp (build 11549) that ``full.py --write`` has kept."""

from __future__ import annotations

import json

import pytest
from mlsys_core.errors import MissingDependencyError
from mlsys_orca.loading.gguf_tokenizer import DISTINCT_NAMES, tokenizer_from_gguf

from tests.oracles.gguf_splits.full import KEPT, vocabulary


@pytest.mark.model
def test_every_way_of_cutting_gives_llama_cpps_tokens() -> None:
    try:
        metadata = vocabulary()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    kept = json.loads(KEPT.read_text("utf-8"))
    assert set(kept) == set(DISTINCT_NAMES)
    for name, tokens in kept.items():
        tokenizer = tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": name})
        assert {text: tokenizer.encode(text) for text in tokens} == tokens, name
