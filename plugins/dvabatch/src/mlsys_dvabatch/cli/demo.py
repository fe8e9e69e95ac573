"""DVABatch's part of ``mlsys demo``: real sentences through a real encoder, under three batching policies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mlsys_core import plot
from mlsys_core.config import settings
from mlsys_core.demo import DemoContext
from mlsys_core.device import Device, get_device
from mlsys_core.errors import MissingDependencyError, MlsysError
from mlsys_core.loop import Collector, FinishReason, Scheduler, ServeRequest
from mlsys_core.loop.baselines import ZeroBatch
from mlsys_core.report import Figure, Section, Story, Table
from mlsys_dvabatch.engine import Engine
from mlsys_dvabatch.scheduling.costs import StageCosts
from mlsys_dvabatch.scheduling.policies.base import Policy
from mlsys_dvabatch.scheduling.policies.input import InputPolicy, PackedPolicy
from mlsys_dvabatch.serve.spec import wire_of
from mlsys_dvabatch.stages.profile import profile_stages
from mlsys_dvabatch.stages.zoo import ENCODER, Loading, load
from numpy.typing import NDArray

TITLE = "Sentence embeddings under three batching policies"
SHORT = (
    "The train is late.",
    "Is the library open on Sunday?",
    "A dog sleeps in the sun.",
    "Bread needs flour, water, salt and time.",
    "When does the museum close?",
    "My flight was delayed for three hours.",
    "How do I bake a loaf at home?",
    "The puppy naps on the warm porch.",
)
LONG = (
    "Although the forecast had promised clear skies for the whole weekend, a storm came up from the coast on Saturday "
    "evening, and by midnight the railway had stopped every train between the two cities until the line was inspected.",
    "The reading room keeps its old hours during the week, but since the renovation the main hall may be visited on "
    "Sundays too, free of charge for anyone who brings a card, and a guided tour begins each hour at the desk.",
    "To make the dough, stir the flour into lukewarm water, let it rest for half an hour, fold in the salt, and leave "
    "it in a covered bowl overnight; the next morning shape it, wait until it has doubled, and bake it very hot.",
)


def run(context: DemoContext) -> Section:
    """Embed every sentence several times with Poisson arrivals; compare latencies, and the vectors with each other."""
    try:
        loaded = load(ENCODER, settings().cache_dir, Loading(num_stages=2, device=get_device(context.device)))
    except MissingDependencyError as error:
        return Section(TITLE, [str(error)], status="skipped")
    padded: Any = loaded.model  # a mlsys_dvabatch.stages.model.Packable
    texts, wire = [*SHORT, *LONG], wire_of(loaded)
    tokens = [wire.payload(text) for text in texts]
    with context.progress("profiling the encoder") as update:
        costs = profile_stages(
            padded,
            loaded.request,
            batch_sizes=(1, 4),
            lengths=(8, 32, 64),
            repeats=1,
            progress=update,
            device=loaded.device,
        )
    packed = padded.with_form(is_packed=True)
    cases: list[tuple[str, Any, Callable[[], Policy | Scheduler[Any, Any, Any]]]] = [
        ("ZeroBatch, padded", padded, lambda: ZeroBatch(max_batch_size=16)),
        ("DVABatch: clusters of lengths", padded, InputPolicy),
        ("DVABatch: token-packed", packed, PackedPolicy),
    ]
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(len(texts)), 6))
    gap_s = costs.stage_s(0, 1, 32) + costs.stage_s(1, 1, 32)
    due_s = np.cumsum(np.random.default_rng(1).exponential(gap_s, len(order)))
    latencies: dict[str, list[float]] = {}
    vectors: list[NDArray[np.float32]] = []
    for name, model, make in cases:
        latencies[name], embedded = _serve(
            model,
            costs,
            make(),
            [tokens[which] for which in order],
            due_s,
            num_threads=context.num_threads,
            device=loaded.device,
        )
        if vectors:
            difference = max(float(np.abs(a - b).max()) for a, b in zip(vectors, embedded, strict=True))
            if difference > 1e-4:
                raise MlsysError(f"{name} gives other vectors than ZeroBatch, by {difference:g}")
        vectors = vectors or embedded
        context.console.print(f"  {name}: {len(order)} sentences, average {np.mean(latencies[name]) * 1e3:.0f} ms")
    rows = [
        [name, f"{np.mean(times) * 1e3:.1f}", f"{np.percentile(times, 99) * 1e3:.1f}"]
        for name, times in latencies.items()
    ]
    by_text = {int(which): vector for which, vector in zip(order, vectors, strict=True)}
    shortest, longest = min(map(len, tokens)), max(map(len, tokens))
    story = Story(
        f"{len(order)} sentences of {shortest} to {longest} tokens, arriving at random, went through "
        "all-MiniLM-L6-v2, cut into two stages, under three policies. All three gave the same vectors.",
        "In a padded batch a short sentence costs as much as the longest. DVABatch forms batches that fit the "
        "inputs, and lets requests join and leave between stages.",
        "Each curve is a policy: the share of sentences (upwards) that were answered within a time (to the right). The "
        "curve furthest to the left is the best. The last table shows that the vectors mean something.",
        "ZeroBatch, one batch after another with padding, is what simple servers do. Triton's dynamic batcher waits "
        "for a window besides. Where all inputs have one length, the three are alike.",
    )
    latency = Table(["policy", "average (ms)", "p99 (ms)"], rows, "Latency")
    figure = Figure(plot.to_svg(plot.cdf(latencies)), "Latency of all sentences")
    return Section(
        TITLE,
        [story, latency, figure, _nearest(texts, by_text)],
        data={"mean_s": {name: float(np.mean(times)) for name, times in latencies.items()}},
    )


def _serve(
    model: Any,
    costs: StageCosts,
    policy: Policy | Scheduler[Any, Any, Any],
    tokens: list[NDArray[np.int64]],
    due_s: Any,
    *,
    num_threads: int,
    device: Device | None,
) -> tuple[list[float], list[NDArray[np.float32]]]:
    """Return each request's latency in seconds, from when it was due, and its vector."""
    collector: Collector[Any, Any] = Collector()
    limits: dict[str, Any] = {"max_batch_size": 16, "num_threads": num_threads}
    with Engine(model, costs, policy, listener=collector, device=device, **limits) as engine:
        start_s = engine.clock.now()
        for number, (ids, at) in enumerate(zip(tokens, due_s, strict=True)):
            time.sleep(max(0.0, start_s + float(at) - engine.clock.now()))
            engine.loop.submit(ServeRequest(str(number), ids, length=len(ids)), str(number))
        engine.loop.drain()
    finished = [collector.finished[str(number)] for number in range(len(tokens))]
    failed = [each for each in finished if each.reason is not FinishReason.DONE]
    if failed:
        raise MlsysError(f"request {failed[0].request_id} ended as {failed[0].reason.value}: {failed[0].error}")
    ended = [collector.finished_s[str(number)] - start_s - float(at) for number, at in enumerate(due_s)]
    vectors: list[Any] = [each.result for each in finished]
    return ended, vectors


def _nearest(texts: list[str], vectors: dict[int, NDArray[np.float32]]) -> Table:
    matrix = np.stack([vectors[number] for number in range(len(texts))])
    likeness = matrix @ matrix.T - 2 * np.eye(len(texts))
    rows = []
    for number in range(0, len(texts), 2):
        nearest = int(likeness[number].argmax())
        rows.append([_short(texts[number]), _short(texts[nearest]), f"{float(likeness[number, nearest]):.2f}"])
    return Table(["sentence", "nearest other sentence", "cosine"], rows, "What the vectors say")


def _short(text: str) -> str:
    return text if len(text) < 60 else text[:57] + "..."
