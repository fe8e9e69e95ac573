"""Answers of divided models beside those of one process: ``mlsys orca bench parity`` prints the table.

Every model goes through every degree in processes of its own, under every policy: prompts that begin alike, sampling of
all kinds, K/V blocks for few of the requests (so some are preempted), guesses under two policies, adapters by turns.
In native kernels the answers must be one process's, to the last bit of each log-probability. In torch's operators each
iteration must be, computed again by one process (:mod:`.replay`), and all tokens those of one process's own run. Then
2,000 requests, of which many are cancelled at some time, must leave every block free.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mlsys_core.config import settings
from mlsys_core.loop import Collector, InlineExecutor, ServingLoop, WallClock
from mlsys_core.models import resolve_model
from mlsys_core.plugins import installed_plugins
from mlsys_core.report import Section
from mlsys_orca.backends.native.decoder import NativeDecoder, new_kv_cache
from mlsys_orca.backends.runner import Runner
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.adapters import AdaptedDecoder, AdapterFiles, read_adapter
from mlsys_orca.parallel.group import Group, Holders
from mlsys_orca.parallel.parts import divide
from mlsys_orca.parallel.wiring import GroupShape
from mlsys_orca.scheduling.batch import SamplingParams
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler
from mlsys_orca.scheduling.request import GenerationRequest

from mlsys_bench.harness.text import rows_section
from mlsys_bench.orca.parity_models import ADAPTERS
from mlsys_bench.orca.replay import Recorded, SlicedModel, first_difference

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

NUM_BLOCKS, MAX_LEN, BATCH = 5, 64, 3
POLICIES = {"orca": 0, "paged": 3, "chunked": 2, "request-level": 0}  # with so many guesses
DEGREES = ((2, 1), (4, 1), (1, 2), (1, 3), (2, 2))
OF_3_HEADS = ((3, 1), (1, 2), (3, 2))
NUM_CANCELLED = 2000


@dataclass(frozen=True, slots=True)
class Case:
    """One model in one engine."""

    model: str
    path: Path
    adapters: dict[str, AdapterFiles]  # by the name that requests give; none: the model takes none
    degrees: tuple[tuple[int, int], ...]
    num_requests: int
    dtype: str | None = "fp32"

    @property
    def name(self) -> str:
        """Its name in the table."""
        return f"{self.model} + LoRA" if self.adapters else self.model


@dataclass(frozen=True, slots=True)
class Parity:
    """One model, divided one way."""

    model: str
    kernels: str  # native or torch
    ranks: int
    stages: int
    equal: str  # policies, of so many
    iterations: int  # of all policies
    preempted: int  # requests
    shared_tokens: int  # of prompts, found in kept blocks
    right_guesses: int  # tokens
    under_adapters: int  # requests
    requests_cancelled: str  # of so many
    blocks_left: int  # that were not free at the end, in all runs; 0 is right
    difference: str  # the first; empty: there is none


@dataclass(slots=True)
class Tally:
    """Numbers of a run."""

    answers: dict[str, Any]
    preempted: int
    shared_tokens: int
    right_guesses: int
    blocks_left: int


def run(context: BenchContext, *, only: tuple[str, ...] = (), policies: tuple[str, ...] = tuple(POLICIES)) -> Section:
    """Return the section; 'failed' if any bit differs or a block is lost.

    Args:
        context: Of the command; ``is_quick`` takes one degree of each model and two policies.
        only: Names of models; none: all.
        policies: Names of policies.
    """
    torch.set_num_threads(1)  # before a tensor: threads do not survive the fork of holders
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mlsys_bench.orca.parity_models", folder]
        subprocess.run(command, capture_output=True, check=True)
        for case in _cases(Path(folder)):
            if only and case.name not in only:
                continue
            degrees = case.degrees[-1:] if context.is_quick else case.degrees
            named = tuple(policies)[1:3] if context.is_quick else policies
            for ranks, stages in degrees:
                row = _compare(case, ranks, stages, named, is_quick=context.is_quick)
                context.console.print(f"{row.model}: TP {ranks}, PP {stages}: {row.equal} policies {row.difference}")
                rows.append(row)
    is_equal = all(not row.difference and not row.blocks_left for row in rows)
    text = (
        f"Policies {', '.join(policies)}; {NUM_BLOCKS} K/V blocks; up to {max(POLICIES.values())} guesses. Native: the "
        "bits of one process's answers. torch: the bits of each iteration, and one process's tokens."
    )
    return rows_section("Orca: divided models beside one process", rows, text, status="ok" if is_equal else "failed")


def _cases(folder: Path) -> Iterator[Case]:
    for model in ("llama", "gpt2", "mixtral", "t5"):
        yield Case(model, folder / model, {}, DEGREES, 14)
    for model in ("llama", "gpt2"):
        yield Case(model, folder / model, _adapters(folder, model), DEGREES, 14)
    smollm2 = resolve_model("smollm2-135m-instruct", settings().cache_dir)
    yield Case("smollm2", smollm2, {}, OF_3_HEADS, 10, None)
    yield Case("smollm2", smollm2, _adapters(folder, "smollm2"), OF_3_HEADS, 10)


def _adapters(folder: Path, model: str) -> dict[str, AdapterFiles]:
    return {name: read_adapter(folder / f"{model}-{name}") for name in ADAPTERS}


def _compare(case: Case, ranks: int, stages: int, policies: Sequence[str], *, is_quick: bool) -> Parity:
    difference, equal, iterations, requests = "", 0, 0, _requests(case)
    tallies: list[Tally] = []
    with _engine(case, ranks, stages) as (executor, is_native):
        for policy in policies:
            recorded = Recorded(executor)
            found = _run(recorded, policy, requests, exactly=is_native)
            model, cache = _reference(case, ranks, is_native=is_native)
            expected = _run(InlineExecutor(Runner(model, cache).run), policy, requests, exactly=is_native)
            at = None if is_native else first_difference(recorded.iterations, model, _emptied(model))
            is_equal = found.answers == expected.answers and at is None
            if not is_equal and not difference:
                difference = f"{policy}: {'answers' if at is None else f'iteration {at}'}"
            equal += is_equal
            iterations += len(recorded.iterations)
            tallies.append(found)
        # A step of the real model is a thousand times dearer.
        number = NUM_CANCELLED // ((20 if is_quick else 1) * (20 if case.model == "smollm2" else 1))
        cancelled, left = _cancel(executor, case, number)
    return Parity(
        model=case.name,
        kernels="native" if is_native else "torch",
        ranks=ranks,
        stages=stages,
        equal=f"{equal} of {len(policies)}",
        iterations=iterations,
        preempted=sum(tally.preempted for tally in tallies),
        shared_tokens=sum(tally.shared_tokens for tally in tallies),
        right_guesses=sum(tally.right_guesses for tally in tallies),
        under_adapters=len(policies) * sum(request.adapter is not None for request in requests),
        requests_cancelled=f"{cancelled} of {number}",
        blocks_left=left + sum(tally.blocks_left for tally in tallies),
        difference=difference,
    )


@contextmanager
def _engine(case: Case, ranks: int, stages: int) -> Iterator[tuple[Any, bool]]:
    """Run the parts in processes; yield the executor over them, and whether they are native programs."""
    degrees: dict[str, Any] = {"tensor_parallel": ranks, "pipeline_parallel": stages}
    head, parts = divide(case.path, **degrees, dtype=case.dtype, adapters=case.adapters)
    with Holders(parts) as holders:
        holders.start()
        shape = GroupShape(
            **degrees,
            max_in_flight=stages,
            max_tokens=NUM_BLOCKS * 16 * 8,
            max_rows=NUM_BLOCKS * 16 * 8,
            hidden_size=head.config.hidden_size,
            vocab_size=head.config.vocab_size,
            num_blocks=NUM_BLOCKS * 8,
            num_threads=1,
            takes_adapters=parts.takes_adapters,
        )
        with Group(holders, shape) as group:
            executor = group.executor()
            executor.serve(0)
            yield executor, all(report.is_native for report in holders.loaded)
            executor.close()


_kept: dict[Any, Any] = {}  # the last reference


def _reference(case: Case, ranks: int, *, is_native: bool) -> tuple[Any, Any]:
    """Return one process's model whose sums have the shape of ``ranks`` ranks, and an empty cache."""
    key = (case.name, is_native or ranks > 1)
    if key not in _kept:
        _kept.clear()
        given = {files.key_of(name): files for name, files in case.adapters.items()}
        model: Any
        if is_native:
            model = load_model(case.path, dtype=case.dtype).model
            assert isinstance(model, NativeDecoder)
        elif ranks > 1:
            options = {"dtype": case.dtype, "backend": "torch"}
            model = SlicedModel(case.path, adapters=given or None, **options)
        else:
            model = load_model(case.path, dtype=case.dtype, backend="torch").model
            model = AdaptedDecoder(model, given) if given else model
        _kept[key] = model
    return _kept[key], _emptied(_kept[key])


def _emptied(model: Any) -> Any:
    own = getattr(model, "new_kv_cache", None)
    return new_kv_cache(model, num_blocks=NUM_BLOCKS * 8) if own is None else own(num_blocks=NUM_BLOCKS * 8)


def _requests(case: Case) -> list[GenerationRequest]:
    """Return prompts of which some begin alike, with all ways to choose, under no adapter and each in turn."""
    chance = random.Random(0)
    beginning = [chance.randrange(2, 258) for _ in range(20)]
    keys = [None, *(files.key_of(name) for name, files in case.adapters.items())]
    has_encoder = case.model == "t5"
    made = []
    for index in range(case.num_requests):
        own = [chance.randrange(2, 258) for _ in range(chance.randrange(1, 20))]
        prompt = tuple(beginning[: 20 * (index % 2)] + own)
        sampling = (
            SamplingParams(allowed_token_ids=(4, 5)),
            SamplingParams(temperature=0.8, seed=index, top_p=0.9),
            SamplingParams(num_logprobs=2, presence_penalty=0.5),
            SamplingParams(num_prompt_logprobs=None if has_encoder else 0),
        )[index % 4]
        made.append(
            GenerationRequest(
                request_id=f"r{index}",
                prompt_token_ids=(*prompt, 0) if has_encoder else prompt,
                max_new_tokens=(8, 24, 24)[index % 3],
                sampling=sampling,
                stop_token_ids=frozenset([1]),
                num_encoder_tokens=len(prompt) if has_encoder else 0,
                adapter=keys[index % len(keys)],
            )
        )
    return made


def _loop(
    executor: Any, policy: str, num_blocks: int, drafts: int
) -> tuple[Any, Any, BlockTables, Collector[Any, Any]]:
    tables = BlockTables(num_blocks=num_blocks)
    scheduler: Any = make_scheduler(
        policy,
        installed_plugins().registry,
        block_tables=tables,
        max_batch_size=BATCH,
        max_model_len=MAX_LEN,
        options={"max_batch_tokens": MAX_LEN} if policy == "chunked" else {},
    )
    scheduler.pool.num_draft_tokens = drafts
    collector: Collector[Any, Any] = Collector()
    return ServingLoop(scheduler, executor, WallClock(), listener=collector), scheduler, tables, collector


def _run(executor: Any, policy: str, requests: Sequence[GenerationRequest], *, exactly: bool) -> Tally:
    """Run the requests, all there at once; the answers are tokens, exactly with all log-probabilities."""
    loop, scheduler, tables, collector = _loop(executor, policy, NUM_BLOCKS, POLICIES.get(policy, 0))
    for request in requests:
        loop.submit(request, request.request_id)
    loop.drain()
    answers = {}
    for name, finished in collector.finished.items():
        assert finished.result is not None, finished
        tokens = [token.token_id for token in finished.result.tokens]
        scored: dict[int, Any] = {}
        for part in finished.result.scored:
            scored.update({part.position + at: token for at, token in enumerate(part.tokens)})
        logprobs = [(token.logprob, token.top_logprobs) for token in finished.result.tokens]
        answers[name] = (tokens, logprobs, scored) if exactly else tokens
    pool = scheduler.pool
    left = tables.num_blocks - tables.num_free_blocks
    return Tally(answers, pool.num_preemptions, pool.num_cached_tokens, pool.num_right, left)


def _cancel(executor: Any, case: Case, number: int) -> tuple[int, int]:
    """Run short requests, of which some are cancelled at any time; return how many were, and the blocks not free."""
    chance, has_encoder = random.Random(1), case.model == "t5"
    loop, _, tables, collector = _loop(executor, "chunked", 24, 0)
    for index in range(number):
        prompt = (5,) * chance.randrange(1, 20)
        request = GenerationRequest(
            request_id=f"c{index}",
            prompt_token_ids=(*prompt, 0) if has_encoder else prompt,
            num_encoder_tokens=len(prompt) if has_encoder else 0,
            max_new_tokens=2,
        )
        loop.submit(request, request.request_id)
        if chance.random() < 0.8:
            loop.cancel(f"c{chance.randrange(number)}")
        if chance.random() < 0.2:
            loop.step()
    loop.drain()
    cancelled = sum(finished.reason.name == "CANCELLED" for finished in collector.finished.values())
    return cancelled, tables.num_blocks - tables.num_free_blocks
