"""Every field that says how tokens are chosen and when an answer ends, on the real model through the real client."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("smollm2")]
MODEL = "smollm2-135m-instruct"


def test_a_seed_gives_the_same_answer_in_any_company(ask):
    options = {"temperature": 1.0, "seed": 11, "max_completion_tokens": 20}
    alone = ask(**options).choices[0].message.content
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(ask, temperature=1.0, seed=100 + i, max_completion_tokens=30) for i in range(5)]
        together = pool.submit(ask, **options).result().choices[0].message.content
        assert len({other.result().choices[0].message.content for other in others}) == 5
    assert together == alone


def test_the_first_of_n_choices_is_the_only_one_of_one(ask):
    options = {"temperature": 1.0, "seed": 3, "max_completion_tokens": 12}
    three = ask(n=3, **options)
    texts = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == ask(**options).choices[0].message.content
    assert three.usage.completion_tokens == 36
    streamed = ["", "", ""]
    for chunk in ask(n=3, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_best_of_gives_the_likeliest_of_its_candidates(complete):
    options = {"temperature": 1.0, "seed": 5, "max_tokens": 6, "logprobs": 0}
    every = complete(n=6, **options).choices
    best = complete(best_of=6, n=2, **options)
    mean = {choice.text: sum(choice.logprobs.token_logprobs) / 6 for choice in every}
    wanted = sorted(mean, key=mean.get, reverse=True)[:2]
    assert [choice.text for choice in best.choices] == wanted
    assert best.usage.completion_tokens == 36, "all candidates were made"


def test_logit_bias_forces_and_forbids(ask, complete, url):
    paris = complete(max_tokens=1).choices[0].text
    assert paris == " Paris"
    (paris_id,) = httpx.post(f"{url}/tokenize", json={"prompt": paris}).json()["tokens"]
    assert complete(max_tokens=1, logit_bias={str(paris_id): -100}).choices[0].text != paris
    forced = ask(max_completion_tokens=4, logit_bias={str(paris_id): 100}).choices[0].message.content
    assert forced == paris * 4


def test_penalties_end_repetition(complete):
    prompt = "one two one two one two one two one two one two"
    plain = complete(prompt, max_tokens=24).choices[0].text.split()
    assert Counter(plain).most_common(1)[0][1] > 8, "the model repeats itself"
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"extra_body": {"repetition_penalty": 1.8}}):
        words = complete(prompt, max_tokens=24, **penalty).choices[0].text.split()
        assert Counter(words).most_common(1)[0][1] < Counter(plain).most_common(1)[0][1], penalty


@pytest.mark.parametrize("cut", [{"top_p": 1e-6}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}])
def test_a_cut_to_the_likeliest_token_is_greedy(complete, cut):
    greedy = complete().choices[0].text
    assert complete(temperature=2.0, seed=9).choices[0].text != greedy
    assert complete(temperature=2.0, seed=9, **cut).choices[0].text == greedy


def test_stop_strings_cross_token_borders_and_are_named(complete):
    whole = complete("Count: one, two, three,", max_tokens=16).choices[0].text
    stop = whole[4:9]
    assert stop in whole
    cut = complete("Count: one, two, three,", max_tokens=16, stop=["nowhere", stop]).choices[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole[: whole.index(stop)], "stop", stop)
    kept = complete(
        "Count: one, two, three,", max_tokens=16, stop=stop, extra_body={"include_stop_str_in_output": True}
    ).choices[0]
    assert kept.text == whole[: whole.index(stop) + len(stop)]


def test_stop_token_ids_end_an_answer(complete, url):
    (comma,) = httpx.post(f"{url}/tokenize", json={"prompt": ","}).json()["tokens"]
    prompt = "Count: one, two, three,"
    assert "," in complete(prompt, max_tokens=16).choices[0].text
    cut = complete(prompt, max_tokens=16, extra_body={"stop_token_ids": [comma]})
    assert "," not in cut.choices[0].text
    assert (cut.choices[0].finish_reason, cut.choices[0].stop_reason) == ("stop", comma)


def test_ignore_eos_and_min_tokens_go_past_the_end(ask):
    options = {"messages": [{"role": "user", "content": "Say just: Hello."}], "max_completion_tokens": 60}
    usual = ask(**options)
    assert usual.choices[0].finish_reason == "stop"
    ends_at = usual.usage.completion_tokens
    on = ask(**options, extra_body={"ignore_eos": True})
    assert (on.usage.completion_tokens, on.choices[0].finish_reason) == (60, "length")
    longer = ask(**options, extra_body={"min_tokens": ends_at + 5})
    assert longer.usage.completion_tokens >= ends_at + 5
    late = ask(**options, stop=["H", "e", "l", "o"], extra_body={"min_tokens": 4})
    assert late.usage.completion_tokens >= 4


def test_logprobs_agree_between_endpoints_and_with_the_prompts_own(ask, complete):
    text = " Paris. It is the capital"
    answer = complete(max_tokens=6, logprobs=5).choices[0]
    assert answer.logprobs.token_logprobs[0] == max(answer.logprobs.top_logprobs[0].values())
    echoed = complete("The capital of France is" + answer.text, echo=True, logprobs=5, max_tokens=0).choices[0]
    assert echoed.text == "The capital of France is" + answer.text
    assert echoed.logprobs.tokens[-6:] == answer.logprobs.tokens
    assert echoed.logprobs.token_logprobs[0] is None
    assert echoed.logprobs.token_logprobs[-6:] == pytest.approx(answer.logprobs.token_logprobs, abs=1e-4)
    assert "".join(echoed.logprobs.tokens) == echoed.text
    assert [echoed.text[offset] for offset in echoed.logprobs.text_offset] == [t[0] for t in echoed.logprobs.tokens]
    scored = complete("The capital of France is" + text, extra_body={"prompt_logprobs": 1}).choices[0].prompt_logprobs
    assert scored[0] is None
    assert all(max(entry["logprob"] for entry in position.values()) <= 0 for position in scored[1:])


def test_a_long_prompt_is_scored_in_pieces_as_in_one(complete):
    prompt = "The quick brown fox jumps over the lazy dog. " * 40
    whole = complete(prompt, echo=True, logprobs=0, max_tokens=1).choices[0].logprobs
    half = complete(prompt[: len(prompt) // 2], echo=True, logprobs=0, max_tokens=1).choices[0].logprobs
    assert len(whole.tokens) > 300, "more than an iteration scores"
    assert half.token_logprobs[1:-2] == pytest.approx(whole.token_logprobs[1 : len(half.tokens) - 2], abs=1e-4)


def test_many_prompts_in_one_request(complete):
    prompts = ["The capital of France is", "The capital of Italy is"]
    both = complete(prompts, n=2, temperature=1.0, seed=1)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    alone = [complete(prompt, n=2, temperature=1.0, seed=1).choices for prompt in prompts]
    assert [choice.text for choice in both.choices] == [choice.text for choice in itertools.chain(*alone)]
    streamed = [""] * 4
    for chunk in complete(prompts, n=2, temperature=1.0, seed=1, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in both.choices]


def test_control_tokens_are_shown_to_who_asks(ask):
    options = {"messages": [{"role": "user", "content": "Say just: Hello."}], "max_completion_tokens": 60}
    shown = ask(**options, extra_body={"skip_special_tokens": False, "include_stop_str_in_output": True})
    assert shown.choices[0].message.content.endswith("<|im_end|>")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"best_of": 1, "n": 2}, "'best_of' is 1"),
        ({"best_of": 2, "stream": True}, "leave out 'stream'"),
        ({"suffix": "x"}, "'suffix' is not implemented"),
        ({"max_tokens": 0}, "'max_tokens' is 0"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt": [1, 49152]}, "token id 49152 is not in the vocabulary"),
        ({"prompt": []}, "prompt"),
        ({"extra_body": {"stop_token_ids": [49152]}}, "token id 49152"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"max_tokens": 600}, "context is 512 tokens; the prompt has 5 and 600 more"),
    ],
)
def test_completions_refuse_by_name(complete, options, says):
    with pytest.raises(openai.BadRequestError, match=says):
        complete(options.pop("prompt", "The capital of France is"), **options)


def test_guesses_were_made_and_some_were_right(complete, metric):
    before = metric("spec_decode_num_accepted_tokens_total")
    complete("a b c d e f g a b c d e f g a b c d", max_tokens=20)
    assert metric("spec_decode_num_accepted_tokens_total") > before


def test_allowed_tokens_alone_come_and_bad_words_do_not(complete, url):
    ids = [httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"][0] for text in (" Rome", " Oslo")]
    only = complete(temperature=1.0, seed=1, extra_body={"allowed_token_ids": ids}).choices[0].text
    assert set(only.split()) <= {"Rome", "Oslo"}
    assert "Paris" in complete().choices[0].text
    without = complete(max_tokens=30, extra_body={"bad_words": ["Paris", "capital of France"]}).choices[0].text
    assert "Paris" not in without
    assert "capital of France" not in without
