"""The suite ``orca-gguf``: one GGUF file behind Orca's server and llama.cpp's: one stream, a prompt, 8 streams.

    python -m mlsys_bench.orca.peers.large --shape 1b           writes three files of 1.1B parameters
    mlsys bench orca-gguf model=.peers/models/llama-1b-q4_0.gguf --threads 2

All servers are up at once, and take turns. A token of one stream reads all weights, so beside it stands what a plain
read by as many threads reaches in the same run, and the share of it that the bytes of the file make. Answers of random
weights part after some tokens, since each engine rounds rows in its own way; the table has how many are equal.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import LoadResult, Replay, Uniform, make_trace

from mlsys_bench.harness.machine import LoadMeter
from mlsys_bench.harness.text import rows_section
from mlsys_bench.orca.peers.cases import CASES, OURS, Job, PeerCase, Settings
from mlsys_bench.orca.peers.models import FOLDER, NUM_SILENT_TOKENS, PEERS, vocabulary
from mlsys_bench.orca.peers.runners import Runner, running
from mlsys_bench.orca.peers.traffic import Traffic

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

VOCABULARY_SIZE = 32000
CONTEXT = 1024
PROMPT, ANSWER, STREAMS = 512, 64, 8
_READ_NBYTES = 1 << 29  # of each thread's plain read


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant; medians of rounds, in tokens per second."""

    server: str
    stream: float  # one request's answer
    prompt: float  # of PROMPT tokens, until the first token
    streams: float  # STREAMS requests' answers together
    read_share: float  # bytes of the file a second of one stream, over what a plain read reaches
    equal_tokens: float  # of one stream's answer before it parts from the first contestant's


def requests(count: int, prompt: int, answer: int, *, seed: int) -> Traffic:
    """Make ``count`` requests that come at once; no two seeds share a prompt.

    Example:
        >>> len(requests(2, 5, 3, seed=0).prompts[1])
        5
    """
    arrivals = Replay((0.0,) * count)
    sizes: dict[str, Any] = {"prompts": Uniform(prompt, prompt), "outputs": Uniform(answer, answer)}
    trace = make_trace(arrivals, num_items=count, seed=seed, **sizes)
    rng = np.random.default_rng(seed)
    prompts = tuple(tuple(rng.integers(NUM_SILENT_TOKENS, VOCABULARY_SIZE, prompt).tolist()) for _ in trace)
    words = tuple(token.replace("Ġ", " ") for token in vocabulary(VOCABULARY_SIZE)[0])
    return Traffic("offline", trace, prompts, words)


def decode_rate(result: LoadResult) -> float:
    """Return the tokens per second from when every request has its first token."""
    begin = max(record.token_s[0] for record in result.records)
    end = max(record.token_s[-1] for record in result.records)
    return sum(at > begin for record in result.records for at in record.token_s) / (end - begin)


def plain_read_rate(num_threads: int) -> float:
    """Return the bytes per second that ``num_threads`` threads read, all together: the best of three passes each."""
    data = [np.ones(_READ_NBYTES // 8) for _ in range(num_threads)]
    seconds = []
    for _ in range(3):
        threads = [threading.Thread(target=part.sum) for part in data]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds.append(time.perf_counter() - begin)
    return num_threads * _READ_NBYTES / min(seconds)


def contestants(path: Path, activations: Sequence[str]) -> list[PeerCase]:
    """Return Orca once for each form of activations, and llama.cpp."""
    named = {case.name: case for case in CASES}
    cases = [
        replace(named[OURS], name=f"{OURS}, {form}", server=partial(_orca_server, path, form)) for form in activations
    ]

    def llama(job: Job, settings: Settings, port: int) -> list[str]:
        from mlsys_bench.orca.peers.cases import child_command

        options = {"num_threads": job.num_threads, "max_model_len": job.max_model_len, **settings}
        return child_command("llama_cpp", {"model": str(path), **options}, port)

    return [*cases, replace(named["llama.cpp"], server=llama)]


def _orca_server(path: Path, activations: str, job: Job, settings: Settings, port: int) -> list[str]:
    del settings
    options = {"name": "model", "port": port, "threads": job.num_threads, "max-model-len": job.max_model_len}
    options |= {"max-batch-size": STREAMS, "activations": activations}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return ["-m", "mlsys_core", "orca", "serve", str(path), *flags]


LLAMA_SETTINGS = {
    "n_parallel": STREAMS,
    "n_ubatch": 512,
    "flash_attention": "auto",
    "kv_unified": False,
    "kv_type": "f16",
}


def run(
    context: BenchContext,
    *,
    model: Path = FOLDER / "llama-1b-q4_0.gguf",
    activations: tuple[str, ...] = ("int8", "float"),
    rounds: int = 5,
    peers: Path = PEERS,
) -> Section:
    """Race the servers.

    Args:
        context: The suite's context.
        model: A file of :mod:`.large`, or another with its vocabulary.
        activations: Orca's forms of activations, each a contestant.
        rounds: Turns of each contestant.
        peers: Folder of the peers' environments.
    """
    if not model.is_file():
        raise InvalidInputError(f"there is no {model}: python -m mlsys_bench.orca.peers.large writes it")
    job = Job("llama", "bf16", context.num_threads, model.parent, peers, CONTEXT)
    cases, notes = contestants(model, activations), []
    rounds = 1 if context.is_quick else rounds
    figures: dict[str, list[tuple[float, ...]]] = {}
    reads: list[float] = []
    context.output_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack, LoadMeter() as meter:
        runners: dict[str, Runner] = {}
        for number, case in enumerate(cases):
            if missing := case.missing(job):
                notes.append(f"{case.name}: {missing}")
                continue
            log = context.output_dir / f"orca-gguf-{number}.log"
            settings = LLAMA_SETTINGS if case.engine == "llama_cpp" else {}
            runners[case.name] = stack.enter_context(running(case, job, settings, is_in_process=False, log=log))
        for turn in range(rounds):
            reads.append(plain_read_rate(context.num_threads))
            answers: list[str] = []
            for name, runner in runners.items():
                context.console.print(f"round {turn + 1}: {name}")
                figures.setdefault(name, []).append(_turn(runner, seed=3 * turn, answers=answers))
    read = statistics.median(reads)
    rows = [_row(name, turns, read, model.stat().st_size) for name, turns in figures.items()]
    notes.append(f"a plain read by {context.num_threads} threads: {read / 1e9:.1f} GB/s. {meter.load}")
    return rows_section(f"Orca and llama.cpp on {model.name}", rows, *notes, model=model.name, read_rate=read)


def _turn(runner: Runner, *, seed: int, answers: list[str]) -> tuple[float, ...]:
    """Return the rates of one turn, and how many words of its answer begin as the first contestant's."""
    one = runner.run(requests(1, 16, ANSWER, seed=seed))
    answers.append(one.records[0].output or "")
    pairs = zip(answers[0].split(), answers[-1].split(), strict=False)
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    prompt = runner.run(requests(1, PROMPT, 2, seed=seed + 1)).records[0]
    many = runner.run(requests(STREAMS, 16, ANSWER, seed=seed + 2))
    return decode_rate(one), PROMPT / (prompt.token_s[0] - prompt.sent_s), decode_rate(many), float(equal)


def _row(name: str, turns: list[tuple[float, ...]], read: float, nbytes: int) -> Row:
    stream, prompt, streams, equal = (statistics.median(values) for values in zip(*turns, strict=True))
    return Row(name, stream, prompt, streams, stream * nbytes / read, equal)
