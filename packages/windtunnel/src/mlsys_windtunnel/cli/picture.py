"""A picture of a translation as HTML: the source's operators on the left, the modules they became on the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from mlsys_windtunnel.module import WindTunnelModule
from mlsys_windtunnel.parse.graph import PipelineGraph

ROW, WIDTH, HEIGHT, LEFT, GAP = (
    76,
    300,
    52,
    40,
    130,
)  # pixels: between rows, of boxes, to the first box, between columns
STYLE = """body{font:14px system-ui,sans-serif;margin:2em;color:#222}svg text{font:13px system-ui,sans-serif}
.small{fill:#666;font-size:11px}rect{fill:#f4f6fa;stroke:#8893a7}rect.trained{fill:#e8f4e8;stroke:#5a9a5a}
rect.host{fill:#fbf1e2;stroke:#c29a52}path{fill:none;stroke:#8893a7}path.becomes{stroke-dasharray:4 3}"""


@dataclass(frozen=True, slots=True)
class Box:
    """One operator or module."""

    name: str  # the value that it makes
    title: str
    note: str
    kind: str  # a class of STYLE, or nothing
    reads: tuple[str, ...]


def picture(graph: PipelineGraph, module: WindTunnelModule) -> str:
    """Draw a page of its own, without scripts or links.

    Args:
        graph: Graph of the source.
        module: Its translation, trained or not.
    """
    source = [Box(graph.input.name, "input", _columns(graph.input.width), "", ())]
    for operator in graph.operators:
        title = (operator.source or operator.kind.value).rpartition(".")[2]
        count = operator.size.num_parameters
        note = f"{operator.name}: {count:,} parameters" if count else operator.name
        reads = tuple(value.name for value in operator.inputs)
        source.append(Box(operator.output.name, title, note, "", reads))
    network = module.network
    modules = [Box(name, name, _columns(width), "host", ()) for name, width in network.frontier]
    for wire, part in zip(network.wires, network.operators, strict=True):
        count = sum(each.numel() for each in part.parameters())
        trained = sum(each.numel() for each in part.parameters() if each.requires_grad)
        note = f"{wire.name}: {count:,} parameters, {trained:,} trained"
        parts = " of ".join(dict.fromkeys(type(each).__name__ for each in (part, *part.children())))
        modules.append(Box(wire.name, parts, note, "trained" if trained else "", wire.inputs))
    total = sum(each.numel() for each in network.parameters())
    trained = sum(each.numel() for each in network.parameters() if each.requires_grad)
    height = ROW * max(len(source), len(modules)) + 40
    at_source, at_modules = _places(source, 0), _places(modules, WIDTH + GAP)
    between = [(name, name) for name in at_source if name in at_modules]
    body = _edges(source, at_source) + _edges(modules, at_modules)
    body += [_becomes(at_source[one], at_modules[other]) for one, other in between]
    body += _boxes(source, at_source) + _boxes(modules, at_modules)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Translation</title><style>{STYLE}</style>'
        f"<h1>From pipeline to network</h1><p>{len(graph.operators)} operators with {graph.size.num_parameters:,} "
        f"parameters became {len(network.wires)} modules with {total:,}, {trained:,} of them trained (green). What the "
        f'host makes is orange.</p><svg width="{2 * WIDTH + GAP + 2 * LEFT}" height="{height}">{"".join(body)}</svg>'
        "</html>\n"
    )


def _columns(width: int | None) -> str:
    return "columns as they come" if width is None else f"{width:,} columns"


def _places(boxes: Sequence[Box], x: int) -> dict[str, tuple[int, int]]:
    return {box.name: (LEFT + x, 10 + ROW * row) for row, box in enumerate(boxes)}


def _boxes(boxes: Sequence[Box], places: Mapping[str, tuple[int, int]]) -> list[str]:
    drawn = []
    for box in boxes:
        x, y = places[box.name]
        drawn.append(
            f'<rect class="{box.kind}" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
            f'<text x="{x + 10}" y="{y + 21}">{escape(_cut(box.title, 40))}</text>'
            f'<text class="small" x="{x + 10}" y="{y + 40}">{escape(_cut(box.note, 52))}'
            f"<title>{escape(box.note)}</title></text>"
        )
    return drawn


def _edges(boxes: Sequence[Box], places: Mapping[str, tuple[int, int]]) -> list[str]:
    """Draw curves to the left of the boxes, wider where they skip some."""
    drawn = []
    for box in boxes:
        for name in box.reads:
            if name in places:
                (x, start), (_, end) = places[name], places[box.name]
                bend = x - min(36, 4 + (end - start) // 12)
                start, end = start + HEIGHT // 2, end + HEIGHT // 2
                drawn.append(f'<path d="M{x},{start} C{bend},{start} {bend},{end} {x},{end}"/>')
    return drawn


def _becomes(one: tuple[int, int], other: tuple[int, int]) -> str:
    start, end = one[1] + HEIGHT // 2, other[1] + HEIGHT // 2
    return f'<path class="becomes" d="M{one[0] + WIDTH},{start} L{other[0]},{end}"/>'


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
