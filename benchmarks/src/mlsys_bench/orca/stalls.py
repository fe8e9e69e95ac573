"""Effect of long prompts on running streams: the time between their tokens, under each policy.

    mlsys bench orca-stalls policies=orca,chunked:128,chunked:512:32 prompts=3

Some streams decode all the time; every few seconds a prompt of 4,000 tokens arrives, one token is asked of it, and it
leaves. ``chunked:N`` has at most N tokens an iteration, ``chunked:N:C`` at most C of prompts where streams decode.
Shown are the percentiles of the gaps between two tokens of the running streams, from the first long prompt's arrival to
the last one's end, those without long prompts, and the time of a long prompt to its token: the price of smooth streams.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mlsys_core.config import settings
from mlsys_core.models import resolve_model
from mlsys_orca.engine.engine import Engine, EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca.scheduling.batch import SampledToken
from mlsys_orca.scheduling.request import GenerationRequest

from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section


PROMPT, ANSWER = 30, 3000  # tokens of a stream, which ends sooner


@dataclass(frozen=True, slots=True)
class Row:
    """Gaps between tokens of the running streams under one policy."""

    policy: str
    gaps: int
    quiet_p50_ms: float  # before the first long prompt
    quiet_p99_ms: float
    p50_ms: float
    p99_ms: float
    longest_ms: float
    long_prompt_s: float  # median time to its token


async def gaps_of(
    engine: Engine, *, num_streams: int, num_prompts: int, prompt_tokens: int, quiet_s: float
) -> tuple[list[float], list[float], list[float]]:
    """Return gaps before the long prompts, gaps during them, and each long prompt's time to its token."""
    stop = asyncio.Event()
    times: list[list[float]] = [[] for _ in range(num_streams)]

    async def stream(number: int) -> None:
        prompt = tuple(range(1000 + 50 * number, 1000 + 50 * number + PROMPT))
        request = GenerationRequest(request_id=f"stream-{number}", prompt_token_ids=prompt, max_new_tokens=ANSWER)
        async for item in engine.generate(request):
            if isinstance(item, SampledToken):
                times[number].append(time.perf_counter())
            if stop.is_set():
                return

    streams = [asyncio.create_task(stream(number)) for number in range(num_streams)]
    while min(map(len, times)) < 2:  # no gap to measure yet
        stopped, _ = await asyncio.wait(streams, timeout=0.01)
        for each in stopped:
            each.result()  # raises what ended it
    await asyncio.sleep(quiet_s)
    begun, took = time.perf_counter(), []
    for number in range(num_prompts):
        prompt = tuple(3000 + (7 * index + number) % 40_000 for index in range(prompt_tokens))
        asked = time.perf_counter()
        async for _ in engine.generate(
            GenerationRequest(request_id=f"long-{number}", prompt_token_ids=prompt, max_new_tokens=1)
        ):
            pass
        took.append(time.perf_counter() - asked)
    ended = time.perf_counter()
    stop.set()
    await asyncio.gather(*streams)
    quiet, loud = [], []
    for seen in times:
        for before, after in pairwise(seen):
            if after <= begun:
                quiet.append(after - before)
            elif before <= ended:
                loud.append(after - before)
    return quiet, loud, took


def row_of(policy: str, quiet: list[float], loud: list[float], took: list[float]) -> Row:
    """Return the percentiles of what :func:`gaps_of` found, in seconds."""
    loud, quiet = sorted(loud), sorted(quiet)
    p99, quiet_p99 = (gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))] for gaps in (loud, quiet))
    return Row(
        policy=policy,
        gaps=len(loud),
        quiet_p50_ms=statistics.median(quiet) * 1e3,
        quiet_p99_ms=quiet_p99 * 1e3,
        p50_ms=statistics.median(loud) * 1e3,
        p99_ms=p99 * 1e3,
        longest_ms=loud[-1] * 1e3,
        long_prompt_s=statistics.median(took),
    )


def run(
    context: BenchContext,
    *,
    model: str = "smollm2-135m-instruct",
    policies: tuple[str, ...] = ("orca", "chunked:512", "chunked:128", "chunked:512:64", "chunked:512:32"),
    streams: int = 4,
    prompts: int = 3,
    tokens: int = 4000,
    quiet: float = 2.0,
    activations: str | None = None,
) -> Section:
    """Measure each policy.

    Args:
        context: The suite's context; quick has two policies and one prompt of 500 tokens.
        model: A name or a path.
        policies: Names; ``chunked:N:C`` has at most N tokens an iteration, and C of prompts where streams decode.
        streams: Streams that decode all the time.
        prompts: Long prompts, one after the other.
        tokens: Of a long prompt.
        quiet: Seconds between the streams' first tokens and the first long prompt.
        activations: The form of rows, with packed weights.
    """
    if context.is_quick:
        policies, prompts, tokens = policies[:2], 1, 500
    form: Any = activations  # which the loader checks
    loaded = load_model(resolve_model(model, settings().cache_dir), activations=form)
    rows = []
    for policy in policies:
        context.console.print(f"{policy} ...")
        name, *limits = policy.split(":")
        options = dict(zip(("max_batch_tokens", "max_chunk_tokens"), map(int, limits), strict=False))
        config = EngineConfig(
            max_batch_size=streams + 1,
            max_model_len=max(tokens, PROMPT + ANSWER) + 8,
            num_threads=context.num_threads,
            policy=name,
            policy_options=options,
        )
        with Engine(loaded, config, available_nbytes=2**34) as engine:
            load = gaps_of(engine, num_streams=streams, num_prompts=prompts, prompt_tokens=tokens, quiet_s=quiet)
            rows.append(row_of(policy, *asyncio.run(load)))
    return rows_section("Orca: stalls", rows, model=model, streams=streams, prompt_tokens=tokens)
