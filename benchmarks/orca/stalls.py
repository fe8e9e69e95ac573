"""Effect of long prompts on running streams: the time between their tokens, under each policy.

    python benchmarks/orca/stalls.py
    python benchmarks/orca/stalls.py --policies orca,chunked:128,chunked:512 --prompts 3 --output /tmp/stalls.json

Some streams decode all the time; every few seconds a prompt of 4,000 tokens arrives, one token is asked of it, and it
leaves. ``chunked:N`` has at most N tokens an iteration. Shown are the percentiles of the gaps between two tokens of the
running streams, from the first long prompt's arrival to the last one's end, those without long prompts, and the time of
a long prompt to its token: the price of smooth streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from mlsys_core.config import settings
from mlsys_core.environment import describe_environment
from mlsys_core.models import resolve_model
from mlsys_orca.engine.engine import Engine, EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.scheduling.batch import SampledToken
from mlsys_orca.scheduling.request import GenerationRequest
from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Stalls:
    """Gaps between tokens, in seconds."""

    policy: str
    num_gaps: int
    quiet_p50_s: float  # before the first long prompt
    p50_s: float
    p99_s: float
    longest_s: float
    long_prompt_s: float  # median time to its token


async def run(
    engine: Engine, *, num_streams: int, num_prompts: int, prompt_tokens: int, quiet_s: float
) -> tuple[list[float], list[float], list[float]]:
    """Return gaps before the long prompts, gaps during them, and each long prompt's time to its token."""
    stop = asyncio.Event()
    times: list[list[float]] = [[] for _ in range(num_streams)]

    async def stream(number: int) -> None:
        prompt = tuple(range(1000 + 50 * number, 1030 + 50 * number))
        request = GenerationRequest(request_id=f"stream-{number}", prompt_token_ids=prompt, max_new_tokens=3000)
        async for item in engine.generate(request):
            if isinstance(item, SampledToken):
                times[number].append(time.perf_counter())
            if stop.is_set():
                return

    streams = [asyncio.create_task(stream(number)) for number in range(num_streams)]
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


def measure(loaded: LoadedModel, policy: str, arguments: argparse.Namespace) -> Stalls:
    """Measure one policy."""
    name, _, budget = policy.partition(":")
    config = EngineConfig(
        max_batch_size=arguments.streams + 1,
        max_model_len=arguments.tokens + 8,
        num_threads=arguments.threads,
        policy=name,
        policy_options={"max_batch_tokens": int(budget)} if budget else {},
    )
    with Engine(loaded, config, available_nbytes=2**34) as engine:
        quiet, loud, took = asyncio.run(
            run(
                engine,
                num_streams=arguments.streams,
                num_prompts=arguments.prompts,
                prompt_tokens=arguments.tokens,
                quiet_s=arguments.quiet,
            )
        )
    quiet.sort(), loud.sort(), took.sort()
    return Stalls(
        policy,
        len(loud),
        quiet[len(quiet) // 2],
        loud[len(loud) // 2],
        loud[min(len(loud) - 1, int(0.99 * len(loud)))],
        loud[-1],
        took[len(took) // 2],
    )


def main() -> None:
    """Measure, print the table, write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name from 'mlsys models list', or a path")
    parser.add_argument("--policies", default="orca,chunked:512,chunked:256,chunked:128", help="separated by commas")
    parser.add_argument("--streams", type=int, default=4, help="that decode all the time")
    parser.add_argument("--prompts", type=int, default=3, help="long ones, one after the other")
    parser.add_argument("--tokens", type=int, default=4000, help="of a long prompt")
    parser.add_argument("--quiet", type=float, default=2.0, help="seconds before the first one")
    parser.add_argument("--threads", type=int, default=2, help="of the model")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    console = Console()
    loaded = load_model(resolve_model(arguments.model, settings().cache_dir))
    measured = []
    for policy in arguments.policies.split(","):
        with console.status(f"{policy} ..."):
            measured.append(measure(loaded, policy, arguments))
    heads = ("policy", "gaps", "quiet p50 ms", "p50 ms", "p99 ms", "longest ms", "long prompt s")
    table = Table(*heads, box=box.SIMPLE_HEAD)
    for each in measured:
        gaps = (each.quiet_p50_s, each.p50_s, each.p99_s, each.longest_s)
        table.add_row(
            each.policy, str(each.num_gaps), *(f"{gap * 1e3:.0f}" for gap in gaps), f"{each.long_prompt_s:.1f}"
        )
    console.print(table)
    if arguments.output:
        record = {
            "model": loaded.name,
            "streams": arguments.streams,
            "prompt_tokens": arguments.tokens,
            "num_threads": arguments.threads,
            "environment": describe_environment(),
            "stalls": [asdict(each) for each in measured],
        }
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
