"""Table of starts: seconds and memory of a server, beside llama.cpp's."""

from __future__ import annotations

from mlsys_bench.figures.results import load, number, processor, table

_SECONDS = {"ready_s": "ready (s)", "first_token_s": "first token (s)"}
_OTHERS = {
    "processor_s": "processor time (s)",
    "file_mib": "file (MiB)",
    "peak_mib": "peak (MiB)",
    "held_mib": "after the first token (MiB)",
}


def starts(name: str) -> str:
    """Return a row for each model and server, and a line on how they were measured; no seconds of a busy machine."""
    found = load(name)
    shown = _OTHERS if found["is_busy"] else _SECONDS | _OTHERS
    rows = []
    before = None
    for row in found["rows"]:
        ratio = f"{row['held_mib'] / row['file_mib']:.2f}x" if row["file_mib"] else ""
        model = row["model"] if row["model"] != before else ""
        rows.append([model, row["server"], *(number(row[key]) for key in shown), ratio])
        before = row["model"]
    text = f"{processor(name)}. {found['method']} {found['load']}"
    if found["is_busy"]:
        text += " Seconds of starts are left out until they are measured on a quiet one."
    return f"{table(['model', 'server', *shown.values(), 'to the file'], rows)}\n\n{text}"
