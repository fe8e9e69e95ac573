"""Cost of one event of ``mlsys_core.profiling.Recorder``, in nanoseconds, for each way to record.

Each form runs in a loop of its own; the loops of all forms are interleaved, and the median of an empty loop is
subtracted. Times are CPU time of the thread: the loops never wait, so on an idle core that is the wall time, and on a
shared machine it leaves out other processes' time. Before the timing, each form's recorded events are checked.

A recorder is measured disabled; enabled with its ring full, so that memory is used again; and while the ring fills for
the first time, which adds page faults and collections of young objects.

    mlsys bench core-recorder repeats=31
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlsys_core.profiling import NULL_RECORDER, Recorder

from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

EMPTY_LOOP = "empty loop"
# name -> the statement in the loop; r, s and i are the recorder, a spanner of it and the loop's counter
FORMS = {
    EMPTY_LOOP: "pass",
    "with spanner": "with s: pass",
    "with recorder.span(name)": "with r.span('step'): pass",
    "with recorder.span(name, 2 arguments)": "with r.span('step', request='7', tokens=12): pass",
    "recorder.complete(name, start, end, track)": "r.complete('request', 1, 2, track='requests')",
    "recorder.instant(name)": "r.instant('preempted')",
    "recorder.count(name, value)": "r.count('queue', i)",
    "if recorder.enabled": "if r.enabled: pass",
}
EVENTS_PER_LOOP = {EMPTY_LOOP: 0, "if recorder.enabled": 0}  # all others: 1
BOUNDS_NS = {(kind, form): 1000.0 for kind in ("full", "filling") for form in FORMS} | {
    ("disabled", "with spanner"): 50.0
}


@dataclass(frozen=True, slots=True)
class Row:
    """The cost of one form."""

    recorder: str  # full, filling, disabled
    form: str
    median_ns: float  # less the empty loop
    fastest_ns: float  # less the empty loop
    slowest_ns: float  # less the empty loop
    bound_ns: float | None  # upper bound of the cost, ns


def loop_of(statement: str) -> Callable[[Any, Any, int], float]:
    """Return a function that runs ``statement`` ``count`` times and returns the CPU seconds it took."""
    source = f"""
def loop(r, s, count, clock=clock):
    numbers = range(count)
    start = clock()
    for i in numbers:
        {statement}
    return clock() - start
"""
    namespace: dict[str, Any] = {"clock": time.thread_time}
    exec(source, namespace)
    return namespace["loop"]  # type: ignore[no-any-return]


def recorder_of(kind: str, loops: int) -> Recorder:
    """Return a recorder in the state ``kind``."""
    if kind == "disabled":
        return NULL_RECORDER
    return Recorder(max_events=loops // 2 if kind == "full" else 2 * loops)


def check(recorder: Recorder, kind: str) -> None:
    """Fail if a form records other events than it should."""
    for form, statement in FORMS.items():
        recorder.recording(clear=True)
        loop_of(statement)(recorder, recorder.spanner("step"), 10)
        expected = 10 * EVENTS_PER_LOOP.get(form, 1) if recorder.enabled else 0
        got = recorder.recording(clear=True).num_events
        if got != expected:
            raise SystemExit(f"{kind} recorder, {form!r}: recorded {got} events in 10 turns, expected {expected}")


def measure_forms(loops: int, repeats: int) -> tuple[list[Row], float]:
    """Return the rows, and the empty loop's own nanoseconds a turn."""
    kinds = ("full", "filling", "disabled")
    for kind in kinds:
        check(recorder_of(kind, loops), kind)
    compiled = {form: loop_of(statement) for form, statement in FORMS.items()}
    times: dict[tuple[str, str], list[float]] = {(kind, form): [] for kind in kinds for form in FORMS}
    for number in range(repeats + 1):
        for kind in kinds:
            for form, loop in compiled.items():
                recorder = recorder_of(kind, loops)
                spanner = recorder.spanner("step")
                if kind == "full":
                    loop(recorder, spanner, loops)
                elapsed_ns = loop(recorder, spanner, loops) / loops * 1e9
                if number:  # the first pass warms up
                    times[kind, form].append(elapsed_ns)
    empty_ns = statistics.median(elapsed_ns for kind in kinds for elapsed_ns in times[kind, EMPTY_LOOP])
    rows = [
        Row(
            recorder=kind,
            form=form,
            median_ns=statistics.median(values) - empty_ns,
            fastest_ns=min(values) - empty_ns,
            slowest_ns=max(values) - empty_ns,
            bound_ns=BOUNDS_NS.get((kind, form)),
        )
        for (kind, form), values in times.items()
        if form != EMPTY_LOOP
    ]
    return rows, empty_ns


def threads_ns(loops: int, num_threads: int) -> float:
    """Return the wall nanoseconds per span while ``num_threads`` share a recorder (the GIL serialises them)."""
    recorder = Recorder()
    loop, spanner = loop_of(FORMS["with spanner"]), recorder.spanner("step")
    threads = [threading.Thread(target=loop, args=(recorder, spanner, loops)) for _ in range(num_threads)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - start) / (loops * num_threads) * 1e9


def run(context: BenchContext, *, loops: int = 20_000, repeats: int = 15) -> Section:
    """Measure; the section has failed if a bound does not hold.

    Args:
        context: The suite's context.
        loops: Turns of each loop.
        repeats: Interleaved passes; medians are over these.
    """
    if context.is_quick:
        loops, repeats = 2_000, 3
    rows, empty_ns = measure_forms(loops, repeats)
    together_ns = statistics.median(threads_ns(loops, 4) for _ in range(5))
    missed = [
        f"{row.recorder} {row.form}" for row in rows if row.bound_ns is not None and row.median_ns >= row.bound_ns
    ]
    texts = [
        f"CPU time in ns, median of {repeats} passes of {loops} turns, less {empty_ns:.1f} for the loop.",
        f"With spanner in 4 threads at once: {together_ns:.0f} ns of wall time a span, the loop included.",
        *([f"Over the bound: {', '.join(missed)}"] if missed else []),
    ]
    return rows_section(
        "Core: the recorder",
        rows,
        *texts,
        status="failed" if missed and not context.is_quick else "ok",
        empty_loop_ns=empty_ns,
        four_threads_ns=together_ns,
    )
