"""A recording as one self-contained HTML page with a timeline on a canvas. Made by ``mlsys trace view``.

The page gets sorted columns of numbers. Drawing finds visible spans by bisection and skips those narrower than a
pixel, so a million spans stay usable. Its layout and script are in ``timeline.html`` beside this file.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections import defaultdict
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from mlsys_core.profiling.files import atomic_write
from mlsys_core.profiling.nesting import place
from mlsys_core.profiling.recording import Recording, Span, Track, plain
from mlsys_core.profiling.summary import RecordingSummary, format_s, summarise_recording

_TABLE_ROWS = 50


def timeline_html(recording: Recording, *, title: str) -> str:
    """Return the page for ``recording``, as text.

    Example:
        >>> from mlsys_core.profiling import Recorder
        >>> recorder = Recorder()
        >>> with recorder.span("prefill"):
        ...     pass
        >>> "prefill" in timeline_html(recorder.recording(), title="a run")
        True
    """
    summary = summarise_recording(recording)
    page = resources.files("mlsys_core.profiling").joinpath("timeline.html").read_text(encoding="utf-8")
    data = json.dumps(timeline_data(recording), separators=(",", ":"), allow_nan=False)
    parts = {
        "TITLE": html.escape(title),
        "FACTS": html.escape(_facts(recording, summary)),
        "WARNING": f'<p class="warning">{html.escape(dropped)}</p>' if (dropped := summary.warning()) else "",
        "TABLE": _table(summary),
        "DATA": data.replace("<", "\\u003c"),  # a span named "</script>" must not end the script
    }
    return re.sub("__([A-Z]+)__", lambda mark: parts[mark[1]], page)


def write_timeline(recording: Recording, path: Path) -> None:
    """Write the page for ``recording`` to ``path``, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    page = timeline_html(recording, title=path.stem)
    with atomic_write(path) as target:
        target.write(page.encode())


def timeline_data(recording: Recording) -> dict[str, Any]:
    """Return the data of the page's script: times in ns since the first event; names and arguments as table indices."""
    origin_ns, end_ns = recording.bounds_ns()
    names: dict[str, int] = {}
    args: dict[str, int] = {"": 0}
    processes = {process.pid: process for process in recording.processes}

    def name_index(name: str) -> int:
        return names.setdefault(name, len(names))

    def args_index(value: object) -> int:
        return args.setdefault(json.dumps(plain(value)) if value else "", len(args))

    spans: dict[Track, list[Span]] = defaultdict(list)
    for span in recording.spans:
        spans[span.track].append(span)
    instants: dict[Track, dict[str, list[int]]] = defaultdict(lambda: {"at": [], "name": [], "args": []})
    for instant in recording.instants:
        columns = instants[instant.track]
        columns["at"].append(instant.at_ns - origin_ns)
        columns["name"].append(name_index(instant.name))
        columns["args"].append(args_index(instant.args))

    tracks = []
    for track in recording.tracks():
        rows: dict[tuple[int, int], dict[str, list[int]]] = defaultdict(
            lambda: {"start": [], "duration": [], "name": [], "args": []}
        )
        own = spans[track]
        for span, placement in zip(own, place(track, own), strict=True):
            row = rows[placement.lane, placement.depth]
            row["start"].append(span.start_ns - origin_ns)
            row["duration"].append(span.duration_ns)
            row["name"].append(name_index(span.name))
            row["args"].append(args_index(span.args))
        process = processes.get(track.pid)
        label = f"{track.name} · {process.name if process else 'process'} {track.pid}"
        tracks.append({"label": label, "rows": [rows[key] for key in sorted(rows)], "instants": instants[track]})

    samples: dict[tuple[int, str], list[tuple[int, float]]] = defaultdict(list)
    for sample in recording.samples:
        if math.isfinite(sample.value):
            samples[sample.pid, sample.name].append((sample.at_ns - origin_ns, plain(sample.value)))
    counters = []
    for (pid, name), points in samples.items():
        at, values = zip(*points, strict=True)
        drawn = {"label": f"{name} · {pid}", "hue": name_index(name), "min": min(values), "max": max(values)}
        counters.append({**drawn, "at": at, "value": values})
    return {
        "wall_ns": end_ns - origin_ns,
        "names": list(names),
        "args": list(args),
        "tracks": tracks,
        "counters": counters,
    }


def _facts(recording: Recording, summary: RecordingSummary) -> str:
    facts = [
        f"events: {summary.num_events}",
        f"processes: {len(recording.processes)}",
        f"wall time: {format_s(summary.wall_s)}",
    ]
    if recording.anchor:
        origin_ns = recording.anchor.wall_ns + recording.bounds_ns()[0] - recording.anchor.clock_ns
        facts.append(f"start: {datetime.fromtimestamp(origin_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC")
    return ", ".join(facts)


def _table(summary: RecordingSummary) -> str:
    columns = ("span", "count", "total", "self", "mean", "p50", "p90", "p99", "max", "of wall")
    rows = []
    for row in summary.spans[:_TABLE_ROWS]:
        d = row.duration_s
        times = [format_s(value) for value in (d.total, row.self_s, d.mean, d.p50, d.p90, d.p99, d.max)]
        rows.append([html.escape(row.name), str(d.count), *times, f"{row.share_of_wall:.1%}"])
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    more = len(summary.spans) - len(rows)
    rest = f"<p>and {more} more: mlsys trace summary lists them all</p>" if more > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"
