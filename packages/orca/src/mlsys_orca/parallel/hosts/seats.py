"""Who sits where: nodes that have joined, the seats of an assignment, and which replicas have all their parts; pure.

The hub tells it what has happened, and acts on what it returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mlsys_orca.parallel.hosts.assignment import Assignment, parts_of
from mlsys_orca.parallel.placement import Placement


@dataclass(slots=True)
class _Seat:
    """One number of the assignment."""

    parts: dict[Placement, tuple[int, ...]]
    node: int | None = None  # who has it
    loaded: set[Placement] = field(default_factory=set)


class Seats:
    """Seats of an assignment, and the nodes on them. Nodes are named by numbers of the caller's.

    Args:
        assignment: Node of each part.

    Example:
        >>> from mlsys_orca.parallel.hosts.assignment import assign
        >>> seats = Seats(assign(tensor_parallel=1, pipeline_parallel=2, num_replicas=1, num_nodes=2))
        >>> seats.join(10), seats.join(11), seats.join(12)
        (0, 1, None)
        >>> seats.lose(10)
        (0, 12)
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        numbers = sorted(set(assignment.values()))
        self._seats = [_Seat(parts_of(assignment, number)) for number in numbers]
        self._spares: list[int] = []  # who has waited longest comes first

    @property
    def num_joined(self) -> int:
        """Number of seats that are taken."""
        return sum(seat.node is not None for seat in self._seats)

    @property
    def num_seats(self) -> int:
        """Number of seats."""
        return len(self._seats)

    def parts(self, seat: int) -> dict[Placement, tuple[int, ...]]:
        """Return the parts of a seat, each with its replicas."""
        return self._seats[seat].parts

    def join(self, node: int, wish: int | None = None) -> int | None:
        """Note that a node has come; return its seat, or None: it is a spare.

        Args:
            node: Its number.
            wish: Seat that it gets if it is free.
        """
        for number in sorted(range(len(self._seats)), key=lambda each: each != wish):
            seat = self._seats[number]
            if seat.node is None:
                seat.node, seat.loaded = node, set()
                return number
        self._spares.append(node)
        return None

    def lose(self, node: int) -> tuple[int, int | None] | None:
        """Note that a node is gone.

        Returns:
            Its seat and the spare that has it now, or None in place of that one; None: it had no seat.
        """
        if node in self._spares:
            self._spares.remove(node)
        for number, seat in enumerate(self._seats):
            if seat.node == node:
                seat.node, seat.loaded = (self._spares.pop(0) if self._spares else None), set()
                return number, seat.node
        return None

    def load(self, node: int, place: Placement) -> None:
        """Note that a node has a part."""
        for seat in self._seats:
            if seat.node == node and place in seat.parts:
                seat.loaded.add(place)

    def nodes_of(self, replica: int) -> dict[Placement, int] | None:
        """Return the node of each part of a replica; None: some are missing."""
        found: dict[Placement, int] = {}
        for (of, place), number in self._assignment.items():
            seat = self._seats[number]
            if of != replica:
                continue
            if seat.node is None or place not in seat.loaded:
                return None
            found[place] = seat.node
        return found

    def lacks(self, replica: int | None = None) -> str | None:
        """Return in one line what a replica, or any, waits for; None: nothing."""
        seats = [seat for seat in self._seats if replica is None or any(replica in of for of in seat.parts.values())]
        empty = sum(seat.node is None for seat in seats)
        if empty:
            return f"{empty} of {len(seats)} nodes {'is' if empty == 1 else 'are'} missing"
        loading = sum(len(seat.parts) - len(seat.loaded) for seat in seats)
        return f"nodes load {loading} of its parts" if loading else None
