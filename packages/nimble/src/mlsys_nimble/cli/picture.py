"""Picture of a stream assignment as SVG: one column and colour a stream, one row a level of dependency."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from mlsys_core.errors import InvalidInputError
from mlsys_nimble.planning.streams import StreamAssignment

MAX_DRAWN = 1000  # operators; a picture of more is unreadable

_COLUMN, _ROW, _WIDTH, _HEIGHT, _MARGIN = 150, 64, 118, 30, 24  # pixels
_MAX_LABEL = 15  # characters that fit a box


def stream_svg(assignment: StreamAssignment) -> str:
    """Draw an SVG of the minimum equivalent graph: solid edges stay within a stream, dashed ones are synchronisations.

    Raises:
        InvalidInputError: more than ``MAX_DRAWN`` operators.
    """
    names, stream_of = assignment.graph.names, assignment.stream_of
    if len(names) > MAX_DRAWN:
        raise InvalidInputError(
            f"cannot draw {len(names)} operators, at most {MAX_DRAWN}; leave out --svg, or use --json"
        )
    level = [0] * len(names)
    for producer, consumer in assignment.meg_edges:  # sorted by producer, so its level is final
        level[consumer] = max(level[consumer], level[producer] + 1)
    x = [_MARGIN + stream * _COLUMN for stream in stream_of]
    y = [2 * _MARGIN + row * _ROW for row in level]
    width = 2 * _MARGIN + (assignment.num_streams - 1) * _COLUMN + _WIDTH
    height = 3 * _MARGIN + max(level) * _ROW + _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12" role="img" aria-label="Stream assignment">',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    parts += (
        f'<text x="{_MARGIN + stream * _COLUMN + _WIDTH // 2}" y="{_MARGIN}" text-anchor="middle" '
        f'fill="{_colour(stream)}">stream {stream}</text>'
        for stream in range(assignment.num_streams)
    )
    for producer, consumer in assignment.meg_edges:
        dashes = "" if stream_of[producer] == stream_of[consumer] else ' stroke-dasharray="5 4"'
        parts.append(
            f'<line x1="{x[producer] + _WIDTH // 2}" y1="{y[producer] + _HEIGHT}" x2="{x[consumer] + _WIDTH // 2}" '
            f'y2="{y[consumer]}" stroke="#555" marker-end="url(#tip)"{dashes}/>'
        )
    parts += _boxes(zip(names, stream_of, x, y, strict=True))
    return "\n".join([*parts, "</svg>\n"])


def _boxes(operators: Iterable[tuple[str, int, int, int]]) -> Iterable[str]:
    for name, stream, left, top in operators:
        label = name if len(name) <= _MAX_LABEL else name[: _MAX_LABEL - 1] + "…"
        yield (
            f'<g><title>{escape(name)}</title><rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" '
            f'fill="{_colour(stream)}"/><text x="{left + _WIDTH // 2}" y="{top + 20}" text-anchor="middle" fill="#fff">'
            f"{escape(label)}</text></g>"
        )


def _colour(stream: int) -> str:
    """Return a hue for a stream, by the golden angle so that neighbours differ; dark enough for white text."""
    return f"hsl({stream * 137.5 % 360:.0f},55%,38%)"
