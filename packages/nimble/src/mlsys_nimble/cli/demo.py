"""Nimble's step of ``mlsys demo``: two nets prepared, compared with eager PyTorch, and timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from mlsys_core.report import Figure, Section, Story, Table

if TYPE_CHECKING:
    from mlsys_core.demo import DemoContext
    from torch import Tensor

NETS = ("six-branch", "resnet20-cifar")
BUDGET_S = 2.0  # of turns for each net
TOLERANCE = 1e-4  # of the largest value


def run(context: DemoContext) -> Section:
    """Prepare two nets, compare and time them in turns, and draw the streams of the first."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(context.num_threads)
    try:
        return _run(context)
    finally:
        torch.set_num_threads(before)


def _calling(model: Callable[..., object], inputs: Sequence[Tensor], num_threads: int) -> Callable[[], None]:
    """Return a call with this number of torch's threads."""
    import torch

    def call() -> None:
        torch.set_num_threads(num_threads)
        model(*inputs)

    return call


def _run(context: DemoContext) -> Section:
    import torch
    from mlsys_core.graphs import draw_graph
    from mlsys_core.plot import to_svg
    from mlsys_core.profiling.turns import take_turns
    from mlsys_nimble.explain import explain
    from mlsys_nimble.module import Nimble
    from mlsys_nimble.nets import net

    rows: list[list[str]] = []
    data: dict[str, object] = {}
    pictures: list[Figure] = []
    worst = 0.0
    with context.progress("compiling kernels, the first time"):
        Nimble(torch.nn.ReLU()).prepare(torch.zeros(1))
    for name in NETS:
        with context.progress(f"{name}: preparing"), torch.no_grad():
            module, inputs = net(name)
            found = explain(module, inputs)
            started = time.perf_counter()
            model = Nimble(module).prepare(inputs, num_threads=context.num_threads)
            prepare_s = time.perf_counter() - started
            wanted = module(*inputs)
            worst = max(worst, float((model(*inputs) - wanted).abs().max() / wanted.abs().max()))
        with context.progress(f"{name}: eager and Nimble in turns"), torch.no_grad():
            calls = {  # eager's threads sleep between operators here, so it may be faster alone
                "eager": _calling(module, inputs, context.num_threads),
                "eager, one thread": _calling(module, inputs, 1),
                "nimble": _calling(model, inputs, context.num_threads),
            }
            turns = take_turns(calls, budget_s=BUDGET_S, turn_s=0.1)
        *eager, ours_s = (statistics.median(chain.from_iterable(turns[key])) for key in calls)
        eager_s = min(eager)
        counts = found.optimised.counts()
        streams, degree = counts["streams"], counts["degree_of_logical_concurrency"]
        speedup, times = f"{eager_s / ours_s:.1f}x", [f"{seconds * 1e3:.3f}" for seconds in (eager_s, ours_s)]
        rows.append([name, str(degree), str(streams), *times, speedup, f"{prepare_s:.1f}"])
        context.console.print(
            f"{name}: at most {degree} of {counts['operators']} operators at once, {streams} streams; "
            f"eager {eager_s * 1e3:.3f} ms, Nimble {ours_s * 1e3:.3f} ms, {speedup}"
        )
        data[name] = {**counts, "eager_s": eager_s, "nimble_s": ours_s, "prepare_s": prepare_s}
        if not pictures:
            caption = f"{name} after the passes, a column for each stream; dashed: synchronisations."
            pictures.append(Figure(to_svg(draw_graph(found.to_networkx())), caption, is_wide=True))
    table = Table(
        ["net", "degree", "streams", "eager, ms", "Nimble, ms", "speed-up", "prepared in, s"],
        rows,
        f"Batch 1, {context.num_threads} threads (eager: or one, where that is faster), medians of calls in turns",
    )
    said = f"Results differ from eager's by at most {worst:.0e} of the largest value."
    context.console.print(said)
    data["difference"] = worst
    story = Story(
        f"{' and '.join(NETS)} were prepared once and replayed, beside eager PyTorch, in turns. {said}",
        "A framework decides at every operator which kernel, which memory and which thread to take. For small "
        "operators that takes longer than the operators. Nimble decides once.",
        "In the picture each column is a stream: operators in different columns may run at the same time. Dashed "
        "lines are the only places where a stream waits for another.",
        "torch.compile, ONNX Runtime and OpenVINO save dispatch and fuse operators as well; mlsys bench nimble races "
        "them all, and docs/nimble-benchmarks.md shows the nets where a peer is ahead.",
    )
    return Section(
        "Nimble: a schedule, replayed",
        [story, table, *pictures],
        status="ok" if worst <= TOLERANCE else "failed",
        data=data,
    )
