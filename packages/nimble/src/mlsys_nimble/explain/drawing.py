"""Places of a graph's operators in a drawing: a row for each step of the longest chain, columns for streams. Pure."""

from __future__ import annotations

from mlsys_nimble.planning.streams import StreamAssignment


def places(assignment: StreamAssignment) -> list[tuple[int, int]]:
    """Return the column and row of each operator.

    An operator's row is the number of operators in the longest chain before it. A stream stays in one column; two
    share one where the rows of the first end above those of the second.

    Example:
        >>> from mlsys_nimble.ir.graph import build_graph
        >>> from mlsys_nimble.planning.streams import assign_streams
        >>> edges = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")]
        >>> sorted(places(assign_streams(build_graph(["a", "b", "c", "d"], edges))))
        [(0, 0), (0, 1), (0, 2), (1, 1)]
    """
    rows = [0] * len(assignment.graph.names)
    for producer, consumer in assignment.graph.edges:  # sorted by producer, and producers stand in order
        rows[consumer] = max(rows[consumer], rows[producer] + 1)
    ends: list[int] = []  # last row of each column so far
    column_of: dict[int, int] = {}
    spans = [[rows[operator] for operator in members] for members in assignment.streams()]
    for stream in sorted(range(len(spans)), key=lambda stream: min(spans[stream])):
        first, last = min(spans[stream]), max(spans[stream])
        column = next((index for index, end in enumerate(ends) if end < first), len(ends))
        ends[column : column + 1] = [last]
        column_of[stream] = column
    return [(column_of[stream], row) for stream, row in zip(assignment.stream_of, rows, strict=True)]
