"""Turn the facts about a request into spans. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mlsys_core.tracing.record import EngineTrace, Fact, Note


@dataclass(frozen=True, slots=True)
class Span:
    """Span to be exported, with those within it. Times are seconds of ``time.perf_counter``."""

    name: str
    start_s: float
    end_s: float
    facts: dict[str, Fact]
    notes: tuple[Note, ...] = ()
    children: tuple[Span, ...] = ()
    is_error: bool = False


def span_of(part: EngineTrace, now_s: float) -> Span:
    """Return the span of a request in an engine: its wait and its run are children.

    Args:
        part: The facts.
        now_s: End of its client's request, for what has not ended.

    Example:
        >>> part = EngineTrace("infer", "m", 1.0, started_s=1.5, ended_s=3.0, reason="done")
        >>> [(child.name, child.end_s - child.start_s) for child in span_of(part, 9.0).children]
        [('queue', 0.5), ('run', 1.5)]
    """
    end_s = max(part.submitted_s, now_s if part.ended_s is None else part.ended_s)
    started_s = end_s if part.started_s is None else min(max(part.started_s, part.submitted_s), end_s)
    facts: dict[str, Fact] = {"mlsys.model": part.model, "mlsys.finish_reason": part.reason or "abandoned"}
    children = [Span("queue", part.submitted_s, started_s, {})]
    notes = list(part.notes)
    if part.started_s is not None:
        ran: dict[str, Fact] = {"mlsys.batches": part.num_batches, "mlsys.executor_s": part.executor_s}
        if part.num_batches:
            ran["mlsys.neighbours.mean"] = part.num_neighbours / part.num_batches
            ran["mlsys.neighbours.max"] = part.max_neighbours
        if part.first_output_s is not None:
            notes.append(Note("first output", part.first_output_s))
            facts["mlsys.first_output_s"] = part.first_output_s - part.submitted_s
        children.append(Span("run", started_s, end_s, ran, tuple(sorted(notes, key=lambda note: note.at_s))))
        notes = []
    return Span(
        f"{part.operation} {part.model}",
        part.submitted_s,
        end_s,
        {**facts, **part.facts},
        tuple(notes),
        tuple(children),
        is_error=part.reason in ("failed", "error"),
    )
