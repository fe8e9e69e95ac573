"""Record of the requests in each iteration: written by the engine into a recorder, read back for pictures.

One span per request and iteration, on a track of the request's own; all spans of an iteration have the same start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlsys_core.loop import LoopRecorder
from mlsys_orca.scheduling.batch import IterationBatch, IterationOutput, RequestSlice

if TYPE_CHECKING:
    from mlsys_core.profiling import Recording

Phase = Literal["prefill", "decode"]
Run = Callable[[IterationBatch], IterationOutput]

_TRACK = "request "


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of the engine."""

    start_ns: int  # of the recorder's clock
    end_ns: int
    phases: dict[str, Phase]  # request id -> what was run of it, in the batch's order


def phase_of(part: RequestSlice) -> Phase:
    """Return ``decode`` if one token after others is run and the next one sampled, else ``prefill``.

    A request that was preempted prefills again.

    The last token of a prompt, run as a chunk of its own, counts as a decode: that is what it costs.
    """
    return "decode" if part.num_tokens == 1 and part.num_computed_tokens and part.sampling is not None else "prefill"


def record_iterations(run: Run, recorder: LoopRecorder, *, clock_ns: Callable[[], int] = time.perf_counter_ns) -> Run:
    """Wrap ``run`` to record a span per request when it returns; an iteration that fails leaves none.

    Args:
        run: The runner's.
        recorder: Its clock must be ``clock_ns``.
        clock_ns: Nanoseconds, monotonic.
    """

    def recorded(batch: IterationBatch) -> IterationOutput:
        start_ns = clock_ns()
        output = run(batch)
        end_ns = clock_ns()
        for part in batch.requests:
            recorder.complete(phase_of(part), start_ns, end_ns, track=_TRACK + part.request_id)
        return output

    return recorded


def iterations_of(recording: Recording) -> list[Iteration]:
    """Return the iterations in order of time, as far as ``recording`` still has them."""
    iterations: dict[int, Iteration] = {}
    for span in recording.spans:
        if not (span.track.is_named and span.track.name.startswith(_TRACK)):
            continue
        iteration = iterations.setdefault(span.start_ns, Iteration(span.start_ns, span.end_ns, {}))
        iteration.phases[span.track.name.removeprefix(_TRACK)] = "prefill" if span.name == "prefill" else "decode"
    return [iterations[start_ns] for start_ns in sorted(iterations)]
