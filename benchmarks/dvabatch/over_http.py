r"""Sentence embeddings over HTTP under Poisson arrivals: DVABatch beside Triton, Ray Serve and LitServe, one model.

Each server runs all-MiniLM-L6-v2 with the same code and weights on one thread (`benchmarks/peers/sentence_model.py`),
batches of at most 64, and is asked in turn, round after round, for texts of the lengths of a GLUE-like workload, in the
JSON form of the inference route. Vectors are compared before latencies. Some servers (LitServe) keep a core busy while
they wait; `--group NAME ID` stops a server's process group while the others are asked.

    mlsys dvabatch serve all-minilm-l6-v2 --threads 1 --port 18400 &
    python benchmarks/dvabatch/over_http.py --rate 10 --server mlsys 127.0.0.1:18400 all-minilm-l6-v2 \
        --server triton 127.0.0.1:18300 all-minilm-l6-v2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from mlsys_core.environment import describe_environment
from mlsys_core.workload import Poisson
from mlsys_dvabatch.bench.workloads import lengths_like

WORDS = ("the", "train", "is", "late", "when", "does", "it", "come", "again", "and", "who", "will", "wait", "here")


def texts_like(workload: str, num: int) -> list[str]:
    """Return texts with the workload's token counts; each word is one token, and the tokenizer adds two."""
    rng = np.random.default_rng(1)
    return [" ".join(rng.choice(WORDS, max(1, length - 2))) for length in lengths_like(workload, num)]


async def ask(client: httpx.AsyncClient, url: str, text: str, due_s: float) -> tuple[float, list[float]]:
    """Send one request; return the seconds since it was due, and the vector."""
    await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": [text]}]}
    answer = await client.post(url, json=body)
    if answer.status_code != 200:
        raise SystemExit(f"{url}: {answer.status_code} {answer.text[:300]}")
    vector: list[float] = answer.json()["outputs"][0]["data"]
    return time.perf_counter() - due_s, vector


async def one_round(address: str, model: str, texts: list[str], rate: float, seed: int) -> tuple[list[float], Any]:
    """Return the latencies and vectors of all texts."""
    gaps_s = Poisson(rate).times(len(texts), np.random.default_rng(seed))
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        start_s = time.perf_counter() + 0.05
        url = f"http://{address}/v2/models/{model}/infer"
        asked = (ask(client, url, text, start_s + float(at)) for text, at in zip(texts, gaps_s, strict=True))
        answers = await asyncio.gather(*asked)
    return [seconds for seconds, _ in answers], np.array([vector for _, vector in answers])


def let_run(name: str, groups: list[list[str]]) -> None:
    """Stop the process groups of all servers but ``name``."""
    for other, group in groups:
        os.killpg(int(group), signal.SIGCONT if other == name else signal.SIGSTOP)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", nargs=3, action="append", required=True, metavar=("NAME", "ADDRESS", "MODEL"))
    parser.add_argument("--group", nargs=2, action="append", default=[], metavar=("NAME", "ID"))
    parser.add_argument("--workload", default="RTE")
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=60, help="in each round")
    parser.add_argument("--rounds", type=int, default=2, help="besides one to warm up")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    texts = texts_like(options.workload, options.requests)
    latencies: dict[str, list[float]] = {name: [] for name, _, _ in options.server}
    expected: Any = None
    for number in range(options.rounds + 1):
        for name, address, model in options.server:
            given = texts if number else texts[:16]
            let_run(name, options.group)
            found, vectors = asyncio.run(one_round(address, model, given, options.rate, number))
            if number:
                expected = vectors if expected is None else expected
                difference = float(np.abs(vectors - expected).max())
                if difference > 1e-4:
                    raise SystemExit(f"{name} gives other vectors, by {difference:g}")
                latencies[name] += found
    for name, _ in options.group:
        let_run(name, [each for each in options.group if each[0] == name])
    rows = [
        {"server": name, "mean_ms": float(np.mean(found)) * 1e3}
        | {f"p{at}_ms": float(np.percentile(found, at)) * 1e3 for at in (50, 99)}
        for name, found in latencies.items()
    ]
    print(f"{options.workload}, {options.rate:g} requests/s, {options.rounds} rounds of {options.requests}")
    for row in rows:
        print(f"{row['server']:<16} mean {row['mean_ms']:8.1f}  p50 {row['p50_ms']:8.1f}  p99 {row['p99_ms']:8.1f} ms")
    if options.json:
        settings = {name: getattr(options, name) for name in ("workload", "rate", "requests", "rounds")}
        result = {"environment": describe_environment(), "settings": settings, "rows": rows}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
