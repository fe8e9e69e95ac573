"""Activations of a batch whose requests have several sizes: one group of tensors for each size that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlsys_dvabatch.stages.activations import Padded
from mlsys_dvabatch.stages.slicing.sizes import Values


@dataclass(frozen=True, slots=True)
class Member:
    """A request's place: its group, its row there, and its own sizes, which padding may have enlarged."""

    group: Values
    row: int
    own: Values


@dataclass(frozen=True, slots=True)
class Grouped:
    """Requests in their order, each with a row of the group of its size. Only requests of one group run together."""

    groups: Mapping[Values, Padded]
    members: tuple[Member, ...]

    @property
    def num(self) -> int:
        """Requests."""
        return len(self.members)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(group.nbytes for group in self.groups.values())

    def select(self, rows: Sequence[int]) -> Grouped:
        """Return the given requests, in the order given."""
        taken: dict[Values, list[int]] = {}
        members = []
        for row in rows:
            member = self.members[row]
            places = taken.setdefault(member.group, [])
            members.append(Member(member.group, len(places), member.own))
            places.append(member.row)
        return Grouped({key: self.groups[key].select(places) for key, places in taken.items()}, tuple(members))

    def join(self, others: Sequence[Grouped]) -> Grouped:
        """Return one batch of all requests; groups of one size become one."""
        parts: dict[Values, list[Padded]] = {}
        members: list[Member] = []
        for each in (self, *others):
            before = {key: sum(part.num for part in parts.get(key, [])) for key in each.groups}
            members += [Member(one.group, one.row + before[one.group], one.own) for one in each.members]
            for key, group in each.groups.items():
                parts.setdefault(key, []).append(group)
        return Grouped({key: each[0].join(each[1:]) for key, each in parts.items()}, tuple(members))

    def mapped(self, run: Callable[[Padded], Padded]) -> Grouped:
        """Return the same requests after ``run`` on each group."""
        return Grouped({key: run(group) for key, group in self.groups.items()}, self.members)
