"""The suite ``orca-contexts``: a long prompt behind Orca's server and llama.cpp's, by dtype of keys and values.

    mlsys bench orca-contexts model=.peers/models/llama-1b-q4_0.gguf contexts=4096,16384,32768 --threads 2

The servers are up one at a time, each for all contexts. llama.cpp runs with its flash attention, and without it
(``llama_flash``) where keys and values are not quantised, which need it. A request's prompt and answer together fill
the context. The prompt's rate is its tokens over the time to the first token; the answer's rate is that of the tokens
behind it, at the full context. Answers of random weights part after some tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsys_core.errors import InvalidInputError

from mlsys_bench.harness.machine import LoadMeter
from mlsys_bench.harness.text import rows_section
from mlsys_bench.orca.peers.cases import CASES, OURS, Job, PeerCase, Settings, child_command
from mlsys_bench.orca.peers.gguf import LLAMA_SETTINGS, decode_rate, requests
from mlsys_bench.orca.peers.models import FOLDER, PEERS
from mlsys_bench.orca.peers.runners import running

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

ANSWER = 32  # tokens
ORCA_KV = ("bfloat16", "float16", "int8")
LLAMA_KV = ("f16", "q8_0")
LLAMA_FLASH = ("enabled", "disabled")


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant at one context; medians of rounds, in tokens per second."""

    server: str
    context: int  # tokens
    prompt: float
    answer: float


def orca_command(
    path: Path, kv_dtype: str, options: Mapping[str, Any], job: Job, settings: Settings, port: int
) -> list[str]:
    """Return the arguments that serve ``path`` with keys and values in ``kv_dtype``."""
    del settings
    given = {"name": "model", "port": port, "threads": job.num_threads, "max-model-len": job.max_model_len}
    given |= {"max-batch-size": 1, "kv-dtype": kv_dtype, "kv-tokens": job.max_model_len, **options}
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    return ["-m", "mlsys_core", "orca", "serve", str(path), *flags]


def llama_command(path: Path, job: Job, settings: Settings, port: int) -> list[str]:
    """Return the arguments that serve ``path`` by llama.cpp."""
    options = {"num_threads": job.num_threads, "max_model_len": job.max_model_len, **settings}
    return child_command("llama_cpp", {"model": str(path), **options}, port)


def contestants(
    path: Path, orca_kv: Sequence[str], llama_kv: Sequence[str], llama_flash: Sequence[str], options: Mapping[str, Any]
) -> list[tuple[PeerCase, Settings]]:
    """Return Orca and llama.cpp, once for each dtype of keys and values, with their settings."""
    named = {case.name: case for case in CASES}
    ours: list[tuple[PeerCase, Settings]] = [
        (replace(named[OURS], name=f"{OURS}, {kv}", server=partial(orca_command, path, kv, options)), {})
        for kv in orca_kv
    ]
    llama = replace(named["llama.cpp"], server=partial(llama_command, path))
    theirs = [
        (
            replace(llama, name=f"llama.cpp, {kv}" + (", no flash attention" if flash == "disabled" else "")),
            LLAMA_SETTINGS | {"n_parallel": 1, "kv_type": kv, "flash_attention": flash},
        )
        for kv in llama_kv
        for flash in llama_flash
        if flash == "enabled" or kv == "f16"
    ]
    return [*ours, *theirs]


def run(
    context: BenchContext,
    *,
    model: Path = FOLDER / "llama-1b-q4_0.gguf",
    contexts: tuple[int, ...] = (4096, 16384, 32768),
    orca_kv: tuple[str, ...] = ORCA_KV,
    llama_kv: tuple[str, ...] = LLAMA_KV,
    llama_flash: tuple[str, ...] = LLAMA_FLASH,
    activations: str = "int8",
    policy: str = "paged",
    rounds: int = 1,
    peers: Path = PEERS,
) -> Section:
    """Measure each context behind each server.

    Args:
        context: The suite's context; quick has one context of 512 tokens.
        model: A file of :mod:`.large`, or another with its vocabulary.
        contexts: Tokens of prompt and answer.
        orca_kv: Orca's dtypes of keys and values, each a contestant.
        llama_kv: llama.cpp's.
        llama_flash: Its flash attention, ``"enabled"`` and ``"disabled"``.
        activations: Orca's form of activations.
        policy: Orca's; a lone request needs no chunks.
        rounds: Requests of each context.
        peers: Folder of the peers' environments.

    Raises:
        InvalidInputError: there is no such file.
    """
    if not model.is_file():
        raise InvalidInputError(f"there is no {model}: python -m mlsys_bench.orca.peers.large writes it")
    sizes = [512] if context.is_quick else [int(size) for size in contexts]
    job = Job("llama", "bf16", context.num_threads, model.parent, peers, max(sizes))
    rows, notes = [], []
    context.output_dir.mkdir(parents=True, exist_ok=True)
    options = {"activations": activations, "policy": policy}
    with LoadMeter() as meter:
        for number, (case, settings) in enumerate(contestants(model, orca_kv, llama_kv, llama_flash, options)):
            if missing := case.missing(job):
                notes.append(f"{case.name}: {missing}")
                continue
            log = context.output_dir / f"orca-contexts-{number}.log"
            with running(case, job, settings, is_in_process=False, log=log) as runner:
                for size in sizes:
                    turns = [runner.run(requests(1, size - ANSWER, ANSWER, seed=turn)) for turn in range(rounds)]
                    try:
                        answer = statistics.median(map(decode_rate, turns))
                    except InvalidInputError as error:  # what was measured before is kept
                        notes.append(f"{case.name}, {size}: {error}")
                        break
                    firsts = [turn.records[0].token_s[0] - turn.records[0].sent_s for turn in turns]
                    prompt = (size - ANSWER) / statistics.median(firsts)
                    rows.append(Row(case.name, size, prompt, answer))
                    context.console.print(
                        f"{case.name}, {size}: {prompt:.0f} prompt tokens/s, {rows[-1].answer:.1f} of the answer"
                    )
    return rows_section(
        f"Long contexts of {model.name}", rows, *notes, str(meter.load), model=model.name, activations=activations
    )
