"""Reservation of slots ahead of need: ORCA's guard against running out of memory half-way through a request.

A slot is the memory for one token's keys and values. A request reserves as many as it can ever use (``max_tokens``)
before its first iteration and keeps them until it is done, so no admitted request can be stuck for memory.
"""

from __future__ import annotations

from collections.abc import Hashable

from mlsys_core.errors import InvalidInputError, MemoryPlanError


class SlotBudget:
    """The reservation in ORCA's Algorithm 2 (OSDI 2022, section 4.2): ``n_rsrv`` of ``n_slots``, by owner.

    Args:
        n_slots: slots in all, 1 or more.

    Raises:
        InvalidInputError: ``n_slots`` is less than 1.

    Example:
        >>> budget = SlotBudget(100)
        >>> budget.try_reserve("request-1", 60), budget.try_reserve("request-2", 60)
        (True, False)
        >>> budget.release("request-1")
        60
        >>> budget.try_reserve("request-2", 60), budget.available
        (True, 40)
    """

    def __init__(self, n_slots: int) -> None:
        if n_slots < 1:
            raise InvalidInputError(f"n_slots is {n_slots}: a budget needs at least 1 slot")
        self._n_slots = n_slots
        self._reserved = 0
        self._by_owner: dict[Hashable, int] = {}

    @property
    def n_slots(self) -> int:
        """Slots in all."""
        return self._n_slots

    @property
    def reserved(self) -> int:
        """Slots reserved now (``n_rsrv``)."""
        return self._reserved

    @property
    def available(self) -> int:
        """Slots that can be reserved now."""
        return self._n_slots - self._reserved

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._by_owner

    def try_reserve(self, owner: Hashable, n: int) -> bool:
        """Reserve ``n`` slots for ``owner``; False, and nothing changes, if fewer are available now.

        Raises:
            InvalidInputError: ``n`` is less than 1.
            MemoryPlanError: ``owner`` has a reservation already, or ``n`` is more than there are in all: waiting would
                never help.
        """
        if n < 1:
            raise InvalidInputError(f"{owner!r} wants {n} slots: reserve at least 1")
        if owner in self._by_owner:
            raise MemoryPlanError(
                f"{owner!r} has {self._by_owner[owner]} slots reserved already: release them before reserving again"
            )
        if n > self._n_slots:
            raise MemoryPlanError(
                f"{owner!r} wants {n} slots, of {self._n_slots} in all: lower its max_tokens or raise n_slots"
            )
        if n > self._n_slots - self._reserved:
            return False
        self._by_owner[owner] = n
        self._reserved += n
        return True

    def release(self, owner: Hashable) -> int:
        """Give back all slots of ``owner``; returns how many they were.

        Raises:
            MemoryPlanError: ``owner`` has none.
        """
        try:
            n = self._by_owner.pop(owner)
        except KeyError:
            raise MemoryPlanError(f"{owner!r} has no slots to release: it never reserved, or released twice") from None
        self._reserved -= n
        return n
