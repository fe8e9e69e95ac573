"""Outcomes of the cases."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Counts of outcomes, and what was wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)

    def note(self, outcome: str, what: str) -> None:
        """Count a case: ``equal``, ``refused``, ``wrong`` or ``raw``; the last two are kept with what they were."""
        self.counts[outcome] += 1
        if outcome in ("wrong", "raw"):
            self.bad.append(f"{outcome}: {what}")

    def check(self, is_right: bool, what: str, *, outcome: str = "equal") -> None:
        """Count a case as ``outcome`` if it is right, else as wrong."""
        self.note(outcome if is_right else "wrong", what)

    def line(self, name: str) -> str:
        """Return the line of the tally."""
        parts = ", ".join(f"{self.counts[kind]:,} {kind}" for kind in ("equal", "refused", "wrong", "raw"))
        return f"{name}: {sum(self.counts.values()):,} cases: {parts}"
