"""Verdicts of an oracle's cases, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

VERDICTS = ("equal", "refused", "wrong", "raw")


@dataclass
class Tally:
    """Verdicts so far: equal to the reference, refused, wrong, or an unexpected exception (raw)."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # of what is refused
    faults: list[str] = field(default_factory=list)  # what is wrong or raw

    def add(self, verdict: str, where: str, detail: str = "") -> None:
        """Count a verdict; keep where it is wrong or raw, and of others the reason in ``detail``."""
        self.counts[verdict] += 1
        if verdict in ("wrong", "raw"):
            self.faults.append(f"{verdict}: {where}: {detail}")
        elif detail:
            self.reasons[detail] += 1

    def check(self, is_right: bool, what: str, *, verdict: str = "equal") -> None:
        """Count a case as ``verdict`` if it is right, else as wrong."""
        self.add(verdict if is_right else "wrong", what)

    def line(self, name: str) -> str:
        """Return the last line of a run; other verdicts than the four are not among its cases."""
        parts = ", ".join(f"{self.counts[verdict]:,} {verdict}" for verdict in VERDICTS)
        return f"{name}: {sum(self.counts[verdict] for verdict in VERDICTS):,} cases: {parts}"

    def report(self, name: str) -> int:
        """Print faults, the commonest reasons and the last line; return 1 if anything is wrong or raw."""
        for fault in self.faults:
            print(f"  {fault}", flush=True)
        for reason, count in self.reasons.most_common(40):
            print(f"{count:5} {reason}")
        print(self.line(name))
        return int(bool(self.faults))
