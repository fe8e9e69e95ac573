"""A few of the zoo in each run of the tests; ``full.py`` takes them all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.oracles.nimble_zoo.compare import Tally, check
from tests.oracles.nimble_zoo.language import FEW, Language, languages


@pytest.fixture(scope="module")
def known() -> dict[str, Language]:
    pytest.importorskip("transformers")
    return {language.name: language for language in languages() if language.name in FEW}


@pytest.mark.parametrize("name", FEW)
def test_padded_batches_are_equal(name: str, known: dict[str, Language]):
    language, tally = known[name], Tally()
    for side in ("none", "left", "right"):
        calls = [{**call, "use_cache": False} for call in language.calls(side)]
        check(tally, f"{name}, padded {side}", language.make(), calls, "prepare")
    assert tally.faults == []
    assert tally.counts["equal"] == 3, tally.refused


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
@pytest.mark.parametrize("way", ["prepare", "compile", "eager"])
def test_caches_are_equal(name: str, way: str, known: dict[str, Language]):
    from tests.oracles.nimble_zoo.language import with_cache

    language, tally = known[name], Tally()
    for side in ("left", "right"):
        options: dict[str, Any] = {"executor": "reference"} if way != "prepare" else {}
        check(tally, f"{name}, {way}, padded {side}", language.make(), with_cache(language, side) or [], way, **options)
    assert tally.faults == []
    assert tally.counts["equal"] == 2, tally.refused
