"""Guides: masks that let through what fits and nothing else, wherever the parser has to go back to."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import WorkerId
from mlsys_orca.api.text_stream import stream_text
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.backends.runner import Runner
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.scheduling.batch import GenerationRequest, GenerationResult, SamplingParams
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.orca import IterationScheduler
from mlsys_orca.text.guides import GrammarGuide, GuideMaker, grammar_of

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["xyxyxyxyxyxy"]}, "b": {"enum": ["xyxyxyxyxyxy", "z"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture
def loaded(make_gguf: Callable[..., Path]) -> LoadedModel:
    return load_model(make_gguf(), dtype="fp32")


@pytest.fixture
def maker(loaded: LoadedModel) -> GuideMaker:
    return GuideMaker(loaded.tokenizer, loaded.config.vocab_size)


def texts(loaded: LoadedModel, mask: np.ndarray) -> set[str]:
    return {loaded.tokenizer.decode([int(token)], skip_special=False) for token in mask.nonzero()[0]}


def test_only_what_fits_may_come_and_then_the_end(loaded: LoadedModel, maker: GuideMaker) -> None:
    guide = maker.guide(grammar_of("regex", "he(l|y)"))
    ids = {text: loaded.tokenizer.encode(text)[0] for text in ("h", "he", "e", "l", "y")}
    assert texts(loaded, guide.allowed([])) == {"h", "he", "hel"}
    assert texts(loaded, guide.allowed([ids["h"]])) == {"e"}
    assert texts(loaded, guide.allowed([ids["he"]])) == {"l", "y"}, "another answer than the one before"
    assert texts(loaded, guide.allowed([ids["h"], ids["e"], ids["y"]])) == {"</s>"}
    assert texts(loaded, guide.allowed([ids["h"]])) == {"e"}


def test_a_mask_made_ahead_is_the_mask_computed_in_time(loaded: LoadedModel, maker: GuideMaker) -> None:
    grammar = grammar_of("json_schema", SCHEMA)
    foreseeing, asking = maker.guide(grammar), maker.guide(grammar)
    answer = loaded.tokenizer.encode('{"a": "xyxy')
    for length in range(len(answer)):
        foreseeing.foresee(answer[:length])
        assert (foreseeing.allowed(answer[:length]) == asking.allowed(answer[:length])).all()
    foreseeing.foresee(answer)
    assert (foreseeing.allowed(answer[:2]) == asking.allowed(answer[:2])).all(), "it came otherwise"


def answer_of(loaded: LoadedModel, guide: GrammarGuide, num_draft_tokens: int, **sampling: float) -> tuple[str, int]:
    """The text, and how many guesses were right."""
    scheduler = IterationScheduler(BlockTables(num_blocks=8), max_batch_size=1, max_model_len=128)
    scheduler.pool.num_draft_tokens = num_draft_tokens
    runner = Runner(loaded.model, new_kv_cache(loaded.model, num_blocks=8))
    request = GenerationRequest(
        request_id="r",
        prompt_token_ids=(5, 6, 7),
        max_new_tokens=100,
        sampling=SamplingParams(guide=guide, **sampling),
        stop_token_ids=loaded.tokenizer.eos_ids,
    )
    scheduler.add(request, 0.0)
    while True:
        batch = scheduler.next_batch(WorkerId(0), 0.0)
        for finished in scheduler.complete(batch, runner.run(batch), 0.0):
            tokens = [token.token_id for token in finished.result.tokens]
            return loaded.tokenizer.decode(tokens), scheduler.pool.num_right


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "seed": 3}], ids=["greedy", "sampled"])
def test_guesses_and_guides_go_together(loaded: LoadedModel, maker: GuideMaker, sampling: dict[str, float]) -> None:
    grammar = grammar_of("json_schema", SCHEMA)
    plain, _ = answer_of(loaded, maker.guide(grammar), 0, **sampling)
    guessed, num_right = answer_of(loaded, maker.guide(grammar), 4, **sampling)
    assert plain == guessed
    assert json.loads(plain)["a"] == "xyxyxyxyxyxy"
    assert num_right > 0


@pytest.mark.parametrize(("kind", "spec"), [("regex", "("), ("lark", "start: ("), ("json_schema", {"type": "what"})])
def test_an_invalid_grammar_is_refused(maker: GuideMaker, kind: str, spec: object) -> None:
    with pytest.raises(InvalidInputError):
        maker.guide(grammar_of(kind, spec))


def test_patterns_of_names_hold_or_are_refused_before_the_first_token(maker: GuideMaker, loaded: LoadedModel) -> None:
    """Objects whose named properties and patterns overlap in any way; walks of random tokens."""
    num_refused = 0
    for seed in range(120):
        rng = random.Random(seed)
        names = rng.sample(["a", "b", "ab"], rng.randint(0, 3))
        patterns = rng.sample(["^a$", "^(a|b)$", "^a", "b$", "^ab?$"], rng.randint(1, 2))
        one = {"enum": [1]}
        schema = {
            "type": "object",
            "properties": dict.fromkeys(names, one),
            "required": rng.sample(names, len(names) // 2),
        }
        schema |= {"patternProperties": dict.fromkeys(patterns, one)}
        schema |= rng.choice([{}, {"additionalProperties": False}, {"additionalProperties": False}])
        schema = rng.choice([schema, {"type": "array", "items": schema, "minItems": 1}, {"anyOf": [schema, one]}])
        try:
            guides = maker.guides(grammar_of("json_schema", schema), 3)
        except InvalidInputError as error:
            num_refused += "'patternProperties'" in str(error)
            continue
        for guide in guides:
            answer: list[int] = []
            for _ in range(40):
                allowed = guide.allowed(answer).nonzero()[0]
                assert guide.failure is None, (seed, loaded.tokenizer.decode(answer))
                answer.append(int(rng.choice(allowed)))
                if answer[-1] in loaded.tokenizer.eos_ids:
                    break
    assert 10 < num_refused < 60


def test_a_grammar_that_no_text_fits_is_refused(loaded) -> None:
    maker = GuideMaker(loaded.tokenizer, loaded.config.vocab_size)
    for grammar in ("start: start", "start: a\na: b\nb: a"):
        with pytest.raises(InvalidInputError, match="no text of this model's tokens fits"):
            maker.guide(grammar_of("lark", grammar))


def test_an_answer_whose_parser_gave_up_is_an_error_and_not_a_short_answer(loaded) -> None:
    guide = GuideMaker(loaded.tokenizer, loaded.config.vocab_size).guide(grammar_of("regex", "(he)+"))
    first = int(guide.allowed([]).nonzero()[0][0])
    assert guide.failure is None
    guide.allowed([first, loaded.config.vocab_size - 3])  # no such token was allowed
    assert guide.failure
    request = GenerationRequest(
        request_id="a", prompt_token_ids=(5,), max_new_tokens=4, sampling=SamplingParams(guide=guide)
    )

    class Tokens:
        def __init__(self) -> None:
            self.request = request

        async def __aiter__(self):
            yield GenerationResult(tokens=(), finish_reason="stop")

        def close(self) -> None:
            pass

    async def read() -> None:
        async for _ in stream_text(Tokens(), loaded.tokenizer):
            pass

    with pytest.raises(InvalidInputError, match="too much for its parser"):
        asyncio.run(read())


@pytest.mark.parametrize(
    ("kind", "spec"), [("lark", "\x00"), ("lark", "a" * 5000), ("gbnf", "root ::= ("), ("regex", "(")]
)
def test_a_refusal_is_one_line_whatever_the_parser_draws(maker: GuideMaker, kind, spec) -> None:
    with pytest.raises(InvalidInputError) as caught:
        maker.guide(grammar_of(kind, spec))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
