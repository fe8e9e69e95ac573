"""Graphs of all subsystems: each is a ``networkx.DiGraph`` with typed attributes, drawn and written in one way.

A subsystem's ``to_networkx()`` starts with :func:`new_graph` and adds nodes (named by strings) and edges whose
attributes are ``str``, ``int``, ``float`` or ``bool``: what GraphML can hold. An attribute that does not apply is left
out. A node's ``label`` is its text in pictures; without one it is the node's name. Networkx and matplotlib are imported
on the first call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mlsys_core.errors import InvalidInputError

if TYPE_CHECKING:
    import networkx as nx
    from matplotlib.figure import Figure

Graph: TypeAlias = "nx.DiGraph[str]"

PICTURES = (".svg", ".png", ".pdf")
FORMATS = (".graphml", ".dot", *PICTURES)
MAX_DRAWN = 1000  # nodes; a larger picture shows nothing
_MAX_LABEL = 36  # characters of a line in a box
_LINE, _CHARACTER, _GAP = 0.13, 0.062, 0.22  # inches: height of a line, mean width of a character, between boxes
_MAX_PNG_INCHES = 160  # a side of a .png, 24,000 pixels


def new_graph(
    title: str,
    *,
    column: str | None = None,
    color: str | None = None,
    dashed: str | None = None,
    hidden: str | None = None,
) -> Graph:
    """Return an empty graph that says how it is to be drawn.

    Args:
        title: Text above the picture.
        column: Attribute of nodes; those of one value stand below each other, values in order of appearance.
        color: Attribute of nodes; those of one value have one colour.
        dashed: Attribute of edges, a ``bool``: a dashed line.
        hidden: Attribute of edges, a ``bool``: not drawn.

    Example:
        >>> graph = new_graph("two steps", color="kind")
        >>> graph.add_node("first", kind="gemm", seconds=1e-3)
        >>> graph.add_edge("first", "second", nbytes=4096)
        >>> list(graph.edges)
        [('first', 'second')]
    """
    import networkx as nx

    drawing = {"title": title, "column": column, "color": color, "dashed": dashed, "hidden": hidden}
    graph: Graph = nx.DiGraph()
    graph.graph.update((name, value) for name, value in drawing.items() if value is not None)
    return graph


def check_format(path: Path) -> None:
    """Raise ``InvalidInputError`` unless :func:`write_graph` can write to ``path``; call it before long work."""
    if path.suffix.lower() not in FORMATS:
        raise InvalidInputError(f"a graph cannot be written as {path.name!r}: end the name in {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise InvalidInputError(f"cannot write {path}: there is no folder {path.absolute().parent}")


def check_attributes(graph: Graph) -> None:
    """Check the rules of this module.

    Raises:
        InvalidInputError: a node's name is no string, an attribute has another type than ``str``, ``int``, ``float`` or
            ``bool`` or different types on different nodes or edges, or a number is not finite.
    """
    types: dict[tuple[str, str], type] = {}
    parts: list[tuple[str, object, Mapping[str, Any]]] = [("graph", graph.graph.get("title", ""), graph.graph)]
    parts += [("node", node, attributes) for node, attributes in graph.nodes(data=True)]
    parts += [("edge", (one, other), attributes) for one, other, attributes in graph.edges(data=True)]
    for kind, where, attributes in parts:
        if kind == "node" and not isinstance(where, str):
            raise InvalidInputError(f"node {where!r} of a graph: names must be strings")
        for name, value in attributes.items():
            known = types.setdefault((kind, name), type(value))
            if type(value) not in (str, int, float, bool) or known is not type(value):
                allowed = "str, int, float or bool" if known is type(value) else known.__name__
                raise InvalidInputError(
                    f"{kind} {where!r}: {name}={value!r} is a {type(value).__name__}, not {allowed}"
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidInputError(f"{kind} {where!r}: {name} is {value!r}; numbers must be finite")


def write_graph(graph: Graph, path: Path) -> None:
    """Write ``graph`` in the format that the name of ``path`` ends in.

    ``.graphml`` holds everything and is read by ``networkx.read_graphml``, Gephi and yEd. ``.dot`` is for Graphviz;
    attributes are its tooltips. The others are pictures.

    Raises:
        InvalidInputError: the name ends otherwise, the file cannot be written, the graph breaks a rule of this module,
            or has too many nodes for a picture.
    """
    import networkx as nx

    check_format(path)
    check_attributes(graph)
    suffix = path.suffix.lower()
    if suffix in PICTURES:
        from mlsys_core.plot import save

        if len(graph) > MAX_DRAWN:
            raise InvalidInputError(f"cannot draw {len(graph)} nodes, at most {MAX_DRAWN}; write .dot or .graphml")
        figure = draw_graph(graph)
        if suffix == ".png" and max(figure.get_size_inches()) > _MAX_PNG_INCHES:
            raise InvalidInputError(f"{path}: the picture is too large for a .png; write .svg or .pdf")
        save(figure, path)
        return
    graph = _without_odd_characters(graph)
    try:
        path.write_text(to_dot(graph) if suffix == ".dot" else "\n".join(nx.generate_graphml(graph)), encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror or error}") from error


def to_dot(graph: Graph) -> str:
    """Return ``graph`` in Graphviz's language.

    Attributes are written as tooltips, since Graphviz gives names such as ``shape`` and ``width`` meanings of its own.
    """
    dashed, hidden = graph.graph.get("dashed", ""), graph.graph.get("hidden", "")
    colors = _colors(graph)
    lines = [f"digraph {_quoted(graph.graph.get('title', ''))} {{", 'node [shape=box, style="rounded,filled"];']
    for node, attributes in graph.nodes(data=True):
        label, tooltip = _quoted(attributes.get("label", node)), _quoted(_described(attributes))
        lines.append(f'{_quoted(node)} [label={label}, tooltip={tooltip}, fillcolor="{colors[node][1]}"];')
    for one, other, attributes in graph.edges(data=True):
        style = "invis" if attributes.get(hidden) else "dashed" if attributes.get(dashed) else "solid"
        lines.append(f"{_quoted(one)} -> {_quoted(other)} [tooltip={_quoted(_described(attributes))}, style={style}];")
    return "\n".join([*lines, "}\n"])


def draw_graph(graph: Graph) -> Figure:
    """Return a picture of a DAG: every edge points down, boxes stand in the columns that the graph asks for.

    Raises:
        InvalidInputError: the graph has a cycle.
    """
    from mlsys_core.plot import house_style, require_matplotlib

    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    labels = {node: _label(attributes.get("label", node)) for node, attributes in graph.nodes(data=True)}
    rows = [line for label in labels.values() for line in label.split("\n")]
    width = _CHARACTER * max(map(len, rows), default=1) + 0.16
    height = _LINE * max((label.count("\n") + 1 for label in labels.values()), default=1) + 0.1
    places, headings = _places(graph)
    across, down = width + _GAP, height + 1.2 * _GAP
    at = {node: (column * across, -row * down) for node, (column, row) in places.items()}
    with house_style():
        most_x, most_y = (max((abs(point[axis]) for point in at.values()), default=0.0) for axis in (0, 1))
        size = most_x + width + 2 * _GAP, most_y + height + 4 * _GAP
        figure = Figure(figsize=size)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(
            xlim=(-width / 2 - _GAP, most_x + width / 2 + _GAP),
            ylim=(-most_y - height / 2 - _GAP, height / 2 + 3 * _GAP),
        )
        axes.set_axis_off()
        figure.text(
            _GAP / size[0],
            1 - 0.4 * _GAP / size[1],
            graph.graph.get("title", ""),
            va="top",
            fontsize=8,
            parse_math=False,
        )
        for text, column in headings:
            axes.text(column * across, height / 2 + 0.1, text, ha="center", fontsize=6, color="0.4", parse_math=False)
        dashed, hidden = graph.graph.get("dashed", ""), graph.graph.get("hidden", "")
        for one, other, attributes in graph.edges(data=True):
            if attributes.get(hidden):
                continue
            (x, y), (to_x, to_y) = at[one], at[other]
            bend = 1.2 * width / (y - to_y) if x == to_x and places[other][1] > places[one][1] + 1 else 0.0
            axes.add_patch(
                FancyArrowPatch(
                    (x, y - height / 2),
                    (to_x, to_y + height / 2),
                    arrowstyle="-|>",
                    connectionstyle=f"arc3,rad={bend}",  # past the boxes between
                    mutation_scale=6,
                    shrinkA=0,
                    shrinkB=0,
                    linewidth=0.7,
                    linestyle=(0, (4, 3)) if attributes.get(dashed) else "solid",
                    color="0.35",
                )
            )
        colors = _colors(graph)
        for node, (x, y) in at.items():
            line, fill = colors[node]
            corner = (x - width / 2, y - height / 2)
            box = FancyBboxPatch(corner, width, height, boxstyle="round,pad=0,rounding_size=0.04", fc=fill, ec=line)
            axes.add_patch(box)
            axes.text(x, y, labels[node], ha="center", va="center", fontsize=6.5, parse_math=False)
    return figure


def _places(graph: Graph) -> tuple[dict[str, tuple[float, int]], list[tuple[str, float]]]:
    """Return column and row of each node, and the columns' headings."""
    import networkx as nx

    try:
        order = list(nx.topological_sort(graph))
    except nx.NetworkXUnfeasible as error:
        raise InvalidInputError("only a graph without a cycle can be drawn; write .dot or .graphml") from error
    rows: dict[str, int] = {}
    if (key := graph.graph.get("column")) is not None:
        values = list(dict.fromkeys(graph.nodes[node].get(key, "") for node in graph))
        column = {value: index for index, value in enumerate(values)}
        free = [0] * len(values)
        for node in order:
            mine = column[graph.nodes[node].get(key, "")]
            rows[node] = max(free[mine], *(rows[source] + 1 for source in graph.predecessors(node)), 0)
            free[mine] = rows[node] + 1
        places = {node: (float(column[graph.nodes[node].get(key, "")]), row) for node, row in rows.items()}
        return places, [(f"{key} {value}", float(index)) for index, value in enumerate(values)]
    at: dict[str, float] = {}
    for row, generation in enumerate(nx.topological_generations(graph)):
        above = {node: [at[source] for source in graph.predecessors(node)] for node in generation}
        wanted = {node: sum(xs) / len(xs) if xs else float(index) for index, (node, xs) in enumerate(above.items())}
        last = -math.inf
        for node in sorted(generation, key=wanted.__getitem__):  # as near below its sources as its neighbours allow
            last = at[node] = max(wanted[node], last + 1)
            rows[node] = row
    return {node: (x, rows[node]) for node, x in at.items()}, []


def _colors(graph: Graph) -> dict[str, tuple[str, str]]:
    """Return the colours of each node's line and filling, by the attribute that the graph names."""
    from mlsys_core.plot import PALETTE

    key = graph.graph.get("color", "")
    values = {value: number for number, value in enumerate(dict.fromkeys(graph.nodes[node].get(key) for node in graph))}
    fills = ["#" + bytes(round(255 - 0.2 * (255 - each)) for each in bytes.fromhex(line[1:])).hex() for line in PALETTE]
    numbers = {node: values[graph.nodes[node].get(key)] % len(PALETTE) for node in graph}
    return {node: (PALETTE[number], fills[number]) for node, number in numbers.items()}


def _label(text: str) -> str:
    """Return printable text whose lines fit a box: of a long line the ends are kept."""
    lines = ["".join(one if one.isprintable() else "?" for one in line) for line in text.split("\n")]
    half = _MAX_LABEL // 2
    return "\n".join(line if len(line) <= _MAX_LABEL else f"{line[:half]}…{line[1 - half :]}" for line in lines)


def _described(attributes: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in attributes.items() if name != "label")


def _quoted(text: object) -> str:
    return '"' + str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _without_odd_characters(graph: Graph) -> Graph:
    """Return a copy whose texts XML and UTF-8 can hold."""
    import networkx as nx

    odd = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

    def clean(value: Any) -> Any:
        return odd.sub("\ufffd", value) if isinstance(value, str) else value

    copy: Graph = nx.relabel_nodes(graph, clean)
    for attributes in (copy.graph, *copy.nodes.values(), *copy.edges.values()):
        attributes.update((name, clean(value)) for name, value in attributes.items())
    return copy
