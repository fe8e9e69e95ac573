"""The suite ``orca-gguf``: one GGUF file behind Orca's server and its peers': one stream, a prompt, 8 and 32 streams.

    python -m mlsys_bench.orca.peers.large --shape 1b           writes three files of 1.1B parameters
    benchmarks/peers/install.sh llama-cpp ik-llama-cpp mistralrs
    mlsys bench orca-gguf model=.peers/models/llama-1b-q4_0.gguf --threads 2
    mlsys bench orca-gguf activations=int8 against=ik_llama.cpp        one peer, where memory is short

All servers are up at once, and take turns. A token of one stream reads all weights, so beside it stands what a plain
read by as many threads reaches in the same run, and the share of it that the bytes of the file make. Answers of random
weights part after some tokens, since each engine rounds rows in its own way; the table has how many are equal.
"""

from __future__ import annotations

import json
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

from mlsys_bench.harness.machine import LoadMeter
from mlsys_bench.harness.text import rows_section
from mlsys_bench.orca.peers.cases import CASES, OURS, Job, PeerCase, Settings, child_command
from mlsys_bench.orca.peers.models import FOLDER, NUM_SILENT_TOKENS, PEERS, vocabulary
from mlsys_bench.orca.peers.runners import Runner, running
from mlsys_bench.orca.peers.traffic import Traffic
from mlsys_bench.workload.arrivals import Replay
from mlsys_bench.workload.lengths import Uniform
from mlsys_bench.workload.results import LoadResult
from mlsys_bench.workload.trace import make_trace

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

VOCABULARY_SIZE = 32000
CONTEXT = 1024
PROMPT, ANSWER, STREAMS = 512, 64, (8, 32)
_READ_NBYTES = 1 << 29  # of each thread's plain read


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant; medians of rounds, in tokens per second."""

    server: str
    stream: float  # one request's answer
    prompt: float  # of PROMPT tokens, until the first token
    streams: float  # 8 requests' answers together
    many_streams: float  # 32
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
    """Return the tokens per second from when every request has its first token.

    Raises:
        InvalidInputError: one never had one.
    """
    if failed := [record for record in result.records if not record.token_s]:
        raise InvalidInputError(f"{len(failed)} of {len(result.records)} requests got no token; its log says why")
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


def contestants(path: Path, activations: Sequence[str], against: Sequence[str], words: Path) -> list[PeerCase]:
    """Return Orca once for each form of activations, and the peers called ``against``.

    Args:
        path: The file that all serve.
        activations: Forms of Orca's.
        against: Names of peers.
        words: A file with the vocabulary, as ``tokenizer.json`` has it, for peers that are asked in text.

    Raises:
        InvalidInputError: a peer is not known.
    """
    named = {case.name: case for case in CASES}
    cases = [
        replace(named[OURS], name=f"{OURS}, {form}", server=partial(_orca_server, path, form)) for form in activations
    ]
    peers = {
        "llama.cpp": replace(named["llama.cpp"], server=partial(_peer_server, path, words, "llama_cpp")),
        **{
            name: replace(
                named["llama.cpp"],
                name=name,
                environment=environment,
                requirement=f"lib/python3*/site-packages/{package}",
                engine=engine,
                server=partial(_peer_server, path, words, engine),
                body={"temperature": 0},
                variables=lambda job: {"RAYON_NUM_THREADS": str(job.num_threads)},
            )
            for name, environment, package, engine in _OWN_FRONT
        },
    }
    if unknown := [name for name in against if name not in peers]:
        raise InvalidInputError(f"peers are {', '.join(peers)}; not {', '.join(unknown)}")
    return [*cases, *(peers[name] for name in against)]


# Peers whose package has no server, behind a small one: name, environment, package, engine.
_OWN_FRONT = (
    ("ik_llama.cpp", "ik-llama-cpp", "ik_llama_cpp", "ik_llama"),
    ("mistral.rs", "mistralrs", "mistralrs", "mistral_rs"),
)


def _peer_server(path: Path, words: Path, engine: str, job: Job, settings: Settings, port: int) -> list[str]:
    options = {"num_threads": job.num_threads, "max_model_len": job.max_model_len, **settings}
    return child_command(engine, {"model": str(path), "tokenizer": str(words), **options}, port)


def _orca_server(path: Path, activations: str, job: Job, settings: Settings, port: int) -> list[str]:
    del settings
    options = {"name": "model", "port": port, "threads": job.num_threads, "max-model-len": job.max_model_len}
    options |= {"max-batch-size": max(STREAMS), "activations": activations}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return ["-m", "mlsys_core", "orca", "serve", str(path), *flags]


LLAMA_SETTINGS: dict[str, Any] = {
    "n_parallel": max(STREAMS),
    "n_ubatch": 512,
    "flash_attention": "auto",
    "kv_unified": False,
    "kv_type": "f16",
}
_SETTINGS: dict[str, Settings] = {  # by engine
    "llama_cpp": LLAMA_SETTINGS,
    "ik_llama": {"n_parallel": max(STREAMS), "n_ubatch": 512, "flash_attention": False, "repack": True},
    "mistral_rs": {},  # one request after another
}


def run(
    context: BenchContext,
    *,
    model: Path = FOLDER / "llama-1b-q4_0.gguf",
    activations: tuple[str, ...] = ("int8", "float"),
    against: tuple[str, ...] = ("llama.cpp", "ik_llama.cpp", "mistral.rs"),
    rounds: int = 5,
    peers: Path = PEERS,
) -> Section:
    """Race the servers.

    Args:
        context: The suite's context.
        model: A file of :mod:`.large`, or another with its vocabulary.
        activations: Orca's forms of activations, each a contestant.
        against: Peers; those that are not installed are named.
        rounds: Turns of each contestant.
        peers: Folder of the peers' environments.
    """
    if not model.is_file():
        raise InvalidInputError(f"there is no {model}: python -m mlsys_bench.orca.peers.large writes it")
    job = Job("llama", "bf16", context.num_threads, model.parent, peers, CONTEXT)
    context.output_dir.mkdir(parents=True, exist_ok=True)
    words = context.output_dir / "orca-gguf-words.json"
    words.write_text(json.dumps({"model": {"vocab": {t: i for i, t in enumerate(vocabulary(VOCABULARY_SIZE)[0])}}}))
    cases, notes = contestants(model, activations, against, words), []
    rounds = 1 if context.is_quick else rounds
    figures: dict[str, list[tuple[float, ...]]] = {}
    reads: list[float] = []
    with ExitStack() as stack, LoadMeter() as meter:
        runners: dict[str, Runner] = {}
        for number, case in enumerate(cases):
            if missing := case.missing(job):
                notes.append(f"{case.name}: {missing}")
                continue
            log = context.output_dir / f"orca-gguf-{number}.log"
            settings = _SETTINGS.get(case.engine, {})
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
    return rows_section(f"Orca and its peers on {model.name}", rows, *notes, model=model.name, read_rate=read)


def _turn(runner: Runner, *, seed: int, answers: list[str]) -> tuple[float, ...]:
    """Return the rates of one turn, and how many words of its answer begin as the first contestant's."""
    one = runner.run(requests(1, 16, ANSWER, seed=seed))
    answers.append(one.records[0].output or "")
    pairs = zip(answers[0].split(), answers[-1].split(), strict=False)
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    prompt = runner.run(requests(1, PROMPT, 2, seed=seed + 1)).records[0]
    many = [decode_rate(runner.run(requests(count, 16, ANSWER, seed=seed + 2))) for count in STREAMS]
    return decode_rate(one), PROMPT / (prompt.token_s[0] - prompt.sent_s), *many, float(equal)


def _row(name: str, turns: list[tuple[float, ...]], read: float, nbytes: int) -> Row:
    stream, prompt, streams, many, equal = (statistics.median(values) for values in zip(*turns, strict=True))
    return Row(name, stream, prompt, streams, many, stream * nbytes / read, equal)
