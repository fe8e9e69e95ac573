"""The recording of an engine's iterations, and the picture drawn from it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling import Recorder
from mlsys_orca.engine.engine import Engine, EngineConfig
from mlsys_orca.engine.iteration_plot import iteration_figure
from mlsys_orca.engine.iteration_trace import Iteration, iterations_of, phase_of, record_iterations
from mlsys_orca.loading.load import load_model
from mlsys_orca.scheduling.batch import BatchBuilder, GenerationRequest, IterationBatch, IterationOutput, SamplingParams


def batch_of(*parts: tuple[str, int, int, bool]) -> IterationBatch:
    """Requests as (id, tokens to run, tokens computed before, whether it samples)."""
    builder = BatchBuilder()
    for name, num_tokens, num_computed, samples in parts:
        sampling = SamplingParams() if samples else None
        builder.add(name, [7] * num_tokens, num_computed_tokens=num_computed, block_table=(0, 1), sampling=sampling)
    return builder.build()


def test_a_span_per_request_and_iteration_comes_back_as_iterations() -> None:
    times = iter([100, 150, 200, 230])
    recorder = Recorder()
    run = record_iterations(lambda _: IterationOutput(()), recorder, clock_ns=lambda: next(times))
    run(batch_of(("a", 5, 0, True), ("b", 3, 0, False)))
    with recorder.span("something else", track="worker 0"):
        run(batch_of(("a", 1, 5, True), ("b", 2, 3, True)))
    assert iterations_of(recorder.recording()) == [
        Iteration(100, 150, {"a": "prefill", "b": "prefill"}),
        Iteration(200, 230, {"a": "decode", "b": "prefill"}),
    ]


def test_an_iteration_that_fails_leaves_nothing() -> None:
    def fail(_: IterationBatch) -> IterationOutput:
        raise RuntimeError("out of order")

    recorder = Recorder()
    with pytest.raises(RuntimeError, match="out of order"):
        record_iterations(fail, recorder)(batch_of(("a", 1, 0, True)))
    assert iterations_of(recorder.recording()) == []


def test_phases() -> None:
    cases = {(1, 0, True): "prefill", (1, 4, True): "decode", (1, 4, False): "prefill", (2, 4, True): "prefill"}
    for (num_tokens, num_computed, samples), expected in cases.items():
        (part,) = batch_of(("a", num_tokens, num_computed, samples)).requests
        assert phase_of(part) == expected


@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_the_engine_records_the_batches_it_ran(make_gguf: Callable[..., Path], policy: str) -> None:
    async def ask(engine: Engine, name: str, num_prompt: int, new: int) -> None:
        prompt = tuple(range(5, 5 + num_prompt))
        async for _ in engine.generate(GenerationRequest(request_id=name, prompt_token_ids=prompt, max_new_tokens=new)):
            pass

    async def run(engine: Engine) -> None:
        await asyncio.gather(ask(engine, "a", 4, 6), ask(engine, "b", 12, 3))

    recorder = Recorder()
    options = {"max_batch_tokens": 5} if policy == "chunked" else {}
    config = EngineConfig(policy=policy, policy_options=options)
    with Engine(load_model(make_gguf(), dtype="fp32"), config, available_nbytes=2**30, recorder=recorder) as engine:
        asyncio.run(run(engine))
    iterations = iterations_of(recorder.recording())
    counts = Counter(cell for iteration in iterations for cell in iteration.phases.items())
    assert (counts["a", "prefill"], counts["a", "decode"], counts["b", "decode"]) == (1, 5, 2)
    assert counts["b", "prefill"] == 1 if policy == "orca" else counts["b", "prefill"] > 2
    assert all(before.end_ns <= after.start_ns for before, after in pairwise(iterations))


def test_the_picture_has_a_cell_for_each_and_marks_the_last() -> None:
    iterations = [
        Iteration(0, 1, {"a": "prefill"}),
        Iteration(1, 2, {"a": "decode", "b": "prefill"}),
        Iteration(2, 3, {"b": "decode"}),
    ]
    axes = iteration_figure(iterations, names={"a": "first", "b": "second"}).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "second"]
    cells = [[path.get_extents().x0 for path in bars.get_paths()] for bars in axes.collections]
    assert cells == [[1.5], [0.5], [2.5], [1.5]], "decode and prefill of a, then of b"
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines] == [(2, 0), (3, 1)]
    with pytest.raises(InvalidInputError, match="no iteration to draw"):
        iteration_figure([])
