"""The order of nodes and their grouping into subgraphs; the graph half of :mod:`.reference`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Groups:
    """Nodes in their new order and the subgraphs they form; fields as in ``GraphPlan``, nodes in the new numbering."""

    order: list[int] = field(default_factory=list)  # new number -> old number
    next: list[int] = field(default_factory=list)
    more: list[tuple[int, int]] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)  # the node whose output rows it takes over; itself: it has its own
    sub_start: list[int] = field(default_factory=list)
    sub_ready: list[int] = field(default_factory=list)
    sub_waiting: list[int] = field(default_factory=list)
    sub_next: list[int] = field(default_factory=list)
    sub_more: list[tuple[int, int]] = field(default_factory=list)


def group(cells: Sequence[int], sources: list[list[int]]) -> Groups:
    """Order the nodes and group them.

    Args:
        cells: [n] the cell of each node.
        sources: [n, inputs] the node that feeds each input, or -1.
    """
    preds = _predecessors(sources)
    order = _topological(preds)
    subgraph = _subgraphs(cells, preds, order)
    return _number(subgraph, preds, order)


def _predecessors(sources: list[list[int]]) -> list[list[int]]:
    """Return for each node the nodes that feed it, rising; ``sources`` [n, inputs] are nodes, or -1."""
    return [sorted({source for source in row if source >= 0}) for row in sources]


def _topological(preds: list[list[int]]) -> list[int]:
    """Return the nodes in an order in which each comes after those that feed it; there is no cycle."""
    if all(not before or before[-1] < node for node, before in enumerate(preds)):
        return list(range(len(preds)))
    missing = [len(before) for before in preds]
    succs: list[list[int]] = [[] for _ in preds]
    for node, before in enumerate(preds):
        for pred in before:
            succs[pred].append(node)
    order = [node for node, count in enumerate(missing) if count == 0]
    for node in order:
        for succ in succs[node]:
            missing[succ] -= 1
            if missing[succ] == 0:
                order.append(succ)  # the loop goes on with it
    return order


def _find(root: list[int], node: int) -> int:
    """Return the root of ``node`` in a forest of parents, and shorten the path to it."""
    while root[node] != node:
        root[node] = root[root[node]]
        node = root[node]
    return node


def _subgraphs(cells: Sequence[int], preds: list[list[int]], order: list[int]) -> list[tuple[int, int]]:
    """Return (stage, root) for each node: equal for nodes of one subgraph."""
    stage = [0] * len(preds)
    root = list(range(len(preds)))
    for node in order:
        cell, before = cells[node], preds[node]
        at = 0
        for pred in before:
            after = stage[pred] + (cells[pred] != cell)
            at = max(at, after)
        stage[node] = at
        for pred in before:
            if stage[pred] == at and cells[pred] == cell:
                root[_find(root, pred)] = _find(root, node)
    return [(stage[node], _find(root, node)) for node in range(len(preds))]


def _number(subgraph: list[tuple[int, int]], preds: list[list[int]], order: list[int]) -> Groups:
    groups = Groups()
    members: dict[tuple[int, int], tuple[list[int], list[int]]] = {}  # -> (ready at once, others)
    internal: list[list[int]] = [[] for _ in preds]
    for node in order:
        own = subgraph[node]
        internal[node] = [pred for pred in preds[node] if subgraph[pred] == own]
        members.setdefault(own, ([], []))[bool(internal[node])].append(node)
    ranked = sorted(members, key=lambda key: key[0])  # by stage, then by first node: the sort is stable
    number = {key: index for index, key in enumerate(ranked)}
    planned = [0] * len(preds)
    for key in ranked:
        ready, others = members[key]
        groups.sub_start.append(len(groups.order))
        groups.sub_ready.append(len(ready))
        for node in (*ready, *others):
            planned[node] = len(groups.order)
            groups.order.append(node)
    _link_nodes(groups, preds, internal, planned)
    _link_subgraphs(groups, subgraph, preds, number)
    return groups


def _link_nodes(groups: Groups, preds: list[list[int]], internal: list[list[int]], planned: list[int]) -> None:
    num_readers = [0] * len(preds)
    for before in preds:
        for pred in before:
            num_readers[pred] += 1
    groups.next = [-1] * len(preds)
    for node in groups.order:
        here = planned[node]
        groups.waiting.append(len(internal[node]))
        owner = here
        for pred in internal[node]:
            there = planned[pred]
            if groups.next[there] < 0:
                groups.next[there] = here
            else:
                groups.more.append((there, here))
            if owner == here and num_readers[pred] == 1:
                owner = groups.owner[there]
        groups.owner.append(owner)


def _link_subgraphs(
    groups: Groups, subgraph: list[tuple[int, int]], preds: list[list[int]], number: dict[tuple[int, int], int]
) -> None:
    before: list[set[int]] = [set() for _ in number]
    for node, own in enumerate(subgraph):
        for pred in preds[node]:
            if subgraph[pred] != own:
                before[number[own]].add(number[subgraph[pred]])
    groups.sub_waiting = [len(subs) for subs in before]
    groups.sub_next = [-1] * len(number)
    for sub, subs in enumerate(before):
        for other in sorted(subs):
            if groups.sub_next[other] < 0:
                groups.sub_next[other] = sub
            else:
                groups.sub_more.append((other, sub))
