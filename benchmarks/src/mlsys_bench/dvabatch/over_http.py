"""The suite ``dvabatch-over-http``: sentence embeddings under Poisson arrivals, DVABatch beside other servers.

Each server runs all-MiniLM-L6-v2 with the same code and weights on one thread (`benchmarks/peers/sentence_model.py`),
batches of at most 64, and is asked in turn, round after round, for texts of the lengths of a GLUE-like workload, in the
JSON form of the inference route. Vectors are compared before latencies. Some servers (LitServe) keep a core busy while
they wait; `groups` stops a server's process group while the others are asked.

    mlsys dvabatch serve all-minilm-l6-v2 --threads 1 --port 18400 &
    mlsys bench dvabatch-over-http "servers=mlsys,127.0.0.1:18400,all-minilm-l6-v2 triton,HOST:PORT,MODEL"
"""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_core.report import Section, Table
from mlsys_core.workload import Poisson

from mlsys_bench.dvabatch.workloads import lengths_like
from mlsys_bench.workload.http_target import HttpTarget
from mlsys_bench.workload.loadgen import LoadOptions, run_load_blocking
from mlsys_bench.workload.targets import Outcome
from mlsys_bench.workload.trace import Trace, TraceItem

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

TOLERANCE = 1e-4
WORDS = ("the", "train", "is", "late", "when", "does", "it", "come", "again", "and", "who", "will", "wait", "here")


def texts_like(workload: str, num: int) -> list[str]:
    """Return texts with the workload's token counts; each word is one token, and the tokenizer adds two."""
    rng = np.random.default_rng(1)
    return [" ".join(rng.choice(WORDS, max(1, length - 2))) for length in lengths_like(workload, num)]


def one_round(address: str, model: str, texts: list[str], rate: float, seed: int) -> tuple[list[float], Any]:
    """Return the latencies and vectors of all texts.

    Raises:
        MlsysError: a request failed.
    """
    times_s = Poisson(rate).times(len(texts), np.random.default_rng(seed)).tolist()
    items = [
        TraceItem(at_s, 1, 1, prompt=text, index=i) for i, (at_s, text) in enumerate(zip(times_s, texts, strict=True))
    ]
    target = HttpTarget(
        f"http://{address}/v2/models/{model}/infer",
        lambda item: {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": [item.prompt]}]},
        read_answer=lambda answer: Outcome(output=json.dumps(answer["outputs"][0]["data"])),
    )
    records = run_load_blocking(Trace(tuple(items)), target, options=LoadOptions(max_connections=256)).records
    if failed := [record for record in records if not record.ok]:
        raise MlsysError(f"{address}: {failed[0].error} {failed[0].detail}")
    return [record.latency_s for record in records], np.array([json.loads(record.output or "") for record in records])


def let_run(name: str, groups: list[list[str]]) -> None:
    """Stop the process groups of all servers but ``name``."""
    for other, group in groups:
        os.killpg(int(group), signal.SIGCONT if other == name else signal.SIGSTOP)


def run(
    context: BenchContext,
    *,
    servers: str = "",
    groups: str = "",
    workload: str = "RTE",
    rate: float = 10.0,
    requests: int = 60,
    rounds: int = 2,
) -> Section:
    """Ask each server in turn.

    Args:
        context: The suite's context; quick has one round of 16 requests.
        servers: ``NAME,ADDRESS,MODEL`` of each, with blanks between.
        groups: ``NAME,ID`` of process groups, with blanks between.
        workload: Texts of the lengths of this GLUE-like workload.
        rate: Requests a second.
        requests: In each round.
        rounds: Besides one to warm up.

    Raises:
        InvalidInputError: no server is named.
        MlsysError: a server refuses, or gives other vectors.
    """
    asked = [tuple(text.split(",")) for text in servers.split()]
    stopped = [text.split(",") for text in groups.split()]
    if not asked:
        raise InvalidInputError('name running servers: servers="mlsys,127.0.0.1:18400,all-minilm-l6-v2"')
    requests, rounds = (16, 1) if context.is_quick else (requests, rounds)
    texts = texts_like(workload, requests)
    latencies: dict[str, list[float]] = {name: [] for name, _, _ in asked}
    expected: Any = None
    for number in range(rounds + 1):
        for name, address, model in asked:
            let_run(name, stopped)
            found, vectors = one_round(address, model, texts if number else texts[:16], rate, number)
            if number:
                expected = vectors if expected is None else expected
                difference = float(np.abs(vectors - expected).max())
                if difference > TOLERANCE:
                    raise MlsysError(f"{name} gives other vectors, by {difference:g}")
                latencies[name] += found
    for name, _ in stopped:
        let_run(name, [each for each in stopped if each[0] == name])
    rows = [
        {"server": name, "mean_ms": float(np.mean(found)) * 1e3}
        | {f"p{at}_ms": float(np.percentile(found, at)) * 1e3 for at in (50, 99)}
        for name, found in latencies.items()
    ]
    lines = [[str(row["server"]), *(f"{row[key]:.1f}" for key in list(row)[1:])] for row in rows]
    caption = f"{workload}, {rate:g} requests/s, {rounds} rounds of {requests}"
    settings = {"workload": workload, "rate": rate, "requests": requests, "rounds": rounds}
    return Section(
        "DVABatch: servers over HTTP",
        [Table(["server", "mean, ms", "p50, ms", "p99, ms"], lines, caption)],
        data={"settings": settings, "rows": rows},
    )
