"""Small layouts, requests and a worker that only counts, for tests of the cellular scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mlsys_batchmaker.plan import CellGraph, CellSpec, Layout, Planner, Port, Wire
from mlsys_batchmaker.plan.spec import Stop
from mlsys_batchmaker.scheduling.requests import CellRequest
from mlsys_batchmaker.scheduling.tasks import Round, RoundOutput, Task

H = Port("h", "float32", (2,))
WORD = Port("word", "int64", high=100)


def layout(*, batch_sizes: tuple[int, ...] = (1, 2, 3, 4), stop: int | None = None) -> Layout:
    """An encoder, a decoder, and the leaf and inner cells of a tree."""
    return Layout(
        [
            CellSpec("encoder", (WORD, H), (H,), batch_sizes=batch_sizes),
            CellSpec(
                "decoder",
                (WORD, H),
                (H, WORD),
                results=(1,),
                priority=1,
                batch_sizes=batch_sizes,
                stop=None if stop is None else Stop(1, stop),
            ),
            CellSpec("leaf", (WORD,), (H,), batch_sizes=batch_sizes),
            CellSpec(
                "inner",
                (Port("left", *H.signature), Port("right", *H.signature)),
                (H,),
                priority=1,
                batch_sizes=batch_sizes,
            ),
        ]
    )


def chain(of: Layout, request_id: str, length: int, **request: object) -> CellRequest:
    graph = CellGraph(of)
    graph.result(graph.chain("encoder", length, each={"word": np.arange(length) % 100}, carry={"h": "h"}).last("h"))
    return CellRequest(request_id, Planner(of).plan(graph), graph.constants, **request)  # type: ignore[arg-type]


def seq2seq(of: Layout, request_id: str, length: int, steps: int, **request: object) -> CellRequest:
    graph = CellGraph(of)
    encoder = graph.chain("encoder", length, each={"word": np.arange(length) % 100}, carry={"h": "h"})
    carry = {"word": "word", "h": "h"}
    graph.result(graph.chain("decoder", steps, carry=carry, first={"word": 1, "h": encoder.last("h")}))
    return CellRequest(request_id, Planner(of).plan(graph), graph.constants, **request)  # type: ignore[arg-type]


def tree_graph(of: Layout, splits: Sequence[int]) -> CellGraph:
    """A binary tree of ``len(splits) + 1`` leaves; each split joins two neighbours, by its index among those left."""
    count = len(splits) + 1
    roots = list(range(count))
    pairs = []
    for number, split in enumerate(splits):
        at = split % (len(roots) - 1)
        pairs.append((roots[at], roots[at + 1]))
        roots[at : at + 2] = [count + number]
    graph = CellGraph(of)
    first = graph.add_many("leaf", count, each={"word": np.arange(count) % 100})
    if pairs:
        left, right = zip(*pairs, strict=True)
        first = graph.add_many("inner", len(pairs), wires={"left": (left, "h"), "right": (right, "h")}) + len(pairs) - 1
    graph.result(first)
    return graph


def tree(of: Layout, request_id: str, splits: Sequence[int], **request: object) -> CellRequest:
    graph = tree_graph(of, splits)
    return CellRequest(request_id, Planner(of).plan(graph), graph.constants, **request)  # type: ignore[arg-type]


def fan(of: Layout, request_id: str, width: int, **request: object) -> CellRequest:
    """Nodes with several readers in their own subgraph, and subgraphs that several others wait for."""
    graph = CellGraph(of)
    leaf = graph.add("leaf", {"word": 1})
    top = graph.add("inner", {"left": Wire(leaf, "h")})
    sides = [graph.add("inner", {"left": Wire(top, "h"), "right": Wire(leaf, "h")}) for _ in range(width)]
    chains = [graph.chain("encoder", 1 + number, carry={"h": "h"}, first={"h": Wire(leaf, "h")}) for number in range(2)]
    last = graph.add("inner", {"left": chains[0].last("h"), "right": chains[1].last("h")})
    for node in (*sides, last):
        graph.result(node)
    return CellRequest(request_id, Planner(of).plan(graph), graph.constants, **request)  # type: ignore[arg-type]


def outputs(batch: Round, of: Layout, *, word: Callable[[Task, int, int], int] = lambda *_: 0) -> RoundOutput:
    """Results of the right shapes; ``word(task, step, row)`` says what a decoder gives."""
    results: list[tuple[np.ndarray, ...]] = []
    for task in batch.tasks:
        indices = list(zip(task.result_steps.tolist(), task.result_rows.tolist(), strict=True))
        if of.cells[task.cell].name == "decoder":
            results.append((np.array([word(task, step, row) for step, row in indices], dtype=np.int64),))
        else:
            results.append((np.zeros((len(indices), 2), dtype=np.float32),))
    return RoundOutput(results, 0.0, 0.0)
