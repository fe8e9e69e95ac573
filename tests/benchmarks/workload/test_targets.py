import asyncio

from mlsys_bench.workload.targets import InProcessTarget, Outcome, synthetic_prompt
from mlsys_bench.workload.trace import TraceItem

ITEM = TraceItem(0.0, 4, 2)


def send(target):
    tokens = []
    return asyncio.run(target.send(ITEM, lambda: tokens.append(1))), len(tokens)


def test_an_awaitable_is_one_answer():
    async def answer(item):
        assert item is ITEM
        return "hello"

    assert send(InProcessTarget(answer)) == (Outcome(), 0)


def test_an_outcome_passes_through():
    async def answer(item):
        return Outcome(num_output_tokens=5, error="busy")

    assert send(InProcessTarget(answer)) == (Outcome(num_output_tokens=5, error="busy"), 0)


def test_each_element_of_an_async_iterator_is_a_token():
    async def tokens(item):
        for number in range(3):
            yield number

    assert send(InProcessTarget(tokens)) == (Outcome(), 3)


def test_blocking_functions_run_in_a_thread():
    target = InProcessTarget(lambda item: asyncio.to_thread(Outcome, item.num_input_tokens))
    assert send(target) == (Outcome(num_output_tokens=4), 0)


def test_synthetic_prompts_differ_by_seed_and_keep_their_length():
    prompts = {synthetic_prompt(50, seed=seed) for seed in range(-20, 20)}
    assert len(prompts) == 40
    assert {len(prompt.split(" ")) for prompt in prompts} == {50}
    assert synthetic_prompt(50, seed=3) == synthetic_prompt(50, seed=3)
