"""Tables of runs that check answers under faults: workers killed, requests cancelled, too much load."""

from __future__ import annotations

from mlsys_bench.figures.results import load, number, processor, table


def chaos(*names: str) -> str:
    """Return what clients got while workers were killed, by model."""
    rows = []
    for name in names:
        found = load(name)
        counts = [f"num_{key}" for key in ("deaths", "answers", "equal", "different", "lost", "repeated", "twice")]
        waits = [number(found[key] * 1e3) for key in ("longest_s", "undisturbed_s")]
        rows.append([processor(name), found["model"], *(f"{found[key]:,}" for key in counts), *waits])
    columns = ["machine", "model", "workers killed", "answers", "equal", "different", "lost", "runs again"]
    return table([*columns, "answered twice", "longest, ms", "longest undisturbed, ms"], rows)


def soak(name: str) -> str:
    """Return how requests ended above capacity, by policy, and what was wrong."""
    rows = []
    for row in load(name)["rows"]:
        ended = {kind: int(count) for count, kind in (part.split(" ", 1) for part in row["reasons"].split(", "))}
        kinds = [f"{ended.get(kind, 0):,}" for kind in ("done", "cancelled", "expired", "failed")]
        faults = [str(row[key]) for key in ("wrong", "lost", "doubled", "batches_left")]
        rows.append([row["policy"], f"{row['requests']:,}", *kinds, *faults])
    columns = ["policy", "requests", "answered", "cancelled", "expired", "failed or refused", "wrong", "lost"]
    return table([*columns, "answered twice", "batches left"], rows)
